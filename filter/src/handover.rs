//! How prefill hands its KV blocks over to decode, engine by engine: the params of both legs.
//!
//! | protocol | prefill leg | its answer | decode leg |
//! |---|---|---|---|
//! | `nixl` | blocks are to be kept (`do_remote_decode`) | says where they are | gets that verbatim, unknown fields included |
//! | `mooncake` | the same under a `transfer_id` of ours | says nothing, or as above | gets the id and, from the configuration, whose it is |
//! | `shared_storage` | nothing | nothing | nothing: the blocks are found by what they hold |
//!
//! Mixing the params of two requests makes vLLM decode from the wrong blocks without an error, so they never leave the
//! request they came for.

use crate::api::Api;
use crate::body::{Edit, Object};
use crate::config::{Mooncake, Protocol};

/// The member that carries the hand-over in requests and answers.
pub const KV_PARAMS: &str = "kv_transfer_params";

/// The member of the params in which the official artifact carries a signature. It describes the prompt: decode does
/// not get it.
pub(crate) const ELDR_SIG: &str = "eldr_sig";

/// Params of the prefill leg.
pub fn prefill_params(protocol: Protocol, transfer_id: &str) -> Option<String> {
    match protocol {
        Protocol::Nixl => Some(
            "{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,\
             \"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}"
                .into(),
        ),
        Protocol::Mooncake => Some(format!(
            "{{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"transfer_id\":\"{transfer_id}\"}}"
        )),
        Protocol::SharedStorage => None,
    }
}

/// What a prefill answer hands over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandOver {
    /// Raw text of `kv_transfer_params`, without `eldr_sig`.
    pub params: String,
    /// Raw text of the signature in them; the last one, if there are several.
    pub eldr_sig: Option<String>,
}

/// What a prefill answer says it hands over; `None` where it says nothing, as when the engine kept no blocks.
pub fn read(answer: &Object<'_>) -> Option<HandOver> {
    let raw = answer.get(KV_PARAMS)?;
    let params = Object::parse(raw.as_bytes()).ok()?;
    Some(HandOver {
        eldr_sig: params.get(ELDR_SIG).map(str::to_owned),
        params: if params.has(ELDR_SIG) {
            params.edit(&[(ELDR_SIG, Edit::Remove)])
        } else {
            raw.to_owned()
        },
    })
}

/// Params of the decode leg, after this answer to a prefill leg with `transfer_id`, from a cluster whose engine is `from`.
/// `None` where there are no blocks to fetch: decode prefills by itself, or finds them by what they hold.
pub fn decode_params(
    protocol: Protocol,
    api: Api,
    answer: &Object<'_>,
    said: Option<&HandOver>,
    transfer_id: &str,
    from: Option<&Mooncake>,
) -> Option<String> {
    match (protocol, said, from) {
        (Protocol::SharedStorage, ..) => None,
        (Protocol::Mooncake, Some(said), _) if names_an_engine(&said.params) => {
            Some(said.params.clone())
        }
        // Waiting for blocks that were not kept would last until the engine's timeout.
        (Protocol::Mooncake, _, Some(from)) if api.ended_at_limit(answer) => {
            let (address, engine) = (json(&from.bootstrap_addr), json(&from.engine_id));
            Some(format!(
                "{{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"transfer_id\":\"{transfer_id}\",\
                 \"remote_bootstrap_addr\":{address},\"remote_engine_id\":{engine}}}"
            ))
        }
        (Protocol::Mooncake, ..) => None,
        (Protocol::Nixl, said, _) => said.map(|said| said.params.clone()),
    }
}

/// Params with a signature alone hand nothing over.
fn names_an_engine(params: &str) -> bool {
    Object::parse(params.as_bytes()).is_ok_and(|params| params.has("remote_engine_id"))
}

fn json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_params_are_taken_verbatim() {
        let params = r#"{"do_remote_prefill":true, "remote_block_ids":[[1,2]],"new":1e400}"#;
        let answer = format!(r#"{{"id":"x","choices":[],"kv_transfer_params":{params}}}"#);
        let found = read(&Object::parse(answer.as_bytes()).unwrap()).unwrap();
        assert_eq!(found.params, params);
        assert_eq!(found.eldr_sig, None);
    }

    #[test]
    fn an_answer_without_blocks_has_no_params() {
        assert_eq!(
            read(&Object::parse(br#"{"id":"x","kv_transfer_params":null}"#).unwrap()),
            None
        );
        assert_eq!(read(&Object::parse(br#"{"id":"x"}"#).unwrap()), None);
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
            let found = read(&Object::parse(answer.as_bytes()).unwrap()).unwrap();
            assert_eq!(
                (found.params.as_str(), found.eldr_sig.as_deref()),
                (left, Some(signature))
            );
        }
    }

    const SAID: &str = r#"{"remote_engine_id":"e","transfer_id":"t","new":1e400}"#;

    /// Params of decode after this answer, where the configuration knows the engine or not.
    fn decode(protocol: Protocol, answer: &str, known: bool) -> Option<String> {
        let answer = Object::parse(answer.as_bytes()).unwrap();
        let engine = Mooncake {
            bootstrap_addr: "http://10.0.0.1:8998".into(),
            engine_id: "p \"0\"".into(),
        };
        let said = read(&answer);
        let from = known.then_some(&engine);
        decode_params(protocol, Api::Chat, &answer, said.as_ref(), "xfer-1", from)
    }

    #[test]
    fn a_prefill_leg_asks_for_what_its_protocol_needs() {
        let mooncake =
            r#"{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"xfer-1"}"#;
        let nixl = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
        for (protocol, expected) in [
            (Protocol::Nixl, Some(nixl)),
            (Protocol::Mooncake, Some(mooncake)),
            (Protocol::SharedStorage, None),
        ] {
            assert_eq!(prefill_params(protocol, "xfer-1").as_deref(), expected);
        }
    }

    #[test]
    fn mooncakes_decode_leg_gets_the_id_and_whose_it_is_if_blocks_were_kept() {
        let kept = r#"{"choices":[{"finish_reason":"length"}]}"#;
        let expected = r#"{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":"xfer-1","remote_bootstrap_addr":"http://10.0.0.1:8998","remote_engine_id":"p \"0\""}"#;
        let mooncake = Protocol::Mooncake;
        assert_eq!(decode(mooncake, kept, true).as_deref(), Some(expected));
        let stopped = r#"{"choices":[{"finish_reason":"stop"}]}"#;
        assert_eq!(decode(mooncake, stopped, true), None);
        assert_eq!(decode(mooncake, kept, false), None);
        // What the engine itself says is better; a signature alone says nothing.
        let says = format!(r#"{{"kv_transfer_params":{SAID}}}"#);
        assert_eq!(decode(mooncake, &says, true).as_deref(), Some(SAID));
        let signs =
            r#"{"kv_transfer_params":{"eldr_sig":"AA=="},"choices":[{"finish_reason":"length"}]}"#;
        assert_eq!(decode(mooncake, signs, true).as_deref(), Some(expected));
    }

    #[test]
    fn nixl_hands_over_what_was_said_and_shared_storage_nothing() {
        let says = format!(r#"{{"kv_transfer_params":{SAID}}}"#);
        assert_eq!(decode(Protocol::Nixl, &says, false).as_deref(), Some(SAID));
        assert_eq!(decode(Protocol::Nixl, "{}", false), None);
        assert_eq!(decode(Protocol::SharedStorage, &says, true), None);
    }
}
