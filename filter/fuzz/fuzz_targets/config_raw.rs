//! Any bytes as a configuration: refused with a reason, or what its JSON says.
#![no_main]

use eldr_filter::config::Config;
use eldr_filter::plugin::Plugin;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// Decode clusters are names or objects with one.
fn names(value: &Value) -> Vec<&str> {
    let list = value.as_array().expect("a list").iter();
    list.map(|entry| {
        entry
            .as_str()
            .or_else(|| entry["name"].as_str())
            .expect("a name")
    })
    .collect()
}

fuzz_target!(|json: &[u8]| match Config::parse(json) {
    Ok(config) => {
        let value: Value = serde_json::from_slice(json).expect("accepted, so it is JSON");
        assert_eq!(names(&value["decode_clusters"]), config.decode_clusters);
        assert_eq!(names(&value["prefill_clusters"]), config.prefill_clusters);
        assert_eq!(config.shares.len(), config.decode_clusters.len());
        let models = value["models"].as_array().expect("a list");
        assert_eq!(models.len(), config.models.len());
        for (said, model) in models.iter().zip(&config.models) {
            assert_eq!(said["model"], *model.name);
            assert_eq!(said["tau"].is_number(), model.tau_is_fixed);
            assert!((0.0..=2.0).contains(&model.rule.tau));
        }
        let count = models.len();
        assert_eq!(Plugin::new(config).models().count(), count);
    }
    Err(mistakes) => assert!(!mistakes.0.is_empty() && mistakes.to_string().contains(": found ")),
});
