//! Signatures that are sampled: streams leave them with the plugin, the root posts them from its tick.

use std::time::Duration;

use proxy_wasm::hostcalls;
use proxy_wasm::types::{LogLevel, MapType};

use super::vm::{self, SharedPlugin, Waiting};
use super::{headers, log, now_ms};
use crate::metrics;
use crate::plugin::{ModelIndex, Plugin, Sampled};
use crate::poll::Source;
use crate::request::Answer;
use crate::samples::TIMEOUT_MS;

/// Takes the signature header of a request's prefill answer as a sample, if it is its turn.
pub(super) fn sample(waiting: &Waiting, header: Option<&[u8]>) {
    let Some(header) = header else { return };
    let model = waiting.request.borrow().model();
    let mut plugin = waiting.plugin.borrow_mut();
    vm::with(|vm| {
        let sampled = plugin.sample(model, header, &mut vm.scratch);
        if sampled != Sampled::No {
            vm.metrics.count(metrics::SIGNATURES_SAMPLED);
        }
        if sampled == Sampled::Dropped {
            vm.metrics.count(metrics::SIGNATURES_DROPPED);
        }
    });
}

/// The models of one root whose signatures are sampled.
#[derive(Default)]
pub(super) struct Posts(Vec<Post>);

struct Post {
    model: ModelIndex,
    source: Source,
    path: String,
    /// The call under way.
    call: Option<u32>,
    /// The last complaint, so that a server that stays away is named once.
    told: String,
}

impl Posts {
    pub(super) fn new(plugin: &mut Plugin) -> Self {
        let models: Vec<ModelIndex> = plugin.models().map(|(model, _)| model).collect();
        let posts = models.into_iter().filter_map(|model| {
            plugin.samples(model)?;
            let source = plugin.source(model)?.clone();
            Some(Post {
                model,
                path: source.signatures_path(),
                source,
                call: None,
                told: String::new(),
            })
        });
        Self(posts.collect())
    }

    /// Posts what waits, a batch of each model at a time.
    pub(super) fn on_tick(&mut self, plugin: &SharedPlugin) {
        for post in &mut self.0 {
            let mut plugin = plugin.borrow_mut();
            let samples = plugin.samples(post.model);
            if let Some(batch) = samples.and_then(|samples| samples.batch(now_ms())) {
                post.start(&batch, &mut plugin);
            }
        }
    }

    /// Takes an answer; false if the call is not one of these.
    pub(super) fn on_answer(
        &mut self,
        token: u32,
        num_headers: usize,
        plugin: &SharedPlugin,
    ) -> bool {
        let Some(post) = self.0.iter_mut().find(|post| post.call == Some(token)) else {
            return false;
        };
        post.call = None;
        // Without headers the map may not even be asked for.
        let headers = match num_headers {
            0 => vec![],
            _ => headers(MapType::HttpCallResponseHeaders),
        };
        let body = Vec::new();
        let status = Answer { headers, body }.status();
        post.finish(status, &mut plugin.borrow_mut());
        true
    }

    /// The root goes, and what waits with it.
    pub(super) fn forget(&self, plugin: &mut Plugin) {
        for post in &self.0 {
            let samples = plugin.samples(post.model);
            let dropped = samples.map_or(0, |samples| samples.forget());
            count(metrics::SIGNATURES_DROPPED, dropped);
        }
    }

    /// Whether none is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.0.iter().all(|post| post.call.is_none())
    }
}

impl Post {
    fn start(&mut self, batch: &[u8], plugin: &mut Plugin) {
        let Source {
            cluster, authority, ..
        } = &self.source;
        let headers = vec![
            (":method", "POST"),
            (":path", self.path.as_str()),
            (":authority", authority.as_str()),
            ("content-type", "text/plain"),
        ];
        let timeout = Duration::from_millis(TIMEOUT_MS);
        let call = hostcalls::dispatch_http_call(cluster, headers, Some(batch), vec![], timeout);
        match call {
            Ok(token) => self.call = Some(token),
            Err(status) => {
                let why = format!("the call could not be made ({status:?})");
                self.end(Err(&why), plugin);
            }
        }
    }

    fn finish(&mut self, status: Option<u32>, plugin: &mut Plugin) {
        match status {
            Some(200..=299) => self.end(Ok(()), plugin),
            Some(404) => self.end(
                Err("the server answered 404\nhint: start `eldr serve` with --online"),
                plugin,
            ),
            Some(status) => self.end(Err(&format!("the server answered {status}")), plugin),
            None => self.end(Err("the server could not be reached or broke off"), plugin),
        }
    }

    /// The batch under way has ended.
    fn end(&mut self, how: Result<(), &str>, plugin: &mut Plugin) {
        let samples = plugin.samples(self.model);
        let signatures = samples.map_or(0, |samples| samples.answered());
        let Err(why) = how else {
            self.told.clear();
            return count(metrics::SIGNATURES_POSTED, signatures);
        };
        count(metrics::SIGNATURES_DROPPED, signatures);
        if self.told != why {
            let Source { cluster, .. } = &self.source;
            let path = &self.path;
            let what = format!("eldr: signatures for {cluster}{path} are dropped: {why}");
            log(LogLevel::Warn, &what);
            why.clone_into(&mut self.told);
        }
    }
}

fn count(name: &str, signatures: u64) {
    if signatures > 0 {
        vm::with(|vm| vm.metrics.add(name, signatures));
    }
}
