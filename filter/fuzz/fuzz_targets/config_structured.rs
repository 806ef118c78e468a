//! Configurations of the right shape with any values: accepted exactly when each value is allowed, and every field that
//! is not is named.
#![no_main]

use eldr_filter::config::Config;
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

#[derive(Arbitrary, Debug)]
struct Input {
    models: Vec<Model>,
    decode: Vec<(Name, Option<(Small, bool)>)>,
    prefill: Vec<Name>,
    prefix_bytes: Option<u32>,
    load_factor: Option<Small>,
    timeout: Option<u32>,
    lease: Option<u32>,
    refresh: Option<u16>,
    eject: Option<u32>,
    eject_max: Option<u32>,
    sampled: Option<u16>,
    unknown: Option<String>,
}

impl Input {
    /// Fields with a number, its default, the least and the most.
    fn numbers(&self) -> [(&'static str, Option<u32>, u32, u32, u32); 7] {
        let eject = self.eject.unwrap_or(1_000);
        [
            ("prefill_prefix_bytes", self.prefix_bytes, 1_024, 1, 1 << 20),
            ("prefill_timeout_ms", self.timeout, 30_000, 1, 3_600_000),
            ("load_lease_ms", self.lease, 2_000, 500, 60_000),
            ("load_refresh_ms", self.refresh.map(u32::from), 1, 0, 1_000),
            ("eject_ms", self.eject, 1_000, 0, 600_000),
            ("eject_max_ms", self.eject_max, 30_000, eject, 3_600_000),
            (
                "log_decisions_per_mille",
                self.sampled.map(u32::from),
                0,
                0,
                1_000,
            ),
        ]
    }
}

#[derive(Arbitrary, Debug)]
struct Model {
    name: Name,
    policy: Option<u8>,
    tau: Option<Small>,
    factor: Option<Factor>,
    blob: Option<Option<Http>>,
}

#[derive(Arbitrary, Debug)]
struct Http {
    cluster: Name,
    path: String,
    absolute: bool,
    interval: Option<u32>,
    authority: Option<Name>,
}

impl Http {
    fn path(&self) -> String {
        let slash = if self.absolute { "/" } else { "" };
        format!("{slash}{}", self.path)
    }
}

#[derive(Arbitrary, Debug)]
enum Name {
    Usual(u8),
    Any(String),
}

/// Numbers around the limits.
#[derive(Arbitrary, Debug, Clone, Copy)]
enum Small {
    Tenths(i8),
    Any(f64),
}

#[derive(Arbitrary, Debug)]
enum Factor {
    None,
    Number(Small),
    Word(String),
}

const POLICIES: [&str; 7] = [
    "band",
    "top1",
    "least_loaded",
    "p2c",
    "round_robin",
    "random",
    "best",
];

impl Name {
    fn get(&self) -> String {
        match self {
            Self::Usual(index) => format!("cluster-{}", index % 8),
            Self::Any(text) => text.clone(),
        }
    }
}

impl Small {
    fn get(self) -> f64 {
        match self {
            Self::Tenths(tenths) => f64::from(tenths) / 10.0,
            Self::Any(number) if number.is_finite() => number,
            Self::Any(_) => 1.0,
        }
    }
}

fn visible(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| (0x21..0x7f).contains(&byte))
}

/// Fields with a value that is not allowed.
fn mistakes(input: &Input) -> Vec<String> {
    let mut wrong = Vec::new();
    let decode: Vec<String> = input.decode.iter().map(|(name, _)| name.get()).collect();
    for (field, names) in [
        ("decode_clusters", &decode),
        ("prefill_clusters", &names(&input.prefill)),
    ] {
        if names.is_empty() {
            wrong.push(field.to_owned());
        }
        for (index, name) in names.iter().enumerate() {
            if !visible(name) || names.iter().take(index).any(|other| other == name) {
                wrong.push(format!("{field}[{index}]"));
            }
        }
    }
    for (index, (_, share)) in input.decode.iter().enumerate() {
        if share.is_some_and(|(weight, _)| !(0.1..=100.0).contains(&weight.get())) {
            wrong.push(format!("decode_clusters[{index}].weight"));
        }
    }
    let drains = |(_, share): &(Name, Option<(Small, bool)>)| share.is_some_and(|(_, drain)| drain);
    if !input.decode.is_empty() && input.decode.iter().all(drains) {
        wrong.push("decode_clusters".into());
    }
    for (field, value, default, low, high) in input.numbers() {
        let value = value.unwrap_or(default);
        if value < low || value > high {
            wrong.push(field.to_owned());
        }
    }
    if input
        .load_factor
        .is_some_and(|factor| !(1.0..=100.0).contains(&factor.get()))
    {
        wrong.push("prefill_load_factor".into());
    }
    if input.models.is_empty() {
        wrong.push("models".into());
    }
    for (index, model) in input.models.iter().enumerate() {
        let name = model.name.get();
        if name.is_empty()
            || input
                .models
                .iter()
                .take(index)
                .any(|other| other.name.get() == name)
        {
            wrong.push(format!("models[{index}].model"));
        }
        if model
            .tau
            .is_some_and(|tau| !(0.0..=2.0).contains(&tau.get()))
        {
            wrong.push(format!("models[{index}].tau"));
        }
        let factor = match &model.factor {
            Some(Factor::Number(number)) => (1.0..=100.0).contains(&number.get()),
            Some(Factor::Word(word)) => word == "none",
            _ => true,
        };
        if !factor {
            wrong.push(format!("models[{index}].max_load_factor"));
        }
        match &model.blob {
            None => {}
            Some(None) => wrong.push(format!("models[{index}].blob")),
            Some(Some(http)) => {
                let mut check = |field: &str, good: bool| {
                    if !good {
                        wrong.push(format!("models[{index}].blob.http.{field}"));
                    }
                };
                check("cluster", visible(&http.cluster.get()));
                let authority = http.authority.as_ref().unwrap_or(&http.cluster);
                check("authority", visible(&authority.get()));
                check("path", http.absolute || http.path.starts_with('/'));
                check("path", visible(&http.path()));
                let interval = http
                    .interval
                    .is_none_or(|ms| (200..=3_600_000).contains(&ms));
                check("interval_ms", interval);
            }
        }
    }
    wrong.sort();
    wrong.dedup();
    wrong
}

fn names(names: &[Name]) -> Vec<String> {
    names.iter().map(Name::get).collect()
}

fuzz_target!(|input: Input| {
    let models: Vec<Value> = input
        .models
        .iter()
        .map(|model| {
            let mut value = json!({ "model": model.name.get() });
            if let Some(policy) = model.policy {
                value["policy"] = POLICIES[usize::from(policy) % POLICIES.len()].into();
            }
            if let Some(tau) = model.tau {
                value["tau"] = tau.get().into();
            }
            match &model.factor {
                Some(Factor::None) => value["max_load_factor"] = "none".into(),
                Some(Factor::Number(number)) => value["max_load_factor"] = number.get().into(),
                Some(Factor::Word(word)) => value["max_load_factor"] = word.as_str().into(),
                None => {}
            }
            match &model.blob {
                None => {}
                Some(None) => value["blob"] = json!({}),
                Some(Some(http)) => {
                    let mut source = json!({ "cluster": http.cluster.get(), "path": http.path() });
                    if let Some(interval) = http.interval {
                        source["interval_ms"] = interval.into();
                    }
                    if let Some(authority) = &http.authority {
                        source["authority"] = authority.get().into();
                    }
                    value["blob"] = json!({ "http": source });
                }
            }
            value
        })
        .collect();
    let decode: Vec<Value> = input
        .decode
        .iter()
        .map(|(name, share)| match share {
            None => json!(name.get()),
            Some((weight, drain)) => {
                json!({ "name": name.get(), "weight": weight.get(), "drain": drain })
            }
        })
        .collect();
    let mut config = json!({
        "models": models,
        "decode_clusters": decode,
        "prefill_clusters": names(&input.prefill),
    });
    for (field, value, ..) in input.numbers() {
        if let Some(value) = value {
            config[field] = value.into();
        }
    }
    if let Some(factor) = input.load_factor {
        config["prefill_load_factor"] = factor.get().into();
    }
    // What the parser itself refuses hides the other mistakes.
    let best = |policy: u8| POLICIES[usize::from(policy) % POLICIES.len()] == "best";
    let mut unreadable = input
        .models
        .iter()
        .any(|model| model.policy.is_some_and(best));
    if let Some(unknown) = &input.unknown {
        config[format!("x{unknown}")] = json!(null);
        unreadable = true;
    }
    let wrong = mistakes(&input);
    match Config::parse(config.to_string().as_bytes()) {
        Ok(config) => {
            assert!(wrong.is_empty() && !unreadable, "{wrong:?}");
            assert_eq!(config.prefill_clusters, names(&input.prefill));
            assert_eq!(
                config.prefill_timeout_ms,
                input.timeout.map_or(30_000, u64::from)
            );
            for (model, said) in config.models.iter().zip(&input.models) {
                assert_eq!(model.rule.tau, said.tau.map_or(0.1, |tau| tau.get() as f32));
            }
        }
        Err(_) if unreadable => {}
        Err(found) => {
            let mut found: Vec<String> = found.0.into_iter().map(|mistake| mistake.field).collect();
            found.sort();
            found.dedup();
            assert_eq!(found, wrong);
        }
    }
});
