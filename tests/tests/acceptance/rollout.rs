//! A policy that is introduced beside the one that was there: shadow, percentage, switchback.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use eldr_core::rollout::{Arm, Rollout};
use eldr_tests::client::{next_piece, post};
use eldr_tests::{Answer, Gateway, Options, blob, eventually};
use hyper::header::HeaderValue;
use serde_json::{Value, json};
use tokio::time::Instant;

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

/// By signature the third worker, by load the first, as long as all are idle.
fn models(rollout: &Value) -> Value {
    let regions = [0, 1, 2].map(|worker| vec![format!("decode-{worker}")]);
    let inline = json!({ "inline": blob::inline(&blob::one_expert_per_region(&regions)) });
    json!([{ "model": "*", "blob": inline, "max_load_factor": "none", "rollout": rollout }])
}

async fn gateway(rollout: Value) -> Gateway {
    let gateway = Gateway::start(Options::filter(json!({ "models": models(&rollout) }))).await;
    gateway.prefill_says(Some(2));
    gateway
}

/// Who answered, and the decision.
async fn ask(gateway: &Gateway) -> (String, String) {
    let reply = gateway.post("/v1/completions", BODY).await;
    let decision = reply.headers["x-eldr-decision"].to_str().unwrap();
    (reply.text(), decision.to_owned())
}

async fn counter(gateway: &Gateway, name: &str) -> u64 {
    let stats = gateway.filter_stats().await;
    stats.get(name).copied().unwrap_or_default()
}

#[tokio::test]
async fn a_shadow_decides_counts_and_logs_but_requests_go_by_load() {
    let gateway = gateway(json!({ "kind": "shadow" })).await;
    let (worker, decision) = ask(&gateway).await;
    assert_eq!(worker, "decode-0");
    assert_eq!(
        decision,
        "decode-0;reason=blind;policy=least_loaded;shadow=decode-2;shadow_reason=in_band"
    );
    gateway.prefill_says(Some(0));
    let (_, decision) = ask(&gateway).await;
    assert!(decision.contains(";shadow=decode-0;"), "{decision}");
    for (name, count) in [
        ("eldr.shadow_differs", 1),
        ("eldr.shadow_agrees", 1),
        ("eldr.reason.blind", 2),
        ("eldr.policy.least_loaded.worker.decode-0.sent", 2),
        ("eldr.shadow.reason.in_band", 2),
    ] {
        let now = async || counter(&gateway, name).await;
        eventually(name, now, |found| *found == count).await;
    }
}

#[tokio::test]
async fn a_percentage_is_told_by_the_request_id() {
    for (percent, expected) in [(0, "decode-0"), (100, "decode-2")] {
        let gateway = gateway(json!({ "kind": "percentage", "percent": percent })).await;
        assert_eq!(ask(&gateway).await.0, expected);
    }
    let gateway = gateway(json!({ "kind": "percentage", "percent": 50, "control": "top1" })).await;
    let mut connection = gateway.connect().await;
    let mut seen = [0, 0];
    for id in (0..20).chain(0..20) {
        let id = format!("id-{id}");
        let mut request = post("/v1/completions", BODY);
        let headers = request.headers_mut();
        headers.insert("x-request-id", HeaderValue::from_str(&id).unwrap());
        let reply = connection.call(request).await;
        let decision = reply.headers["x-eldr-decision"].to_str().unwrap();
        let arm = Rollout::Percentage { percent: 50 }.arm(id.as_bytes(), 0);
        let (policy, arm) = match arm {
            Arm::Control => ("top1", 0),
            Arm::Treatment => ("band", 1),
        };
        assert!(
            decision.ends_with(&format!(";policy={policy}")),
            "{decision}"
        );
        seen[arm] += 1;
    }
    assert!(seen.iter().all(|&count| count > 4), "{seen:?}");
}

#[tokio::test]
async fn a_switchback_switches_all_threads_by_the_clock() {
    let slice_ms = 2_000;
    let rollout = json!({ "kind": "switchback", "slice_ms": slice_ms, "washout_ms": 0 });
    let gateway = Gateway::start(Options {
        threads: 2,
        ..Options::filter(json!({ "models": models(&rollout) }))
    })
    .await;
    gateway.prefill_says(Some(2));
    // Connections land on both threads.
    let mut connections = Vec::new();
    for _ in 0..8 {
        connections.push(gateway.connect().await);
    }
    let rollout = Rollout::Switchback {
        slice_ms,
        washout_ms: 0,
    };
    let arm = || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let now_ms = now.as_millis() as u64;
        (now_ms / slice_ms, rollout.arm(b"", now_ms))
    };
    let mut seen = [0, 0];
    while seen.iter().any(|&count| count < 24) {
        for connection in &mut connections {
            let before = arm();
            let reply = connection.call(post("/v1/completions", BODY)).await;
            // A request over a switch may be of either arm.
            if before == arm() {
                let arm = usize::from(before.1 == Arm::Treatment);
                let policy = ["policy=least_loaded", "policy=band"][arm];
                let decision = reply.headers["x-eldr-decision"].to_str().unwrap();
                assert!(decision.ends_with(policy), "{decision}");
                seen[arm] += 1;
            }
        }
    }
}

#[tokio::test]
async fn it_is_changed_without_a_restart_and_streams_go_on() {
    let mut gateway = Gateway::start(Options {
        lds: true,
        ..Options::filter(json!({ "models": models(&json!({ "kind": "shadow" })) }))
    })
    .await;
    gateway.prefill_says(Some(2));
    gateway.decode[0].by_hand();
    let mut connection = gateway.connect().await;
    let (answer, stream) = gateway.decode[0]
        .streams_to(connection.send(post("/v1/completions", BODY)))
        .await;
    let mut body = answer.into_body();
    let percentage = json!({ "kind": "percentage", "percent": 100 });
    gateway.update(json!({ "models": models(&percentage) }), 2);
    // Neither the first worker, which is busy, nor the next one by load.
    let worker = async || gateway.post("/v1/completions", BODY).await.text();
    eventually("the update serves", worker, |text| text == "decode-2").await;
    stream.send("whole").await;
    assert_eq!(next_piece(&mut body).await.as_deref(), Some(&b"whole"[..]));
    stream.finish();
    assert_eq!(next_piece(&mut body).await, None);
    gateway.expect_in_flight(0).await;
}

/// A stream of four events, a pause before each.
async fn stream(gateway: &mut Gateway, worker: usize, pause: Duration) {
    gateway.decode[worker].by_hand();
    let mut connection = gateway.connect().await;
    let (answer, ()) = tokio::join!(connection.send(post("/v1/completions", BODY)), async {
        let exchange = gateway.decode[worker].next().await;
        let stream = exchange.stream(Answer::event_stream());
        for event in ["data: a\n\n", "data: b\n\n", "data: c\n\n", "data: d\n\n"] {
            // The worker takes its time for a step.
            let begun = Instant::now();
            eventually("a step", async || begun.elapsed(), |taken| *taken >= pause).await;
            stream.send(event).await;
        }
        stream.finish();
    });
    let mut body = answer.into_body();
    while next_piece(&mut body).await.is_some() {}
}

/// Least value of a histogram; `None` until there is one.
async fn least(gateway: &Gateway, name: &str) -> Option<f64> {
    let stats = gateway
        .envoy
        .stats(&name.replace('.', r"\."))
        .await
        .unwrap();
    let mut all = stats.histograms.into_values().flatten();
    all.find(|(percentile, _)| *percentile == 0.0)
        .map(|(_, value)| value)
}

#[tokio::test]
async fn ttft_and_tpot_are_taken_by_worker_and_policy() {
    let mut gateway = gateway(json!({ "kind": "percentage", "percent": 100 })).await;
    let mut found = Vec::new();
    for (worker, pause_ms) in [(2, 20), (1, 60)] {
        gateway.prefill_says(Some(worker));
        stream(&mut gateway, worker, Duration::from_millis(pause_ms)).await;
        let of = |what| format!("eldr.policy.band.worker.decode-{worker}.{what}");
        let (ttft, tpot) = (of("ttft_ms"), of("tpot_us"));
        let measured = async || (least(&gateway, &ttft).await, least(&gateway, &tpot).await);
        let both = |times: &(Option<f64>, Option<f64>)| times.0.is_some() && times.1.is_some();
        let (ttft, tpot) = eventually("both are measured", measured, both).await;
        // Pauses are never shorter; Envoy keeps two digits.
        assert!(ttft.unwrap() >= 0.9 * pause_ms as f64, "{ttft:?}");
        assert!(tpot.unwrap() >= 0.9 * 1_000.0 * pause_ms as f64, "{tpot:?}");
        found.push(tpot.unwrap());
    }
    let [fast, slow] = found[..] else {
        panic!("two workers");
    };
    assert!(slow >= 50_000.0 && fast >= 18_000.0, "{found:?}");
}

#[tokio::test]
async fn streams_are_measured_without_a_rollout_only_where_that_is_asked_for() {
    for (measures, name) in [(true, "measured"), (false, "not measured")] {
        let filter = json!({ "measure_streams": measures });
        let mut gateway = Gateway::start(Options::filter(filter)).await;
        gateway.prefill_says(Some(2));
        stream(&mut gateway, 2, Duration::from_millis(1)).await;
        gateway.expect_outcomes(&[("routed(in_band)", 1)]).await;
        let now = async || least(&gateway, "eldr.policy.band.worker.decode-2.tpot_us").await;
        eventually(name, now, |found| found.is_some() == measures).await;
    }
}

#[tokio::test]
async fn a_wash_out_counts_for_neither_arm() {
    // All day but its last millisecond.
    let day = 86_400_000;
    let rollout = json!({ "kind": "switchback", "slice_ms": day, "washout_ms": day - 1 });
    let mut gateway = gateway(rollout).await;
    for worker in &mut gateway.decode {
        worker.answers(Answer::event_stream().body("data: a\n\ndata: b\n\n"));
    }
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200);
    gateway.expect_in_flight(0).await;
    let stats = gateway.envoy.stats(r"eldr\.policy\.").await.unwrap();
    let of = |what: &str| {
        let named = stats.values.iter().filter(|(name, _)| name.ends_with(what));
        named.map(|(_, count)| count).sum::<u64>()
    };
    assert_eq!((of(".sent"), of(".not_counted")), (1, 1));
    assert!(stats.histograms.is_empty(), "{:?}", stats.histograms);
}
