//! How popular experts are, and in which layers kinds of requests differ: from real counts.

use std::io::Read as _;

use flate2::read::GzDecoder;
use serde::Deserialize;

use super::Shape;

/// Counts of Qwen3-30B-A3B by language over the same problems (MGSM), 48 layers × 128 experts; source and licence in
/// `calibrator/data/README.md`.
const COUNTS: &[u8] = include_bytes!("../../data/qwen3-30b-a3b-languages.json.gz");
/// Keeps logits of experts that were never used finite.
const FLOOR: f64 = 1e-4;

#[derive(Deserialize)]
struct File {
    langs: std::collections::BTreeMap<String, Language>,
}

#[derive(Deserialize)]
struct Language {
    total_tokens: f64,
    counts: Vec<Vec<f64>>,
}

/// What all requests of a model have in common.
#[derive(Clone, Debug)]
pub(super) struct Popularity {
    /// Logit of each expert's share of tokens, `[layer][expert]`.
    pub(super) logits: Vec<f32>,
    /// By layer, how much languages differ there, as a multiple of the mean over layers.
    pub(super) spread: Vec<f32>,
}

impl Popularity {
    /// Of Qwen3-30B-A3B; a model with other layers gets the layer at the same relative depth, one with other experts takes them in turn.
    pub(super) fn of(shape: &Shape) -> Self {
        let languages = languages();
        let layers = languages[0].len();
        let per_layer = |layer: usize| -> (Vec<f64>, f64) {
            let rows: Vec<&Vec<f64>> = languages.iter().map(|counts| &counts[layer]).collect();
            let count = rows.len() as f64;
            let experts = rows[0].len();
            let mean: Vec<f64> = (0..experts)
                .map(|expert| rows.iter().map(|row| row[expert]).sum::<f64>() / count)
                .collect();
            let squares = rows.iter().flat_map(|row| {
                row.iter()
                    .zip(&mean)
                    .map(|(own, mean)| (own - mean).powi(2))
            });
            let spread = (squares.sum::<f64>() / count / experts as f64).sqrt();
            (mean, spread)
        };
        let geometry = shape.geometry;
        let (mut logits, mut spread) = (Vec::with_capacity(geometry.counts()), Vec::new());
        for layer in 0..geometry.layers {
            let (mean, differ) = per_layer(layer * layers / geometry.layers);
            let taken = mean.iter().cycle().take(geometry.experts);
            logits.extend(taken.map(|&logit| logit as f32));
            spread.push(differ as f32);
        }
        let mean = spread.iter().sum::<f32>() / spread.len().max(1) as f32;
        spread.iter_mut().for_each(|differ| *differ /= mean);
        Popularity { logits, spread }
    }
}

/// Logits by language, layer and expert.
fn languages() -> Vec<Vec<Vec<f64>>> {
    let mut text = String::new();
    let read = GzDecoder::new(COUNTS).read_to_string(&mut text);
    read.expect("the shipped counts are whole");
    let file: File = serde_json::from_str(&text).expect("the shipped counts are JSON");
    let logits = file.langs.into_values().map(|language| {
        let logit = |count: &f64| {
            let p = (count / language.total_tokens).clamp(0.0, 1.0);
            ((p + FLOOR) / (1.0 - p + FLOOR)).ln()
        };
        language
            .counts
            .iter()
            .map(|layer| layer.iter().map(logit).collect())
            .collect()
    });
    logits.collect()
}
