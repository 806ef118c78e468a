//! What a request says of its tokens, and what prefill says of its prompt; read only where load is counted in tokens.

use eldr_core::signature::Encoded;

use super::Request;
use crate::api::Api;
use crate::body::Object;
use crate::tokens::Known;

impl Request {
    /// What is known of its tokens so far.
    pub fn tokens(&self) -> Known {
        self.tokens
    }

    /// Takes note of how long its prompt is, where that is known from another leg.
    pub fn prompt_has(&mut self, tokens: Option<u64>) {
        self.tokens.prompt = self.tokens.prompt.or(tokens);
    }

    /// Reads what the client wants.
    pub(super) fn read_limits(&mut self, api: Api, object: &Object<'_>) {
        self.tokens.limit = api.output_limit(object);
        self.tokens.sequences = Known::sequences(api.sequences(object));
    }
}

/// Tokens of a prompt, by the signature of its prefill leg or by the `usage` of the answer to that.
pub fn prompt_tokens(signature: Option<&[u8]>, usage: impl FnOnce() -> Option<u64>) -> Option<u64> {
    let encoded = signature.and_then(|value| Encoded::parse(value).ok());
    let said = encoded.and_then(|encoded| encoded.prompt_tokens());
    said.or_else(usage).filter(|&tokens| tokens > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::plugin::Plugin;
    use crate::request::Answer;

    #[test]
    fn what_client_and_prefill_say_is_known_where_it_is_wanted() {
        let all = Known {
            prompt: Some(9),
            limit: Some(5),
            sequences: 2,
        };
        for (unit, expected) in [("requests", Known::default()), ("kv_tokens", all)] {
            let config = serde_json::json!({
                "models": [{"model": "*", "load_unit": unit}],
                "decode_clusters": ["d"],
                "prefill_clusters": ["p"],
            });
            let plugin = Plugin::new(Config::parse(config.to_string().as_bytes()).unwrap());
            let header = |name: &str, value: &str| (name.to_owned(), value.as_bytes().to_vec());
            let path = header(":path", "/v1/chat/completions");
            let mut request = Request::default();
            request.on_headers(vec![header(":method", "POST"), path], false);
            request.on_body(&plugin, br#"{"max_tokens":5,"n":2}"#);
            let answer = Answer {
                headers: vec![header(":status", "200")],
                body: br#"{"usage":{"prompt_tokens":9}}"#.to_vec(),
            };
            request.on_prefill(&answer, &plugin);
            assert_eq!(request.tokens(), expected, "{unit}");
        }
    }

    #[test]
    fn a_signature_is_believed_first_and_0_says_nothing() {
        let usage = || Some(9);
        for (signature, expected) in [
            (Some(":AAAAAA==:;l=1;e=2;n=7"), Some(7)),
            (Some(":AAAAAA==:;l=1;e=2;n=0"), None),
            (Some(":AAAAAA==:;l=1;e=2"), Some(9)),
            (Some("rubbish"), Some(9)),
            (None, Some(9)),
        ] {
            let found = prompt_tokens(signature.map(str::as_bytes), usage);
            assert_eq!(found, expected, "{signature:?}");
        }
        assert_eq!(prompt_tokens(None, || Some(0)), None);
    }
}
