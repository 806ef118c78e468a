//! The load generator against the mock engine, over real sockets.

use std::sync::Arc;
use std::time::Duration;

use eldr_core::Geometry;
use eldr_core::engine::StepModel;
use eldr_examples::load::{LoadConfig, LoadRequest, Summary, arrivals, run};
use eldr_examples::mock::{Catalog, MockConfig, MockEngine};

#[tokio::test]
async fn the_load_generator_times_every_token_and_names_every_failure() {
    let step = StepModel {
        t0_ms: 5.0,
        b_ms: 0.0,
        c_ms: 0.0,
        kv_ms_per_1k: 0.0,
    };
    let config = MockConfig {
        step,
        ..MockConfig::default()
    };
    let catalog = Catalog::new(Geometry::new(1, 4).unwrap(), 2).unwrap();
    let engine = MockEngine::start(config, Arc::new(catalog)).await.unwrap();
    let requests = ["a", "b", "c"].map(|id| LoadRequest {
        id: id.into(),
        prompt_tokens: 5,
        decode_tokens: 4,
    });
    let arrivals = arrivals(requests.len(), 200.0, Duration::from_millis(200), 1);
    let config = LoadConfig {
        url: format!("http://{}", engine.decode()[0]),
        model: "mock".into(),
        in_flight_max: 8,
        timeout: Duration::from_secs(30),
    };
    let mut seen = 0;
    let samples = run(&config, &requests, &arrivals, |completed| seen = completed)
        .await
        .unwrap();
    let summary = Summary::new(&samples);
    assert_eq!(
        (summary.requests, summary.failures),
        (arrivals.len(), 0),
        "{samples:?}"
    );
    assert_eq!(seen, arrivals.len());
    assert!(samples.iter().all(|sample| sample.tokens == 4));
    assert_eq!(engine.decode_reports()[0].tokens, 4 * arrivals.len() as u64);

    let elsewhere = LoadConfig {
        model: "other".into(),
        ..config
    };
    let samples = run(&elsewhere, &requests, &arrivals[..1], |_| {})
        .await
        .unwrap();
    let failure = samples[0].failure.as_deref().unwrap();
    assert!(
        failure.contains("404") && failure.contains("does not exist"),
        "{failure}"
    );
}
