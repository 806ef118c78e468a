//! Similarities that outlive the answer they came with: computed when prefill answers, used when decode is asked.

use eldr_core::decide::{Decision, Draw, Worker};
use eldr_core::route::{Scratch, route_by};

use super::{Course, ModelIndex, Plugin};
use crate::ring::Kept;

impl Plugin {
    /// What is to be kept of a prefill answer with this signature header; `None` without a blob.
    pub fn keep(
        &self,
        model: Option<ModelIndex>,
        signature: &[u8],
        scratch: &mut Scratch,
    ) -> Option<Kept> {
        let map = self.map(model)?;
        let found = map.similarities(signature, scratch, |_| ());
        Some(Kept {
            revision: map.revision,
            fingerprint: map.fingerprint,
            found: found.map(<[f32]>::to_vec),
        })
    }

    /// Whether what was kept is of the model's blob in use: it says nothing about other centroids.
    pub fn is_current(&self, model: Option<ModelIndex>, kept: &Kept) -> bool {
        let map = self.map(model);
        map.is_some_and(|map| (map.revision, map.fingerprint) == (kept.revision, kept.fingerprint))
    }

    /// Chooses the decode cluster by what was kept, if that is [current](Self::is_current).
    pub fn decide_by(
        &self,
        course: impl Into<Course>,
        kept: &Kept,
        workers: &[Worker],
        draw: Draw,
    ) -> Option<Decision> {
        let course = course.into();
        let map = self.map(course.model)?;
        let found = kept.found.as_deref().map_err(|reason| *reason);
        self.is_current(course.model, kept)
            .then(|| route_by(&self.rule(course), map, found, workers, draw))
    }
}

#[cfg(test)]
mod tests {
    use eldr_core::blob::Blob;
    use eldr_core::decide::Reason;
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
            let kept = plugin.keep(model, header.as_bytes(), &mut scratch).unwrap();
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
        let kept = plugin.keep(model, header.as_bytes(), &mut scratch).unwrap();
        plugin.config.models[1].rule.policy = eldr_core::Policy::LeastLoaded;
        let decision = plugin.decide_by(model, &kept, &workers(), DRAW).unwrap();
        assert_eq!((decision.target.0, decision.reason), (0, Reason::Blind));
    }

    #[test]
    fn nothing_is_kept_without_a_blob_and_nothing_of_another_model_or_revision_is_used() {
        let (mut plugin, mut scratch) = (plugin(), Scratch::default());
        let (moe, other) = (plugin.model(Some("moe")), plugin.model(Some("other")));
        let header = signature([0, 9, 0, 0]);
        assert_eq!(plugin.keep(other, header.as_bytes(), &mut scratch), None);
        assert_eq!(plugin.keep(None, header.as_bytes(), &mut scratch), None);
        let kept = plugin.keep(moe, header.as_bytes(), &mut scratch).unwrap();
        assert_eq!(plugin.decide_by(other, &kept, &workers(), DRAW), None);
        let mut others = blob_bytes_of(1, 0.5);
        plugin.update(other.unwrap(), 1, &others).unwrap();
        assert_eq!(plugin.decide_by(other, &kept, &workers(), DRAW), None);
        others = blob_bytes(2, &["decode-0", "decode-1"]);
        plugin.update(moe.unwrap(), 2, &others).unwrap();
        assert_eq!(plugin.decide_by(moe, &kept, &workers(), DRAW), None);
    }

    /// A blob of the same shape and revision whose weights differ.
    fn blob_bytes_of(revision: u64, weight: f32) -> Vec<u8> {
        let mut blob = Blob::from_bytes(&blob_bytes(revision, &["decode-0", "decode-1"])).unwrap();
        let geometry = blob.transform.geometry();
        blob.transform = Transform::new(geometry, vec![0], vec![weight; 4]).unwrap();
        blob.to_bytes().unwrap()
    }
}
