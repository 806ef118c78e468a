//! The mock engine over real sockets.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use eldr_core::Geometry;
use eldr_core::engine::ExpertIds;
use eldr_examples::mock::{Catalog, Entry, MockConfig, MockEngine, WorkerReport, prompt_for};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

#[path = "mock/kv.rs"]
mod kv;
#[path = "mock/prefixes.rs"]
mod prefixes;
#[path = "mock/protocols.rs"]
mod protocols;

/// What a condition gets to become true: far more than it needs on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const SIGNATURE: &str = ":AQACAAMABAA=:;l=1;e=4;n=5";

/// One layer, four experts, top-2. "a" and "b" are recorded and share no expert; "endless" is long.
fn catalog() -> Catalog {
    let geometry = Geometry::new(1, 4).unwrap();
    let mut catalog = Catalog::new(geometry, 2).unwrap();
    for (id, ids, decode_tokens) in [
        ("a", [0, 1, 0, 1], 3),
        ("b", [2, 3, 2, 3], 3),
        ("endless", [0, 1, 0, 1], 100_000),
    ] {
        let ids = Arc::new(ExpertIds::new(geometry, 2, ids.to_vec()).unwrap());
        let signature = Some(SIGNATURE.parse().unwrap());
        catalog.insert(
            id,
            Entry {
                decode_tokens,
                signature,
                ids,
            },
        );
    }
    catalog
}

async fn engine(config: MockConfig) -> MockEngine {
    MockEngine::start(config, Arc::new(catalog()))
        .await
        .unwrap()
}

/// Two prefill and two decode workers that take no time.
fn instant() -> MockConfig {
    MockConfig {
        prefill_workers: 2,
        decode_workers: 2,
        time_scale: 0.0,
        ..MockConfig::default()
    }
}

struct Http(Client<HttpConnector, Full<Bytes>>);

impl Http {
    fn new() -> Self {
        Http(Client::builder(TokioExecutor::new()).build_http())
    }

    async fn post(&self, url: &str, request_id: &str, body: &Value) -> Response<Incoming> {
        let request = Request::post(url)
            .header("x-request-id", request_id)
            .body(Full::new(body.to_string().into()))
            .unwrap();
        self.0.request(request).await.unwrap()
    }

    async fn get(&self, url: &str) -> String {
        let request = Request::get(url).body(Full::default()).unwrap();
        text(self.0.request(request).await.unwrap()).await
    }
}

async fn text(response: Response<Incoming>) -> String {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

async fn json_of(response: Response<Incoming>) -> Value {
    assert_eq!(response.status(), StatusCode::OK);
    serde_json::from_str(&text(response).await).unwrap()
}

/// Waits until `condition` holds for the report of worker `index` (prefill workers come first).
async fn until(engine: &MockEngine, index: usize, condition: impl Fn(&WorkerReport) -> bool) {
    let wait = async {
        while !condition(&engine.reports()[index]) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, wait).await;
    assert!(waited.is_ok(), "still {:?}", engine.reports()[index]);
}

/// Waits until no worker holds KV blocks.
async fn nothing_held(engine: &MockEngine) {
    let waited = tokio::time::timeout(PATIENCE, engine.kv_nothing_held()).await;
    assert!(waited.is_ok(), "still {:?}", engine.reports());
}

fn completions(address: std::net::SocketAddr) -> String {
    format!("http://{address}/v1/completions")
}

#[tokio::test]
async fn a_stream_has_one_event_per_token_and_ends_with_usage_and_done() {
    let engine = engine(instant()).await;
    let url = completions(engine.decode()[0]);
    let body = json!({
        "model": "mock", "prompt": prompt_for("a", 5), "max_tokens": 2, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let response = Http::new().post(&url, "r1", &body).await;
    assert_eq!(
        response.headers()["content-type"],
        "text/event-stream; charset=utf-8"
    );
    let text = text(response).await;
    let events: Vec<&str> = text.split_terminator("\n\n").collect();
    let chunk = |event: &str| -> Value {
        serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()
    };
    let [first, second, usage, done] = events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(chunk(first)["choices"][0]["text"], " w0");
    assert_eq!(chunk(first)["choices"][0]["finish_reason"], Value::Null);
    assert_eq!(chunk(second)["choices"][0]["finish_reason"], "length");
    assert_eq!(chunk(second)["id"], "cmpl-r1");
    assert_eq!(
        chunk(usage)["usage"],
        json!({"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2})
    );
    assert_eq!(done, "data: [DONE]");
}

#[tokio::test]
async fn a_chat_stream_opens_each_choice_with_the_role() {
    let engine = engine(instant()).await;
    let url = format!("http://{}/v1/chat/completions", engine.decode()[0]);
    let body = json!({
        "messages": [{"role": "user", "content": prompt_for("a", 5)}], "n": 2, "stream": true,
        "max_completion_tokens": 2,
    });
    let text = text(Http::new().post(&url, "r1", &body).await).await;
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let chunks: Vec<Value> = text
        .split_terminator("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    for index in [0, 1] {
        let deltas: Vec<_> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .map(|choice| choice["delta"].clone())
            .collect();
        let role = json!({"role": "assistant", "content": ""});
        assert_eq!(
            deltas,
            [role, json!({"content": " w0"}), json!({"content": " w1"})]
        );
    }
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["object"] == "chat.completion.chunk")
    );
}

#[tokio::test]
async fn a_whole_answer_is_as_long_as_the_trace_says_unless_the_client_does() {
    let engine = engine(instant()).await;
    let (http, url) = (Http::new(), completions(engine.decode()[0]));
    for (limit, tokens, finish) in [(None, 3, "stop"), (Some(7), 7, "length")] {
        let body = json!({"prompt": prompt_for("a", 5), "max_tokens": limit});
        let answer = json_of(http.post(&url, "r1", &body).await).await;
        assert_eq!(answer["usage"]["completion_tokens"], tokens);
        assert_eq!(answer["choices"][0]["finish_reason"], finish);
    }
}

#[tokio::test]
async fn prefill_signs_and_hands_over_and_decode_takes_the_hand_over_once() {
    let engine = engine(instant()).await;
    let http = Http::new();
    let prefill = |id: &'static str, worker: usize| {
        let url = completions(engine.prefill()[worker]);
        let body = json!({
            "prompt": prompt_for(id, 5), "max_tokens": 1, "stream": false,
            "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false},
        });
        let http = &http;
        async move {
            let response = http.post(&url, id, &body).await;
            assert_eq!(response.headers()["x-eldr-signature"], SIGNATURE);
            let answer = json_of(response).await;
            assert_eq!(answer["usage"]["completion_tokens"], 1);
            answer["kv_transfer_params"].clone()
        }
    };
    let decode = |id: &'static str, params: Value| {
        let url = completions(engine.decode()[1]);
        let body = json!({"prompt": prompt_for(id, 5), "kv_transfer_params": params});
        let http = &http;
        async move { http.post(&url, id, &body).await }
    };
    let (a, b) = (prefill("a", 0).await, prefill("b", 1).await);
    assert_eq!(a["do_remote_prefill"], true);
    assert_eq!(engine.kv_held(), 2);

    let response = decode("a", b.clone()).await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(text(response).await.contains("another prompt"));

    let response = decode("a", a.clone()).await;
    assert!(!response.headers().contains_key("x-eldr-signature"));
    assert_eq!(json_of(response).await["usage"]["completion_tokens"], 3);
    assert_eq!(
        json_of(decode("b", b).await).await["usage"]["completion_tokens"],
        3
    );

    assert_eq!(
        decode("a", a).await.status(),
        StatusCode::INTERNAL_SERVER_ERROR
    );
    assert_eq!(engine.kv_held(), 0);
    let report = &engine.decode_reports()[1];
    assert_eq!((report.mixed_up, report.requests, report.tokens), (2, 4, 6));
    assert_eq!(report.prefill_tokens, 0);
}

#[tokio::test]
async fn a_worker_asked_without_params_is_a_plain_node() {
    let engine = engine(instant()).await;
    let body = json!({"prompt": prompt_for("a", 5)});
    let response = Http::new()
        .post(&completions(engine.decode()[0]), "r1", &body)
        .await;
    assert_eq!(response.headers()["x-eldr-signature"], SIGNATURE);
    assert_eq!(json_of(response).await.get("kv_transfer_params"), None);
    assert_eq!(engine.decode_reports()[0].prefill_tokens, 5);
}

#[tokio::test]
async fn a_request_unknown_to_the_trace_is_served_without_a_signature() {
    let engine = engine(instant()).await;
    let body = json!({"prompt": "tell me a story", "max_tokens": 4});
    let response = Http::new()
        .post(&completions(engine.decode()[0]), "r1", &body)
        .await;
    assert!(!response.headers().contains_key("x-eldr-signature"));
    assert_eq!(json_of(response).await["usage"]["completion_tokens"], 4);
    let report = &engine.decode_reports()[0];
    assert!((2.0..=4.0).contains(&report.mean_experts), "{report:?}");
}

#[tokio::test]
async fn a_step_counts_the_distinct_experts_of_the_sequences_that_share_it() {
    let engine = engine(instant()).await;
    let (http, url) = (Http::new(), completions(engine.decode()[0]));
    // The prompts of one request join the same step.
    for (prompts, batch, experts) in [(["a", "a"], 2.0, 2.0), (["a", "b"], 2.0, 4.0)] {
        engine.restart_statistics();
        let body = json!({"prompt": prompts, "max_tokens": 5});
        let answer = json_of(http.post(&url, "r1", &body).await).await;
        assert_eq!(answer["usage"]["completion_tokens"], 10);
        let report = &engine.decode_reports()[0];
        assert_eq!(
            (report.steps, report.mean_batch, report.mean_experts),
            (5, batch, experts)
        );
    }
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_the_batch() {
    let engine = engine(MockConfig {
        prefill_base_ms: 0.0,
        ..MockConfig::default()
    })
    .await;
    for stream in [true, false] {
        engine.restart_statistics();
        let (http, url) = (Http::new(), completions(engine.decode()[0]));
        let body = json!({"prompt": prompt_for("endless", 5), "stream": stream});
        let asked = tokio::spawn(async move {
            let mut response = http.post(&url, "r1", &body).await;
            while response.body_mut().frame().await.is_some() {}
        });
        until(&engine, 1, |report| {
            report.running == 1 && report.tokens > 2
        })
        .await;
        asked.abort();
        until(&engine, 1, |report| {
            report.running == 0 && report.disconnects == 1
        })
        .await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_frees_the_lane_and_the_queue() {
    let config = MockConfig {
        prefill_base_ms: 3.6e6,
        ..MockConfig::default()
    };
    let engine = engine(config).await;
    let url = completions(engine.prefill()[0]);
    let ask = || {
        let (http, url) = (Http::new(), url.clone());
        let body = json!({
            "prompt": prompt_for("a", 5), "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": true},
        });
        tokio::spawn(async move { http.post(&url, "r1", &body).await.status() })
    };
    let running = ask();
    until(&engine, 0, |report| {
        (report.running, report.waiting) == (1, 0)
    })
    .await;
    let waiting = ask();
    until(&engine, 0, |report| {
        (report.running, report.waiting) == (1, 1)
    })
    .await;

    waiting.abort();
    until(&engine, 0, |report| {
        (report.running, report.waiting) == (1, 0)
    })
    .await;
    running.abort();
    until(&engine, 0, |report| {
        (report.running, report.disconnects) == (0, 2)
    })
    .await;
    assert_eq!(engine.kv_held(), 0);
}

#[tokio::test]
async fn metrics_have_the_names_of_vllm_and_follow_the_load() {
    let engine = engine(MockConfig {
        prefill_base_ms: 0.0,
        ..MockConfig::default()
    })
    .await;
    let (http, address) = (Http::new(), engine.decode()[0]);
    let body = json!({"prompt": prompt_for("endless", 5), "stream": true});
    let response = http.post(&completions(address), "r1", &body).await;
    until(&engine, 1, |report| report.tokens > 0).await;
    let metrics = http.get(&format!("http://{address}/metrics")).await;
    let value = |name: &str| -> f64 {
        let line = format!("vllm:{name}{{engine=\"0\",model_name=\"mock\"}} ");
        metrics
            .lines()
            .find_map(|text| text.strip_prefix(&line))
            .unwrap()
            .parse()
            .unwrap()
    };
    assert_eq!(value("num_requests_running"), 1.0);
    assert_eq!(value("num_requests_waiting"), 0.0);
    assert_eq!(value("prompt_tokens_total"), 5.0);
    assert!(value("kv_cache_usage_perc") > 0.0);
    assert!(value("generation_tokens_total") >= 1.0);
    drop(response);

    assert_eq!(http.get(&format!("http://{address}/health")).await, "");
    let models: Value =
        serde_json::from_str(&http.get(&format!("http://{address}/v1/models")).await).unwrap();
    assert_eq!(models["data"][0]["id"], "mock");
}

#[tokio::test]
async fn errors_have_the_shape_of_vllm() {
    let engine = engine(instant()).await;
    let response = Http::new()
        .post(&completions(engine.decode()[0]), "r1", &json!({}))
        .await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let error: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(
        error,
        json!({"error": {
            "message": "prompt: Field required", "type": "BadRequestError", "param": "prompt", "code": 400,
        }})
    );
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let engine = engine(instant()).await;
    let base_port = engine.prefill()[0].port();
    let config = MockConfig {
        base_port,
        ..MockConfig::default()
    };
    let error = MockEngine::start(config, Arc::new(catalog()))
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&format!("127.0.0.1:{base_port} for prefill-0")),
        "{error}"
    );
}
