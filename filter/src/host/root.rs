//! Root context: configuration, tick, prefill calls.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{BufferType, ContextType, LogLevel, MapType};

use super::stream::{self, Stream};
use super::vm::{self, SharedPlugin};
use super::{EnvoyShared, headers, log, now_ms};
use crate::blobs;
use crate::config::Config;
use crate::headers::for_prefill;
use crate::metrics;
use crate::plugin::{ModelIndex, Plugin};
use crate::request::{Answer, PrefillLeg};

/// Heartbeat, gauges and blob updates.
const TICK: Duration = Duration::from_millis(200);

/// Most bytes of a prefill answer that are read.
const MAX_ANSWER_BYTES: usize = 16 << 20;

#[derive(Default)]
pub(super) struct Root {
    plugin: Option<SharedPlugin>,
    /// Tells the plugins of one VM apart in shared data.
    name: String,
}

impl Context for Root {
    fn on_http_call_response(
        &mut self,
        token: u32,
        num_headers: usize,
        body_size: usize,
        _: usize,
    ) {
        let Some(stream) = vm::with(|vm| vm.calls.remove(&token)) else {
            return;
        };
        let answer = Answer {
            // Without headers the maps may not even be asked for.
            headers: if num_headers == 0 {
                vec![]
            } else {
                headers(MapType::HttpCallResponseHeaders)
            },
            body: hostcalls::get_buffer(
                BufferType::HttpCallResponseBody,
                0,
                body_size.min(MAX_ANSWER_BYTES),
            )
            .ok()
            .flatten()
            .unwrap_or_default(),
        };
        on_answer(stream, &answer);
    }
}

/// Acts on the stream, if it is still there.
fn on_answer(stream: u32, answer: &Answer) {
    let waiting = vm::with(|vm| vm.waiting.remove(&stream));
    match waiting {
        Some(waiting) if hostcalls::set_effective_context(stream).is_ok() => {
            stream::on_prefill(&waiting, answer);
        }
        _ => vm::with(|vm| vm.metrics.count(metrics::LATE_PREFILL)),
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
        for model in &config.models {
            if let Some((bytes, map)) = &model.blob {
                blobs::publish(
                    &EnvoyShared,
                    &self.blob_name(&model.name),
                    map.revision,
                    bytes,
                );
            }
        }
        let _ = hostcalls::set_tick_period(TICK);
        self.plugin = Some(Rc::new(RefCell::new(Plugin::new(config))));
        true
    }

    fn on_tick(&mut self) {
        let Some(plugin) = &self.plugin else { return };
        self.update_blobs(plugin);
        {
            let plugin = plugin.borrow();
            let timing = plugin.config().timing;
            vm::with(|vm| {
                let now = now_ms();
                vm.loads.tick(&EnvoyShared, now, timing);
                vm.loads.refresh(&EnvoyShared, now, timing);
                for cluster in &plugin.config().decode_clusters {
                    let in_flight = vm.loads.in_flight(cluster);
                    vm.metrics
                        .set(&metrics::in_flight(cluster), u64::from(in_flight));
                }
            });
        }
        // Last, for it leaves another context in effect.
        stream::answer_starving();
    }

    fn on_queue_ready(&mut self, queue: u32) {
        // The bytes only wake; the list says what to do.
        while let Ok(Some(_)) = hostcalls::dequeue_shared_queue(queue) {}
        while let Some(stream) = vm::with(|vm| vm.to_dispatch.pop_front()) {
            dispatch(stream);
        }
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream::new(id, self.plugin.clone())))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

impl Root {
    fn blob_name(&self, model: &str) -> String {
        format!("{}.{model}", self.name)
    }

    fn update_blobs(&self, plugin: &SharedPlugin) {
        let models: Vec<(ModelIndex, String)> = {
            let plugin = plugin.borrow();
            plugin
                .models()
                .map(|(index, name)| (index, self.blob_name(name)))
                .collect()
        };
        for (model, name) in models {
            let current = plugin.borrow().revision(model);
            let Some(bytes) = blobs::newer(&EnvoyShared, &name, current) else {
                continue;
            };
            let updated = plugin.borrow_mut().update(model, &bytes);
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

/// Sends a stream's prefill leg. A leg that cannot be sent is answered like one that broke off.
fn dispatch(stream: u32) {
    let Some((plugin, request, turn)) = vm::with(|vm| {
        let waiting = vm.waiting.get(&stream)?;
        let (plugin, request) = (waiting.plugin.clone(), waiting.request.clone());
        Some((plugin, request, vm.turn()))
    }) else {
        return; // gone before it was sent
    };
    let PrefillLeg { headers, body } = request.borrow_mut().take_leg();
    let call = {
        let plugin = plugin.borrow();
        hostcalls::dispatch_http_call(
            plugin.prefill_cluster(turn),
            for_prefill(&headers),
            Some(body.as_bytes()),
            vec![],
            Duration::from_millis(plugin.config().prefill_timeout_ms),
        )
    };
    match call {
        Ok(token) => vm::with(|vm| {
            vm.calls.insert(token, stream);
        }),
        Err(_) => on_answer(
            stream,
            &Answer {
                headers: vec![],
                body: vec![],
            },
        ),
    }
}
