//! Which signatures are sampled: those in turn that are good in every part for the blob in use.

use eldr_core::route::Scratch;

use super::{ModelIndex, Plugin};
use crate::samples::Samples;

/// What became of a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sampled {
    /// It is no sample.
    No,
    /// It waits to be posted.
    Kept,
    /// It is one, but there was no room.
    Dropped,
}

impl Plugin {
    /// Takes the signature header of a model's request as a sample, if it is that request's turn.
    pub fn sample(
        &mut self,
        model: Option<ModelIndex>,
        header: &[u8],
        scratch: &mut Scratch,
    ) -> Sampled {
        let index = model.map_or(usize::MAX, |model| model.0);
        let Some(Some(samples)) = self.samples.get_mut(index) else {
            return Sampled::No;
        };
        // Without a blob there is nothing to refit.
        let map = self.maps.get(index).and_then(Option::as_ref);
        if !samples.is_in_turn() || !map.is_some_and(|map| map.fits(header, scratch)) {
            return Sampled::No;
        }
        match samples.push(header) {
            true => Sampled::Kept,
            false => Sampled::Dropped,
        }
    }

    /// A model's samples, where there are some.
    pub fn samples(&mut self, model: ModelIndex) -> Option<&mut Samples> {
        self.samples.get_mut(model.0)?.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use eldr_core::signature::{Encoding, Geometry, Signature};
    use serde_json::json;

    use super::*;
    use crate::config::Config;
    use crate::plugin::tests::{blob_bytes, signature};

    /// Model `moe` is sampled so; `*` is not.
    fn plugin(share: f64) -> Plugin {
        let http = json!({"cluster": "eldr-serve", "path": "/v1/blob"});
        let config = json!({
            "models": [
                {"model": "*"},
                {"model": "moe", "blob": {"http": http}, "signature_sample": share}
            ],
            "decode_clusters": ["decode-0", "decode-1"],
            "prefill_clusters": ["p0"],
        });
        Plugin::new(Config::parse(config.to_string().as_bytes()).unwrap())
    }

    fn with_blob(mut plugin: Plugin) -> Plugin {
        let moe = plugin.model(Some("moe")).unwrap();
        let blob = blob_bytes(1, &["decode-0", "decode-1"]);
        plugin.update(moe, 1, &blob).unwrap();
        plugin
    }

    fn sample(plugin: &mut Plugin, model: &str, header: &str) -> Sampled {
        let model = plugin.model(Some(model));
        plugin.sample(model, header.as_bytes(), &mut Scratch::default())
    }

    #[test]
    fn what_is_good_in_every_part_is_kept_as_it_came() {
        let mut plugin = with_blob(plugin(1.0));
        let counts = [7, 9, 1, 0];
        let geometry = Geometry::new(1, 4).unwrap();
        let varint = Signature::dense(geometry, counts.to_vec(), Some(17)).unwrap();
        let good = [
            signature(counts),
            varint.encode(Encoding::Varint) + ";from=\"elsewhere\"",
        ];
        for header in &good {
            assert_eq!(sample(&mut plugin, "moe", header), Sampled::Kept);
        }
        for bad in [
            "",
            ":AAAA:;l=1;e=4",
            ":AAAAAA==:;l=1;e=2",
            ":AA?AAAAAAAA=:;l=1;e=4",
        ] {
            assert_eq!(sample(&mut plugin, "moe", bad), Sampled::No, "{bad}");
        }
        let moe = plugin.model(Some("moe")).unwrap();
        let batch = plugin.samples(moe).unwrap().batch(10_000).unwrap();
        assert_eq!(String::from_utf8(batch).unwrap(), good.join("\n") + "\n");
    }

    #[test]
    fn nothing_is_sampled_without_a_blob_and_of_models_that_do_not_ask_for_it() {
        let header = signature([1, 2, 3, 4]);
        assert_eq!(sample(&mut plugin(1.0), "moe", &header), Sampled::No);
        let mut off = with_blob(plugin(0.0));
        assert_eq!(sample(&mut off, "moe", &header), Sampled::No);
        let moe = off.model(Some("moe")).unwrap();
        assert!(off.samples(moe).is_none());
        let mut other = with_blob(plugin(1.0));
        assert_eq!(sample(&mut other, "other", &header), Sampled::No);
        assert_eq!(
            other.sample(None, header.as_bytes(), &mut Scratch::default()),
            Sampled::No
        );
    }
}
