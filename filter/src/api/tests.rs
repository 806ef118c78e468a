use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const ALL: [Api; 4] = [Api::Completions, Api::Chat, Api::Responses, Api::Generate];

fn object(json: &str) -> Object<'_> {
    Object::parse(json.as_bytes()).unwrap()
}

fn prefill(api: Api, request: &str) -> Value {
    serde_json::from_str(&api.prefill_body(&object(request), Some(r#"{"k":1}"#))).unwrap()
}

/// The body of the decode leg with these params.
fn placed(api: Api, request: &str, params: &str) -> Option<String> {
    let place = api.place(&object(request))?;
    let rest = &request[place.replaces..];
    Some(format!("{}{params}{}{rest}", place.before, place.after))
}

#[test]
fn paths_are_read_as_an_engine_reads_them() {
    for (path, api) in [
        ("/v1/completions", Some(Api::Completions)),
        ("/v1/%63ompletions?x=/y", Some(Api::Completions)),
        ("/v1/chat/completions", Some(Api::Chat)),
        ("/v1/responses", Some(Api::Responses)),
        ("/inference/v1/generate?a", Some(Api::Generate)),
        ("/v1/responses/resp_1/cancel", None),
        ("/v1/embeddings", None),
        ("/%zz", None),
    ] {
        assert_eq!(Api::of(path.as_bytes()), api, "{path}");
    }
}

#[test]
fn prefill_asks_for_one_token_and_keeps_the_rest() {
    let client = r#"{"model":"m","prompt":"hi","max_tokens":64,"min_tokens":9,"stream":true,"stream_options":{"include_usage":true},"n":2,"seed":123456789012345678901}"#;
    let expected = r#"{"model":"m","prompt":"hi","max_tokens":1,"stream":false,"n":1,"seed":123456789012345678901,"kv_transfer_params":{"x":null}}"#;
    let body = Api::Completions.prefill_body(&object(client), Some(r#"{"x":null}"#));
    assert_eq!(body, expected);
    let alone = Api::Completions.prefill_body(&object(client), None);
    assert_eq!(
        alone,
        expected.replace(r#","kv_transfer_params":{"x":null}"#, "")
    );
}

#[test]
fn each_api_has_its_own_limit_and_a_limit_of_null_is_one_too() {
    let kv = json!({"k": 1});
    for (api, client, expected) in [
        (
            Api::Chat,
            r#"{"max_completion_tokens":64}"#,
            json!({"max_completion_tokens": 1, "max_tokens": 1, "stream": false, "kv_transfer_params": kv}),
        ),
        (
            Api::Chat,
            r#"{"max_tokens":null,"max_completion_tokens":null,"min_tokens":null,"n":null,"stream":null,"stream_options":null}"#,
            json!({"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": false, "kv_transfer_params": kv}),
        ),
        (
            Api::Completions,
            r#"{"best_of":4,"n":3}"#,
            json!({"best_of": 1, "n": 1, "max_tokens": 1, "stream": false, "kv_transfer_params": kv}),
        ),
        (
            Api::Responses,
            r#"{"input":"hi","max_output_tokens":null,"stream":true,"store":true,"background":false}"#,
            json!({"input": "hi", "max_output_tokens": 1, "stream": false, "store": false, "kv_transfer_params": kv}),
        ),
        (
            Api::Generate,
            r#"{"token_ids":[1],"sampling_params":{"max_tokens":64,"min_tokens":2,"n":2,"seed":1.50},"stream":true}"#,
            json!({"token_ids": [1], "stream": false, "sampling_params":
                {"max_tokens": 1, "n": 1, "seed": 1.50, "extra_args": {"kv_transfer_params": kv}}}),
        ),
        (
            Api::Generate,
            r#"{"sampling_params":{"extra_args":{"a":1}}}"#,
            json!({"stream": false, "sampling_params":
                {"max_tokens": 1, "extra_args": {"a": 1, "kv_transfer_params": kv}}}),
        ),
        (
            Api::Generate,
            r#"{"sampling_params":{"extra_args":null}}"#,
            json!({"stream": false, "sampling_params":
                {"max_tokens": 1, "extra_args": {"kv_transfer_params": kv}}}),
        ),
    ] {
        assert_eq!(prefill(api, client), expected, "{client}");
    }
}

#[test]
fn the_params_of_decode_are_put_where_the_engine_wants_them_and_no_other_byte_changes() {
    for (api, client, expected) in [
        (
            Api::Chat,
            "\n { \"n\":1.0}",
            Some("\n {\"kv_transfer_params\":P, \"n\":1.0}"),
        ),
        (Api::Responses, "{ }", Some("{\"kv_transfer_params\":P }")),
        (
            Api::Generate,
            r#"{"token_ids":[1, 2],"sampling_params": {"seed":1.50}}"#,
            Some(
                r#"{"token_ids":[1, 2],"sampling_params": {"extra_args":{"kv_transfer_params":P},"seed":1.50}}"#,
            ),
        ),
        (
            Api::Generate,
            r#"{"sampling_params":{},"x":1}"#,
            Some(r#"{"sampling_params":{"extra_args":{"kv_transfer_params":P}},"x":1}"#),
        ),
        (
            Api::Generate,
            r#"{"sampling_params":{"a":1,"extra_args": { "b":[ ]}, "c":2}}"#,
            Some(
                r#"{"sampling_params":{"a":1,"extra_args": {"kv_transfer_params":P, "b":[ ]}, "c":2}}"#,
            ),
        ),
        (
            Api::Generate,
            r#"{"sampling_params":{"extra_args":null,"c":2}}"#,
            Some(r#"{"sampling_params":{"extra_args":{"kv_transfer_params":P},"c":2}}"#),
        ),
        (
            Api::Generate,
            r#"{"sampling_params":{"a":1},"sampling_params":{"b":2}}"#,
            Some(
                r#"{"sampling_params":{"a":1},"sampling_params":{"extra_args":{"kv_transfer_params":P},"b":2}}"#,
            ),
        ),
        (Api::Generate, r#"{"token_ids":[1]}"#, None),
        (Api::Generate, r#"{"sampling_params":7}"#, None),
    ] {
        assert_eq!(placed(api, client, "P").as_deref(), expected, "{client}");
    }
}

#[test]
fn params_of_a_client_are_found_wherever_an_engine_would_take_them() {
    let top = r#"{"kv\u005ftransfer_params":null}"#;
    let extra = r#"{"vllm_xargs":{"kv_transfer_params":["x"]}}"#;
    let inside = r#"{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}"#;
    for api in ALL {
        assert!(api.has_params(&object(top)) && api.has_params(&object(extra)));
        assert_eq!(api.has_params(&object(inside)), api == Api::Generate);
        let innocent = r#"{"prompt":"kv_transfer_params","messages":[{"kv_transfer_params":1}],"vllm_xargs":{"a":1},"sampling_params":{}}"#;
        assert!(!api.has_params(&object(innocent)));
    }
}

#[test]
fn several_prompts_and_kept_states_go_alone() {
    for (api, request, alone) in [
        (Api::Completions, r#"{"prompt":["a","b"]}"#, true),
        (Api::Completions, r#"{"prompt":[ [1,2],[3]]}"#, true),
        (Api::Completions, r#"{"prompt":[1,2,3]}"#, false),
        (Api::Completions, r#"{"prompt":[]}"#, false),
        (Api::Generate, r#"{"token_ids":[1,2,3]}"#, false),
        (
            Api::Responses,
            r#"{"input":[{"role":"user"}],"previous_response_id":null}"#,
            false,
        ),
        (Api::Responses, r#"{"previous_response_id":"resp_1"}"#, true),
        (Api::Responses, r#"{"background":true}"#, true),
        (Api::Responses, r#"{"background":false}"#, false),
    ] {
        assert_eq!(api.goes_alone(&object(request)), alone, "{request}");
    }
}

#[test]
fn an_answer_ended_at_its_limit_or_for_another_reason() {
    for (api, answer, ended) in [
        (
            Api::Chat,
            r#"{"choices":[{"index":0,"finish_reason":"length"}]}"#,
            true,
        ),
        (
            Api::Generate,
            r#"{"choices":[{"finish_reason":"stop"}]}"#,
            false,
        ),
        (
            Api::Completions,
            r#"{"choices":[{"finish_reason":null}]}"#,
            false,
        ),
        (Api::Completions, r#"{"choices":[]}"#, false),
        (Api::Completions, r#"{"choices":7}"#, false),
        (Api::Responses, r#"{"status":"incomplete"}"#, true),
        (Api::Responses, r#"{"status":"completed"}"#, false),
    ] {
        assert_eq!(api.ended_at_limit(&object(answer)), ended, "{answer}");
    }
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        "[a-z\\\\\"{},:é]{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        let keys = prop_oneof!["[a-z]{1,3}", Just("extra_args".to_owned())];
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(keys, inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn request() -> impl Strategy<Value = Value> {
    let keys = prop_oneof![
        Just("sampling_params".to_owned()),
        Just("stream".to_owned()),
        Just("n".to_owned()),
        "[a-z]{1,4}",
    ];
    proptest::collection::btree_map(keys, json_value(), 0..6)
        .prop_map(|map| Value::Object(map.into_iter().collect()))
}

/// What [`Api::with_params`] says, the slow way.
#[test]
fn limits_and_sequences_are_read_where_each_api_has_them() {
    use Api::{Chat, Completions, Generate, Responses};
    for (api, request, limit, sequences) in [
        (Completions, r#"{"max_tokens":7,"n":3}"#, Some(7), Some(3)),
        (Completions, "{}", Some(16), None),
        (Completions, r#"{"max_tokens":null}"#, None, None),
        (Completions, r#"{"max_tokens":"7","n":-1}"#, None, None),
        (Chat, r#"{"max_tokens":7,"n":2}"#, Some(7), Some(2)),
        (
            Chat,
            r#"{"max_tokens":7,"max_completion_tokens":9}"#,
            Some(9),
            None,
        ),
        (
            Chat,
            r#"{"max_tokens":7,"max_completion_tokens":null}"#,
            Some(7),
            None,
        ),
        (Chat, "{}", None, None),
        (Responses, r#"{"max_output_tokens":5,"n":2}"#, Some(5), None),
        (Responses, r#"{"max_tokens":5}"#, None, None),
        (
            Generate,
            r#"{"max_tokens":1,"sampling_params":{"max_tokens":4,"n":2}}"#,
            Some(4),
            Some(2),
        ),
        (Generate, r#"{"sampling_params":{}}"#, Some(16), None),
        (Generate, "{}", None, None),
    ] {
        let object = object(request);
        let found = (api.output_limit(&object), api.sequences(&object));
        assert_eq!(found, (limit, sequences), "{api:?} {request}");
    }
}

#[test]
fn an_answer_says_how_long_its_prompt_was() {
    for (api, answer, expected) in [
        (Api::Chat, r#"{"usage":{"prompt_tokens":9}}"#, Some(9)),
        (Api::Generate, r#"{"usage":{"prompt_tokens":9}}"#, Some(9)),
        (Api::Responses, r#"{"usage":{"input_tokens":9}}"#, Some(9)),
        (Api::Responses, r#"{"usage":{"prompt_tokens":9}}"#, None),
        (Api::Chat, r#"{"usage":{"prompt_tokens":-9}}"#, None),
        (Api::Chat, r#"{"usage":null}"#, None),
        (Api::Chat, "{}", None),
    ] {
        assert_eq!(api.prompt_tokens(&object(answer)), expected, "{answer}");
    }
}

fn oracle(api: Api, mut request: Value, params: &Value) -> Value {
    if api != Api::Generate {
        request[KV_PARAMS] = params.clone();
        return request;
    }
    for path in ["/sampling_params", "/sampling_params/extra_args"] {
        if !request.pointer(path).is_some_and(Value::is_object) {
            let (parent, key) = path.rsplit_once('/').unwrap();
            request.pointer_mut(parent).unwrap()[key] = json!({});
        }
    }
    request["sampling_params"][EXTRA_ARGS][KV_PARAMS] = params.clone();
    request
}

proptest! {
    #[test]
    fn params_are_read_where_they_are_put(request in request(), params in json_value(), pretty in any::<bool>()) {
        let text = if pretty { format!("{request:#}") } else { request.to_string() };
        let raw = params.to_string();
        for api in ALL {
            let expected = oracle(api, request.clone(), &params);
            let with = api.with_params(&object(&text), &raw);
            let found: Value = serde_json::from_str(&with).unwrap();
            prop_assert_eq!(&found, &expected);
            prop_assert_eq!(api.params(&object(&with)), Some(raw.as_str()));
            match placed(api, &text, &raw) {
                Some(body) => {
                    prop_assert_eq!(serde_json::from_str::<Value>(&body).unwrap(), expected);
                }
                None => prop_assert!(!request["sampling_params"].is_object()),
            }
            let prefill: Value =
                serde_json::from_str(&api.prefill_body(&object(&text), Some(&raw))).unwrap();
            prop_assert_eq!(&prefill["stream"], &json!(false));
            let found = prefill.to_string();
            prop_assert_eq!(api.params(&object(&found)).map(str::to_owned), Some(raw.clone()));
        }
    }
}
