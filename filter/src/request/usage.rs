//! `usage` of an answer, as prefill saw it: the decode worker found the whole prompt computed, or none of it.

use super::Request;
use crate::api::{Api, edit_or_new, member};
use crate::body::{Edit, Object};

const USAGE: &str = "usage";
const CACHED_TOKENS: &str = "cached_tokens";

impl Request {
    /// Whether the answer, if it is JSON, is to say what prefill had cached.
    pub fn reports_cached_tokens(&self) -> bool {
        self.cached_tokens.is_some()
    }

    /// The answer with that, once; `None` where it stays as it is.
    pub fn with_cached_tokens(&mut self, answer: &[u8]) -> Option<String> {
        let api = self.api?;
        with_cached_tokens(
            api,
            &Object::parse(answer).ok()?,
            self.cached_tokens.take()?,
        )
    }
}

/// Prompt tokens that a prefill answer's `usage` says were cached. Engines leave out what is 0.
pub(super) fn cached_tokens(api: Api, answer: &Object<'_>) -> Option<u64> {
    let usage = member(answer, USAGE)?;
    let details = member(&usage, api.prompt_details());
    let cached = details.and_then(|details| details.get(CACHED_TOKENS)?.parse().ok());
    Some(cached.unwrap_or(0))
}

/// Only the number changes, or the details are added where an engine leaves them out.
fn with_cached_tokens(api: Api, answer: &Object<'_>, cached: u64) -> Option<String> {
    let usage = member(answer, USAGE)?;
    let details = member(&usage, api.prompt_details());
    if details.is_none() && cached == 0 {
        return None;
    }
    let set = |value: String| Edit::Set(value);
    let details = edit_or_new(
        details.as_ref(),
        &[(CACHED_TOKENS, set(cached.to_string()))],
    );
    let usage = usage.edit(&[(api.prompt_details(), set(details))]);
    Some(answer.edit(&[(USAGE, set(usage))]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(json: &str) -> Object<'_> {
        Object::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn what_prefill_had_cached_is_read_where_its_api_has_it() {
        for (api, answer, expected) in [
            (
                Api::Chat,
                r#"{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":5}}}"#,
                Some(5),
            ),
            (
                Api::Responses,
                r#"{"usage":{"input_tokens_details":{"cached_tokens":7}}}"#,
                Some(7),
            ),
            (
                Api::Chat,
                r#"{"usage":{"prompt_tokens_details":null}}"#,
                Some(0),
            ),
            (Api::Chat, r#"{"usage":{"prompt_tokens":9}}"#, Some(0)),
            (Api::Generate, r#"{"choices":[]}"#, None),
            (Api::Chat, r#"{"usage":null}"#, None),
        ] {
            assert_eq!(cached_tokens(api, &object(answer)), expected, "{answer}");
        }
    }

    #[test]
    fn only_the_number_changes() {
        for (api, answer, cached, expected) in [
            (
                Api::Completions,
                r#"{"id":"x", "usage":{"prompt_tokens":9, "prompt_tokens_details":{"audio":1.50,"cached_tokens":9}},"z":1}"#,
                5,
                Some(
                    r#"{"id":"x", "usage":{"prompt_tokens":9, "prompt_tokens_details":{"audio":1.50,"cached_tokens":5}},"z":1}"#,
                ),
            ),
            (
                Api::Completions,
                r#"{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}"#,
                5,
                Some(
                    r#"{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":5}}}"#,
                ),
            ),
            (
                Api::Responses,
                r#"{"usage":{"input_tokens_details":{"cached_tokens":9}}}"#,
                0,
                Some(r#"{"usage":{"input_tokens_details":{"cached_tokens":0}}}"#),
            ),
            (
                Api::Completions,
                r#"{"usage":{"prompt_tokens":9}}"#,
                0,
                None,
            ),
            (Api::Completions, r#"{"error":{}}"#, 5, None),
        ] {
            let found = with_cached_tokens(api, &object(answer), cached);
            assert_eq!(found.as_deref(), expected, "{answer}");
        }
    }
}
