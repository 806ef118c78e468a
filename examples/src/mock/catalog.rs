//! What the mock engine knows about requests: the records of a trace, by id.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use axum::http::HeaderValue;
use eldr_calibrator::trace::{Prefix, Record, TopK};
use eldr_core::engine::ExpertIds;
use eldr_core::{Geometry, Signature};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::carriage::dense;
use super::spread::{Group, Spread};
use crate::records::with_hint;

/// Patterns that requests unknown to the trace share.
const STRANGERS: u64 = 32;
/// Tokens after which such a pattern starts over.
const STRANGER_TOKENS: usize = 32;
/// Answers a request of which neither trace nor client says how long it is.
const DECODE_TOKENS_DEFAULT: u32 = 128;

/// How to behave for each request id: what prefill says and which experts every decode step uses.
///
/// A request that the trace does not know is served all the same: without a signature, with expert
/// ids drawn at random from a fixed seed by its id, 128 tokens long.
#[derive(Debug)]
pub struct Catalog {
    geometry: Geometry,
    entries: HashMap<String, Known>,
    strangers: Vec<Entry>,
}

/// One recorded request.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Tokens that decode yields unless the client limits them.
    pub decode_tokens: u32,
    /// Value of the `x-eldr-signature` header that prefill answers with, sent as it is.
    pub signature: Option<HeaderValue>,
    /// Experts of every decode step.
    pub ids: Arc<ExpertIds>,
}

/// An entry and what is known of its signature.
#[derive(Debug)]
struct Known {
    entry: Entry,
    /// `None` if there is no signature, or none of this model.
    spread: Option<Spread>,
}

impl Catalog {
    /// A catalog that knows no request yet, of a model of `geometry` with top-`k` routing.
    pub fn new(geometry: Geometry, k: usize) -> anyhow::Result<Self> {
        let strangers = (0..STRANGERS)
            .map(|seed| {
                let ids = random_ids(geometry, k, seed)?;
                Ok(Entry {
                    decode_tokens: DECODE_TOKENS_DEFAULT,
                    signature: None,
                    ids,
                })
            })
            .collect::<anyhow::Result<_>>()?;
        Ok(Catalog {
            geometry,
            entries: HashMap::new(),
            strangers,
        })
    }

    /// The catalog of a trace; its records must agree on geometry.
    ///
    /// A record without `decode_topk` decodes like a stranger but keeps its signature and length.
    pub fn from_records<'a>(records: impl IntoIterator<Item = &'a Record>) -> anyhow::Result<Self> {
        let mut catalog: Option<Catalog> = None;
        let mut pending = Vec::new();
        let mut prefixed = Vec::new();
        for record in records {
            prefixed.extend(record.prefix.as_ref().map(|prefix| (record, prefix)));
            let topk = record.topk().map_err(|error| with_hint(&error.into()))?;
            if catalog.is_none()
                && let Some((geometry, k)) = shape(record, topk.as_ref())?
            {
                catalog = Some(Catalog::new(geometry, k)?);
            }
            match &mut catalog {
                Some(catalog) => catalog.add(record, topk)?,
                None => pending.push(record),
            }
        }
        let mut catalog = catalog.context(
            "no record of the trace has a signature or expert ids\n\
             hint: the mock engine replays `prefill` and `decode_topk`; record at least one of them",
        )?;
        for record in pending {
            catalog.add(record, None)?;
        }
        catalog.group(&prefixed)?;
        Ok(catalog)
    }

    /// Adds or replaces the request `id`, which shares no prefix.
    pub fn insert(&mut self, id: impl Into<String>, entry: Entry) {
        let signature = entry.signature.as_ref();
        let spread = signature
            .and_then(|header| Signature::decode(header.as_bytes()).ok())
            .filter(|signature| signature.geometry() == self.geometry)
            .map(|signature| Spread {
                counts: dense(&signature),
                group: None,
            });
        self.entries.insert(id.into(), Known { entry, spread });
    }

    /// Counts of the request `id` by position in its prompt, if it was recorded.
    pub(crate) fn spread(&self, id: &str) -> Option<&Spread> {
        self.entries.get(id)?.spread.as_ref()
    }

    /// Lets the records of a group share its prefix; one without signature or length does not.
    fn group(&mut self, prefixed: &[(&Record, &Prefix)]) -> anyhow::Result<()> {
        let mut groups: BTreeMap<&str, Vec<(&str, u64, u64)>> = BTreeMap::new();
        for &(record, prefix) in prefixed {
            let signature = record
                .prefill_signature()
                .map_err(|error| with_hint(&error.into()))?;
            let told = signature.and_then(|signature| signature.prompt_tokens());
            if let Some(tokens) = record.prompt_tokens.or(told)
                && self.spread(&record.id).is_some()
            {
                let group = groups.entry(&prefix.group).or_default();
                group.push((&record.id, tokens, prefix.tokens));
            }
        }
        for (name, records) in groups {
            let members: Vec<(&[u16], u64, u64)> = records
                .iter()
                .filter_map(|&(id, tokens, prefix)| {
                    Some((self.spread(id)?.counts.as_slice(), tokens, prefix))
                })
                .collect();
            let group = Group::new(name, &members);
            for (id, ..) in records {
                if let Some(Known {
                    spread: Some(spread),
                    ..
                }) = self.entries.get_mut(id)
                {
                    spread.group.clone_from(&group);
                }
            }
        }
        Ok(())
    }

    /// Layers and experts of the model that the trace recorded.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// How to serve the request `id`, known or not.
    pub fn entry(&self, id: &str) -> &Entry {
        match self.entries.get(id) {
            Some(known) => &known.entry,
            None => &self.strangers[(fnv1a(id.as_bytes()) % STRANGERS) as usize],
        }
    }

    fn add(&mut self, record: &Record, topk: Option<TopK>) -> anyhow::Result<()> {
        let stranger = self.entry(&record.id);
        let ids = match topk {
            None => Arc::clone(&stranger.ids),
            Some(topk) => {
                ensure!(
                    topk.geometry() == self.geometry,
                    "record {}: `decode_topk` has {}, the records before it {}\n\
                     hint: one engine serves one model; use one trace per model",
                    record.id,
                    topk.geometry(),
                    self.geometry,
                );
                let ids = (0..topk.tokens())
                    .flat_map(|token| topk.step(token))
                    .copied()
                    .collect();
                Arc::new(ExpertIds::new(self.geometry, topk.k(), ids)?)
            }
        };
        let decode_tokens = match record.decode_tokens {
            None => DECODE_TOKENS_DEFAULT,
            Some(tokens) => u32::try_from(tokens)
                .with_context(|| format!("record {}: {tokens} decode tokens", record.id))?,
        };
        let signature = record
            .prefill
            .as_deref()
            .map(HeaderValue::from_str)
            .transpose()
            .with_context(|| format!("record {}: `prefill` is no header value", record.id))?;
        self.insert(
            &record.id,
            Entry {
                decode_tokens,
                signature,
                ids,
            },
        );
        Ok(())
    }
}

/// Geometry and k as the record tells them; without expert ids, k is what its counts sum to per token.
fn shape(record: &Record, topk: Option<&TopK>) -> anyhow::Result<Option<(Geometry, usize)>> {
    if let Some(topk) = topk {
        return Ok(Some((topk.geometry(), topk.k())));
    }
    let Some(signature) = record
        .prefill_signature()
        .map_err(|error| with_hint(&error.into()))?
    else {
        return Ok(None);
    };
    let geometry = signature.geometry();
    Ok(Some((
        geometry,
        k_of(&signature).unwrap_or(8).clamp(1, geometry.experts),
    )))
}

fn k_of(signature: &Signature) -> Option<usize> {
    let row: u64 = signature
        .counts()
        .iter()
        .take(signature.geometry().experts)
        .copied()
        .map(u64::from)
        .sum();
    usize::try_from(row.checked_div(signature.prompt_tokens()?)?).ok()
}

/// Uniformly drawn experts, k distinct ones per token and layer.
fn random_ids(geometry: Geometry, k: usize, seed: u64) -> anyhow::Result<Arc<ExpertIds>> {
    let Geometry { layers, experts } = geometry;
    if k == 0 || k > experts || experts > usize::from(u16::MAX) {
        bail!(
            "top-{k} of {experts} experts: k must be 1 to the number of experts, that at most 65535"
        );
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut pool: Vec<u16> = (0..experts as u16).collect();
    let mut ids = Vec::with_capacity(STRANGER_TOKENS * layers * k);
    for _ in 0..STRANGER_TOKENS * layers {
        for i in 0..k {
            pool.swap(i, i + (rng.next_u64() % (experts - i) as u64) as usize);
        }
        ids.extend_from_slice(&pool[..k]);
    }
    Ok(Arc::new(ExpertIds::new(geometry, k, ids)?))
}

/// FNV-1a: the same pattern for the same id on every machine.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
