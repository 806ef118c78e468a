//! The object of a centroid file, key by key.

use std::path::Path;

use serde::de::{DeserializeOwned, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::{NUMBERS, PLACEHOLDER, python};
use crate::error::Error;
use crate::trace::shorten;

/// The members of a centroid file in their order, values as they stand there.
pub(super) struct Members {
    pub(super) name: String,
    pub(super) members: Vec<(String, Box<RawValue>)>,
}

struct InOrder(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for InOrder {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = InOrder;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<InOrder, A::Error> {
                let mut members: Vec<(String, Box<RawValue>)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, _>()? {
                    if members.iter().any(|(known, _)| *known == key) {
                        return Err(A::Error::custom(format!("key `{key}` is there twice")));
                    }
                    members.push((key, value));
                }
                Ok(InOrder(members))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

impl Members {
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, Error> {
        let name = path.display().to_string();
        let InOrder(members) = serde_json::from_str(text).map_err(|error| {
            let hint = "a centroid file is one JSON object; NaN and Infinity are no JSON";
            Error::new(format!("{name}: it is no centroid file: {error}"), hint)
        })?;
        Ok(Members { name, members })
    }

    fn raw(&self, key: &str) -> Option<&str> {
        let found = self.members.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.get())
    }

    /// The value of `key`, if it is there and not null.
    pub(super) fn optional<T: DeserializeOwned>(
        &self,
        key: &str,
        allowed: &str,
    ) -> Result<Option<T>, Error> {
        let raw = self.raw(key).filter(|&raw| raw != "null");
        let value = raw.map(|raw| {
            serde_json::from_str(raw).map_err(|error| {
                let squeezed: String = raw.split_whitespace().collect();
                let what = format!(
                    "{} where {allowed} was expected ({error})",
                    shorten(&squeezed)
                );
                self.told(key, what)
            })
        });
        value.transpose()
    }

    pub(super) fn needed<T: DeserializeOwned>(&self, key: &str, allowed: &str) -> Result<T, Error> {
        let value = self.optional(key, allowed)?;
        value.ok_or_else(|| self.told(key, format!("missing where {allowed} was expected")))
    }

    /// Keys that would change what a number means, if they had another value.
    pub(super) fn check_meaning(&self) -> Result<(), Error> {
        for (key, neutral) in [
            ("sig_dtype", [r#""<i2""#, "null"]),
            ("sig_per_layer_norm", ["false", "null"]),
            ("sig_mean", ["null", "null"]),
        ] {
            if let Some(raw) = self.raw(key).filter(|raw| !neutral.contains(raw)) {
                let what = format!("{} where {} was expected", shorten(raw), neutral[0]);
                return Err(self.told(key, what));
            }
        }
        Ok(())
    }

    pub(super) fn told(&self, key: &str, what: String) -> Error {
        let hint = "a gateway would route by other numbers than the artifact; write the file again";
        Error::new(format!("{}: key `{key}`: {what}", self.name), hint)
    }

    /// The object without the numbers that the blob has.
    pub(super) fn source(&self) -> String {
        let members = self.members.iter().map(|(key, value)| {
            let of_blob = NUMBERS.contains(&key.as_str()) && value.get() != "null";
            let value = if of_blob { PLACEHOLDER } else { value.get() };
            format!("{}:{value}", python::string(key))
        });
        format!("{{{}}}", members.collect::<Vec<_>>().join(","))
    }
}
