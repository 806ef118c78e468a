//! What outlives the answer it came with: similarities, computed when prefill answers and used when decode is asked; or, for policies that
//! look at what runs by then, the signature itself.

use eldr_core::decide::{Decision, Draw, Reason, Worker};
use eldr_core::route::{Scratch, route_by};

use super::{Course, ModelIndex, Plugin};
use crate::ring::{Found, Kept};

impl Plugin {
    /// What is to be kept of a prefill answer with this signature header to a prompt of so many tokens, if that is to be
    /// known; `None` where that would be nothing.
    pub fn keep(
        &self,
        model: Option<ModelIndex>,
        signature: Option<&[u8]>,
        prompt_tokens: Option<u64>,
        scratch: &mut Scratch,
    ) -> Option<Kept> {
        let found = match (self.map(model), signature) {
            (_, Some(header)) if self.measure(model).is_some() => self
                .condense(model, header, prompt_tokens)
                .map(Found::Signature),
            (Some(map), Some(header)) => {
                let found = map.similarities(header, scratch, |_| ());
                found.map(|all| Found::Similarities(all.to_vec()))
            }
            _ if prompt_tokens.is_none() => return None,
            (None, _) => Err(Reason::NoBlob),
            (Some(_), None) => Err(Reason::NoSignature),
        };
        let (revision, fingerprint) = self.centroids(model);
        Some(Kept {
            revision,
            fingerprint,
            found,
            prompt_tokens,
        })
    }

    /// Tells a model's centroids from others.
    fn centroids(&self, model: Option<ModelIndex>) -> (u64, u64) {
        let map = self.map(model);
        map.map_or((0, 0), |map| (map.revision, map.fingerprint))
    }

    /// Whether what was kept can be used: similarities say nothing about other centroids than those of the blob in use.
    pub fn is_current(&self, model: Option<ModelIndex>, kept: &Kept) -> bool {
        kept.signature().is_some() || self.centroids(model) == (kept.revision, kept.fingerprint)
    }

    /// Chooses the decode cluster by similarities that were kept, or the lack of them, if those are [current](Self::is_current).
    pub fn decide_by(
        &self,
        course: impl Into<Course>,
        kept: &Kept,
        workers: &[Worker],
        draw: Draw,
    ) -> Option<Decision> {
        let course = course.into();
        let map = self.map(course.model)?;
        let found = match &kept.found {
            Ok(Found::Similarities(all)) => Ok(all.as_slice()),
            Ok(Found::Signature(_)) => return None,
            Err(reason) => Err(*reason),
        };
        self.is_current(course.model, kept)
            .then(|| route_by(&self.rule(course), map, found, workers, draw))
    }
}

#[cfg(test)]
mod tests {
    use eldr_core::blob::Blob;
    use eldr_core::transform::Transform;

    use super::*;
    use crate::plugin::Now;
    use crate::plugin::tests::{blob_bytes, plugin, signature};

    const DRAW: Draw = Draw {
        sequence: 0,
        entropy: 0,
    };

    fn workers() -> Vec<Worker> {
        plugin().workers(|cluster| Now {
            load: f64::from(u8::from(cluster == "decode-1")),
            is_available: true,
            is_full: false,
        })
    }

    fn keep(
        plugin: &Plugin,
        model: Option<ModelIndex>,
        header: &str,
        scratch: &mut Scratch,
    ) -> Option<Kept> {
        plugin.keep(model, Some(header.as_bytes()), None, scratch)
    }

    #[test]
    fn what_was_kept_decides_as_the_signature_would() {
        let (plugin, mut scratch) = (plugin(), Scratch::default());
        let model = plugin.model(Some("moe"));
        for header in [
            signature([9, 0, 0, 0]),
            signature([0, 9, 0, 0]),
            signature([7, 9, 1, 0]),
            signature([0, 0, 5, 5]),
            ":AAAA:;l=1;e=4".into(),
            ":AAAAAA==:;l=1;e=2".into(),
        ] {
            let kept = keep(&plugin, model, &header, &mut scratch).unwrap();
            let now = plugin.decide(
                model,
                Some(header.as_bytes()),
                &workers(),
                DRAW,
                &mut scratch,
                |_| (),
            );
            let later = plugin.decide_by(model, &kept, &workers(), DRAW);
            assert_eq!(later, Some(now), "{header}");
        }
    }

    #[test]
    fn a_policy_that_does_not_look_does_not_look_at_what_was_kept() {
        let mut plugin = plugin();
        let (model, mut scratch) = (plugin.model(Some("moe")), Scratch::default());
        let header = signature([0, 9, 0, 0]);
        let kept = keep(&plugin, model, &header, &mut scratch).unwrap();
        plugin.config.models[1].rule.policy = eldr_core::Policy::LeastLoaded;
        let decision = plugin.decide_by(model, &kept, &workers(), DRAW).unwrap();
        assert_eq!((decision.target.0, decision.reason), (0, Reason::Blind));
    }

    #[test]
    fn nothing_is_kept_without_a_blob_and_nothing_of_another_model_or_revision_is_used() {
        let (mut plugin, mut scratch) = (plugin(), Scratch::default());
        let (moe, other) = (plugin.model(Some("moe")), plugin.model(Some("other")));
        let header = signature([0, 9, 0, 0]);
        assert_eq!(keep(&plugin, other, &header, &mut scratch), None);
        assert_eq!(keep(&plugin, None, &header, &mut scratch), None);
        let kept = keep(&plugin, moe, &header, &mut scratch).unwrap();
        assert_eq!(plugin.decide_by(other, &kept, &workers(), DRAW), None);
        let mut others = blob_bytes_of(1, 0.5);
        plugin.update(other.unwrap(), 1, &others).unwrap();
        assert_eq!(plugin.decide_by(other, &kept, &workers(), DRAW), None);
        others = blob_bytes(2, &["decode-0", "decode-1"]);
        plugin.update(moe.unwrap(), 2, &others).unwrap();
        assert_eq!(plugin.decide_by(moe, &kept, &workers(), DRAW), None);
    }

    #[test]
    fn the_length_of_a_prompt_is_kept_where_there_is_nothing_to_compare() {
        let (mut plugin, mut scratch) = (plugin(), Scratch::default());
        let (moe, other) = (plugin.model(Some("moe")), plugin.model(Some("other")));
        let header = signature([0, 9, 0, 0]);
        for (model, signature, found, decision) in [
            (moe, None, Reason::NoSignature, Some(Reason::NoSignature)),
            (other, Some(header.as_bytes()), Reason::NoBlob, None),
            (other, None, Reason::NoBlob, None),
        ] {
            let kept = plugin.keep(model, signature, Some(7), &mut scratch);
            let kept = kept.unwrap();
            assert_eq!((kept.prompt_tokens, &kept.found), (Some(7), &Err(found)));
            assert!(plugin.is_current(model, &kept));
            let decided = plugin.decide_by(model, &kept, &workers(), DRAW);
            assert_eq!(decided.map(|decided| decided.reason), decision);
        }
        let kept = plugin.keep(other, None, Some(7), &mut scratch).unwrap();
        let blob = blob_bytes(1, &["decode-0", "decode-1"]);
        plugin.update(other.unwrap(), 1, &blob).unwrap();
        assert!(!plugin.is_current(other, &kept));
    }

    /// A blob of the same shape and revision whose weights differ.
    fn blob_bytes_of(revision: u64, weight: f32) -> Vec<u8> {
        let mut blob = Blob::from_bytes(&blob_bytes(revision, &["decode-0", "decode-1"])).unwrap();
        let geometry = blob.transform.geometry();
        blob.transform = Transform::new(geometry, vec![0], vec![weight; 4]).unwrap();
        blob.to_bytes().unwrap()
    }
}
