//! Each API that generates, and each way in which prefill hands its KV blocks over.

use std::collections::BTreeSet;
use std::sync::Arc;

use eldr_core::Geometry;
use eldr_examples::mock::{Catalog, KvProtocol, MockConfig, MockEngine};
use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Options, blob};
use serde_json::{Value, json};

/// A prefill answer in the shape of an API, which ended at its limit.
fn prefill_answer(path: &str, params: &str) -> Answer {
    let choice = r#"[{"index":0,"finish_reason":"length"}]"#;
    let body = match path {
        "/v1/responses" => format!(
            r#"{{"id":"resp_1","object":"response","status":"incomplete","output":[],"kv_transfer_params":{params}}}"#
        ),
        "/inference/v1/generate" => {
            format!(r#"{{"request_id":"r","choices":{choice},"kv_transfer_params":{params}}}"#)
        }
        _ => format!(r#"{{"id":"c","choices":{choice},"kv_transfer_params":{params}}}"#),
    };
    Answer::json(body).header("x-eldr-signature", blob::signature_of(1, 3))
}

/// Path, the client's body, and what of the prefill leg's body differs from it, but for the params.
fn requests() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        (
            "/v1/responses",
            r#"{"model":"m","input":"hi","max_output_tokens":64,"stream":true,"seed":18446744073709551617}"#,
            json!({"max_output_tokens": 1, "stream": false, "store": false}),
        ),
        (
            "/v1/responses",
            r#"{"model":"m","input":[{"role":"user","content":"hi"}],"max_output_tokens":null}"#,
            json!({"max_output_tokens": 1, "stream": false, "store": false}),
        ),
        (
            "/v1/completions",
            r#"{"model":"m","prompt":"hi","n":3,"best_of":4,"max_tokens":null}"#,
            json!({"max_tokens": 1, "n": 1, "best_of": 1, "stream": false}),
        ),
        (
            "/v1/chat/completions",
            r#"{"model":"m","messages":[],"n":2,"max_completion_tokens":null}"#,
            json!({"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": false}),
        ),
        (
            "/inference/v1/generate",
            r#"{"model":"m","token_ids":[1, 2],"sampling_params":{"max_tokens":64,"temperature":0.50},"stream":true}"#,
            json!({"stream": false, "sampling_params": {"max_tokens": 1, "temperature": 0.5}}),
        ),
        (
            "/inference/v1/generate",
            r#"{"token_ids":[1],"sampling_params":{"max_tokens":null,"extra_args":{"mine":1.50}}}"#,
            json!({"stream": false, "sampling_params": {"max_tokens": 1, "extra_args": {"mine": 1.5}}}),
        ),
    ]
}

/// Takes the params out of where the API has them.
fn take_params(path: &str, body: &mut Value) -> Value {
    let holder = match path {
        "/inference/v1/generate" => &mut body["sampling_params"]["extra_args"],
        _ => body,
    };
    let holder = holder.as_object_mut().expect("an object with params");
    holder.remove("kv_transfer_params").unwrap_or_default()
}

#[tokio::test]
async fn every_api_gets_a_prefill_leg_of_one_token_and_its_hand_over_where_it_wants_it() {
    let gateway = Gateway::start(Options::default()).await;
    for (index, (path, body, differs)) in requests().into_iter().enumerate() {
        let params = format!(r#"{{"do_remote_prefill":true, "new":[ 1e400, {index}]}}"#);
        gateway.prefill.answers(prefill_answer(path, &params));
        let reply = gateway.post(path, body).await;
        assert_eq!(reply.text(), "decode-1", "{body}");

        let mut asked = gateway.prefill.received()[index].json();
        let asks = take_params(path, &mut asked);
        assert_eq!(asks["do_remote_decode"], true, "{body}");
        let mut expected: Value = serde_json::from_str(body).unwrap();
        for (key, value) in differs.as_object().unwrap() {
            expected[key] = value.clone();
        }
        if asked["sampling_params"]["extra_args"] == json!({}) {
            asked["sampling_params"]
                .as_object_mut()
                .unwrap()
                .remove("extra_args");
        }
        assert_eq!(asked, expected, "{body}");

        let received = &gateway.decode[1].received()[index];
        assert_eq!(received.path, path);
        assert!(
            received.text().contains(&params),
            "verbatim: {}",
            received.text()
        );
        // Without the params it is what the client sent, byte for byte.
        let without = [
            (format!(r#""kv_transfer_params":{params},"#), ""),
            (
                format!(r#""extra_args":{{"kv_transfer_params":{params}}},"#),
                "",
            ),
        ];
        let left = without
            .iter()
            .fold(received.text().to_owned(), |text, (from, to)| {
                text.replace(from, to)
            });
        assert_eq!(left, body);
        let length = received.headers["content-length"].to_str().unwrap();
        assert_eq!(length, received.body.len().to_string());
    }
    let count = requests().len() as u64;
    gateway.expect_outcomes(&[("routed(in_band)", count)]).await;
}

#[tokio::test]
async fn a_client_can_send_params_in_no_api() {
    let gateway = Gateway::start(Options::default()).await;
    let bodies = [
        (
            "/v1/responses",
            r#"{"input":"hi","kv_transfer_params":null}"#,
        ),
        (
            "/v1/chat/completions",
            r#"{"messages":[],"vllm_xargs":{"kv_transfer_params":[1]}}"#,
        ),
        (
            "/inference/v1/generate",
            r#"{"sampling_params":{},"kv_transfer_params":{}}"#,
        ),
        (
            "/inference/v1/generate",
            r#"{"sampling_params":{"extra_args":{"kv\u005ftransfer_params":{}}}}"#,
        ),
    ];
    for (path, body) in bodies {
        let reply = gateway.post(path, body).await;
        assert_eq!(reply.status, 400, "{body}");
        assert!(
            reply.text().contains("may not be sent by clients"),
            "{}",
            reply.text()
        );
    }
    gateway.expect_outcomes(&[("refused", 4)]).await;
    assert!(gateway.prefill.received().is_empty());
}

#[tokio::test]
async fn requests_with_a_state_and_such_as_no_engine_takes_go_to_decode_alone() {
    let gateway = Gateway::start(Options::default()).await;
    let bodies = [
        (
            "/v1/responses",
            r#"{"input":"hi","previous_response_id":"resp_1"}"#,
        ),
        ("/v1/responses", r#"{"input":"hi","background":true}"#),
        ("/inference/v1/generate", r#"{"token_ids":[1]}"#),
    ];
    for (path, body) in bodies {
        assert_eq!(gateway.post(path, body).await.text(), "decode-0", "{body}");
    }
    let received = gateway.decode[0].received();
    assert!(
        received
            .iter()
            .zip(bodies)
            .all(|(got, (_, sent))| got.text() == sent)
    );
    assert!(gateway.prefill.received().is_empty());
    gateway
        .expect_outcomes(&[("routed(no_signature)", 3)])
        .await;
}

fn mooncake() -> Options {
    let engine = |index: u16| {
        json!({
            "bootstrap_addr": format!("http://10.0.0.{index}:8998"),
            "engine_id": format!("engine-{index}"),
        })
    };
    Options {
        prefills: 2,
        ..Options::filter(json!({
            "protocol": "mooncake",
            "mooncake": { "prefill": engine(0), "prefill-1": engine(1) },
        }))
    }
}

#[tokio::test]
async fn mooncakes_transfers_have_names_of_their_own_and_decode_learns_whose_they_are() {
    let gateway = Gateway::start(mooncake()).await;
    for prefill in [&gateway.prefill, &gateway.other_prefills[0]] {
        // The stock connector says nothing in its answer.
        prefill.answers(prefill_answer("/v1/completions", "null"));
    }
    let mut body = eldr_tests::client::post("/v1/completions", r#"{"prompt":"hi"}"#);
    let same = "the-same-id".parse().unwrap();
    body.headers_mut().insert("x-request-id", same);
    for _ in 0..6 {
        gateway.connect().await.call(body.clone()).await;
    }
    let legs = [&gateway.prefill, &gateway.other_prefills[0]].map(|upstream| {
        let received = upstream.received().into_iter();
        received
            .map(|leg| leg.json()["kv_transfer_params"].clone())
            .collect::<Vec<_>>()
    });
    assert_eq!((legs[0].len(), legs[1].len()), (3, 3));
    let mut names = BTreeSet::new();
    for decode in gateway.decode[1].received() {
        let params = decode.json()["kv_transfer_params"].clone();
        let name = params["transfer_id"].as_str().expect("a name").to_owned();
        let of = |leg: &Vec<Value>| leg.iter().any(|leg| leg["transfer_id"] == name);
        let engine = legs
            .iter()
            .position(of)
            .expect("a prefill leg with this name");
        let expected = json!({
            "do_remote_prefill": true, "do_remote_decode": false, "transfer_id": name,
            "remote_bootstrap_addr": format!("http://10.0.0.{engine}:8998"),
            "remote_engine_id": format!("engine-{engine}"),
        });
        assert_eq!(params, expected);
        names.insert(name);
    }
    assert_eq!(names.len(), 6, "{names:?}");
    for leg in legs.iter().flatten() {
        let expected = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "transfer_id": leg["transfer_id"],
        });
        assert_eq!(*leg, expected);
    }
}

#[tokio::test]
async fn mooncakes_decode_does_not_wait_for_blocks_that_were_not_kept() {
    let gateway = Gateway::start(mooncake()).await;
    let stopped = r#"{"choices":[{"index":0,"finish_reason":"stop"}]}"#;
    for prefill in [&gateway.prefill, &gateway.other_prefills[0]] {
        prefill.answers(Answer::json(stopped));
    }
    let body = r#"{"prompt":"hi"}"#;
    gateway.post("/v1/completions", body).await;
    assert_eq!(gateway.decode[0].only().text(), body);
}

#[tokio::test]
async fn shared_storage_needs_nothing_on_the_wire() {
    let filter = json!({ "protocol": "shared_storage" });
    let gateway = Gateway::start(Options::filter(filter)).await;
    let body = r#"{"prompt":"hi","max_tokens":8}"#;
    // Whatever a prefill worker says, decode finds the blocks by what they hold.
    for params in ["null", KV_TRANSFER_PARAMS] {
        gateway
            .prefill
            .answers(prefill_answer("/v1/completions", params));
        assert_eq!(
            gateway.post("/v1/completions", body).await.text(),
            "decode-1"
        );
    }
    for leg in gateway.prefill.received() {
        assert_eq!(
            leg.json(),
            json!({"prompt": "hi", "max_tokens": 1, "stream": false})
        );
    }
    assert!(
        gateway.decode[1]
            .received()
            .iter()
            .all(|leg| leg.text() == body)
    );
}

#[tokio::test]
async fn a_whole_answer_says_what_prefill_had_cached_where_that_is_configured() {
    let cached = r#"{"kv_transfer_params":{},"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":5}}}"#;
    let answer = r#"{"id":"x", "usage":{"prompt_tokens":9, "prompt_tokens_details":{"cached_tokens":9}},"f":1.50}"#;
    let expected = answer.replace(r#""cached_tokens":9"#, r#""cached_tokens":5"#);
    let body = r#"{"prompt":"hi"}"#;
    for (configured, expected) in [(true, expected.as_str()), (false, answer)] {
        let filter = json!({ "report_cached_tokens": configured });
        let gateway = Gateway::start(Options::filter(filter)).await;
        gateway.prefill.answers(Answer::json(cached));
        gateway.decode[0].answers(Answer::json(answer));
        let reply = gateway.post("/v1/completions", body).await;
        assert_eq!(reply.text(), expected);
        assert_eq!(reply.header("content-length"), expected.len().to_string());
        // What grows, what has no usage, and errors.
        for (says, gets) in [
            (
                r#"{"usage":{"prompt_tokens":9}}"#,
                r#"{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":5}}}"#,
            ),
            (r#"{"error":{}}"#, r#"{"error":{}}"#),
            ("no JSON", "no JSON"),
        ] {
            gateway.decode[0].answers(Answer::json(says));
            let reply = gateway.post("/v1/completions", body).await;
            assert_eq!(reply.text(), if configured { gets } else { says });
        }
        let long = format!(r#"{{"usage":{{}},"x":"{}"}}"#, "y".repeat(600 << 10));
        gateway.decode[0].answers(Answer::json(long.clone()));
        assert_eq!(gateway.post("/v1/completions", body).await.text(), long);
        gateway.assert_no_trap();
    }
}

#[tokio::test]
async fn streams_are_never_held_for_it() {
    let mut gateway =
        Gateway::start(Options::filter(json!({ "report_cached_tokens": true }))).await;
    let cached = r#"{"usage":{"prompt_tokens_details":{"cached_tokens":5}}}"#;
    gateway.prefill.answers(Answer::json(cached));
    gateway.decode[0].by_hand();
    let mut connection = gateway.connect().await;
    let request = eldr_tests::client::post("/v1/completions", r#"{"prompt":"a","stream":true}"#);
    let (answer, stream) = gateway.decode[0].streams_to(connection.send(request)).await;
    stream.send("data: 1\n\n").await;
    let mut body = answer.into_body();
    let first = eldr_tests::client::next_piece(&mut body).await;
    assert_eq!(first.as_deref(), Some(&b"data: 1\n\n"[..]));
    stream.finish();
    assert_eq!(eldr_tests::client::next_piece(&mut body).await, None);
}

#[tokio::test]
async fn params_of_many_requests_at_a_time_each_stay_with_their_own() {
    let mut gateway = Gateway::start(Options {
        threads: 2,
        ..Options::default()
    })
    .await;
    gateway.prefill.by_hand();
    let mut clients = tokio::task::JoinSet::new();
    for index in 0..40 {
        let address = gateway.address;
        clients.spawn(async move {
            let body = format!(r#"{{"prompt":"p-{index}"}}"#);
            let request = eldr_tests::client::post("/v1/completions", body);
            eldr_tests::Connection::open(address)
                .await
                .call(request)
                .await
        });
    }
    let mut held = Vec::new();
    for _ in 0..40 {
        held.push(gateway.prefill.next().await);
    }
    // Answered in another order than asked.
    for leg in held.into_iter().rev() {
        let prompt = leg.request.json()["prompt"].as_str().unwrap().to_owned();
        let params = format!(r#"{{"of":"{prompt}","unknown":{{"a":[1.50]}}}}"#);
        leg.answer(Answer::prefill(&params, None));
    }
    while let Some(reply) = clients.join_next().await {
        assert_eq!(reply.unwrap().status, 200);
    }
    let legs = gateway.decode.iter().flat_map(|worker| worker.received());
    let mut count = 0;
    for leg in legs {
        let body = leg.json();
        assert_eq!(body["kv_transfer_params"]["of"], body["prompt"]);
        assert!(leg.text().contains(r#""unknown":{"a":[1.50]}"#));
        count += 1;
    }
    assert_eq!(count, 40);
}

/// Engines that check what they get, behind a gateway that speaks their protocol: every API twice, and not one mix-up,
/// prompt computed twice, or block left behind.
async fn assert_engines_agree(protocol: KvProtocol, filter: Value) {
    let config = MockConfig {
        prefill_workers: 2,
        decode_workers: 2,
        protocol,
        time_scale: 0.0,
        ..MockConfig::default()
    };
    let catalog = Catalog::new(Geometry::new(1, 8).unwrap(), 2).unwrap();
    let engine = MockEngine::start(config, Arc::new(catalog)).await.unwrap();
    let (prefill, decode) = (engine.prefill(), engine.decode());
    let mut all = json!({
        "models": [{ "model": "*", "policy": "round_robin" }],
        "prefill_clusters": ["p-0", "p-1"],
        "decode_clusters": ["d-0", "d-1"],
    });
    for (key, value) in filter.as_object().unwrap() {
        all[key] = value.clone();
    }
    for (index, address) in prefill.iter().enumerate() {
        if let Some(engines) = all.get_mut("mooncake") {
            engines[format!("p-{index}")] = json!({
                "bootstrap_addr": format!("http://{address}"),
                "engine_id": format!("mock-prefill-{index}"),
            });
        }
    }
    let gateway = Gateway::start(Options {
        clusters: vec![
            ("p-0", prefill[0]),
            ("p-1", prefill[1]),
            ("d-0", decode[0]),
            ("d-1", decode[1]),
        ],
        ..Options::filter(all)
    })
    .await;
    let bodies = [
        ("/v1/completions", r#"{"prompt":"one two","max_tokens":3}"#),
        (
            "/v1/completions",
            r#"{"prompt":"one two","max_tokens":null,"n":2}"#,
        ),
        (
            "/v1/chat/completions",
            r#"{"messages":[{"role":"user","content":"hi"}],"max_completion_tokens":3}"#,
        ),
        (
            "/v1/responses",
            r#"{"input":"three four five","max_output_tokens":3}"#,
        ),
        (
            "/v1/responses",
            r#"{"input":"three four five","stream":true}"#,
        ),
        (
            "/inference/v1/generate",
            r#"{"token_ids":[1,2,3],"sampling_params":{"max_tokens":3}}"#,
        ),
        (
            "/inference/v1/generate",
            r#"{"token_ids":[4,5],"sampling_params":{"extra_args":{}},"stream":true}"#,
        ),
    ];
    for (path, body) in bodies.iter().chain(&bodies) {
        let reply = gateway.post(path, *body).await;
        assert_eq!(
            reply.status,
            200,
            "{protocol:?} {path} {body}: {}",
            reply.text()
        );
    }
    for worker in engine.reports() {
        assert_eq!(worker.mixed_up, 0, "{worker:?}");
        assert_eq!(worker.requests, 7, "each leg at its turn: {worker:?}");
        let alone = worker.name.starts_with("decode") && worker.prefill_tokens > 0;
        assert!(!alone, "a prompt was computed twice: {worker:?}");
    }
    assert_eq!((engine.kv_held(), engine.kv_stranded()), (0, 0));
    gateway.expect_outcomes(&[("routed(blind)", 14)]).await;
}

#[tokio::test]
async fn engines_with_nixl_agree() {
    assert_engines_agree(KvProtocol::Nixl, json!({})).await;
}

#[tokio::test]
async fn engines_with_mooncake_agree() {
    let filter = json!({ "protocol": "mooncake", "mooncake": {} });
    assert_engines_agree(KvProtocol::Mooncake, filter).await;
}

#[tokio::test]
async fn engines_with_shared_storage_agree() {
    let filter = json!({ "protocol": "shared_storage" });
    assert_engines_agree(KvProtocol::SharedStorage, filter).await;
}
