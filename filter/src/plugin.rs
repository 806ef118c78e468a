//! A configuration with the blobs in use: chooses prefill and decode clusters.

mod kept;
mod running;
mod sampling;

use eldr_core::blob::Blob;
use eldr_core::decide::{Decision, Draw, Policy, Rule, Worker, WorkerIndex};
use eldr_core::prefix_hash::{Ring, VNODES};
use eldr_core::rollout::{Arm, Rollout};
use eldr_core::route::{Map, Scratch, Step, route_timed};
use eldr_core::signature::header_from_eldr_sig;

use crate::body;
use crate::config::{ANY_MODEL, Config, Model, PrefillPolicy};
use crate::load::LoadUnit;
use crate::poll::Source;
use crate::prefill::Leg;
use crate::samples::Samples;

pub use sampling::Sampled;

/// Index into the configured models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelIndex(usize);

/// What is known of a decode cluster when a decision is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Now {
    /// In any unit that all share, not yet divided by the weight.
    pub load: f64,
    /// See [`health`](crate::health).
    pub is_available: bool,
    /// It reports more of its KV cache in use than it may.
    pub is_full: bool,
}

/// A request's model, and which arm of the model's rollout it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Course {
    model: Option<ModelIndex>,
    arm: Arm,
}

impl From<Option<ModelIndex>> for Course {
    /// By the model's own policy.
    fn from(model: Option<ModelIndex>) -> Self {
        let arm = Arm::Treatment;
        Self { model, arm }
    }
}

/// What one listener's filter runs with.
#[derive(Debug)]
pub struct Plugin {
    config: Config,
    /// One per model.
    maps: Vec<Option<Map>>,
    /// Empty unless the policy looks at prefixes.
    prefill_ring: Ring,
    /// Revision of each model's last blob that could not be used, so that it is refused once.
    refused: Vec<Option<u64>>,
    /// Signatures of each model's requests that go to where its blobs come from, where some do.
    samples: Vec<Option<Samples>>,
    /// A request's body came while its headers were held, so Envoy is set up for that.
    pub gets_bodies: bool,
}

impl Plugin {
    /// Puts the inline blobs to use.
    pub fn new(mut config: Config) -> Self {
        let maps: Vec<_> = config
            .models
            .iter_mut()
            .map(|model| model.blob.take())
            .collect();
        let vnodes = match config.prefill_policy {
            PrefillPolicy::PrefixHash => VNODES,
            PrefillPolicy::RoundRobin | PrefillPolicy::LeastLoaded => 0,
        };
        let samples = config.models.iter();
        let samples = samples.map(|model| Samples::new(model.signature_sample));
        Self {
            samples: samples.collect(),
            prefill_ring: Ring::new(&config.prefill_clusters, vnodes),
            config,
            refused: vec![None; maps.len()],
            maps,
            gets_bodies: false,
        }
    }

    /// The configuration; its inline blobs are in use and no longer there.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Models with their names.
    pub fn models(&self) -> impl Iterator<Item = (ModelIndex, &str)> {
        let models = self.config.models.iter().enumerate();
        models.map(|(index, model)| (ModelIndex(index), model.name.as_str()))
    }

    /// The entry for a request's model: its own, else the one for any model.
    pub fn model(&self, name: Option<&str>) -> Option<ModelIndex> {
        let find = |wanted: &str| {
            self.config
                .models
                .iter()
                .position(|model| model.name == wanted)
        };
        name.and_then(find)
            .or_else(|| find(ANY_MODEL))
            .map(ModelIndex)
    }

    /// A model's name as configured; empty for one that is not.
    pub fn name(&self, model: Option<ModelIndex>) -> &str {
        self.settings(model).map_or("", |model| &model.name)
    }

    /// What the loads of workers are compared in for a model's requests.
    pub fn load_unit(&self, model: Option<ModelIndex>) -> LoadUnit {
        let settings = self.settings(model);
        settings.map_or(LoadUnit::Requests, |model| model.load_unit)
    }

    /// Revision of the blob in use.
    pub fn revision(&self, model: ModelIndex) -> Option<u64> {
        self.map(Some(model)).map(|map| map.revision)
    }

    /// Where a model's blobs come from, if not from the configuration alone.
    pub fn source(&self, model: ModelIndex) -> Option<&Source> {
        self.settings(Some(model))?.source.as_ref()
    }

    /// Published blobs are of interest above this revision: neither in use nor refused.
    pub fn known_revision(&self, model: ModelIndex) -> Option<u64> {
        let refused = self.refused.get(model.0).copied().flatten();
        self.revision(model).max(refused)
    }

    /// Verifies a blob in full: its own promises, and that it names configured decode clusters only.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn bind(&self, bytes: &[u8]) -> Result<Map, String> {
        let blob = Blob::from_bytes(bytes).map_err(|error| error.to_string())?;
        Map::bind(blob, &self.config.decode_clusters).map_err(|error| error.to_string())
    }

    /// Replaces a model's blob by the one published as `revision`; the old one stays when the new one cannot be used.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn update(
        &mut self,
        model: ModelIndex,
        published_as: u64,
        bytes: &[u8],
    ) -> Result<u64, String> {
        let bound = self.bind(bytes);
        if bound.is_err()
            && let Some(refused) = self.refused.get_mut(model.0)
        {
            *refused = (*refused).max(Some(published_as));
        }
        let map = bound?;
        let revision = map.revision;
        if let Some(settings) = self.config.models.get_mut(model.0)
            && !settings.tau_is_fixed
        {
            settings.rule.tau = map.tau;
        }
        if let Some(place) = self.maps.get_mut(model.0) {
            *place = Some(map);
        }
        Ok(revision)
    }

    /// The decode clusters as a decision sees them. One whose KV cache is full is no candidate while another has room.
    pub fn workers(&self, now: impl Fn(&str) -> Now) -> Vec<Worker> {
        let clusters = self.config.decode_clusters.iter().zip(&self.config.shares);
        let (mut workers, full): (Vec<Worker>, Vec<bool>) = clusters
            .map(|(name, share)| {
                let now = now(name);
                (share.worker(now.load, now.is_available), now.is_full)
            })
            .unzip();
        let mut room = workers.iter().zip(&full);
        if full.contains(&true) && room.any(|(worker, full)| worker.available && !full) {
            for (worker, _) in workers.iter_mut().zip(full).filter(|(_, full)| *full) {
                worker.available = false;
            }
        }
        workers
    }

    /// Chooses the decode cluster.
    pub fn decide(
        &self,
        course: impl Into<Course>,
        signature: Option<&[u8]>,
        workers: &[Worker],
        draw: Draw,
        scratch: &mut Scratch,
        done: impl FnMut(Step),
    ) -> Decision {
        let course = course.into();
        route_timed(
            &self.rule(course),
            self.map(course.model),
            signature,
            workers,
            draw,
            scratch,
            done,
        )
    }

    /// How a model's policy is being introduced.
    pub fn rollout(&self, model: Option<ModelIndex>) -> Option<Rollout> {
        Some(self.settings(model)?.rollout?.0)
    }

    /// The course of a request with this id that arrives at `now_ms`.
    pub fn course(&self, model: Option<ModelIndex>, request_id: &[u8], now_ms: u64) -> Course {
        let arm = self
            .rollout(model)
            .map_or(Arm::Treatment, |rollout| rollout.arm(request_id, now_ms));
        Course { model, arm }
    }

    /// The policy that decides on this course.
    pub fn policy(&self, course: Course) -> Policy {
        self.rule(course).policy
    }

    fn rule(&self, course: Course) -> Rule {
        let Some(settings) = self.settings(course.model) else {
            return Rule::default();
        };
        let policy = match (course.arm, settings.rollout) {
            (Arm::Control, Some((_, control))) => control,
            _ => settings.rule.policy,
        };
        Rule {
            policy,
            tau: settings.tau(policy),
            ..settings.rule
        }
    }

    /// Name of a decode cluster.
    pub fn decode_cluster(&self, worker: WorkerIndex) -> &str {
        self.config
            .decode_clusters
            .get(worker.0)
            .map(String::as_str)
            .unwrap_or_default()
    }

    /// Chooses the cluster that a prefill leg goes to next: see [`Leg::choose`].
    pub fn choose_prefill(
        &self,
        leg: &mut Leg,
        in_flight: impl Fn(&str) -> u32,
        turn: impl FnOnce() -> u64,
    ) -> &str {
        leg.choose(&self.config, &self.prefill_ring, in_flight, turn)
    }

    /// Chooses the cluster that a release goes to: the least loaded, not the one that just failed if there is another.
    pub fn release_cluster(&self, failed: Option<&str>, workers: &[Worker]) -> &str {
        let clusters = self.config.decode_clusters.iter().map(String::as_str);
        clusters
            .zip(workers)
            .min_by(|(a, x), (b, y)| {
                let rank = |name: &str, worker: &Worker| (Some(name) == failed, !worker.available);
                let by_rank = rank(a, x).cmp(&rank(b, y));
                by_rank.then(x.load.total_cmp(&y.load))
            })
            .map(|(cluster, _)| cluster)
            .unwrap_or_default()
    }

    /// Value of a signature header that says what a prefill answer's `eldr_sig` (raw JSON) says, or one that is as
    /// malformed. An absent signature is empty or null, for the official artifact.
    pub fn header_from_eldr_sig(&self, model: Option<ModelIndex>, raw: &str) -> Option<Vec<u8>> {
        if raw == "null" || raw == "\"\"" {
            return None;
        }
        // Without a blob nobody looks at it.
        let geometry = self.map(model).map(Map::geometry);
        let text = body::string(raw);
        let header = geometry
            .zip(text)
            .and_then(|(geometry, text)| header_from_eldr_sig(text.as_bytes(), geometry).ok());
        Some(header.unwrap_or_default().into_bytes())
    }

    fn settings(&self, model: Option<ModelIndex>) -> Option<&Model> {
        self.config.models.get(model?.0)
    }

    fn map(&self, model: Option<ModelIndex>) -> Option<&Map> {
        self.maps.get(model?.0)?.as_ref()
    }
}

#[cfg(test)]
pub(crate) mod tests;
