//! Who fetches blobs, when, and what an answer means: one thread per gateway polls, the others read what it publishes.
//!
//! The poller holds a lease in shared data and renews it at its tick; when its thread dies, another takes over with the
//! next poll. The entry also says when the next poll is due and what the server called its last blob (ETag), so a
//! change of poller fetches nothing twice.

use serde::{Deserialize, Serialize};

use crate::shared::Shared;

/// Largest blob that is fetched, bytes; also what Envoy buffers at most of such an answer.
pub const MAX_BLOB_BYTES: usize = 32 << 20;

/// A fetch that takes longer has failed, milliseconds; less where polls are more frequent.
const MAX_FETCH_MS: u64 = 10_000;

/// Where a model's blobs come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Envoy cluster of the server.
    pub cluster: String,
    /// Path and query.
    pub path: String,
    /// `:authority` of the request.
    pub authority: String,
    /// From one fetch to the next.
    pub interval_ms: u64,
}

impl Source {
    /// Names what comes from here in shared data. Another source is another sequence of revisions.
    pub fn name(&self, model: &str) -> String {
        format!("{model}@{}{}", self.cluster, self.path)
    }

    /// Path, and query, to which signatures are posted: the blob's and `/signatures`.
    pub fn signatures_path(&self) -> String {
        match self.path.split_once('?') {
            Some((path, query)) => format!("{path}/signatures?{query}"),
            None => format!("{}/signatures", self.path),
        }
    }

    /// Deadline of a fetch.
    pub fn timeout_ms(&self) -> u64 {
        self.interval_ms.min(MAX_FETCH_MS)
    }

    /// Headers of the request.
    pub fn request<'a>(&'a self, etag: Option<&'a str>) -> Vec<(&'a str, &'a str)> {
        let mut headers = vec![
            (":method", "GET"),
            (":path", self.path.as_str()),
            (":authority", self.authority.as_str()),
        ];
        headers.extend(etag.map(|etag| ("if-none-match", etag)));
        headers
    }
}

/// The entry in shared data.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    /// Tells pollers apart.
    holder: u64,
    heartbeat_ms: u64,
    next_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    etag: Option<String>,
}

fn key(name: &str) -> String {
    format!("eldr.poll.{name}")
}

fn read(shared: &impl Shared, name: &str) -> (Option<Entry>, Option<u32>) {
    let (value, version) = shared.get(&key(name));
    let entry = value.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    (entry, version)
}

fn write(shared: &impl Shared, name: &str, entry: &Entry, version: Option<u32>) -> bool {
    let bytes = serde_json::to_vec(entry).unwrap_or_default();
    shared.set(&key(name), &bytes, version)
}

/// Renews `holder`'s lease on polling for `name`, or takes it if nobody has it. True if a fetch is due now and `holder`
/// is to do it; the next is then due after `interval_ms`.
///
/// Call it from the tick alone: a VM that only tries out a configuration never ticks.
pub fn is_due(
    shared: &impl Shared,
    name: &str,
    holder: u64,
    now_ms: u64,
    lease_ms: u64,
    interval_ms: u64,
) -> bool {
    if shared.get(&key(name)).1.is_none() {
        shared.create(&key(name));
    }
    let (entry, version) = read(shared, name);
    let mut entry = entry.unwrap_or_default();
    let is_held = now_ms.abs_diff(entry.heartbeat_ms) <= lease_ms;
    if is_held && entry.holder != holder {
        return false;
    }
    // A clock that was set back must not put the next poll off for ever.
    let due = now_ms >= entry.next_ms || entry.next_ms - now_ms > interval_ms;
    entry.holder = holder;
    entry.heartbeat_ms = now_ms;
    if due {
        entry.next_ms = now_ms.saturating_add(interval_ms);
    }
    write(shared, name, &entry, version) && due
}

/// What the server called the last blob that was taken from it.
pub fn etag(shared: &impl Shared, name: &str) -> Option<String> {
    read(shared, name).0?.etag
}

/// Keeps what the server calls the blob that was just taken from it.
pub fn keep_etag(shared: &impl Shared, name: &str, etag: Option<&str>) {
    // Lost against another thread's heartbeat it only costs a fetch that was not needed.
    if let (Some(mut entry), version) = read(shared, name) {
        entry.etag = etag.map(str::to_owned);
        write(shared, name, &entry, version);
    }
}

/// What an answer means.
#[derive(Debug, PartialEq, Eq)]
pub enum Fetched<'a> {
    /// Nothing new.
    NotModified,
    /// A blob, not yet verified.
    Blob(&'a [u8]),
    /// No blob came; why.
    Failed(String),
}

/// Reads the server's answer; no status stands for one that broke off or was too large for Envoy.
pub fn judge(status: Option<u32>, body: &[u8]) -> Fetched<'_> {
    match status {
        None => {
            Fetched::Failed("the server could not be reached, broke off, or sent too much".into())
        }
        Some(304) => Fetched::NotModified,
        Some(200) if body.len() > MAX_BLOB_BYTES => Fetched::Failed(format!(
            "{} bytes; at most {MAX_BLOB_BYTES} are taken",
            body.len()
        )),
        Some(200) => Fetched::Blob(body),
        Some(504) => Fetched::Failed("no answer in time (504)".into()),
        Some(status) => Fetched::Failed(format!("the server answered {status}, not 200 or 304")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shared::memory::Memory;

    const LEASE: u64 = 2_000;

    fn due(shared: &Memory, holder: u64, now_ms: u64) -> bool {
        is_due(shared, "m", holder, now_ms, LEASE, 5_000)
    }

    #[test]
    fn one_thread_polls_and_another_takes_over_when_it_is_gone() {
        let shared = Memory::default();
        assert!(due(&shared, 1, 10_000));
        assert!(!due(&shared, 2, 10_100), "held by another");
        assert!(!due(&shared, 1, 10_200), "not yet due");
        for now in (10_400..15_000).step_by(200) {
            assert!(!due(&shared, 1, now) && !due(&shared, 2, now));
        }
        assert!(!due(&shared, 2, 15_000) && due(&shared, 1, 15_000));
        // The first is gone; the poll after that comes in time, but not before.
        assert!(!due(&shared, 2, 17_100), "takes the lease");
        assert!(!due(&shared, 2, 19_000));
        assert!(due(&shared, 2, 20_000));
    }

    #[test]
    fn the_etag_survives_a_change_of_poller_and_another_source_has_its_own() {
        let shared = Memory::default();
        assert!(due(&shared, 1, 10_000));
        keep_etag(&shared, "m", Some("\"a\""));
        assert!(due(&shared, 2, 20_000));
        assert_eq!(etag(&shared, "m").as_deref(), Some("\"a\""));
        assert_eq!(etag(&shared, "n"), None);
        keep_etag(&shared, "m", None);
        assert_eq!(etag(&shared, "m"), None);
    }

    #[test]
    fn rubbish_is_an_entry_that_nobody_holds_and_a_clock_set_back_heals() {
        let shared = Memory::default();
        shared.set("eldr.poll.m", b"\xff{", None);
        assert!(due(&shared, 1, 1_000_000));
        assert!(due(&shared, 1, 500_000));
    }

    #[test]
    fn answers_are_read() {
        assert_eq!(judge(Some(304), b""), Fetched::NotModified);
        assert_eq!(judge(Some(200), b"b"), Fetched::Blob(b"b"));
        for (status, word) in [
            (None, "broke off"),
            (Some(504), "504"),
            (Some(404), "404"),
            (Some(206), "206"),
        ] {
            assert!(
                matches!(judge(status, b"b"), Fetched::Failed(why) if why.contains(word)),
                "{status:?}"
            );
        }
        let large = vec![0; MAX_BLOB_BYTES + 1];
        assert!(matches!(judge(Some(200), &large), Fetched::Failed(_)));
        assert!(matches!(judge(Some(200), &large[1..]), Fetched::Blob(_)));
    }

    #[test]
    fn a_request_names_the_last_blob() {
        let source = Source {
            cluster: "s".into(),
            path: "/v1/blob".into(),
            authority: "a".into(),
            interval_ms: 500,
        };
        let expected = [
            (":method", "GET"),
            (":path", "/v1/blob"),
            (":authority", "a"),
            ("if-none-match", "\"e\""),
        ];
        assert_eq!(source.request(Some("\"e\"")), expected);
        assert_eq!(source.request(None), expected[..3]);
        assert_eq!(source.timeout_ms(), 500);
    }

    #[test]
    fn signatures_go_below_the_path_of_the_blob() {
        for (path, expected) in [
            ("/v1/blob", "/v1/blob/signatures"),
            ("/v1/blobs/a?token=x?", "/v1/blobs/a/signatures?token=x?"),
        ] {
            let source = Source {
                cluster: "s".into(),
                path: path.into(),
                authority: "a".into(),
                interval_ms: 500,
            };
            assert_eq!(source.signatures_path(), expected);
        }
    }

    proptest! {
        #[test]
        fn polls_are_never_closer_than_the_interval(
            ticks in proptest::collection::vec((1u64..4, 1u64..3_000), 1..100),
        ) {
            let shared = Memory::default();
            let (mut now, mut last) = (10_000, None);
            for (holder, pause) in ticks {
                now += pause;
                if due(&shared, holder, now) {
                    prop_assert!(last.is_none_or(|last| now - last >= 5_000));
                    last = Some(now);
                }
            }
        }
    }
}
