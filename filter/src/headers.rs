//! Header hygiene: what clients may not send, what they never see, what goes along to the prefill worker.

/// Header name and value, as the host gives them: names in lower case.
pub type Header = (String, Vec<u8>);

/// The signature of a request, in a prefill answer.
pub const SIGNATURE: &str = "x-eldr-signature";
/// Names a request.
pub const REQUEST_ID: &str = "x-request-id";
/// Tells Envoy's `cluster_header` route the decode cluster.
pub const DECODE_CLUSTER: &str = "x-eldr-decode-cluster";
/// Tells Envoy's `override_host` policy the endpoint within a cluster.
pub const DESTINATION_ENDPOINT: &str = "x-gateway-destination-endpoint";
/// The decision, on answers to clients, where `debug_headers` is on.
pub const DECISION: &str = "x-eldr-decision";

/// Prefix of headers that are ours alone.
const OURS: &str = "x-eldr-";

/// Headers with which other gateways choose a worker or a rank.
const STEERING: [&str; 3] = [
    DESTINATION_ENDPOINT,
    "x-data-parallel-rank",
    "x-prefiller-host-port",
];

/// Connection-level headers, which end at each hop (RFC 9110 §7.6.1), and those that describe a body we replace.
const NOT_FORWARDED: [&str; 14] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
    "content-type",
    "accept-encoding",
    "expect",
];

/// A header that a client may not send: it would steer the choice of worker.
pub fn is_steering(name: &str) -> bool {
    name.starts_with(OURS) || STEERING.contains(&name)
}

/// A header that an answer may not carry to a client. Signatures describe the prompt.
pub fn is_private(name: &str) -> bool {
    name.starts_with(OURS)
}

/// First value of a header.
pub fn get<'a>(headers: &'a [Header], name: &str) -> Option<&'a [u8]> {
    headers
        .iter()
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.as_slice())
}

/// Headers of the prefill leg: the client's, without what ends at this hop and what describes the old body.
///
/// The call interface takes text, so a value that is not UTF-8 stays behind.
pub fn for_prefill(headers: &[Header]) -> Vec<(&str, &str)> {
    let pseudo = |name, default| {
        let value = get(headers, name).and_then(|value| std::str::from_utf8(value).ok());
        (name, value.unwrap_or(default))
    };
    let mut out = vec![
        (":method", "POST"),
        pseudo(":path", "/"),
        pseudo(":authority", "prefill"),
        ("content-type", "application/json"),
    ];
    out.extend(headers.iter().filter_map(|(name, value)| {
        let own = name.starts_with(':') || name.starts_with("x-envoy-");
        if own || is_steering(name) || NOT_FORWARDED.contains(&name.as_str()) {
            return None;
        }
        Some((name.as_str(), std::str::from_utf8(value).ok()?))
    }));
    out
}

/// Headers of a prefill answer that goes back to the client as it is.
pub fn for_client(headers: &[Header]) -> Vec<(&str, &[u8])> {
    let kept = |name: &str| {
        let hop = NOT_FORWARDED.contains(&name) && name != "content-type";
        !name.starts_with(':') && !name.starts_with("x-envoy-") && !is_private(name) && !hop
    };
    let headers = headers.iter().filter(|(name, _)| kept(name));
    headers
        .map(|(name, value)| (name.as_str(), value.as_slice()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> Vec<Header> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()))
            .collect()
    }

    #[test]
    fn steering_headers_are_recognised() {
        for name in [
            "x-eldr-decode-cluster",
            "x-eldr-anything",
            "x-data-parallel-rank",
        ] {
            assert!(is_steering(name));
        }
        for name in ["x-request-id", "x-eldritch", "authorization"] {
            assert!(!is_steering(name));
        }
    }

    #[test]
    fn prefill_gets_identity_and_trace_but_nothing_of_the_connection_or_the_old_body() {
        let mut client = headers(&[
            (":method", "POST"),
            (":path", "/v1/completions?x=1"),
            (":authority", "llm.example"),
            (":scheme", "http"),
            ("x-request-id", "r-1"),
            ("traceparent", "00-a-b-01"),
            ("authorization", "Bearer t"),
            ("content-length", "17"),
            ("content-type", "application/json; charset=utf-8"),
            ("accept-encoding", "gzip"),
            ("expect", "100-continue"),
            ("connection", "close"),
            ("x-eldr-decode-cluster", "decode-3"),
            ("x-envoy-internal", "true"),
        ]);
        client.push(("x-latin1".into(), vec![0xe9]));
        assert_eq!(
            for_prefill(&client),
            [
                (":method", "POST"),
                (":path", "/v1/completions?x=1"),
                (":authority", "llm.example"),
                ("content-type", "application/json"),
                ("x-request-id", "r-1"),
                ("traceparent", "00-a-b-01"),
                ("authorization", "Bearer t"),
            ]
        );
    }

    #[test]
    fn a_rejection_goes_back_without_the_signature() {
        let answer = headers(&[
            (":status", "422"),
            ("content-type", "application/json"),
            ("content-length", "9"),
            ("x-eldr-signature", ":AAA=:;l=1;e=1"),
            ("x-envoy-upstream-service-time", "3"),
            ("retry-after", "1"),
        ]);
        let expected: [(&str, &[u8]); 2] =
            [("content-type", b"application/json"), ("retry-after", b"1")];
        assert_eq!(for_client(&answer), expected);
    }
}
