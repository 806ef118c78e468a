//! Asking decode workers for their load, each on the one thread of the gateway that holds the lease for it.

use std::time::Duration;

use proxy_wasm::hostcalls;
use proxy_wasm::types::{BufferType, LogLevel, MapType};

use super::vm;
use super::{EnvoyShared, headers, log, now_ms};
use crate::config::Config;
use crate::exposition::MAX_BYTES;
use crate::headers::DESTINATION_ENDPOINT;
use crate::metrics;
use crate::poll;
use crate::reports::{self, Report};
use crate::request::Answer;

/// The decode workers of one root, when they are asked.
#[derive(Default)]
pub(super) struct Scrapes {
    /// Tells this root from those of other threads; drawn at the first tick.
    holder: u64,
    scrapes: Vec<Scrape>,
}

struct Scrape {
    cluster: String,
    lease: String,
    /// The call under way, and what this gateway had in flight there when it began.
    call: Option<(u32, u32)>,
    /// The last complaint, so that a worker that stays silent is named once.
    told: String,
}

impl Scrapes {
    pub(super) fn new(config: &Config) -> Self {
        let clusters = match config.reporting.interval_ms {
            0 => &[],
            _ => config.decode_clusters.as_slice(),
        };
        let scrapes = clusters.iter().map(|cluster| Scrape {
            cluster: cluster.clone(),
            lease: reports::lease(cluster),
            call: None,
            told: String::new(),
        });
        Self {
            holder: 0,
            scrapes: scrapes.collect(),
        }
    }

    /// Asks whom it is time to ask, and looks at what others were told.
    pub(super) fn on_tick(&mut self, config: &Config) {
        let (reporting, timing) = (&config.reporting, config.timing);
        if self.scrapes.is_empty() {
            return;
        }
        if self.holder == 0 {
            self.holder = vm::with(|vm| vm.entropy()) | 1;
        }
        let (now, holder, interval_ms) = (now_ms(), self.holder, reporting.interval_ms);
        for scrape in &mut self.scrapes {
            let lease_ms = timing.lease_ms;
            let due = poll::is_due(
                &EnvoyShared,
                &scrape.lease,
                holder,
                now,
                lease_ms,
                interval_ms,
            );
            if due && scrape.call.is_none() {
                scrape.start(config);
            }
        }
        vm::with(|vm| {
            vm.reports.refresh(&EnvoyShared, now, 0);
            for Scrape { cluster, .. } in &self.scrapes {
                let report = vm.reports.of(cluster, now, reporting.stale_ms);
                let elsewhere = report.map_or(0, |report| report.elsewhere);
                let name = metrics::elsewhere(cluster);
                vm.metrics.set(&name, u64::from(elsewhere));
            }
        });
    }

    /// Takes an answer; false if the call is not one of these.
    pub(super) fn on_answer(
        &mut self,
        token: u32,
        num_headers: usize,
        body_size: usize,
        config: &Config,
    ) -> bool {
        let is_it = |scrape: &&mut Scrape| scrape.call.is_some_and(|(call, _)| call == token);
        let Some(scrape) = self.scrapes.iter_mut().find(is_it) else {
            return false;
        };
        if let Some((_, own)) = scrape.call.take() {
            scrape.finish(num_headers, body_size, own, config);
        }
        true
    }
}

impl Scrape {
    fn start(&mut self, config: &Config) {
        let reporting = &config.reporting;
        let (cluster, endpoint) = config.destination.of(&self.cluster);
        let mut headers = reporting.request(cluster).to_vec();
        headers.extend(endpoint.map(|endpoint| (DESTINATION_ENDPOINT, endpoint)));
        let call = hostcalls::dispatch_http_call(
            cluster,
            headers,
            None,
            vec![],
            Duration::from_millis(reporting.timeout_ms()),
        );
        match call {
            Ok(token) => {
                let own = vm::with(|vm| {
                    vm.loads.refresh(&EnvoyShared, now_ms(), config.timing);
                    vm.loads.in_flight(&self.cluster)
                });
                self.call = Some((token, own));
            }
            Err(status) => self.failed(&format!("the call could not be made ({status:?})")),
        }
    }

    fn finish(&mut self, num_headers: usize, body_size: usize, own: u32, config: &Config) {
        // Without headers the map may not even be asked for.
        let headers = match num_headers {
            0 => vec![],
            _ => headers(MapType::HttpCallResponseHeaders),
        };
        let size = body_size.min(MAX_BYTES + 1);
        let body = hostcalls::get_buffer(BufferType::HttpCallResponseBody, 0, size);
        let body = body.ok().flatten().unwrap_or_default();
        let answer = Answer { headers, body };
        match reports::judge(answer.status(), &answer.body) {
            Ok(gauges) => {
                let stale_ms = config.reporting.stale_ms;
                vm::with(|vm| {
                    let now = now_ms();
                    vm.loads.refresh(&EnvoyShared, now, config.timing);
                    let own = own.max(vm.loads.in_flight(&self.cluster));
                    let report = Report::new(gauges, own, now);
                    vm.reports
                        .publish(&EnvoyShared, &self.cluster, report, stale_ms);
                });
                self.told.clear();
            }
            Err(why) => self.failed(&why),
        }
    }

    fn failed(&mut self, why: &str) {
        vm::with(|vm| vm.metrics.count(metrics::LOAD_REPORT_FAILED));
        if self.told != why {
            let cluster = &self.cluster;
            log(
                LogLevel::Warn,
                &format!("eldr: {cluster}: its load is not known: {why}"),
            );
            why.clone_into(&mut self.told);
        }
    }
}
