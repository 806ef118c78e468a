//! Root context: configuration, tick, prefill calls.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{BufferType, ContextType, LogLevel, MapType};

use super::calls;
use super::fetch::Fetches;
use super::post::Posts;
use super::scrape::Scrapes;
use super::stages;
use super::starving::answer_starving;
use super::stream::Stream;
use super::vm::{self, SharedPlugin};
use super::{EnvoyShared, headers, log, now_ms};
use crate::blobs;
use crate::config::Config;
use crate::metrics;
use crate::plugin::{ModelIndex, Plugin};
use crate::request::Answer;

/// Heartbeat, gauges and blob updates.
const TICK: Duration = Duration::from_millis(200);

/// A page of WebAssembly's memory.
const PAGE_BYTES: u64 = 1 << 16;

/// Most bytes of a prefill answer that are read.
const MAX_ANSWER_BYTES: usize = 16 << 20;

pub(super) struct Root {
    id: u32,
    /// Envoy wants it to go; it stays until its calls are answered.
    ending: bool,
    plugin: Option<SharedPlugin>,
    /// Tells the plugins of one VM apart in shared data.
    name: String,
    fetches: Fetches,
    scrapes: Scrapes,
    posts: Posts,
}

impl Context for Root {
    fn on_http_call_response(
        &mut self,
        token: u32,
        num_headers: usize,
        body_size: usize,
        _: usize,
    ) {
        if let Some(plugin) = &self.plugin
            && self
                .fetches
                .on_answer(token, num_headers, body_size, plugin)
        {
            return;
        }
        if let Some(plugin) = &self.plugin
            && self.posts.on_answer(token, num_headers, plugin)
        {
            return self.end_if_idle();
        }
        if let Some(plugin) = &self.plugin {
            let plugin = plugin.borrow();
            let (scrapes, config) = (&mut self.scrapes, plugin.config());
            if scrapes.on_answer(token, num_headers, body_size, config) {
                return;
            }
        }
        stages::begin();
        // Without headers the maps may not even be asked for.
        let headers = match num_headers {
            0 => vec![],
            _ => headers(MapType::HttpCallResponseHeaders),
        };
        stages::end("answer_headers");
        let body_size = body_size.min(MAX_ANSWER_BYTES);
        let body = hostcalls::get_buffer(BufferType::HttpCallResponseBody, 0, body_size);
        let body = body.ok().flatten().unwrap_or_default();
        stages::end("answer_body");
        let answer = Answer { headers, body };
        calls::on_answer(token, &answer);
        self.end_if_idle();
    }

    /// Waits for the answers to its calls: they end counts, and may have blocks to release.
    fn on_done(&mut self) -> bool {
        calls::run_errands(self.id);
        if let Some(plugin) = &self.plugin {
            self.posts.forget(&mut plugin.borrow_mut());
        }
        self.ending = !self.is_idle();
        !self.ending
    }
}

impl RootContext for Root {
    fn on_configure(&mut self, _: usize) -> bool {
        let json = self.get_plugin_configuration().unwrap_or_default();
        let config = match Config::parse(&json) {
            Ok(config) => config,
            Err(mistakes) => {
                log(LogLevel::Error, &format!("eldr: {mistakes}"));
                return false;
            }
        };
        let root_id = hostcalls::get_property(vec!["plugin_root_id"])
            .ok()
            .flatten();
        self.name = String::from_utf8_lossy(&root_id.unwrap_or_default()).into_owned();
        let _ = hostcalls::set_tick_period(TICK);
        let plugin = Rc::new(RefCell::new(Plugin::new(config)));
        self.fetches = Fetches::new(&plugin, |model| self.blob_name(&plugin.borrow(), model));
        self.scrapes = Scrapes::new(plugin.borrow().config());
        self.posts = Posts::new(&mut plugin.borrow_mut());
        // What was fetched before an update of the configuration serves at once.
        self.update_blobs(&plugin);
        self.plugin = Some(plugin);
        true
    }

    fn on_tick(&mut self) {
        let Some(plugin) = &self.plugin else { return };
        self.update_blobs(plugin);
        let lease_ms = plugin.borrow().config().timing.lease_ms;
        if !self.ending {
            self.fetches.on_tick(lease_ms);
            self.posts.on_tick(plugin);
        }
        if !self.ending {
            let plugin = plugin.borrow();
            self.scrapes.on_tick(plugin.config());
        }
        {
            let plugin = plugin.borrow();
            let timing = plugin.config().timing;
            vm::with(|vm| {
                let now = now_ms();
                vm.loads.tick(&EnvoyShared, now, timing);
                vm.loads.refresh(&EnvoyShared, now, timing);
                let slots = vm.loads.slots();
                vm.running.tick(&EnvoyShared, slots, now, timing);
                let config = plugin.config();
                for cluster in config
                    .decode_clusters
                    .iter()
                    .chain(&config.prefill_clusters)
                {
                    let in_flight = vm.loads.in_flight(cluster);
                    vm.metrics
                        .set(&metrics::in_flight(cluster), u64::from(in_flight));
                }
                if config.counts_tokens() {
                    for cluster in &config.decode_clusters {
                        let tokens = vm.loads.tokens(cluster);
                        vm.metrics.set(&metrics::kv_tokens(cluster), tokens);
                    }
                }
                // A thread that keeps no batches knows nothing of them.
                if !vm.running.is_empty() {
                    for cluster in &config.decode_clusters {
                        let known = vm.running.known(cluster);
                        vm.metrics.set(&metrics::known(cluster), known.into());
                    }
                }
                if let Some(slot) = vm.loads.slot() {
                    let bytes = core::arch::wasm32::memory_size::<0>() as u64 * PAGE_BYTES;
                    vm.metrics.set(&metrics::vm_memory(slot), bytes);
                }
            });
        }
        // Last, for it leaves another context in effect.
        answer_starving();
    }

    fn on_queue_ready(&mut self, queue: u32) {
        stages::begin();
        // The bytes only wake; the errands say what to do.
        while let Ok(Some(_)) = hostcalls::dequeue_shared_queue(queue) {}
        calls::run_errands(self.id);
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream::new(id, self.plugin.clone())))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

impl Root {
    pub(super) fn new(id: u32) -> Self {
        Self {
            id,
            ending: false,
            plugin: None,
            name: String::new(),
            fetches: Fetches::default(),
            scrapes: Scrapes::default(),
            posts: Posts::default(),
        }
    }

    fn is_idle(&self) -> bool {
        calls::is_idle(self.id) && self.posts.is_idle()
    }

    fn end_if_idle(&mut self) {
        if self.ending && self.is_idle() {
            self.ending = false;
            let _ = hostcalls::done();
        }
    }

    /// Name in shared data of what is fetched for a model. None where the blob is inline alone: every thread has that
    /// from its own configuration, and another listener's is none of its business.
    fn blob_name(&self, plugin: &Plugin, model: ModelIndex) -> Option<String> {
        let (_, name) = plugin.models().find(|(index, _)| *index == model)?;
        let source = plugin.source(model)?;
        Some(format!("{}.{}", self.name, source.name(name)))
    }

    fn update_blobs(&self, plugin: &SharedPlugin) {
        let models: Vec<(ModelIndex, String)> = {
            let plugin = plugin.borrow();
            plugin
                .models()
                .filter_map(|(index, _)| Some((index, self.blob_name(&plugin, index)?)))
                .collect()
        };
        for (model, name) in models {
            let known = plugin.borrow().known_revision(model);
            let Some((revision, bytes)) = blobs::newer(&EnvoyShared, &name, known) else {
                continue;
            };
            let updated = plugin.borrow_mut().update(model, revision, &bytes);
            match updated {
                Ok(revision) => log(
                    LogLevel::Info,
                    &format!("eldr: {name}: blob revision {revision}"),
                ),
                Err(error) => {
                    vm::with(|vm| vm.metrics.count(metrics::BLOB_REFUSED));
                    log(
                        LogLevel::Warn,
                        &format!("eldr: {name}: blob refused: {error}"),
                    );
                }
            }
        }
    }
}
