//! The workers of a topology, and their names.

use std::collections::BTreeMap;

use toml::de::DeValue;

use super::table::{Entries, Mistakes, show};
use super::topology::Worker;

const WORKERS: &str = "list the workers: workers = [\"host:port\", …]";
const ADDRESS: &str = "host:port is allowed, such as decode-0:8000";

/// Host and port; an IPv6 address stands in brackets.
pub(super) fn split_address(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let inner = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let valid = match inner {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            !host.is_empty()
                && host
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        }
    };
    let port = port.parse().ok()?;
    valid.then(|| (inner.unwrap_or(host).to_owned(), port))
}

pub(super) fn workers(
    table: &mut Entries<'_, '_>,
    told: &mut Mistakes<'_>,
    kind: &str,
    endpoints: bool,
    mooncake: bool,
) -> Vec<(usize, Worker)> {
    let Some((at, list)) = table.array(told, "workers", WORKERS) else {
        if table.get("workers").is_none() {
            told.add(table.at, kind, "it has no workers", WORKERS);
        }
        return Vec::new();
    };
    if list.is_empty() {
        told.add(at, &table.field("workers"), "the list is empty", WORKERS);
    }
    let mut workers = Vec::new();
    for (index, value) in list.iter().enumerate() {
        let (at, path) = (value.span().start, format!("{kind}.workers[{index}]"));
        let inline = match value.get_ref() {
            DeValue::Table(inline) => Some(inline),
            _ => None,
        };
        let mut entries = Entries::new(&path, at, inline);
        let name = entries.text(told, "name");
        let (at, address) = match (value.get_ref().as_str(), inline) {
            (Some(address), _) => (at, address.to_owned()),
            (_, Some(_)) => match entries.text(told, "address") {
                Some(found) => found,
                None => {
                    told.add(
                        at,
                        &path,
                        "it has no address",
                        "say address = \"host:port\"",
                    );
                    continue;
                }
            },
            _ => {
                told.add(at, &path, show(value.get_ref()), ADDRESS);
                continue;
            }
        };
        let weight = entries.number(told, "weight", 0.1..=100.0);
        let drain = entries.boolean(told, "drain").unwrap_or(false);
        let bootstrap = entries.text(told, "bootstrap_addr").map(|(_, text)| text);
        let engine = entries.text(told, "engine_id").map(|(_, text)| text);
        let engine_known = bootstrap.is_some() && engine.is_some();
        if mooncake && !engine_known {
            let hint = "with the protocol mooncake say address, bootstrap_addr = \"http://host:8998\" and engine_id";
            told.add(at, &path, "how to reach its KV blocks is not said", hint);
        }
        entries.end(told);
        let Some((host, port)) = split_address(&address) else {
            told.add(at, &path, format!("{address:?} is no address"), ADDRESS);
            continue;
        };
        if endpoints && host.parse::<std::net::IpAddr>().is_err() {
            let hint =
                "an endpoint is named by its IP address; a name wants destination = \"cluster\"";
            told.add(at, &path, format!("{host:?} is a name"), hint);
        }
        if endpoints && let Some((at, _)) = name {
            told.add(
                at,
                &path,
                "an endpoint has no name",
                "its address is its name: leave `name` out",
            );
        }
        if kind == "prefill" && (weight.is_some() || drain) {
            told.add(
                at,
                &path,
                "prefill workers have no weight and do not drain",
                "leave them out",
            );
        }
        let own = name.map_or_else(|| format!("{kind}-{index}"), |(_, name)| name);
        let worker = Worker {
            name: if endpoints { address } else { own },
            host,
            port,
            weight,
            drain,
            mooncake: bootstrap.zip(engine),
        };
        workers.push((at, worker));
    }
    workers
}

/// Names go into a header and into statistics, and each cluster has its own.
pub(super) fn check_names(
    told: &mut Mistakes<'_>,
    decode: &[(usize, Worker)],
    prefill: &[(usize, Worker)],
    separate: bool,
) {
    let mut seen: BTreeMap<&str, String> = BTreeMap::from([
        ("decode-any", "the cluster of all decode workers".into()),
        ("eldr-serve", "the cluster of a blob server".into()),
    ]);
    if !separate {
        seen.insert("prefill", "the cluster of all prefill workers".into());
    }
    // In the cluster of all, prefill workers have no names.
    let prefill = if separate { prefill } else { &[] };
    for (kind, workers) in [("decode", decode), ("prefill", prefill)] {
        for (index, (at, worker)) in workers.iter().enumerate() {
            let (name, path) = (worker.name.as_str(), format!("{kind}.workers[{index}]"));
            let letters = |c: char| c.is_ascii_alphanumeric() || "._-:[]".contains(c);
            if name.is_empty() || !name.chars().all(letters) {
                let hint = "letters, digits, '.', '_' and '-' are allowed";
                told.add(*at, &path, format!("its name is {name:?}"), hint);
            }
            if let Some(other) = seen.insert(name, path.clone()) {
                let hint = "give each worker a name of its own";
                told.add(
                    *at,
                    &path,
                    format!("{name} is the name of {other} as well"),
                    hint,
                );
            }
        }
    }
}
