//! `eldr record` against an engine that a test scripts.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse as _;
use eldr_calibrator::trace;
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::bench::Bench;
use crate::errors::transcript;

/// Status, signature header, body.
type Answer = (u16, Option<&'static str>, Value);

const SIGNATURE: &str = ":AQACAA==:;l=1;e=2;n=3";

/// An engine on a thread of its own, as long as the test runs.
struct Engine {
    address: SocketAddr,
    /// Id, prompt or messages, authorization.
    received: Arc<Mutex<Vec<(String, Value, String)>>>,
}

type Script = Arc<dyn Fn(&str, usize) -> Answer + Send + Sync>;

#[derive(Clone)]
struct Shared {
    script: Script,
    received: Arc<Mutex<Vec<(String, Value, String)>>>,
}

impl Engine {
    /// Answers request `n` (from 0) with a prompt id by what `script` says.
    fn start(script: impl Fn(&str, usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::new(Mutex::new(Vec::new()));
        let shared = Shared {
            script: Arc::new(script),
            received: Arc::clone(&received),
        };
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let router = Router::new().fallback(answer).with_state(shared);
                axum::serve(listener, router).await.unwrap();
            });
        });
        Engine { address, received }
    }

    fn record(&self, options: &str) -> String {
        {
            let command = format!(
                "record --prefill http://{} --prompts p.jsonl -o t.jsonl",
                self.address
            );
            format!("{command} {options}").trim_end().to_owned()
        }
    }

    /// Ids in the order of arrival.
    fn asked(&self) -> Vec<String> {
        let received = self.received.lock().unwrap();
        received.iter().map(|(id, ..)| id.clone()).collect()
    }
}

async fn answer(
    State(shared): State<Shared>,
    headers: HeaderMap,
    body: Bytes,
) -> axum::response::Response {
    let header = |name: &str| {
        headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
            .to_owned()
    };
    let id = header("x-request-id");
    let mut body: Value = serde_json::from_slice(&body).unwrap();
    let content = match body["messages"].take() {
        Value::Null => body["prompt"].take(),
        messages => messages,
    };
    let n = {
        let mut received = shared.received.lock().unwrap();
        received.push((id.clone(), content, header("authorization")));
        received.len() - 1
    };
    let (status, signature, body) = (shared.script)(&id, n);
    let mut answer = axum::Json(body).into_response();
    *answer.status_mut() = StatusCode::from_u16(status).unwrap();
    if let Some(signature) = signature {
        answer
            .headers_mut()
            .insert("x-eldr-signature", signature.parse().unwrap());
    }
    answer
}

fn good() -> Answer {
    (
        200,
        Some(SIGNATURE),
        json!({"choices": [], "usage": {"prompt_tokens": 3}}),
    )
}

/// A folder with these prompts.
fn bench(prompts: &str) -> Bench {
    let bench = Bench::new();
    bench.write("p.jsonl", prompts);
    bench
}

fn ids(bench: &Bench) -> Vec<String> {
    let records = trace::read(bench.path("t.jsonl")).unwrap();
    records.map(|record| record.unwrap().id).collect()
}

const THREE: &str = r#"{"id":"a","prompt":"one","label":"x"}
{"messages":[{"role":"user","content":"two"}]}

{"id":7,"prompt":[1,2,3]}
{"id":"a","prompt":"again"}
"#;

#[test]
fn every_kind_of_prompt_is_recorded_once_in_order() {
    let engine = Engine::start(|_, _| good());
    let bench = bench(THREE);
    let ran = bench.eldr(&engine.record("--header authorization:Bearer-x"));
    let expected =
        "t.jsonl: 3 recorded, 1 there already, 0 left out because the engine refused them\n";
    assert_eq!(ran.succeeded().stdout, expected);
    assert_eq!(ids(&bench), ["a", "2", "7"]);
    let mut received = engine.received.lock().unwrap().clone();
    received.sort_by(|a, b| a.0.cmp(&b.0));
    let token = "Bearer-x".to_owned();
    assert_eq!(
        received,
        [
            (
                "2".into(),
                json!([{"role": "user", "content": "two"}]),
                token.clone()
            ),
            ("7".into(), json!([1, 2, 3]), token.clone()),
            ("a".into(), json!("one"), token),
        ]
    );
    let first = trace::read(bench.path("t.jsonl"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    assert_eq!(
        (first.label.as_deref(), first.prefill.as_deref()),
        (Some("x"), Some(SIGNATURE))
    );
}

#[test]
fn a_second_run_asks_only_for_what_is_missing() {
    let engine = Engine::start(|_, _| good());
    let bench = bench(THREE);
    bench.write(
        "t.jsonl",
        format!("{{\"id\":\"a\",\"prefill\":\"{SIGNATURE}\"}}\n{{\"id\":\"2\",\"pre"),
    );
    bench.eldr(&engine.record("--concurrency 1")).succeeded();
    assert_eq!(engine.asked(), ["2", "7"]);
    assert_eq!(ids(&bench), ["a", "2", "7"]);
}

#[test]
fn what_may_pass_is_sent_once_more() {
    let engine = Engine::start(|_, n| match n {
        0 => (503, None, json!("loading")),
        1 => (429, None, json!("slow down")),
        _ => good(),
    });
    let bench = bench("{\"prompt\":\"one\"}");
    bench.eldr(&engine.record("--retries 2")).succeeded();
    assert_eq!(engine.asked(), ["1", "1", "1"]);
}

#[test]
fn a_prompt_that_the_engine_refuses_is_told_and_left_out() {
    let engine = Engine::start(|id, _| match id {
        "2" => (400, None, json!({"error": "too long"})),
        _ => good(),
    });
    let bench = bench(THREE);
    let ran = bench.eldr(&engine.record(""));
    assert_eq!(ran.code, 0);
    assert_eq!(
        ran.stderr,
        "note: left out: prompt 2: 400 Bad Request: {\"error\":\"too long\"}\n"
    );
    assert_eq!(ids(&bench), ["a", "7"]);
}

#[test]
fn what_was_recorded_before_a_failure_stays() {
    let engine = Engine::start(|id, _| match id {
        "7" => (500, None, json!("out of memory")),
        _ => good(),
    });
    let bench = bench(THREE);
    let ran = bench.eldr(&engine.record("--retries 0"));
    assert_eq!(ran.code, 1);
    assert_eq!(ids(&bench), ["a", "2"]);
}

#[test]
fn recordings_that_fail() {
    let mut told = String::new();
    let mut one = |prompts: &str, script: Answer, options: &str| {
        let engine = Engine::start(move |_, _| script.clone());
        let bench = bench(prompts);
        let text = transcript(&bench, &[&engine.record(options)]);
        told += &text.replace(&engine.address.to_string(), "ENGINE");
    };
    let prompt = r#"{"prompt":"one"}"#;
    let routed =
        json!({"usage": {"prompt_tokens": 3}, "choices": [{"prompt_routed_experts": [[[0, 1]]]}]});
    one(prompt, (200, None, json!({"choices": [{"text": "a"}]})), "");
    one(prompt, (200, None, routed.clone()), "");
    one(prompt, (200, None, routed), "--experts 2");
    one(prompt, (200, Some("?"), json!({})), "");
    one(prompt, (200, None, json!([1])), "");
    one(prompt, (401, None, json!("who are you")), "");
    one(prompt, (404, None, json!("no such model")), "");
    one(prompt, (502, None, json!("bad gateway")), "--retries 0");
    one(prompt, (400, None, json!("bad prompt")), "");
    one("", good(), "");
    one("{\"prompt\":1}", good(), "");
    one("{\"prompt\":\"a\",\"messages\":[]}", good(), "");
    one("one", good(), "");
    let bench = bench(prompt);
    // Bound and not served: nobody else may take the port meanwhile.
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let unreachable =
        format!("record --prefill http://{closed} --prompts p.jsonl -o t.jsonl --retries 1");
    let text = transcript(
        &bench,
        &[
            &unreachable,
            "record --prefill http://e --prompts none -o t.jsonl",
            "record --prefill http://e --prompts p.jsonl -o t.jsonl.gz",
            "record --prefill http://e --prompts p.jsonl -o no/t.jsonl",
            "record --prefill https://e --prompts p.jsonl -o t.jsonl",
            "record --prefill nowhere --prompts p.jsonl -o t.jsonl",
            "record --prefill http://e --prompts p.jsonl -o t.jsonl --header secret",
            "record --prefill http://e --prompts p.jsonl -o t.jsonl --eldr-sig",
        ],
    );
    told += &text.replace(&closed.to_string(), "CLOSED");
    assert_snapshot!(told);
}
