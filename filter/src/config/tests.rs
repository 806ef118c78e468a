mod objective;
mod source;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::plugin::tests::blob_bytes;

fn minimal() -> Value {
    json!({"models": [{"model": "*"}], "decode_clusters": ["decode-0"], "prefill_clusters": ["prefill"]})
}

fn parse(value: &Value) -> Result<Config, Mistakes> {
    Config::parse(value.to_string().as_bytes())
}

#[test]
fn a_minimal_configuration_has_the_documented_defaults() {
    let config = parse(&minimal()).unwrap();
    assert_eq!(
        config.timing,
        Timing {
            lease_ms: 2_000,
            refresh_ms: 1
        }
    );
    assert_eq!(config.prefill_timeout_ms, 30_000);
    assert_eq!(config.on_prefill_failure, OnPrefillFailure::DecodeOnly);
    assert_eq!(config.prefill_policy, PrefillPolicy::RoundRobin);
    assert_eq!(config.prefill_prefix_bytes, 1_024);
    assert_eq!(config.prefill_load_factor, 1.25);
    assert!(config.prefill_retry);
    assert_eq!(config.release, Form::Decode);
    assert_eq!(config.models[0].rule, Rule::default());
    let reporting = Reporting {
        interval_ms: 0,
        path: "/metrics".into(),
        stale_ms: 5_000,
    };
    assert_eq!((config.reporting, config.kv_usage_limit), (reporting, 0.95));
    assert!(!config.debug_headers);
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let mistakes = parse(&json!({
        "models": [
            {"model": "a", "tau": -0.5, "max_load_factor": 0.5},
            {"model": "a", "max_load_factor": "nome", "blob": {"inline": "AAAA"}},
            {"model": "", "blob": {"inline": "?"}},
        ],
        "decode_clusters": ["d", "d", "two words"],
        "prefill_clusters": [],
        "prefill_timeout_ms": 0,
        "prefill_prefix_bytes": 0,
        "prefill_load_factor": 0.9,
        "load_lease_ms": 1,
    }))
    .unwrap_err();
    let text = mistakes.to_string();
    let expected = [
        "plugin configuration refused, 14 mistake(s):",
        "\n  decode_clusters[1]: found \"d\", allowed: visible ASCII characters, each cluster once",
        "\n  decode_clusters[2]: found \"two words\", allowed: visible ASCII",
        "\n  prefill_clusters: found [], allowed: at least one Envoy cluster",
        "\n  prefill_timeout_ms: found 0, allowed: 1 to 3600000",
        "\n  prefill_prefix_bytes: found 0, allowed: 1 to 1048576",
        "\n  prefill_load_factor: found 0.9, allowed: a number from 1 to 100",
        "\n  load_lease_ms: found 1, allowed: 500 to 60000",
        "\n  models[0].tau: found -0.5, allowed: 0 to 2",
        "\n  models[0].max_load_factor: found 0.5, allowed: a number from 1 to 100, or \"none\"",
        "\n  models[1].model: found \"a\", allowed: a name that no other entry has",
        "\n  models[1].blob.inline: found centroid blob is not a safetensors file",
        "\n  models[1].max_load_factor: found \"nome\"",
        "\n  models[2].model: found \"\", allowed: a model name, or \"*\" for any",
        "\n  models[2].blob.inline: found 1 characters: ",
    ];
    for part in expected {
        assert!(text.contains(part), "{part}\nnot in\n{text}");
    }
}

#[test]
fn decode_goes_by_endpoint_of_one_cluster() {
    let mut config = minimal();
    config["destination"] = json!("endpoint");
    config["decode_endpoints"] = json!(["10.0.0.5:80", {"name": "[::1]:80", "weight": 2}]);
    let valid = parse(&config).unwrap();
    assert_eq!(valid.destination, Destination::Endpoint("decode-0".into()));
    assert_eq!(valid.decode_clusters, ["10.0.0.5:80", "[::1]:80"]);
    assert_eq!(valid.shares[1].weight, 2.0);
    let mistakes = |field: &str, value: Value| {
        let mut config = config.clone();
        config[field] = value;
        parse(&config).unwrap_err().to_string()
    };
    let bad = json!([
        "10.0.0.5:80",
        "10.0.0.5:80",
        "host:80",
        "10.0.0.5:0",
        "[0::1]:80"
    ]);
    let text = mistakes("decode_endpoints", bad);
    assert!(
        text.contains("4 mistake(s)") && text.contains("decode_endpoints[1]: found"),
        "{text}"
    );
    let text = mistakes("decode_endpoints", json!([]));
    assert!(
        text.contains("decode_endpoints: found [], allowed: at least one"),
        "{text}"
    );
    let text = mistakes(
        "decode_endpoints",
        json!([{"name": "10.0.0.5:80", "drain": true}]),
    );
    assert!(
        text.contains("decode_endpoints: found all of them drain"),
        "{text}"
    );
    let text = mistakes("decode_clusters", json!(["a", "b"]));
    assert!(
        text.contains("decode_clusters: found 2 clusters, allowed: one"),
        "{text}"
    );
    let text = mistakes("destination", json!("cluster"));
    assert!(
        text.contains("decode_endpoints: found 2 endpoint(s), allowed: none"),
        "{text}"
    );
}

#[test]
fn load_reports_have_bounds() {
    let refused = |field: &str, value: Value| {
        let mut config = minimal();
        config[field] = value;
        let text = parse(&config).unwrap_err().to_string();
        assert!(
            text.contains("1 mistake(s)") && text.contains(field),
            "{text}"
        );
    };
    refused("load_report_interval_ms", json!(199));
    refused("load_report_interval_ms", json!(60_001));
    refused("load_report_path", json!("metrics"));
    refused("load_report_path", json!("/a b"));
    refused("load_report_stale_ms", json!(199));
    refused("load_report_stale_ms", json!(600_001));
    refused("kv_usage_limit", json!(1.01));
    refused("kv_usage_limit", json!(-0.01));
    let mut config = minimal();
    config["load_report_interval_ms"] = json!(10_000);
    let text = parse(&config).unwrap_err().to_string();
    assert!(
        text.contains("load_report_stale_ms: found 5000, allowed: 10000 to 600000"),
        "{text}"
    );
    config["load_report_stale_ms"] = json!(10_000);
    assert_eq!(parse(&config).unwrap().reporting.interval_ms, 10_000);
}

#[test]
fn decode_clusters_may_have_weights_and_drain() {
    let mut config = minimal();
    config["decode_clusters"] =
        json!(["a", {"name": "b", "weight": 2.5}, {"name": "c", "drain": true}]);
    let parsed = parse(&config).unwrap();
    assert_eq!(parsed.decode_clusters, ["a", "b", "c"]);
    let shares = parsed
        .shares
        .iter()
        .map(|share| (share.weight, share.drain));
    assert!(shares.eq([(1.0, false), (2.5, false), (1.0, true)]));
    for (clusters, expected) in [
        (
            json!([{"name": "a", "weight": 0.01}]),
            "decode_clusters[0].weight: found 0.01, allowed: 0.1 to 100",
        ),
        (
            json!([{"name": "a", "drain": true}]),
            "decode_clusters: found all of them drain",
        ),
        (
            json!(["a", {"name": "a"}]),
            "decode_clusters[1]: found \"a\"",
        ),
        (
            json!(["a", {"name": "b", "wait": 1}]),
            "decode_clusters[1].wait: found unknown field `wait`",
        ),
        (json!([7]), "decode_clusters[0]: found invalid type"),
    ] {
        config["decode_clusters"] = clusters;
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}\nnot in\n{error}");
    }
}

#[test]
fn cool_downs_and_log_fields_have_defaults_and_ranges() {
    let config = parse(&minimal()).unwrap();
    let CoolDown { first_ms, max_ms } = config.cool_down;
    assert_eq!((first_ms, max_ms), (1_000, 30_000));
    assert_eq!(
        (config.log_signatures, config.log_decisions_per_mille),
        (false, 0)
    );
    let mut config = minimal();
    config["eject_ms"] = json!(5_000);
    config["eject_max_ms"] = json!(4_000);
    config["log_decisions_per_mille"] = json!(1_001);
    let error = parse(&config).unwrap_err().to_string();
    for part in [
        "eject_max_ms: found 4000, allowed: 5000 to 3600000",
        "log_decisions_per_mille: found 1001, allowed: 0 to 1000",
    ] {
        assert!(error.contains(part), "{part}\nnot in\n{error}");
    }
}

#[test]
fn relay_mode_has_defaults_and_ranges_and_settings_of_its_own() {
    let mut value = minimal();
    assert_eq!(parse(&value).unwrap().mode, Mode::Orchestrate);
    value["relay_body_signature"] = json!(true);
    let text = parse(&value).unwrap_err().to_string();
    let expected = "relay_body_signature: found true, allowed: false, or \"mode\": \"relay\"";
    assert!(text.contains(expected), "{text}");
    value["mode"] = json!("relay");
    let config = parse(&value).unwrap();
    assert_eq!((config.mode, config.relay_ttl_ms), (Mode::Relay, 60_000));
    assert!(config.relay_body_signature);
    for ttl_ms in [999, 3_600_001] {
        value["relay_ttl_ms"] = json!(ttl_ms);
        let text = parse(&value).unwrap_err().to_string();
        let expected = format!("relay_ttl_ms: found {ttl_ms}, allowed: 1000 to 3600000");
        assert!(text.contains(&expected), "{text}");
    }
}

#[test]
fn mooncake_wants_to_know_every_prefill_engine_and_others_none() {
    let mut value = minimal();
    value["protocol"] = json!("mooncake");
    let text = parse(&value).unwrap_err().to_string();
    assert!(
        text.contains("mooncake.prefill: found nothing, allowed: {\"boot"),
        "{text}"
    );
    let engine = json!({"bootstrap_addr": "http://10.0.0.1:8998", "engine_id": "p"});
    value["mooncake"] = json!({ "prefill": engine });
    let config = parse(&value).unwrap();
    assert_eq!(config.protocol, Protocol::Mooncake);
    assert_eq!(config.engines[0].as_ref().unwrap().engine_id, "p");
    value["mooncake"]["other"] = json!({"bootstrap_addr": "10.0.0.1:8998", "engine_id": ""});
    let text = parse(&value).unwrap_err().to_string();
    for expected in [
        "3 mistake(s)",
        "mooncake: found \"other\"",
        "mooncake.other.bootstrap_addr: found \"10.0.0.1:8998\"",
        "mooncake.other.engine_id: found \"\"",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    value["mooncake"] = json!({ "prefill": engine });
    value["protocol"] = json!("nixl");
    assert!(parse(&value).is_err(), "nixl has no use for it");
    value["mooncake"] = json!({});
    value["mode"] = json!("relay");
    value["protocol"] = json!("mooncake");
    assert!(parse(&value).is_ok(), "the coordinator knows them");
}

#[test]
fn what_relay_mode_cannot_do_is_refused() {
    let mut value = minimal();
    value["protocol"] = json!("shared_storage");
    value["report_cached_tokens"] = json!(true);
    assert!(parse(&value).unwrap().report_cached_tokens);
    value["mode"] = json!("relay");
    let text = parse(&value).unwrap_err().to_string();
    for expected in [
        "2 mistake(s)",
        "protocol: found",
        "report_cached_tokens: found true",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn loads_are_compared_in_requests_unless_a_model_wants_tokens() {
    let mut config = minimal();
    assert!(!parse(&config).unwrap().counts_tokens());
    for (unit, counts) in [("requests", false), ("kv_tokens", true)] {
        config["models"] = json!([{"model": "a"}, {"model": "*", "load_unit": unit}]);
        let parsed = parse(&config).unwrap();
        assert_eq!(parsed.counts_tokens(), counts, "{unit}");
        assert_eq!(parsed.models[0].load_unit, LoadUnit::Requests);
    }
    config["models"][1]["load_unit"] = json!("tokens");
    let error = parse(&config).unwrap_err().to_string();
    for part in [
        "models[1].load_unit",
        "`tokens`",
        "`requests` or `kv_tokens`",
    ] {
        assert!(error.contains(part), "{part} not in {error}");
    }
}

#[test]
fn unknown_fields_and_policies_are_named() {
    let mut config = minimal();
    config["prefil_timeout_ms"] = json!(1);
    let error = parse(&config).unwrap_err().to_string();
    assert!(
        error.contains("unknown field `prefil_timeout_ms`"),
        "{error}"
    );
    let mut config = minimal();
    config["models"][0]["policy"] = json!("bands");
    let error = parse(&config).unwrap_err().to_string();
    assert!(
        error.contains("models[0].policy: found unknown variant `bands`, expected one of `band`"),
        "{error}"
    );
    let trailing = format!("{} x", minimal());
    let error = Config::parse(trailing.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("trailing characters"), "{error}");
}

#[test]
fn candidates_are_all_unless_some_are_to_be_drawn() {
    let mut config = minimal();
    let candidates = |config: &Value| parse(config).map(|config| config.models[0].rule.candidates);
    assert_eq!(candidates(&config).unwrap(), None);
    for drawn in [1, 16, 4096] {
        config["models"][0]["candidates"] = json!(drawn);
        assert_eq!(candidates(&config).unwrap(), Some(drawn));
    }
    for wrong in [0u64, 4097, 1 << 40] {
        config["models"][0]["candidates"] = json!(wrong);
        let mistakes = candidates(&config).unwrap_err().0;
        assert_eq!(
            (mistakes[0].field.as_str(), mistakes.len()),
            ("models[0].candidates", 1)
        );
        assert_eq!(mistakes[0].allowed, "1 to 4096");
    }
}

#[test]
fn tau_comes_from_the_blob_unless_it_is_set() {
    let inline = STANDARD.encode(blob_bytes(1, &["decode-0"]));
    let mut config = minimal();
    config["models"][0]["blob"] = json!({"inline": inline});
    let rule = parse(&config).unwrap().models[0].rule;
    assert_eq!(rule.tau, 0.2);
    config["models"][0]["tau"] = json!(0.05);
    assert_eq!(parse(&config).unwrap().models[0].rule.tau, 0.05);
    config["models"][0]["max_load_factor"] = json!("none");
    assert_eq!(parse(&config).unwrap().models[0].rule.max_load_factor, None);
}

#[test]
fn a_blob_for_other_clusters_is_refused_with_a_hint() {
    let inline = STANDARD.encode(blob_bytes(1, &["decode-9"]));
    let mut config = minimal();
    config["models"][0]["blob"] = json!({"inline": inline});
    let error = parse(&config).unwrap_err().to_string();
    assert!(error.contains("names decode cluster \"decode-9\"") && error.contains("hint: list it"));
}

#[test]
fn a_blob_that_is_wrong_in_any_one_byte_is_refused() {
    let good = blob_bytes(1, &["decode-0"]);
    let refusal = |bytes: &[u8]| {
        let mut config = minimal();
        config["models"][0]["blob"] = json!({"inline": STANDARD.encode(bytes)});
        parse(&config).err().map(|mistakes| mistakes.to_string())
    };
    assert_eq!(refusal(&good), None);
    for at in 0..good.len() {
        for flip in [0x01, 0x20, 0x80] {
            let mut bad = good.clone();
            bad[at] ^= flip;
            let words = refusal(&bad).unwrap_or_else(|| panic!("byte {at} ^ {flip:#x} is taken"));
            assert!(words.contains("models[0].blob.inline: found"), "{words}");
        }
        assert!(refusal(&good[..at]).is_some(), "cut off after {at} bytes");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        prop_assert!(Config::parse(&bytes).is_err());
    }

    #[test]
    fn mutated_configurations_never_panic(at: prop::sample::Index, byte in "[ -~]") {
        let mut text = minimal().to_string().into_bytes();
        let at = at.index(text.len());
        text[at] = byte.as_bytes()[0];
        let _ = Config::parse(&text);
    }
}

#[test]
fn a_rollout_has_defaults_ranges_and_another_policy_than_the_model() {
    let with = |rollout: serde_json::Value| {
        let config = json!({
            "models": [{"model": "*", "rollout": rollout}],
            "decode_clusters": ["d"],
            "prefill_clusters": ["p"],
        });
        Config::parse(config.to_string().as_bytes())
    };
    let rollout = |value| with(value).unwrap().models[0].rollout.unwrap();
    let shadow = rollout(json!({"kind": "shadow"}));
    assert_eq!(shadow, (Rollout::Shadow, Policy::LeastLoaded));
    let percentage = rollout(json!({"kind": "percentage", "percent": 7, "control": "top1"}));
    assert_eq!(
        percentage,
        (Rollout::Percentage { percent: 7 }, Policy::Top1)
    );
    let switchback = Rollout::Switchback {
        slice_ms: 600_000,
        washout_ms: 60_000,
    };
    assert_eq!(rollout(json!({"kind": "switchback"})).0, switchback);
    for (bad, fields) in [
        (
            json!({"kind": "percentage", "percent": 101, "control": "band"}),
            &["percent", "control"][..],
        ),
        (
            json!({"kind": "switchback", "slice_ms": 99, "washout_ms": 99}),
            &["slice_ms", "washout_ms"],
        ),
        (json!({"kind": "shadow", "control": "band"}), &["control"]),
    ] {
        let mistakes = with(bad).unwrap_err().0;
        let found: Vec<_> = mistakes
            .iter()
            .map(|mistake| mistake.field.as_str())
            .collect();
        let expected: Vec<_> = fields
            .iter()
            .map(|field| format!("models[0].rollout.{field}"))
            .collect();
        assert_eq!(found, expected);
    }
    for bad in [
        json!({"kind": "shadow", "percent": 1}),
        json!({"kind": "canary"}),
    ] {
        let error = with(bad).unwrap_err().to_string();
        assert!(error.contains("models[0].rollout"), "{error}");
    }
}
