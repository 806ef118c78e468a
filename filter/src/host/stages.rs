//! Where a request's time goes inside the VM. Without the feature `time-stages` all of this is nothing.

#[cfg(feature = "time-stages")]
mod timed {
    use std::cell::RefCell;

    use super::super::metrics::Metrics;
    use super::super::now_ns;

    #[derive(Default)]
    struct Clock {
        last_ns: u64,
        metrics: Metrics,
    }

    thread_local! {
        // Not the VM's own metrics: stages end where those are borrowed.
        static CLOCK: RefCell<Clock> = RefCell::default();
    }

    pub(in super::super) fn begin() {
        CLOCK.with(|clock| clock.borrow_mut().last_ns = now_ns());
    }

    pub(in super::super) fn end(stage: &str) {
        CLOCK.with(|clock| {
            let clock = &mut *clock.borrow_mut();
            let elapsed = now_ns().saturating_sub(clock.last_ns);
            clock
                .metrics
                .record(&format!("eldr.stage_ns.{stage}"), elapsed);
            clock.last_ns = now_ns();
        });
    }
}

#[cfg(feature = "time-stages")]
pub(super) use timed::{begin, end};

/// Envoy calls into the VM: the first stage begins.
#[cfg(not(feature = "time-stages"))]
pub(super) fn begin() {}

/// A stage ends, and the next one begins.
#[cfg(not(feature = "time-stages"))]
pub(super) fn end(_: &str) {}
