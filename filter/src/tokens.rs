//! How many tokens a request will have in its decode worker's KV cache: its prompt, and what is expected of its answers.
//!
//! ```text
//! tokens = prompt + sequences × min(limit of the request, mean length of the model's last answers)
//! ```
//!
//! A prompt's length is known once prefill has answered. Where it is not (prefill failed or was not asked), the mean of
//! the model's last prompts stands for it. Each thread learns its own means; what was added to a worker's load with them
//! is what is taken off again, whatever they have become.

use std::collections::HashMap;

/// A longer prompt or answer is an error of whoever said so: no context window comes near.
pub const MAX_TOKENS: u32 = 1 << 24;
/// Most sequences that one request is taken to have.
const MAX_SEQUENCES: u32 = 128;
/// A prompt while none is known.
pub const FIRST_PROMPT: f64 = 512.0;
/// An answer while none has ended.
pub const FIRST_OUTPUT: f64 = 256.0;
/// About so many of the last values count.
const MEMORY: u32 = 64;

/// What is known of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// Tokens of the prompt, once prefill has said it.
    pub prompt: Option<u64>,
    /// Most tokens of an answer; `None` where only the engine knows.
    pub limit: Option<u64>,
    /// Answers to the one prompt, `n`.
    pub sequences: u32,
}

impl Default for Known {
    fn default() -> Self {
        Self {
            prompt: None,
            limit: None,
            sequences: 1,
        }
    }
}

impl Known {
    /// `n` as the request has it, which may be anything.
    pub fn sequences(n: Option<u64>) -> u32 {
        n.unwrap_or(1).clamp(1, MAX_SEQUENCES.into()) as u32
    }
}

/// A plain mean of the first [`MEMORY`] values, then one that forgets.
#[derive(Debug, Clone, Copy)]
struct Mean {
    value: f64,
    count: u32,
}

impl Mean {
    /// One that has this value until it learns another.
    fn starting_at(value: f64) -> Self {
        Self { value, count: 0 }
    }

    fn learn(&mut self, value: f64) {
        self.count = (self.count + 1).min(MEMORY);
        self.value += (value - self.value) / f64::from(self.count);
    }
}

/// What one model's requests are like.
#[derive(Debug)]
struct OfModel {
    prompt: Mean,
    output: Mean,
}

impl Default for OfModel {
    fn default() -> Self {
        Self {
            prompt: Mean::starting_at(FIRST_PROMPT),
            output: Mean::starting_at(FIRST_OUTPUT),
        }
    }
}

/// What one thread has learned.
#[derive(Debug)]
pub struct Expected {
    /// By name as configured.
    models: HashMap<String, OfModel>,
    /// Of a request of any model.
    request: Mean,
}

impl Default for Expected {
    fn default() -> Self {
        Self {
            models: HashMap::new(),
            request: Mean::starting_at(FIRST_PROMPT + FIRST_OUTPUT),
        }
    }
}

impl Expected {
    /// Tokens that a request of this model will have, from 1 on.
    pub fn expects(&self, model: &str, known: Known) -> u32 {
        let default = OfModel::default();
        let of = self.models.get(model).unwrap_or(&default);
        let prompt = known.prompt.map_or(of.prompt.value, bounded);
        let output = known.limit.map_or(f64::INFINITY, bounded);
        let sequences = f64::from(known.sequences);
        let tokens = prompt + sequences * output.min(of.output.value);
        tokens.clamp(1.0, MAX_TOKENS.into()).round() as u32
    }

    /// The same of one that is being sent; from what is known of it others are judged by.
    pub fn arrives(&mut self, model: &str, known: Known) -> u32 {
        let tokens = self.expects(model, known);
        if let Some(prompt) = known.prompt {
            self.of(model).prompt.learn(bounded(prompt));
        }
        self.request.learn(tokens.into());
        tokens
    }

    /// An answer of this model has come to its end, with so many tokens in all its sequences.
    pub fn ends(&mut self, model: &str, output: u64, sequences: u32) {
        let output = bounded(output) / f64::from(sequences.max(1));
        self.of(model).output.learn(output);
    }

    /// Tokens that so many requests have of which nothing is known, those that others send.
    pub fn of_others(&self, requests: u32) -> f64 {
        f64::from(requests) * self.request.value
    }

    fn of(&mut self, model: &str) -> &mut OfModel {
        self.models.entry(model.to_owned()).or_default()
    }
}

fn bounded(tokens: u64) -> f64 {
    f64::from(u32::try_from(tokens).unwrap_or(u32::MAX).min(MAX_TOKENS))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn known(prompt: impl Into<Option<u64>>, limit: impl Into<Option<u64>>) -> Known {
        Known {
            prompt: prompt.into(),
            limit: limit.into(),
            sequences: 1,
        }
    }

    #[test]
    fn a_request_has_its_prompt_and_the_shorter_of_its_limit_and_the_mean() {
        let mut expected = Expected::default();
        assert_eq!(expected.arrives("m", known(1_000, 16)), 1_016);
        assert_eq!(expected.arrives("m", known(1_000, 99_999)), 1_256);
        assert_eq!(expected.arrives("m", known(1_000, None)), 1_256);
        for output in [10, 30] {
            expected.ends("m", output, 1);
        }
        assert_eq!(expected.arrives("m", known(1_000, None)), 1_020);
        // Each model has a mean of its own.
        assert_eq!(expected.arrives("other", known(1, None)), 257);
    }

    #[test]
    fn several_answers_to_one_prompt_share_it() {
        let mut expected = Expected::default();
        expected.ends("m", 40, 4);
        let four = Known {
            sequences: 4,
            ..known(100, None)
        };
        assert_eq!(expected.arrives("m", four), 140);
        for (said, meant) in [(None, 1), (Some(0), 1), (Some(3), 3), (Some(u64::MAX), 128)] {
            assert_eq!(Known::sequences(said), meant, "{said:?}");
        }
    }

    #[test]
    fn an_unknown_prompt_is_taken_for_the_mean_of_the_known_ones() {
        let mut expected = Expected::default();
        assert_eq!(expected.arrives("m", known(None, 0)), 512);
        expected.arrives("m", known(100, 0));
        expected.arrives("m", known(300, 0));
        assert_eq!(expected.arrives("m", known(None, 0)), 200);
    }

    #[test]
    fn requests_of_others_are_taken_for_the_mean_of_ours() {
        let mut expected = Expected::default();
        assert_eq!(expected.of_others(2), 2.0 * 768.0);
        expected.arrives("m", known(90, 10));
        expected.arrives("n", known(190, 10));
        assert_eq!(expected.of_others(3), 3.0 * 150.0);
    }

    #[test]
    fn a_mean_follows_what_changes() {
        let mut expected = Expected::default();
        for output in [[1_000; 500], [10; 500]].concat() {
            expected.ends("m", output, 1);
        }
        let now = expected.arrives("m", known(1, None));
        assert!((11..13).contains(&now), "{now}");
    }

    proptest! {
        #[test]
        fn whatever_engines_and_clients_say_the_load_of_a_request_has_bounds(
            said in proptest::collection::vec((any::<Option<u64>>(), any::<Option<u64>>(), any::<Option<u64>>(), any::<u64>()), 1..50),
        ) {
            let mut expected = Expected::default();
            for (prompt, limit, n, output) in said {
                let sequences = Known::sequences(n);
                let tokens = expected.arrives("m", Known { prompt, limit, sequences });
                prop_assert!((1..=MAX_TOKENS).contains(&tokens));
                expected.ends("m", output, sequences);
                let others = expected.of_others(u32::MAX);
                prop_assert!(others.is_finite() && others >= 0.0);
            }
        }
    }
}
