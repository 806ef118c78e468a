//! The models of a topology, and their blobs.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::blob::Blob;
use eldr_core::decide::{MAX_CANDIDATES, Policy};
use eldr_core::marginal::MAX_EXPONENT;
use serde_json::{Value, json};
use toml::de::DeValue;

use super::table::{Entries, Mistakes, show, to_json};
use super::topology::{BlobSource, Model, Worker};
use super::workers::split_address;
use crate::blob_file;

/// What a decode step takes, ms, for policies that look at running batches: t0, then for each expert, request and thousand tokens of KV cache.
const STEP: [(&str, RangeInclusive<f64>); 4] = [
    ("step_t0_ms", 0.0..=10_000.0),
    ("step_b_ms", 1e-6..=1_000.0),
    ("step_c_ms", 0.0..=1_000.0),
    ("step_kv_ms_per_1k", 0.0..=1_000.0),
];

pub(super) fn models(
    root: &mut Entries<'_, '_>,
    told: &mut Mistakes<'_>,
    folder: &Path,
    decode: &[Worker],
) -> Vec<Model> {
    let hint = "write each model as a table: [[model]]";
    let Some((_, list)) = root.array(told, "model", hint) else {
        let fields = json!({"model": "*", "policy": "band"});
        return vec![Model {
            fields,
            fetched: None,
        }];
    };
    let mut models: Vec<Model> = Vec::new();
    for (index, value) in list.iter().enumerate() {
        let (at, path) = (value.span().start, format!("model[{index}]"));
        if !value.get_ref().is_table() {
            told.add(at, &path, show(value.get_ref()), hint);
        }
        let mut entries = Entries::new(&path, at, value.get_ref().as_table());
        let name = entries
            .text(told, "name")
            .map_or_else(|| "*".into(), |(_, name)| name);
        let policies = Policy::ALL.map(|policy| (policy.name(), policy.name()));
        let policy = entries
            .choice(told, "policy", &policies)
            .unwrap_or_default();
        let mut fields = json!({"model": name, "policy": policy});
        if let Some(tau) = entries.number(told, "tau", 0.0..=2.0) {
            fields["tau"] = json!(tau);
        }
        if let Some((_, DeValue::String(none))) = entries.get("max_load_factor")
            && none == "none"
        {
            fields["max_load_factor"] = json!("none");
        } else if let Some(factor) = entries.number(told, "max_load_factor", 1.0..=100.0) {
            fields["max_load_factor"] = json!(factor);
        }
        if let Some(drawn) = entries.whole(told, "candidates", 1..=MAX_CANDIDATES) {
            fields["candidates"] = json!(drawn);
        }
        for (key, range) in STEP {
            if let Some(ms) = entries.number(told, key, range) {
                fields[key] = json!(ms);
            }
        }
        if let Some(exponent) = entries.whole(told, "step_exponent", 1..=MAX_EXPONENT) {
            fields["step_exponent"] = json!(exponent);
        }
        if let Some(learns) = entries.boolean(told, "learn_steps") {
            fields["learn_steps"] = json!(learns);
        }
        if let Some((at, rollout)) = entries.get("rollout") {
            match to_json(rollout).filter(Value::is_object) {
                Some(rollout) => fields["rollout"] = rollout,
                None => told.add(
                    at,
                    &entries.field("rollout"),
                    show(rollout),
                    "say rollout = { kind = \"shadow\" }",
                ),
            }
        }
        let fetched = blob(&mut entries, told, folder, decode, &mut fields);
        entries.end(told);
        if models
            .iter()
            .any(|model| model.fields["model"] == fields["model"])
        {
            let hint = "each model has one entry, and \"*\" is every other";
            told.add(at, &path, format!("{name:?} is there twice"), hint);
        }
        models.push(Model { fields, fetched });
    }
    models
}

/// A model's blob: a file that goes into the configuration, or a server.
fn blob(
    entries: &mut Entries<'_, '_>,
    told: &mut Mistakes<'_>,
    folder: &Path,
    decode: &[Worker],
    fields: &mut Value,
) -> Option<BlobSource> {
    let hint = "say blob = \"task.eldr\", or blob = { server = \"host:8089\" }";
    let (at, value) = entries.get("blob")?;
    let field = entries.field("blob");
    match value {
        DeValue::String(name) => {
            let path: PathBuf = folder.join(name.as_ref());
            let read = blob_file::read(&path)
                .and_then(|bytes| Ok((blob_file::verify(&path, &bytes)?, bytes)));
            match read {
                Ok((blob, bytes)) => {
                    check_regions(&blob, decode, told, at, &field);
                    fields["blob"] = json!({"inline": STANDARD.encode(bytes)});
                }
                Err(error) => told.add(at, &field, error.to_string(), error.hint()),
            }
            None
        }
        DeValue::Table(server) => {
            let mut server = Entries::new(&field, at, Some(server));
            let interval_ms = server.whole(told, "interval_ms", 200..=3_600_000);
            let path = server
                .text(told, "path")
                .map_or_else(|| "/v1/blob".into(), |(_, path)| path);
            if !path.starts_with('/') {
                told.add(
                    at,
                    &server.field("path"),
                    format!("{path:?}"),
                    "a path begins with /",
                );
            }
            let address = server.text(told, "server");
            let parsed = address
                .as_ref()
                .and_then(|(_, address)| split_address(address));
            if parsed.is_none() {
                let found = address.map_or("nothing".into(), |(_, address)| format!("{address:?}"));
                told.add(
                    at,
                    &server.field("server"),
                    found,
                    "host:port is allowed, such as eldr-serve:8089",
                );
            }
            server.end(told);
            let (host, port) = parsed?;
            Some(BlobSource {
                host,
                port,
                path,
                interval_ms,
            })
        }
        other => {
            told.add(at, &field, show(other), hint);
            None
        }
    }
}

fn check_regions(blob: &Blob, decode: &[Worker], told: &mut Mistakes<'_>, at: usize, field: &str) {
    for (region, names) in blob.regions.iter().enumerate() {
        for name in names {
            if !decode.iter().any(|worker| worker.name == *name) {
                let known: Vec<_> = decode.iter().map(|worker| worker.name.as_str()).collect();
                let hint = format!("the decode workers are: {}", known.join(", "));
                told.add(
                    at,
                    field,
                    format!("its region {region} is for {name}, which is none"),
                    &hint,
                );
            }
        }
    }
}
