//! `eldr record` against the mock engine: what it writes is what the engine was given to replay.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use eldr_calibrator::record::{Done, Engine, Options, Prompts, Routing, record};
use eldr_calibrator::trace::Record;
use eldr_examples::mock::{Catalog, MockConfig, MockEngine, SignatureCarriage, prompt_for};
use eldr_examples::records;
use tempfile::TempDir;

/// Forty recorded requests, and prompts that stand for them.
fn prompts(dir: &TempDir) -> Vec<Record> {
    let shipped = "data/small-moe/task_calibration.jsonl.gz";
    let mut records = records::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(shipped)).unwrap();
    records.truncate(40);
    let lines = records.iter().map(|record| {
        let prompt = prompt_for(&record.id, record.prompt_tokens.unwrap());
        serde_json::json!({"id": record.id, "text": prompt, "domain": record.label}).to_string()
    });
    let lines: Vec<String> = lines.collect();
    std::fs::write(dir.path().join("prompts.jsonl"), lines.join("\n")).unwrap();
    records
}

async fn engine(records: &[Record], signature_carriage: SignatureCarriage) -> MockEngine {
    let config = MockConfig {
        time_scale: 0.0,
        signature_carriage,
        ..MockConfig::default()
    };
    let catalog = Catalog::from_records(records).unwrap();
    MockEngine::start(config, Arc::new(catalog)).await.unwrap()
}

fn options(routing: Routing, hand_over: bool) -> Options {
    Options {
        model: "mock".into(),
        max_tokens: 1,
        routing,
        hand_over,
        concurrency: 6,
        retries: 0,
    }
}

async fn run(engine: &MockEngine, dir: &TempDir, options: &Options) -> (Done, Vec<Record>) {
    let url = format!("http://{}", engine.prefill()[0]);
    let client = Engine::new(&url, &[], Duration::from_secs(30)).unwrap();
    let prompts = Prompts::open(&dir.path().join("prompts.jsonl")).unwrap();
    let output = dir.path().join("trace.jsonl");
    let done = record(&client, prompts, &output, options, |_| {}).await;
    (done.unwrap(), records::read(&output).unwrap())
}

fn assert_same(found: &[Record], expected: &[Record]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!((&found.id, &found.label), (&expected.id, &expected.label));
        assert_eq!(found.prompt_tokens, expected.prompt_tokens);
        let [found, expected] =
            [found, expected].map(|record| record.prefill_signature().unwrap().unwrap());
        assert_eq!(found.counts(), expected.counts());
        assert_eq!(found.prompt_tokens(), expected.prompt_tokens());
    }
}

#[tokio::test]
async fn signatures_in_headers_become_the_trace_and_an_interruption_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let expected = prompts(&dir);
    let engine = engine(&expected, SignatureCarriage::Header).await;
    let (done, found) = run(&engine, &dir, &options(Routing::default(), false)).await;
    assert_eq!((done.recorded, done.there, done.rejected), (40, 0, 0));
    assert_same(&found, &expected);

    // As if it had been killed while it wrote the 30th line.
    let path = dir.path().join("trace.jsonl");
    let whole = std::fs::read(&path).unwrap();
    let ends = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    let end = ends.map(|(at, _)| at).nth(28).unwrap();
    std::fs::write(&path, &whole[..end + 100]).unwrap();
    let (done, _) = run(&engine, &dir, &options(Routing::default(), false)).await;
    assert_eq!((done.recorded, done.there), (11, 29));
    assert!(std::fs::read(&path).unwrap() == whole, "byte for byte");
}

#[tokio::test]
async fn the_official_forks_signatures_are_read_and_its_kv_blocks_released() {
    let dir = tempfile::tempdir().unwrap();
    let expected = prompts(&dir);
    let engine = engine(&expected, SignatureCarriage::Body).await;
    let routing = Routing {
        layers: Some(6),
        experts: Some(64),
    };
    let (done, found) = run(&engine, &dir, &options(routing, true)).await;
    assert_eq!(done.recorded, 40);
    assert_same(&found, &expected);
    assert_eq!((engine.kv_held(), engine.kv_stranded()), (0, 0));
}
