//! Decisions by what runs on each worker.

use eldr_core::batch::{Measure, spread};
use eldr_core::decide::{Decision, Draw, Evidence, Reason, Regions, Worker, decide};
use eldr_core::engine::StepModel;
use eldr_core::route::{Fleet, Prompt, Scratch, route_running};
use eldr_core::signature::{Encoded, Encoding, Geometry, Signature, SignatureError};

use super::{Course, ModelIndex, Plugin};
use crate::ring::MAX_SIGNATURE_BYTES;
use crate::running::{Kind, Known};

impl Plugin {
    /// What is kept of a model's requests that run, where its policies look at any.
    pub fn measure(&self, model: Option<ModelIndex>) -> Option<Measure> {
        self.settings(model)?.measure()
    }

    /// What a decode step of a model is stated to cost, where it is learned how much that is.
    pub fn learns(&self, model: Option<ModelIndex>) -> Option<StepModel> {
        let settings = self.settings(model)?;
        let learns = settings.learns_steps && settings.measure() == Some(Measure::Usage);
        learns.then_some(settings.rule.objective.step)
    }

    /// Whether a prompt's length matters to a model's requests.
    pub fn asks_for_prompt_tokens(&self, model: Option<ModelIndex>) -> bool {
        self.config.counts_tokens() || self.measure(model) == Some(Measure::Usage)
    }

    /// The batches that a request with this signature is held against: of layers [spread] over those that the model's blob selects,
    /// else over those that the signature has. `None` where the model's policies look at none.
    pub fn kind(
        &self,
        model: Option<ModelIndex>,
        header: Option<&[u8]>,
    ) -> Option<Result<Kind<'_>, Reason>> {
        let measure = self.measure(model)?;
        let header = header.ok_or(Reason::NoSignature);
        let read = header.and_then(|header| self.read(model, header));
        Some(read.map(|(geometry, layers)| Kind {
            model: self.name(model),
            measure,
            geometry,
            layers: spread(&layers),
            workers: &self.config.decode_clusters,
            steps: self.learns(model),
        }))
    }

    /// What a model's policies read of this signature, batches or regions: the layers that the blob selects, else some of those that there are.
    fn read(
        &self,
        model: Option<ModelIndex>,
        header: &[u8],
    ) -> Result<(Geometry, Vec<u16>), Reason> {
        if let Some(map) = self.map(model) {
            return Ok((map.geometry(), map.layers().to_vec()));
        }
        let signature = Encoded::parse(header).map_err(|_| Reason::MalformedSignature)?;
        Ok((signature.geometry(), spread(&signature.layers())))
    }

    /// Chooses the decode cluster by the batches of the request's kind, or as well as may be where it has none.
    pub fn decide_running(
        &self,
        course: Course,
        prompt: Prompt<'_>,
        known: Result<Known<'_>, Reason>,
        workers: &[Worker],
        draw: Draw,
        scratch: &mut Scratch,
    ) -> Decision {
        let mut rule = self.rule(course);
        match known {
            Ok(Known { batches, steps }) => {
                rule.objective.step = steps.unwrap_or(rule.objective.step);
                let map = self.map(course.model);
                let fleet = Fleet { workers, batches };
                route_running(&rule, map, prompt, fleet, draw, scratch)
            }
            Err(reason) if rule.policy.measure().is_some() => {
                let evidence = Evidence::Missing(reason);
                decide(&rule, evidence, &Regions::NONE, workers, draw)
            }
            Err(_) => self.decide(course, prompt.header, workers, draw, scratch, |_| ()),
        }
    }

    /// The part of a signature that the model's policies read, as a signature of its own that says how long the prompt is.
    pub(super) fn condense(
        &self,
        model: Option<ModelIndex>,
        header: &[u8],
        prompt_tokens: Option<u64>,
    ) -> Result<Vec<u8>, Reason> {
        let (geometry, layers) = self.read(model, header)?;
        let signature = Encoded::parse(header).map_err(|_| Reason::MalformedSignature)?;
        if signature.geometry() != geometry {
            return Err(Reason::GeometryMismatch);
        }
        let mut counts: Vec<u16> = Vec::new();
        let read = signature.rows(&layers, &mut Default::default(), &mut counts);
        read.map_err(|error| match error {
            SignatureError::NoRow { .. } => Reason::GeometryMismatch,
            _ => Reason::MalformedSignature,
        })?;
        let tokens = signature.prompt_tokens().or(prompt_tokens);
        let part = Signature::sparse(geometry, layers, counts, tokens);
        let part = part.map_err(|_| Reason::MalformedSignature)?;
        let header = part.encode(Encoding::Varint).into_bytes();
        match header.len() <= MAX_SIGNATURE_BYTES {
            true => Ok(header),
            false => Err(Reason::NoSignature),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::Config;
    use crate::plugin::tests::deep_blob_bytes;
    use crate::ring::Found;
    use eldr_core::batch::Batches;

    const DRAW: Draw = Draw {
        sequence: 0,
        entropy: 0,
    };
    const IDLE: [Worker; 2] = [Worker {
        load: 0.0,
        available: true,
    }; 2];

    fn plugin(model: Value) -> Plugin {
        let config = json!({
            "models": [model],
            "decode_clusters": ["decode-0", "decode-1"],
            "prefill_clusters": ["p"],
        });
        Plugin::new(Config::parse(config.to_string().as_bytes()).unwrap())
    }

    fn with_blob(policy: &str) -> Plugin {
        with_layers(policy, 1)
    }

    fn with_layers(policy: &str, layers: u16) -> Plugin {
        let mut plugin = plugin(json!({"model": "*", "policy": policy}));
        let blob = deep_blob_bytes(1, &["decode-0", "decode-1"], layers);
        let model = plugin.model(None).unwrap();
        plugin.update(model, 1, &blob).unwrap();
        plugin
    }

    /// One token on expert 0 of each of `layers` layers with four experts.
    fn signature(layers: usize) -> String {
        let geometry = eldr_core::signature::Geometry::new(layers, 4).unwrap();
        let counts = (0..layers * 4).map(|at| u16::from(at % 4 == 0)).collect();
        let signature = Signature::dense(geometry, counts, Some(1)).unwrap();
        signature.encode(Encoding::U16)
    }

    #[test]
    fn layers_are_some_of_the_blobs_or_of_the_signatures() {
        let (bare, blob) = (
            plugin(json!({"model": "*", "policy": "marginal"})),
            with_blob("marginal"),
        );
        let header = signature(24);
        let kind = bare.kind(bare.model(None), Some(header.as_bytes()));
        let kind = kind.unwrap().unwrap();
        assert_eq!((kind.geometry.layers, kind.layers.len()), (24, 12));
        let kind = blob.kind(blob.model(None), Some(header.as_bytes()));
        let kind = kind.unwrap().unwrap();
        assert_eq!((kind.geometry.layers, kind.layers), (1, vec![0]));
        let blob = with_layers("marginal", 48);
        let kind = blob.kind(blob.model(None), Some(header.as_bytes()));
        let every_fourth: Vec<u16> = (2..48).step_by(4).collect();
        assert_eq!(kind.unwrap().unwrap().layers, every_fourth);
        let other = plugin(json!({"model": "*", "policy": "band"}));
        assert_eq!(other.kind(other.model(None), None), None);
    }

    #[test]
    fn without_batches_there_is_a_reason() {
        let plugin = plugin(json!({"model": "*", "policy": "marginal"}));
        let model = plugin.model(None);
        for (header, reason) in [
            (None, Reason::NoSignature),
            (Some("rubbish"), Reason::MalformedSignature),
        ] {
            let header = header.map(str::as_bytes);
            let kind = plugin.kind(model, header).unwrap();
            let prompt = Prompt {
                header,
                ..Prompt::default()
            };
            let held = Err(kind.unwrap_err());
            let scratch = &mut Scratch::default();
            let decision = plugin.decide_running(model.into(), prompt, held, &IDLE, DRAW, scratch);
            assert_eq!(decision.reason, reason);
        }
    }

    #[test]
    fn what_is_kept_of_a_prefill_answer_decides_as_the_signature_would() {
        for (plugin, layers) in [
            (plugin(json!({"model": "*", "policy": "marginal"})), 24),
            (with_blob("hybrid"), 1),
            (with_blob("marginal"), 1),
            (with_layers("hybrid", 24), 24),
            (with_layers("marginal", 24), 24),
        ] {
            let (model, header) = (plugin.model(None), signature(layers));
            let kept = plugin.keep(
                model,
                Some(header.as_bytes()),
                None,
                &mut Scratch::default(),
            );
            let kept = kept.unwrap();
            let short = kept.signature().unwrap();
            assert!(plugin.is_current(model, &kept));
            let kinds = [header.as_bytes(), short].map(|header| plugin.kind(model, Some(header)));
            let [whole, part] = kinds.map(|kind| kind.unwrap().unwrap());
            assert_eq!(whole, part);
            let batches = Batches::new(part.measure, part.geometry, part.layers.clone(), 2);
            let batches = batches.unwrap();
            let seen = [header.as_bytes(), short].map(|header| {
                let prompt = Prompt {
                    header: Some(header),
                    ..Prompt::default()
                };
                let mut scratch = Scratch::default();
                let held = Ok(Known {
                    batches: &batches,
                    steps: part.steps,
                });
                let decision =
                    plugin.decide_running(model.into(), prompt, held, &IDLE, DRAW, &mut scratch);
                (decision, scratch.request().cloned())
            });
            assert!(seen[0].1.is_some() && seen[0] == seen[1], "{seen:?}");
            assert_eq!(seen[0].0.reason, Reason::Marginal);
        }
    }

    #[test]
    fn a_length_that_only_the_answer_says_is_kept_in_the_signature() {
        let plugin = plugin(json!({"model": "*", "policy": "marginal"}));
        let (model, scratch) = (plugin.model(None), &mut Scratch::default());
        assert!(plugin.asks_for_prompt_tokens(model));
        let header = signature(2).replace(";n=1", "");
        let kept = plugin.keep(model, Some(header.as_bytes()), Some(9), scratch);
        let kept = kept.unwrap();
        let short = Encoded::parse(kept.signature().unwrap()).unwrap();
        assert_eq!(
            (short.prompt_tokens(), kept.prompt_tokens),
            (Some(9), Some(9))
        );
    }

    #[test]
    fn what_cannot_be_kept_is_a_reason() {
        let bare = plugin(json!({"model": "*", "policy": "marginal"}));
        let blob = with_blob("hybrid");
        let scratch = &mut Scratch::default();
        let long = eldr_core::signature::Geometry::new(1, 30_000).unwrap();
        let long = Signature::dense(long, vec![9; 30_000], Some(9)).unwrap();
        let (long, other) = (long.encode(Encoding::U16), signature(2));
        for (plugin, header, reason) in [
            (&bare, "rubbish", Reason::MalformedSignature),
            (&bare, long.as_str(), Reason::NoSignature),
            (&blob, other.as_str(), Reason::GeometryMismatch),
        ] {
            let kept = plugin.keep(plugin.model(None), Some(header.as_bytes()), None, scratch);
            assert_eq!(kept.unwrap().found, Err(reason));
        }
    }

    #[test]
    fn a_model_that_looks_no_longer_reads_the_signature_that_was_kept() {
        // Regions are compared by more layers than batches are.
        let (hybrid, band) = (with_layers("hybrid", 24), with_layers("band", 24));
        let (model, header) = (hybrid.model(None), signature(24));
        let kept = hybrid.keep(
            model,
            Some(header.as_bytes()),
            None,
            &mut Scratch::default(),
        );
        let kept = kept.unwrap();
        assert!(matches!(kept.found, Ok(Found::Signature(_))));
        assert!(band.is_current(model, &kept));
        let scratch = &mut Scratch::default();
        let decision = band.decide(model, kept.signature(), &IDLE, DRAW, scratch, |_| ());
        assert_eq!(decision.reason, Reason::InBand);
    }
}
