//! vLLM's NixlConnector: prefill computes the KV blocks, decode pulls them from it, and the decode worker may be chosen
//! after prefill.
//!
//! The prefill leg asks for one token and for blocks to be kept (`do_remote_decode`); its answer carries
//! `kv_transfer_params`, which the decode leg gets verbatim, unknown fields included. Mixing the params of two
//! requests makes vLLM decode from the wrong blocks without an error, so they never leave the request they came for.

use crate::body::{Edit, NotAnObject, Object};

/// The member that carries the hand-over in requests and answers.
pub const KV_PARAMS: &str = "kv_transfer_params";

/// The member of the params in which the official artifact carries a signature. It describes the prompt: decode does
/// not get it.
pub(crate) const ELDR_SIG: &str = "eldr_sig";

const DO_REMOTE_DECODE: &str = "{\"do_remote_decode\":true,\"do_remote_prefill\":false,\
     \"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}";

/// Body of the prefill leg: the client's, cut down to one token and no stream.
pub fn prefill_body(request: &Object<'_>) -> String {
    let set = |value: &str| Edit::Set(value.to_owned());
    let replace = |value: &str| Edit::Replace(value.to_owned());
    request.edit(&[
        ("stream", set("false")),
        ("max_tokens", set("1")),
        ("max_completion_tokens", replace("1")),
        ("n", replace("1")),
        ("stream_options", Edit::Remove),
        ("min_tokens", Edit::Remove),
        (KV_PARAMS, set(DO_REMOTE_DECODE)),
    ])
}

/// What a prefill answer hands over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandOver {
    /// Raw text of `kv_transfer_params`, without `eldr_sig`.
    pub params: String,
    /// Raw text of the signature in them; the last one, if there are several.
    pub eldr_sig: Option<String>,
}

/// What a prefill answer hands over; `None` where the engine kept no blocks, in which case decode prefills by itself.
///
/// # Errors
/// The answer is not a JSON object.
pub fn hand_over(answer: &[u8]) -> Result<Option<HandOver>, NotAnObject> {
    let answer = Object::parse(answer)?;
    let Some(raw) = answer.get(KV_PARAMS).filter(|raw| raw.starts_with('{')) else {
        return Ok(None);
    };
    let params = Object::parse(raw.as_bytes())?;
    Ok(Some(HandOver {
        eldr_sig: params.get(ELDR_SIG).map(str::to_owned),
        params: if params.has(ELDR_SIG) {
            params.edit(&[(ELDR_SIG, Edit::Remove)])
        } else {
            raw.to_owned()
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: &str = r#"{"model":"m","prompt":"hi","max_tokens":64,"min_tokens":9,"stream":true,"stream_options":{"include_usage":true},"n":2,"seed":123456789012345678901}"#;

    #[test]
    fn prefill_asks_for_one_token_and_keeps_the_rest() {
        let request = Object::parse(CLIENT.as_bytes()).unwrap();
        let expected = r#"{"model":"m","prompt":"hi","max_tokens":1,"stream":false,"n":1,"seed":123456789012345678901,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#;
        assert_eq!(prefill_body(&request), expected);
    }

    #[test]
    fn the_newer_name_of_the_token_limit_is_only_set_where_the_client_used_it() {
        let request = Object::parse(br#"{"max_completion_tokens":64}"#).unwrap();
        let body = prefill_body(&request);
        assert!(body.starts_with(r#"{"max_completion_tokens":1,"stream":false,"max_tokens":1,"#));
    }

    #[test]
    fn the_params_are_taken_verbatim() {
        let params = r#"{"do_remote_prefill":true, "remote_block_ids":[[1,2]],"new":1e400}"#;
        let answer = format!(r#"{{"id":"x","choices":[],"kv_transfer_params":{params}}}"#);
        let found = hand_over(answer.as_bytes()).unwrap().unwrap();
        assert_eq!(found.params, params);
        assert_eq!(found.eldr_sig, None);
    }

    #[test]
    fn an_answer_without_blocks_has_no_params() {
        assert_eq!(
            hand_over(br#"{"id":"x","kv_transfer_params":null}"#),
            Ok(None)
        );
        assert_eq!(hand_over(br#"{"id":"x"}"#), Ok(None));
        assert!(hand_over(br#"{"id":"x","kv_tran"#).is_err());
        assert!(hand_over(b"").is_err());
    }

    #[test]
    fn the_artifacts_signature_is_taken_out_and_nothing_else_changes() {
        for (params, left, signature) in [
            (
                r#"{"a":1.50, "eldr_sig":"AA==","b":[ 1 ]}"#,
                r#"{"a":1.50,"b":[ 1 ]}"#,
                r#""AA==""#,
            ),
            (r#"{"eldr_sig": null , "a":1}"#, r#"{"a":1}"#, "null"),
            (r#"{"eldr\u005fsig":"x","eldr_sig":"y"}"#, "{}", r#""y""#),
        ] {
            let answer = format!(r#"{{"kv_transfer_params":{params}}}"#);
            let found = hand_over(answer.as_bytes()).unwrap().unwrap();
            assert_eq!(
                (found.params.as_str(), found.eldr_sig.as_deref()),
                (left, Some(signature))
            );
        }
    }
}
