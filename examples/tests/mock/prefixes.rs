//! Prompts with a common prefix.

use eldr_calibrator::trace::{Prefix, Record};
use eldr_core::Signature;
use eldr_core::signature::Encoding;

use super::*;

/// Signature of 3 layers with 4 experts, of `tokens` tokens with 2 experts each, differently spread for each `seed`.
fn signature(tokens: u64, seed: u64) -> String {
    let mut counts = Vec::new();
    for layer in 0..3 {
        let first = (tokens * (1 + (seed + layer) % 5) / 6) as u16;
        let second = (tokens * (1 + (seed * 3 + layer) % 4) / 7) as u16;
        let tokens = tokens as u16;
        counts.extend([first, tokens - first, second, tokens - second]);
    }
    let geometry = Geometry::new(3, 4).unwrap();
    let signature = Signature::dense(geometry, counts, Some(tokens)).unwrap();
    signature.encode(Encoding::U16)
}

fn record(id: &str, tokens: u64, prefix: Option<(&str, u64)>) -> Record {
    Record {
        id: id.into(),
        prompt_tokens: Some(tokens),
        prefill: Some(signature(tokens, u64::from(id.as_bytes()[0]))),
        prefix: prefix.map(|(group, tokens)| Prefix {
            group: group.into(),
            tokens,
        }),
        ..Record::default()
    }
}

/// The signature and the cached tokens that the prefill worker tells.
async fn ask(http: &Http, engine: &MockEngine, id: &str, tokens: u64) -> (String, Option<u64>) {
    let body = json!({
        "prompt": prompt_for(id, tokens), "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true},
    });
    let url = completions(engine.prefill()[0]);
    let response = http.post(&url, id, &body).await;
    let signature = response.headers()["x-eldr-signature"].to_str().unwrap();
    let signature = signature.to_owned();
    let usage = json_of(response).await["usage"].clone();
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
    (signature, cached)
}

async fn prefix_engine(config: MockConfig) -> MockEngine {
    let records = [
        record("a", 100, Some(("g", 70))),
        record("b", 200, Some(("g", 80))),
        record("c", 64, Some(("h", 50))),
        record("d", 90, None),
    ];
    let catalog = Catalog::from_records(&records).unwrap();
    MockEngine::start(config, Arc::new(catalog)).await.unwrap()
}

#[tokio::test]
async fn a_cached_prefix_gives_the_exact_signature() {
    let config = MockConfig {
        prefill_workers: 1,
        ..instant()
    };
    let (engine, http) = (prefix_engine(config).await, Http::new());
    // The group's prefix is 70 tokens, of which four blocks are full. Equal prompts share all full blocks.
    for (id, tokens, cached) in [
        ("a", 100, None),
        ("b", 200, Some(64)),
        ("c", 64, None),
        ("d", 90, None),
        ("a", 100, Some(96)),
        ("b", 200, Some(192)),
        ("d", 90, Some(80)),
    ] {
        let seed = u64::from(id.as_bytes()[0]);
        let expected = (signature(tokens, seed), cached);
        assert_eq!(ask(&http, &engine, id, tokens).await, expected, "{id}");
    }
    let report = &engine.reports()[0];
    assert_eq!(report.kv.cached_tokens, 64 + 96 + 192 + 80);
    assert_eq!(report.prefill_tokens, 100 + 200 + 64 + 90 + 100 + 200 + 90);
}

#[tokio::test]
async fn blocks_are_evicted_with_their_signatures_and_held_ones_are_not() {
    let config = MockConfig {
        prefill_workers: 1,
        // 13 blocks: of "a" 7, of "b" 13, of "d" 6.
        kv_cache_tokens: 13 * 16,
        kv_lease: Duration::from_millis(50),
        ..instant()
    };
    let (engine, http) = (prefix_engine(config).await, Http::new());
    let expected = |id: &str, tokens, cached| (signature(tokens, id.as_bytes()[0].into()), cached);
    let first = ask(&http, &engine, "a", 100).await;
    assert_eq!(first, expected("a", 100, None));
    // Whether or not "a" is held still, it is exact.
    let (told, _) = ask(&http, &engine, "b", 200).await;
    assert_eq!(told, expected("b", 200, None).0);
    nothing_held(&engine).await;
    // Takes all blocks: "a" goes but for the prefix.
    let cached = ask(&http, &engine, "b", 200).await.1;
    assert!(cached >= Some(64), "{cached:?}");
    nothing_held(&engine).await;
    let again = ask(&http, &engine, "a", 100).await;
    assert_eq!(again, expected("a", 100, Some(64)));
}

#[tokio::test]
async fn prefill_takes_time_for_what_is_not_cached_only() {
    let config = MockConfig {
        prefill_workers: 1,
        prefill_base_ms: 0.0,
        prefill_ms_per_token: 20.0,
        ..MockConfig::default()
    };
    let (engine, http) = (prefix_engine(config).await, Http::new());
    let start = std::time::Instant::now();
    ask(&http, &engine, "c", 64).await;
    assert!(start.elapsed() >= Duration::from_millis(64 * 20));
    // All four blocks are full and cached: 64 tokens more would take longer than this machine may be late.
    let start = std::time::Instant::now();
    assert_eq!(ask(&http, &engine, "c", 64).await.1, Some(64));
    assert!(start.elapsed() < Duration::from_millis(64 * 20));
}
