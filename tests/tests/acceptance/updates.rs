//! Configurations that change under traffic, and several of them in one Envoy.

use eldr_tests::client::{next_piece, post};
use eldr_tests::{Answer, Connection, Gateway, Options, blob, eventually};
use serde_json::{Value, json};

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

/// Models with an inline blob that sends expert `i` of three to `decode-{workers[i]}`.
fn models(revision: u64, workers: [usize; 3]) -> Value {
    let regions = workers.map(|worker| vec![format!("decode-{worker}")]);
    let mut blob = blob::one_expert_per_region(&regions);
    blob.revision = revision;
    let inline = json!({ "inline": blob::inline(&blob) });
    // Blobs alone decide, not the load of streams that a test holds.
    json!([{ "model": "*", "blob": inline, "max_load_factor": "none" }])
}

#[tokio::test]
async fn requests_in_every_phase_survive_an_update_and_their_counts_end() {
    let mut gateway = Gateway::start(Options {
        lds: true,
        ..Options::filter(json!({ "models": models(7, [0, 1, 2]) }))
    })
    .await;
    gateway.prefill_says(Some(1));
    gateway.decode[1].by_hand();
    let mut decoding = gateway.connect().await;
    let (answer, stream) = gateway.decode[1]
        .streams_to(decoding.send(post("/v1/completions", BODY)))
        .await;
    let mut body = answer.into_body();
    gateway.prefill.by_hand();
    let mut prefilling = gateway.connect().await;
    let leg = {
        let client = prefilling.send(post("/v1/completions", BODY));
        let rest = async {
            let leg = gateway.prefill.next().await;
            gateway.expect_in_flight(2).await;
            // Of a lower revision, as after a rollback: the configuration in force is what counts.
            gateway.prefill_says(Some(1));
            gateway.update(json!({ "models": models(3, [1, 2, 0]) }), 2);
            let decision = async || gateway.post("/v1/completions", BODY).await.text();
            gateway.decode[1].answers(Answer::json("decode-1"));
            eventually("the update serves", decision, |text| text == "decode-2").await;
            let params = eldr_tests::KV_TRANSFER_PARAMS;
            let signature = blob::signature_of(1, 3);
            leg.answer(Answer::prefill(params, Some(&signature)));
        };
        tokio::join!(client, rest).0
    };
    // The request began under the old configuration and is decided by it.
    let decision = leg.headers()["x-eldr-decision"].to_str().unwrap();
    assert!(
        decision.starts_with("decode-1;reason=in_band"),
        "{decision}"
    );

    stream.send("whole").await;
    assert_eq!(next_piece(&mut body).await.as_deref(), Some(&b"whole"[..]));
    stream.finish();
    assert_eq!(next_piece(&mut body).await, None);
    gateway.expect_in_flight(0).await;
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.text(), "decode-2", "the rollback stays");
    gateway.assert_no_trap();
}

#[tokio::test]
async fn listeners_with_different_blobs_do_not_mix() {
    // The main one has root_id `eldr` and revision 1; all share a VM.
    let mut gateway = Gateway::start(Options {
        listeners: vec![
            (
                "same-root",
                "eldr",
                json!({ "models": models(9, [1, 2, 0]) }),
            ),
            (
                "other-root",
                "other",
                json!({ "models": models(5, [2, 0, 1]) }),
            ),
        ],
        ..Options::default()
    })
    .await;
    let mut listeners = vec![(gateway.address, "decode-0")];
    for (name, worker) in [("same-root", "decode-1"), ("other-root", "decode-2")] {
        let address = gateway.envoy.listener(name).await.unwrap();
        listeners.push((address, worker));
    }
    let assert_apart = async || {
        for (address, worker) in &listeners {
            let mut connection = Connection::open(*address).await;
            let reply = connection.call(post("/v1/completions", BODY)).await;
            assert_eq!(reply.text(), *worker, "{address}");
        }
    };
    assert_apart().await;
    // Blobs in shared data would be taken at a tick, and so are the gauges set: see some ticks go by.
    for _ in 0..3 {
        gateway.decode[0].by_hand();
        let mut connection = gateway.connect().await;
        let held = gateway.decode[0]
            .streams_to(connection.send(post("/v1/completions", BODY)))
            .await;
        gateway.expect_in_flight(1).await;
        drop((connection, held));
        gateway.expect_in_flight(0).await;
        gateway.decode[0].answers(Answer::json("decode-0"));
    }
    assert_apart().await;
    gateway.assert_no_trap();
}
