//! Decode workers: clusters, or endpoints of one.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use arbitrary::Arbitrary;
use serde_json::{Value, json};

use super::values::{Name, Small, visible};

#[derive(Arbitrary, Debug)]
pub(super) struct Worker<N> {
    name: N,
    share: Option<(Small, bool)>,
}

/// What a worker is called.
pub(super) trait Named {
    fn get(&self) -> String;
    /// Whether a worker of this kind may have the name.
    fn is_allowed(&self) -> bool;
}

impl Named for Name {
    fn get(&self) -> String {
        self.get()
    }

    fn is_allowed(&self) -> bool {
        visible(&self.get())
    }
}

#[derive(Arbitrary, Debug)]
pub(super) enum Endpoint {
    Usual(u8),
    V4([u8; 4], u16),
    V6([u8; 16], u16),
    /// Not as it is written everywhere else.
    Padded([u8; 4], u16),
    Any(String),
}

impl Endpoint {
    fn address(&self) -> Option<SocketAddr> {
        match *self {
            Self::Usual(last) => Some((Ipv4Addr::new(10, 0, 0, last % 8), 80).into()),
            Self::V4(octets, port) => Some((Ipv4Addr::from(octets), port).into()),
            Self::V6(octets, port) => Some((Ipv6Addr::from(octets), port).into()),
            Self::Padded(..) | Self::Any(_) => None,
        }
    }
}

impl Named for Endpoint {
    fn get(&self) -> String {
        match self {
            Self::Padded([a, b, c, d], port) => format!("{a}.{b}.{c}.{d}:0{port}"),
            Self::Any(text) => text.clone(),
            _ => self.address().map(|it| it.to_string()).unwrap_or_default(),
        }
    }

    fn is_allowed(&self) -> bool {
        match self {
            Self::Padded(..) => false,
            // Noise is an address by chance only, and then it has to be spelt as it would be.
            Self::Any(text) => text
                .parse::<SocketAddr>()
                .is_ok_and(|address| address.port() != 0 && address.to_string() == *text),
            _ => self.address().is_some_and(|address| address.port() != 0),
        }
    }
}

pub(super) fn names<N: Named>(workers: &[Worker<N>]) -> Vec<String> {
    workers.iter().map(|worker| worker.name.get()).collect()
}

pub(super) fn json<N: Named>(workers: &[Worker<N>]) -> Value {
    let entry = |worker: &Worker<N>| match worker.share {
        None => json!(worker.name.get()),
        Some((weight, drain)) => {
            json!({ "name": worker.name.get(), "weight": weight.get(), "drain": drain })
        }
    };
    workers.iter().map(entry).collect()
}

/// Fields with a value that is not allowed.
pub(super) fn mistakes<N: Named>(field: &str, workers: &[Worker<N>]) -> Vec<String> {
    let mut wrong = Vec::new();
    let names = names(workers);
    if names.is_empty() {
        wrong.push(field.to_owned());
    }
    for (index, worker) in workers.iter().enumerate() {
        let is_first = !names[..index].contains(&names[index]);
        if !worker.name.is_allowed() || !is_first {
            wrong.push(format!("{field}[{index}]"));
        }
        let weight = worker.share.map_or(1.0, |(weight, _)| weight.get());
        if !(0.1..=100.0).contains(&weight) {
            wrong.push(format!("{field}[{index}].weight"));
        }
    }
    let drains = |worker: &Worker<N>| worker.share.is_some_and(|(_, drain)| drain);
    if !workers.is_empty() && workers.iter().all(drains) {
        wrong.push(field.to_owned());
    }
    wrong
}
