//! Decode clusters as configured: a name, or a name with its weight and whether it drains.

use std::fmt;

use eldr_core::decide::Worker;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// What a decode cluster may take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// Requests in flight are compared divided by this: a cluster of weight 2 takes twice as many. 0.1 to 100.
    pub weight: f64,
    /// It finishes what it has and gets nothing new.
    pub drain: bool,
}

impl Default for Share {
    fn default() -> Self {
        Self {
            weight: 1.0,
            drain: false,
        }
    }
}

impl Share {
    /// The cluster as a decision sees it. One that drains is above every load, so it is not even the least loaded
    /// when all others are out.
    pub fn worker(self, load: f64, is_available: bool) -> Worker {
        if self.drain {
            return Worker {
                load: f64::MAX,
                available: false,
            };
        }
        Worker {
            load: load / self.weight,
            available: is_available,
        }
    }
}

/// An entry of `decode_clusters`: `"decode-0"` or `{"name": "decode-0", "weight": 2, "drain": true}`.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeCluster {
    /// Envoy's name for it.
    pub name: String,
    /// What it may take.
    pub share: Share,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Object {
    name: String,
    #[serde(default = "default_weight")]
    weight: f64,
    #[serde(default)]
    drain: bool,
}

fn default_weight() -> f64 {
    Share::default().weight
}

impl<'de> Deserialize<'de> for DecodeCluster {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // By hand, because an untagged enum would hide which field of the object was wrong.
        deserializer.deserialize_any(NameOrObject)
    }
}

struct NameOrObject;

impl<'de> Visitor<'de> for NameOrObject {
    type Value = DecodeCluster;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of an Envoy cluster, or an object with `name`, `weight`, `drain`")
    }

    fn visit_str<E>(self, name: &str) -> Result<DecodeCluster, E> {
        Ok(DecodeCluster {
            name: name.to_owned(),
            share: Share::default(),
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DecodeCluster, A::Error> {
        let object = Object::deserialize(MapAccessDeserializer::new(map))?;
        let Object {
            name,
            weight,
            drain,
        } = object;
        Ok(DecodeCluster {
            name,
            share: Share { weight, drain },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<DecodeCluster, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn a_name_alone_is_an_object_with_the_defaults() {
        assert_eq!(parse(r#""d""#), parse(r#"{"name":"d"}"#));
        let heavy = parse(r#"{"name":"d","weight":2,"drain":true}"#).unwrap();
        assert_eq!((heavy.share.weight, heavy.share.drain), (2.0, true));
    }

    #[test]
    fn a_wrong_field_is_named() {
        let error = parse(r#"{"name":"d","wieght":2}"#).unwrap_err();
        assert!(error.contains("unknown field `wieght`"), "{error}");
        let error = parse("7").unwrap_err();
        assert!(error.contains("the name of an Envoy cluster"), "{error}");
    }

    #[test]
    fn loads_are_compared_by_weight_and_one_that_drains_is_never_the_least() {
        let share = |weight, drain| Share { weight, drain };
        assert!(
            share(2.0, false).worker(3.0, true).load < share(1.0, false).worker(2.0, true).load
        );
        let draining = share(1.0, true).worker(0.0, true);
        assert!(!draining.available && draining.load.is_finite());
        assert!(draining.load > share(0.1, false).worker(f64::from(u32::MAX), false).load);
    }
}
