//! The other APIs and connectors that the mock engine speaks, checked as strictly.

use eldr_examples::mock::KvProtocol;

use super::*;

async fn post(
    http: &Http,
    address: std::net::SocketAddr,
    path: &str,
    body: &Value,
) -> (u16, Value) {
    let response = http
        .post(&format!("http://{address}{path}"), "r1", body)
        .await;
    let status = response.status().as_u16();
    (status, serde_json::from_str(&text(response).await).unwrap())
}

const RESPONSES: &str = "/v1/responses";
const GENERATE: &str = "/inference/v1/generate";
const COMPLETIONS: &str = "/v1/completions";

fn ask() -> Value {
    json!({"do_remote_decode": true, "do_remote_prefill": false})
}

#[tokio::test]
async fn a_response_has_the_shape_of_vllm_whole_and_streamed() {
    let (engine, http) = (engine(instant()).await, Http::new());
    let worker = engine.decode()[0];
    let body = json!({"input": prompt_for("a", 5), "max_output_tokens": 2});
    let (status, whole) = post(&http, worker, RESPONSES, &body).await;
    assert_eq!((status, &whole["status"]), (200, &json!("incomplete")));
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(whole["output"][0]["content"][0]["text"], " w0 w1");
    assert_eq!(
        whole["usage"]["input_tokens_details"],
        json!({"cached_tokens": 0})
    );
    assert_eq!(
        (
            &whole["usage"]["input_tokens"],
            &whole["usage"]["output_tokens"]
        ),
        (&json!(5), &json!(2))
    );

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let url = format!("http://{worker}{RESPONSES}");
    let events = text(http.post(&url, "r1", &streamed).await).await;
    let names: Vec<&str> = events
        .lines()
        .filter_map(|line| line.strip_prefix("event: "))
        .collect();
    let delta = "response.output_text.delta";
    assert_eq!(
        names,
        ["response.created", delta, delta, "response.incomplete"]
    );
    for refused in [
        json!({"max_output_tokens": 2}),
        json!({"input": "a", "previous_response_id": "resp_1"}),
        json!({"input": "a", "background": true}),
        json!({"input": "a", "max_output_tokens": 0}),
    ] {
        assert!(
            post(&http, worker, RESPONSES, &refused).await.0 >= 400,
            "{refused}"
        );
    }
}

#[tokio::test]
async fn token_requests_have_their_params_inside_and_nowhere_else() {
    let (engine, http) = (engine(instant()).await, Http::new());
    let leg = |params: Value| {
        json!({"token_ids": [1, 2, 3], "sampling_params":
            {"max_tokens": 1, "extra_args": {"kv_transfer_params": params}}})
    };
    let (status, prefill) = post(&http, engine.prefill()[0], GENERATE, &leg(ask())).await;
    assert_eq!(status, 200);
    assert_eq!(prefill["choices"][0]["token_ids"], json!([0]));
    assert_eq!(prefill["choices"][0]["finish_reason"], "length");
    let decode = leg(prefill["kv_transfer_params"].clone());
    assert_eq!(
        post(&http, engine.decode()[0], GENERATE, &decode).await.0,
        200
    );
    nothing_held(&engine).await;
    for refused in [
        json!({"token_ids": [1]}),
        json!({"token_ids": [1], "sampling_params": {}, "kv_transfer_params": {}}),
        json!({"token_ids": [1], "sampling_params": {"n": 2}}),
        json!({"sampling_params": {}}),
    ] {
        assert_eq!(
            post(&http, engine.decode()[0], GENERATE, &refused).await.0,
            400,
            "{refused}"
        );
    }
}

#[tokio::test]
async fn mooncake_wants_a_name_for_each_transfer_and_the_right_engine() {
    let config = MockConfig {
        protocol: KvProtocol::Mooncake,
        ..instant()
    };
    let (engine, http) = (engine(config).await, Http::new());
    let leg =
        |params: &Value| json!({"prompt": "a", "max_tokens": 1, "kv_transfer_params": params});
    let mut named = ask();
    named["transfer_id"] = json!("xfer-1");
    let worker = engine.prefill()[1];
    assert_eq!(
        post(&http, worker, COMPLETIONS, &leg(&ask())).await.0,
        500,
        "no name"
    );
    let (status, answer) = post(&http, worker, COMPLETIONS, &leg(&named)).await;
    assert_eq!((status, answer.get("kv_transfer_params")), (200, None));
    assert_eq!(
        post(&http, worker, COMPLETIONS, &leg(&named)).await.0,
        500,
        "used before"
    );
    let good = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "transfer_id": "xfer-1",
        "remote_bootstrap_addr": format!("http://{worker}"), "remote_engine_id": "mock-prefill-1",
    });
    for (key, wrong) in [
        ("transfer_id", "xfer-2"),
        ("remote_engine_id", "mock-prefill-0"),
        ("remote_bootstrap_addr", "http://10.0.0.1:1"),
    ] {
        let mut params = good.clone();
        params[key] = json!(wrong);
        assert_eq!(
            post(&http, engine.decode()[0], COMPLETIONS, &leg(&params))
                .await
                .0,
            500
        );
    }
    assert_eq!(
        post(&http, engine.decode()[0], COMPLETIONS, &leg(&good))
            .await
            .0,
        200
    );
    nothing_held(&engine).await;
}

#[tokio::test]
async fn shared_storage_finds_what_was_prefilled_and_takes_no_params() {
    let config = MockConfig {
        protocol: KvProtocol::SharedStorage,
        ..instant()
    };
    let (engine, http) = (engine(config).await, Http::new());
    let leg = json!({"prompt": prompt_for("a", 5), "max_tokens": 1});
    let mut with_params = leg.clone();
    with_params["kv_transfer_params"] = ask();
    let refused = post(&http, engine.prefill()[0], COMPLETIONS, &with_params).await;
    assert_eq!(refused.0, 400);
    let decoded_alone = || engine.decode_reports()[0].prefill_tokens;
    post(&http, engine.decode()[0], COMPLETIONS, &leg).await;
    assert_eq!(decoded_alone(), 5, "nothing is stored yet");
    let response = http
        .post(&completions(engine.prefill()[0]), "r1", &leg)
        .await;
    assert_eq!(response.headers()["x-eldr-signature"], SIGNATURE);
    text(response).await;
    post(&http, engine.decode()[0], COMPLETIONS, &leg).await;
    assert_eq!(decoded_alone(), 5, "found");
}
