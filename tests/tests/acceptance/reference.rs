//! The reference configuration that the project ships, in a real Envoy.

use std::net::SocketAddr;

use eldr_examples::envoy::Envoy;
use eldr_tests::client::{Connection, get, post};
use eldr_tests::{
    Answer, KV_TRANSFER_PARAMS, Upstream, blob, envoy_binary, eventually, wasm_module,
};

const REFERENCE: &str = include_str!("../../../envoy/envoy.yaml");

/// Replaces text that must be there: a reference configuration that no longer has it needs another test.
pub(crate) fn replace(text: &str, from: &str, to: &str) -> String {
    assert!(
        text.contains(from),
        "envoy/envoy.yaml no longer has {from:?}"
    );
    text.replace(from, to)
}

/// The reference configuration before workers of a test.
pub(crate) struct Reference {
    pub(crate) envoy: Envoy,
    pub(crate) address: SocketAddr,
    pub(crate) prefill: Upstream,
    pub(crate) decode: [Upstream; 2],
}

/// Starts it; `edit` may change more of it, on top of addresses, module and blob.
pub(crate) async fn start(edit: impl Fn(&str) -> String) -> Reference {
    start_from(REFERENCE, edit).await
}

/// As [`start`], from this configuration.
pub(crate) async fn start_from(config: &str, edit: impl Fn(&str) -> String) -> Reference {
    let signature = blob::signature_of(1, 2);
    let prefill = Upstream::start(Answer::prefill(KV_TRANSFER_PARAMS, Some(&signature))).await;
    let decode = [
        Upstream::start(Answer::json("decode-0")).await,
        Upstream::start(Answer::json("decode-1")).await,
    ];
    let regions = [vec!["decode-0".to_owned()], vec!["decode-1".to_owned()]];
    let centroids = blob::inline(&blob::one_expert_per_region(&regions));

    let module = wasm_module().to_str().expect("a path in UTF-8");
    let mut config = replace(config, "/etc/envoy/eldr_filter.wasm", module);
    config = replace(
        &config,
        "address: 0.0.0.0, port_value: 10000",
        "address: 127.0.0.1, port_value: 0",
    );
    let model = r#"{"model": "*", "policy": "band"}"#;
    let with_blob =
        format!(r#"{{"model": "*", "policy": "band", "blob": {{"inline": "{centroids}"}}}}"#);
    config = replace(&config, model, &with_blob);
    let workers = [("decode-0", &decode[0]), ("decode-1", &decode[1])];
    for (name, upstream) in workers
        .into_iter()
        .chain([("prefill-0", &prefill), ("prefill-1", &prefill)])
    {
        let port = upstream.address.port();
        let address = format!("address: 127.0.0.1, port_value: {port}");
        config = replace(
            &config,
            &format!("address: {name}, port_value: 8000"),
            &address,
        );
    }

    let envoy = Envoy::start(envoy_binary(), &edit(&config), 2)
        .await
        .unwrap_or_else(|e| panic!("{e}"));
    let address = envoy.listener("llm").await.unwrap();
    Reference {
        envoy,
        address,
        prefill,
        decode,
    }
}

#[tokio::test]
async fn routes_a_completion_and_passes_everything_else() {
    let Reference {
        envoy,
        address,
        decode,
        prefill: _prefill,
    } = start(str::to_owned).await;
    let mut connection = Connection::open(address).await;
    let reply = connection
        .call(post("/v1/completions", r#"{"prompt":"hi"}"#))
        .await;
    assert_eq!(
        (reply.status.as_u16(), reply.text().as_str()),
        (200, "decode-1")
    );
    let ours = reply
        .headers
        .keys()
        .filter(|name| name.as_str().contains("eldr"));
    assert_eq!(ours.count(), 0, "{:?}", reply.headers);
    let received = decode[1].only();
    assert_eq!(received.headers.get("x-eldr-decode-cluster"), None);
    assert!(received.headers.contains_key("x-request-id"));
    assert_eq!(connection.call(get("/v1/models")).await.status, 200);

    let scrape = async || {
        let page = envoy.admin_get("/stats/prometheus?filter=eldr").await;
        page.unwrap_or_else(|e| panic!("{e}"))
    };
    for expected in [
        r#"eldr_outcome{eldr_outcome="routed"} 1"#,
        r#"eldr_outcome{eldr_outcome="bypassed"} 1"#,
        r#"eldr_reason{eldr_reason="in_band"} 1"#,
        r#"eldr_worker_routed{eldr_worker="decode-1"} 1"#,
    ] {
        eventually(expected, scrape, |stats| stats.contains(expected)).await;
    }
}
