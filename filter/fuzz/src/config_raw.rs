//! Any bytes as a configuration: refused with a reason, or what its JSON says.

use eldr_filter::config::Config;
use eldr_filter::load::LoadUnit;
use eldr_filter::plugin::Plugin;
use serde_json::Value;

/// Decode workers are names or objects with one.
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

/// Panics where a promise is broken.
pub fn check(json: &[u8]) {
    match Config::parse(json) {
        Ok(config) => {
            let value: Value = serde_json::from_slice(json).expect("accepted, so it is JSON");
            let workers = match value["destination"] == "endpoint" {
                true => "decode_endpoints",
                false => "decode_clusters",
            };
            assert_eq!(names(&value[workers]), config.decode_clusters);
            assert_eq!(names(&value["prefill_clusters"]), config.prefill_clusters);
            assert_eq!(config.shares.len(), config.decode_clusters.len());
            let models = value["models"].as_array().expect("a list");
            assert_eq!(models.len(), config.models.len());
            for (said, model) in models.iter().zip(&config.models) {
                assert_eq!(said["model"], *model.name);
                assert_eq!(said["tau"].is_number(), model.tau_is_fixed);
                assert_eq!(said["rollout"].is_object(), model.rollout.is_some());
                let in_tokens = model.load_unit == LoadUnit::KvTokens;
                assert_eq!(said["load_unit"] == "kv_tokens", in_tokens);
                let share = said["signature_sample"].as_f64().unwrap_or(0.0);
                assert_eq!(share, model.signature_sample);
                assert!((0.0..=2.0).contains(&model.rule.tau));
            }
            let count = models.len();
            assert_eq!(Plugin::new(config).models().count(), count);
        }
        Err(mistakes) => {
            assert!(!mistakes.0.is_empty() && mistakes.to_string().contains(": found "));
        }
    }
}
