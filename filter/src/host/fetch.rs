//! Fetching blobs over HTTP, on the one thread of the gateway that holds the lease for it.

use std::time::Duration;

use proxy_wasm::hostcalls;
use proxy_wasm::types::{BufferType, LogLevel, MapType};

use super::vm::{self, SharedPlugin};
use super::{EnvoyShared, headers, log, now_ms};
use crate::blobs;
use crate::headers::get;
use crate::metrics;
use crate::plugin::ModelIndex;
use crate::poll::{self, Fetched, MAX_BLOB_BYTES, Source};

/// The models of one root whose blobs come over HTTP.
#[derive(Default)]
pub(super) struct Fetches {
    /// Tells this root from those of other threads; drawn at the first tick.
    holder: u64,
    polls: Vec<Poll>,
}

struct Poll {
    model: ModelIndex,
    /// The blob's name in shared data.
    name: String,
    source: Source,
    /// The call under way.
    call: Option<u32>,
    /// What the server called the last blob it sent here, taken or not: one that was not is looked at once.
    etag: Option<String>,
    /// The last complaint, so that a server that stays down is named once.
    told: String,
}

impl Fetches {
    /// `name_of` gives the name in shared data of what is fetched for a model.
    pub(super) fn new(
        plugin: &SharedPlugin,
        name_of: impl Fn(ModelIndex) -> Option<String>,
    ) -> Self {
        let plugin = plugin.borrow();
        let polls = plugin.models().filter_map(|(model, _)| {
            Some(Poll {
                model,
                name: name_of(model)?,
                source: plugin.source(model)?.clone(),
                call: None,
                etag: None,
                told: String::new(),
            })
        });
        Self {
            holder: 0,
            polls: polls.collect(),
        }
    }

    /// Fetches what is due.
    pub(super) fn on_tick(&mut self, lease_ms: u64) {
        if self.holder == 0 {
            self.holder = vm::with(|vm| vm.entropy()) | 1;
        }
        for poll in &mut self.polls {
            let (name, interval_ms) = (&poll.name, poll.source.interval_ms);
            let now = now_ms();
            let due = poll::is_due(&EnvoyShared, name, self.holder, now, lease_ms, interval_ms);
            if due && poll.call.is_none() {
                poll.start();
            }
        }
    }

    /// Takes an answer; false if the call is not one of these.
    pub(super) fn on_answer(
        &mut self,
        token: u32,
        num_headers: usize,
        body_size: usize,
        plugin: &SharedPlugin,
    ) -> bool {
        let Some(poll) = self.polls.iter_mut().find(|poll| poll.call == Some(token)) else {
            return false;
        };
        poll.call = None;
        poll.finish(num_headers, body_size, plugin);
        true
    }
}

impl Poll {
    fn start(&mut self) {
        let etag = self
            .etag
            .clone()
            .or_else(|| poll::etag(&EnvoyShared, &self.name));
        let call = hostcalls::dispatch_http_call(
            &self.source.cluster,
            self.source.request(etag.as_deref()),
            None,
            vec![],
            Duration::from_millis(self.source.timeout_ms()),
        );
        match call {
            Ok(token) => self.call = Some(token),
            Err(status) => {
                let cluster = &self.source.cluster;
                self.failed(&format!(
                    "the call to Envoy cluster {cluster:?} could not be made ({status:?})"
                ));
            }
        }
    }

    fn finish(&mut self, num_headers: usize, body_size: usize, plugin: &SharedPlugin) {
        // Without headers the map may not even be asked for.
        let answer = match num_headers {
            0 => vec![],
            _ => headers(MapType::HttpCallResponseHeaders),
        };
        let text = |name| {
            let value = std::str::from_utf8(get(&answer, name)?).ok()?;
            Some(value.to_owned())
        };
        let size = body_size.min(MAX_BLOB_BYTES + 1);
        let body = hostcalls::get_buffer(BufferType::HttpCallResponseBody, 0, size);
        let body = body.ok().flatten().unwrap_or_default();
        let status = text(":status").and_then(|status| status.parse().ok());
        match poll::judge(status, &body) {
            Fetched::NotModified => self.told.clear(),
            Fetched::Failed(why) => self.failed(&why),
            Fetched::Blob(bytes) => self.take(bytes, text("etag"), plugin),
        }
    }

    /// Publishes a blob if it can be used and is newer.
    fn take(&mut self, bytes: &[u8], etag: Option<String>, plugin: &SharedPlugin) {
        self.etag = etag;
        let bound = plugin.borrow().bind(bytes);
        let revision = match bound {
            Ok(map) => map.revision,
            Err(why) => {
                vm::with(|vm| vm.metrics.count(metrics::BLOB_REFUSED));
                self.tell(&format!("blob refused, the old one stays: {why}"));
                return;
            }
        };
        let published = blobs::newer(&EnvoyShared, &self.name, None);
        let current = published
            .as_ref()
            .map(|(revision, _)| *revision)
            .max(plugin.borrow().revision(self.model));
        if current.is_none_or(|current| revision > current) {
            blobs::publish(&EnvoyShared, &self.name, revision, bytes);
            poll::keep_etag(&EnvoyShared, &self.name, self.etag.as_deref());
            self.told.clear();
            return;
        }
        let is_same = match published {
            Some((_, known)) => known == bytes,
            None => current == Some(revision), // an inline one
        };
        if !is_same {
            let current = current.unwrap_or_default();
            self.tell(&format!(
                "revision {revision} is not above {current}, which is in use: not taken\n\
                 hint: publish it again under a higher revision"
            ));
        }
    }

    fn failed(&mut self, why: &str) {
        vm::with(|vm| vm.metrics.count(metrics::BLOB_FETCH_FAILED));
        let every = self.source.interval_ms;
        self.tell(&format!(
            "blob not fetched, the old one stays, next try in {every} ms: {why}"
        ));
    }

    fn tell(&mut self, what: &str) {
        if self.told != what {
            log(LogLevel::Warn, &format!("eldr: {}: {what}", self.name));
            what.clone_into(&mut self.told);
        }
    }
}
