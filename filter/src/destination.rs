//! How Envoy is told where a decode request goes: by cluster, one per worker, or by endpoint of one cluster.
//!
//! By endpoint, the cluster has Envoy's `override_host` load balancing policy, which takes the address from the header
//! `x-gateway-destination-endpoint` (the Gateway API's endpoint picker protocol). An address that is not in the cluster, or not healthy,
//! silently takes the policy's fallback, so who served is compared with who was asked.

use std::net::SocketAddr;

use serde::Deserialize;

/// `destination` in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Each worker is an Envoy cluster.
    #[default]
    Cluster,
    /// Each worker is an endpoint of one Envoy cluster.
    Endpoint,
}

/// Where decode requests go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// To the cluster that has the worker's name.
    Cluster,
    /// To this cluster, and in it to the endpoint that is the worker's name.
    Endpoint(String),
}

impl Destination {
    /// The Envoy cluster for a worker, and the endpoint to ask it for.
    pub fn of<'a>(&'a self, worker: &'a str) -> (&'a str, Option<&'a str>) {
        match self {
            Self::Cluster => (worker, None),
            Self::Endpoint(cluster) => (cluster, Some(worker)),
        }
    }

    /// Who served instead of `worker`, from the address that Envoy says it spoke to; `None` if it was the worker,
    /// or nobody, or if Envoy had no choice.
    pub fn other(&self, worker: &str, address: &[u8]) -> Option<String> {
        let Self::Endpoint(_) = self else { return None };
        let address = endpoint(std::str::from_utf8(address).ok()?)?;
        (address != worker).then_some(address)
    }
}

/// An endpoint as it is written here and in blobs: `10.0.0.5:8000`, `[2001:db8::1]:8000`; as Envoy writes it, too.
pub fn endpoint(text: &str) -> Option<String> {
    let address: SocketAddr = text.parse().ok()?;
    (address.port() != 0).then(|| address.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_worker_is_a_cluster_or_an_endpoint_of_one() {
        assert_eq!(Destination::Cluster.of("decode-0"), ("decode-0", None));
        let pool = Destination::Endpoint("pool".into());
        assert_eq!(pool.of("10.0.0.5:80"), ("pool", Some("10.0.0.5:80")));
    }

    #[test]
    fn only_another_endpoint_is_a_fallback() {
        let pool = Destination::Endpoint("pool".into());
        let other = |address: &str| pool.other("10.0.0.5:80", address.as_bytes());
        assert_eq!(other("10.0.0.5:80"), None);
        assert_eq!(other(""), None, "nobody was reached");
        assert_eq!(other("10.0.0.6:80").as_deref(), Some("10.0.0.6:80"));
        assert_eq!(Destination::Cluster.other("d", b"10.0.0.6:80"), None);
    }

    proptest! {
        #[test]
        fn endpoints_have_one_spelling(address in any::<(std::net::IpAddr, u16)>(), noise in ".{0,20}") {
            let _ = endpoint(&noise);
            let address = SocketAddr::from(address);
            if let Some(text) = endpoint(&address.to_string()) {
                prop_assert_eq!(endpoint(&text), Some(text));
            } else {
                prop_assert_eq!(address.port(), 0);
            }
        }
    }
}
