use super::*;

fn parse(api: Api, body: &str) -> Result<GenerationRequest, ApiError> {
    let limits = Limits {
        model: "m".into(),
        context_tokens: 1000,
    };
    GenerationRequest::parse(api, body.as_bytes(), &limits)
}

fn refused(api: Api, body: &str) -> String {
    let error = parse(api, body).expect_err(body);
    format!("{} {}", error.status.as_u16(), error.message)
}

#[test]
fn prompts_come_in_every_shape_the_protocol_has() {
    for (body, expected) in [
        (r#"{"prompt":"a b t1"}"#, vec![("t1", 3)]),
        (r#"{"prompt":["x t1","t2"]}"#, vec![("t1", 2), ("t2", 1)]),
    ] {
        let request = parse(Api::Completions, body).unwrap();
        let prompts: Vec<_> = request
            .prompts
            .iter()
            .map(|prompt| (prompt.id.as_str(), prompt.tokens))
            .collect();
        assert_eq!(prompts, expected, "{body}");
    }
    for (body, tokens) in [(r#"{"prompt":[1,2,3]}"#, 3), (r#"{"prompt":[[7,8]]}"#, 2)] {
        assert_eq!(
            parse(Api::Completions, body).unwrap().prompts[0].tokens,
            tokens,
            "{body}"
        );
    }
}

#[test]
fn the_id_of_a_conversation_is_in_the_last_message_of_the_user() {
    let body = r#"{"messages":[{"role":"system","content":"be kind"},{"role":"user","content":"a t1"},
        {"role":"assistant","content":"b"},{"role":"user","content":[{"type":"text","text":"c t2"}]},
        {"role":"assistant","content":null}],"max_tokens":9,"max_completion_tokens":4}"#;
    let request = parse(Api::Chat, body).unwrap();
    assert_eq!(
        (request.prompts[0].id.as_str(), request.prompts[0].tokens),
        ("t2", 7)
    );
    assert_eq!(request.max_tokens, Some(4));
}

#[test]
fn of_equal_keys_the_last_wins() {
    let request = parse(
        Api::Completions,
        r#"{"prompt":"a","max_tokens":3,"max_tokens":5}"#,
    );
    assert_eq!(request.unwrap().max_tokens, Some(5));
}

#[test]
fn kv_transfer_params_tell_the_leg() {
    let kv = |params: &str| {
        let body = format!(r#"{{"prompt":"a","kv_transfer_params":{params}}}"#);
        parse(Api::Completions, &body).map(|request| request.kv)
    };
    assert_eq!(kv("null"), Ok(KvTransfer::None));
    assert_eq!(kv(r#"{"do_remote_decode":false}"#), Ok(KvTransfer::None));
    assert_eq!(
        kv(r#"{"do_remote_decode":true,"do_remote_prefill":false}"#),
        Ok(KvTransfer::RemoteDecode)
    );
    assert!(matches!(
        kv(r#"{"do_remote_prefill":true}"#),
        Ok(KvTransfer::RemotePrefill(_))
    ));
    assert!(kv("3").is_err());
    assert!(kv(r#"{"do_remote_decode":true,"do_remote_prefill":true}"#).is_err());
}

#[test]
fn bad_bodies_get_the_errors_of_vllm() {
    use Api::{Chat, Completions};
    for (api, body, expected) in [
        (Completions, "{", "400 the body is invalid"),
        (Completions, "[]", "400 the body is invalid"),
        (Completions, r#"{"prompt":7}"#, "400 the body is invalid"),
        (Completions, "{}", "400 prompt: Field required"),
        (Chat, r#"{"prompt":"a"}"#, "400 messages: Field required"),
        (
            Chat,
            r#"{"messages":[]}"#,
            "400 The decoder prompt cannot be empty",
        ),
        (
            Completions,
            r#"{"prompt":""}"#,
            "400 The decoder prompt cannot be empty",
        ),
        (
            Completions,
            r#"{"prompt":[]}"#,
            "400 The decoder prompt cannot be empty",
        ),
        (
            Completions,
            r#"{"prompt":"a","model":"x"}"#,
            "404 The model `x` does not exist.",
        ),
        (Completions, r#"{"prompt":"a","n":0}"#, "400 n=0"),
        (Completions, r#"{"prompt":"a","n":999}"#, "400 n=999"),
        (
            Completions,
            r#"{"prompt":"a","max_tokens":0}"#,
            "400 max_tokens must be at least 1",
        ),
        (
            Completions,
            r#"{"prompt":"a","max_tokens":-1}"#,
            "400 the body is invalid",
        ),
        (
            Completions,
            r#"{"prompt":"a","max_tokens":1,"min_tokens":2}"#,
            "400 min_tokens must be less than or equal to max_tokens=1, got 2.",
        ),
        (
            Completions,
            r#"{"prompt":"a","stream_options":{"include_usage":true}}"#,
            "400 Stream options can only be defined when `stream=True`.",
        ),
        (
            Completions,
            r#"{"prompt":"a","max_tokens":1000}"#,
            "400 This model's maximum context length is 1000 tokens.",
        ),
        (
            Completions,
            r#"{"prompt":"a","stream":true,"kv_transfer_params":{"do_remote_decode":true}}"#,
            "400 do_remote_decode with stream=true",
        ),
    ] {
        let error = refused(api, body);
        assert!(error.starts_with(expected), "{body}: {error}");
    }
}
