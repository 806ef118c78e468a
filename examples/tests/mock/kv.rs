//! KV blocks between the legs: leases, releases, and how the signature travels beside them.

use eldr_examples::mock::{KvLoadFailurePolicy, SignatureCarriage};

use super::*;

/// The prompt "a" of 40 tokens has three KV blocks.
fn leg(params: Value) -> Value {
    json!({"prompt": prompt_for("a", 40), "max_tokens": 1, "kv_transfer_params": params})
}

/// Runs a prefill leg at worker 0: the params it hands out.
async fn prefill(http: &Http, engine: &MockEngine) -> Value {
    let body = leg(json!({"do_remote_decode": true, "do_remote_prefill": false}));
    let response = http
        .post(&completions(engine.prefill()[0]), "r1", &body)
        .await;
    json_of(response).await["kv_transfer_params"].clone()
}

async fn decode(http: &Http, engine: &MockEngine, params: &Value) -> StatusCode {
    let url = completions(engine.decode()[0]);
    let response = http.post(&url, "r1", &leg(params.clone())).await;
    let status = response.status();
    text(response).await;
    status
}

async fn release(http: &Http, engine: &MockEngine, body: &Value) -> (StatusCode, Value) {
    let url = format!("http://{}/v1/kv_transfer/release", engine.decode()[0]);
    let response = http.post(&url, "r9", body).await;
    let status = response.status();
    (status, serde_json::from_str(&text(response).await).unwrap())
}

/// Blocks and requests held, blocks and requests stranded, at prefill worker 0.
fn blocks(engine: &MockEngine) -> [u64; 4] {
    let kv = &engine.reports()[0].kv;
    [
        kv.held_blocks,
        kv.held_requests,
        kv.stranded_blocks,
        kv.stranded_requests,
    ]
}

#[tokio::test]
async fn a_decode_frees_the_blocks_and_the_params_count_once() {
    let (engine, http) = (engine(instant()).await, Http::new());
    let params = prefill(&http, &engine).await;
    assert_eq!(blocks(&engine), [3, 1, 0, 0]);
    assert_eq!(decode(&http, &engine, &params).await, StatusCode::OK);
    nothing_held(&engine).await;
    assert_eq!(blocks(&engine), [0, 0, 0, 0]);
    let again = decode(&http, &engine, &params).await;
    assert_eq!(again, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(engine.decode_reports()[0].mixed_up, 1);
}

#[tokio::test]
async fn a_release_frees_the_blocks_at_the_worker_that_holds_them() {
    let (engine, http) = (engine(instant()).await, Http::new());
    let params = prefill(&http, &engine).await;
    let body = json!({"kv_transfer_params": params});
    let first = release(&http, &engine, &body).await;
    assert_eq!(first, (StatusCode::OK, json!({"released": true})));
    nothing_held(&engine).await;
    assert_eq!(blocks(&engine), [0, 0, 0, 0]);
    let second = release(&http, &engine, &body).await;
    assert_eq!(second, (StatusCode::OK, json!({"released": false})));
    let used = decode(&http, &engine, &params).await;
    assert_eq!(used, StatusCode::INTERNAL_SERVER_ERROR);

    let stranger = json!({"kv_transfer_params": {"remote_request_id": "cmpl-x"}});
    let (status, error) = release(&http, &engine, &stranger).await;
    assert_eq!(
        (status, error["error"]["code"].as_u64()),
        (StatusCode::NOT_FOUND, Some(404))
    );
    let (status, _) = release(&http, &engine, &json!({"kv_transfer_params": null})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let kv = &engine.decode_reports()[0].kv;
    assert_eq!(
        (kv.releases, kv.repeated_releases, kv.unknown_releases),
        (1, 1, 1)
    );
}

#[tokio::test]
async fn blocks_that_nobody_fetches_are_stranded_when_the_lease_ends() {
    let config = MockConfig {
        kv_lease: Duration::from_millis(20),
        ..instant()
    };
    let (engine, http) = (engine(config).await, Http::new());
    let params = prefill(&http, &engine).await;
    nothing_held(&engine).await;
    assert_eq!(blocks(&engine), [0, 0, 3, 1]);
    assert_eq!(engine.kv_stranded(), 1);
    let metrics = http
        .get(&format!("http://{}/metrics", engine.prefill()[0]))
        .await;
    for line in [
        "# TYPE mock:kv_blocks_held gauge",
        "mock:kv_blocks_held{engine=\"0\",model_name=\"mock\"} 0.0",
        "# TYPE mock:kv_blocks_stranded_total counter",
        "mock:kv_blocks_stranded_total{engine=\"0\",model_name=\"mock\"} 3.0",
    ] {
        assert!(
            metrics.lines().any(|found| found == line),
            "{line}\n{metrics}"
        );
    }

    let late = decode(&http, &engine, &params).await;
    assert_eq!(late, StatusCode::INTERNAL_SERVER_ERROR);
    let report = &engine.decode_reports()[0];
    assert_eq!(
        (report.kv.late_decodes, report.mixed_up, report.tokens),
        (1, 0, 0)
    );
}

#[tokio::test]
async fn a_late_decode_prefills_itself_where_the_policy_says_so() {
    let config = MockConfig {
        kv_lease: Duration::ZERO,
        kv_load_failure_policy: KvLoadFailurePolicy::Recompute,
        ..instant()
    };
    let (engine, http) = (engine(config).await, Http::new());
    let params = prefill(&http, &engine).await;
    assert_eq!(decode(&http, &engine, &params).await, StatusCode::OK);
    let report = &engine.decode_reports()[0];
    assert_eq!(
        (report.kv.late_decodes, report.prefill_tokens, report.tokens),
        (1, 40, 1)
    );
    let again = decode(&http, &engine, &params).await;
    assert_eq!(again, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(engine.decode_reports()[0].mixed_up, 1);
}

#[tokio::test]
async fn the_body_can_carry_the_signature_and_a_leak_is_counted() {
    let config = MockConfig {
        signature_carriage: SignatureCarriage::Body,
        ..instant()
    };
    let (engine, http) = (engine(config).await, Http::new());
    let body = leg(json!({"do_remote_decode": true}));
    let url = completions(engine.prefill()[0]);
    let response = http.post(&url, "r1", &body).await;
    assert!(!response.headers().contains_key("x-eldr-signature"));
    let mut params = json_of(response).await["kv_transfer_params"].clone();
    assert_eq!(params["eldr_sig"], "AQACAAMABAA=");

    // The engine works all the same: only the count tells.
    let leaked = params.clone();
    params.as_object_mut().unwrap().remove("eldr_sig");
    assert_eq!(decode(&http, &engine, &leaked).await, StatusCode::OK);
    let (status, _) = release(&http, &engine, &json!({"kv_transfer_params": params})).await;
    assert_eq!(status, StatusCode::OK);
    let kv = &engine.decode_reports()[0].kv;
    assert_eq!((kv.leaked_signatures, kv.repeated_releases), (1, 1));
}
