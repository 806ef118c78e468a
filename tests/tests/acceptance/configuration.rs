//! A bad configuration is refused, at start and on update, with every mistake named.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_examples::envoy::validate;
use eldr_tests::{Gateway, Options, blob, config, envoy_binary, eventually, wasm_module};
use serde_json::{Value, json};

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

/// Mistakes, and a word of the message that names each.
fn mistakes() -> Vec<(Value, &'static str)> {
    vec![
        (json!({ "no_such_field": 1 }), "no_such_field"),
        (json!({ "decode_clusters": [] }), "decode_clusters"),
        (
            json!({ "decode_clusters": ["decode-0", "decode-1"] }),
            "decode-2",
        ),
        (json!({ "decode_clusters": null }), "decode_clusters"),
        (
            json!({ "on_prefill_failure": "retry" }),
            "on_prefill_failure: found",
        ),
        (
            json!({ "models": [{ "model": "*", "policy": "fastest" }] }),
            "fastest",
        ),
        (json!({ "models": [{ "model": "*", "tau": 3 }] }), "tau"),
        (
            json!({ "models": [{ "model": "*", "max_load_factor": 0.5 }] }),
            "max_load_factor",
        ),
        (
            json!({ "models": [{ "model": "*", "policy": "marginal", "step_b_ms": 0 }] }),
            "models[0].step_b_ms: found 0, allowed: above 0, at most 1000",
        ),
        (
            json!({ "models": [{ "model": "*", "policy": "hybrid", "step_exponent": 17 }] }),
            "models[0].step_exponent: found 17, allowed: 1 to 16",
        ),
        (
            json!({ "models": [{
                "model": "*", "policy": "marginal", "rollout": { "kind": "shadow", "control": "batch_band" }
            }] }),
            "models[0].rollout.control: found \"batch_band\" beside \"marginal\"",
        ),
        (
            json!({ "models": [{ "model": "*", "blob": { "inline": "AAAA" } }] }),
            "blob",
        ),
    ]
}

#[tokio::test]
async fn a_bad_one_is_refused_at_start() {
    for (filter, word) in mistakes() {
        let refused = Gateway::try_start(Options::filter(filter.clone())).await;
        let words = refused.expect_err(&format!("Envoy started with {filter}"));
        assert!(words.contains(word), "{filter}: {words}");
    }
}

#[tokio::test]
async fn a_bad_one_fails_validation_and_a_good_one_passes() {
    let verdict = async |filter: Value| {
        let listener = config::Listener {
            name: config::LISTENER,
            root_id: "eldr",
            module: wasm_module(),
            filter: &Options::filter(filter).filter_config(),
            access_log: "/dev/null".as_ref(),
            without_stop_iteration: false,
            buffer_limit: 1 << 20,
        };
        let default = config::cluster("default", ([127, 0, 0, 1], 1).into());
        let bootstrap = config::bootstrap(&[default], &[listener.render()]);
        validate(envoy_binary(), &bootstrap.to_string())
            .await
            .unwrap()
    };
    assert_eq!(verdict(json!({})).await, Ok(()));
    let words = verdict(json!({ "prefill_timeout_ms": 0 }))
        .await
        .unwrap_err();
    assert!(words.contains("prefill_timeout_ms: found 0"), "{words}");

    // Natively every byte is tried; here one of the length, of the description, of the numbers.
    let regions: Vec<_> = (0..3).map(|i| vec![format!("decode-{i}")]).collect();
    let good = blob::one_expert_per_region(&regions).to_bytes().unwrap();
    for at in [0, good.len() / 3, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        let inline = STANDARD.encode(bad);
        let words = verdict(json!({ "models": [{ "model": "*", "blob": { "inline": inline } }] }));
        let words = words.await.unwrap_err();
        assert!(words.contains("models[0].blob.inline: found"), "{words}");
    }
}

#[tokio::test]
async fn all_mistakes_are_named_at_once() {
    let filter = json!({
        "decode_clusters": [],
        "prefill_clusters": [],
        "models": [{ "model": "*", "tau": -1 }, { "model": "*", "max_load_factor": 0 }]
    });
    let refused = Gateway::try_start(Options::filter(filter)).await;
    let words = refused.expect_err("Envoy started");
    for word in [
        "decode_clusters",
        "prefill_clusters",
        "tau",
        "max_load_factor",
    ] {
        assert!(words.contains(word), "{word}: {words}");
    }
}

#[tokio::test]
async fn a_bad_update_is_refused_and_the_old_one_runs_on() {
    let gateway = Gateway::start(Options {
        lds: true,
        ..Options::default()
    })
    .await;
    assert_eq!(
        gateway.post("/v1/completions", BODY).await.text(),
        "decode-0"
    );

    gateway.update(json!({ "decode_clusters": [] }), 2);
    let rejected = "listener_manager.lds.update_rejected";
    let seen = async || gateway.envoy.stat(rejected).await.unwrap();
    eventually("the update is rejected", seen, |count| *count == 1).await;
    gateway.prefill_says(Some(1));
    assert_eq!(
        gateway.post("/v1/completions", BODY).await.text(),
        "decode-1"
    );

    // A good one is taken, so the listener was not just dead.
    gateway.update(
        json!({ "models": [{ "model": "*", "policy": "least_loaded" }] }),
        3,
    );
    let decision = async || {
        gateway
            .post("/v1/completions", BODY)
            .await
            .header("x-eldr-decision")
    };
    eventually("the good update serves", decision, |d| {
        d.contains("reason=blind")
    })
    .await;
}

#[tokio::test]
async fn a_missing_plugin_flag_is_named_to_the_client() {
    let gateway = Gateway::start(Options {
        without_stop_iteration: true,
        ..Options::default()
    })
    .await;
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.status, 500);
    assert!(
        reply.text().contains("allow_on_headers_stop_iteration"),
        "{}",
        reply.text()
    );
    gateway.expect_outcomes(&[("internal", 1)]).await;
}
