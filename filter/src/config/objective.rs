//! What policies that look at running batches are told: how long a decode step takes, and whose time counts how much.

use eldr_core::batch::Measure;
use eldr_core::decide::Policy;
use eldr_core::engine::StepModel;
use eldr_core::marginal::{MAX_EXPONENT, Objective};

use super::check::Check;
use super::raw::RawModel;

impl Check {
    /// The objective of a model's entry.
    pub(super) fn objective(&mut self, field: &str, raw: &RawModel) -> Objective {
        let default = Objective::default();
        let step = StepModel {
            t0_ms: raw.step_t0_ms.unwrap_or(default.step.t0_ms),
            b_ms: raw.step_b_ms.unwrap_or(default.step.b_ms),
            c_ms: raw.step_c_ms.unwrap_or(default.step.c_ms),
            kv_ms_per_1k: raw.step_kv_ms_per_1k.unwrap_or(default.step.kv_ms_per_1k),
        };
        for (name, value, most) in [
            ("step_t0_ms", step.t0_ms, 10_000.0),
            ("step_b_ms", step.b_ms, 1_000.0),
            ("step_c_ms", step.c_ms, 1_000.0),
            ("step_kv_ms_per_1k", step.kv_ms_per_1k, 1_000.0),
        ] {
            // With experts that cost nothing, batches would tell nothing.
            let above_0 = name == "step_b_ms";
            if !(0.0..=most).contains(&value) || above_0 && value == 0.0 {
                let allowed = match above_0 {
                    true => format!("above 0, at most {most}"),
                    false => format!("0 to {most}"),
                };
                self.mistake(&format!("{field}.{name}"), &value.to_string(), &allowed);
            }
        }
        let exponent = raw.step_exponent.unwrap_or(default.exponent.into());
        let name = format!("{field}.step_exponent");
        self.range(&name, exponent, 1, MAX_EXPONENT.into());
        Objective {
            step,
            exponent: exponent.try_into().unwrap_or(MAX_EXPONENT),
        }
    }

    /// Both policies of a rollout look at the same batches, or one of them at none.
    pub(super) fn same_batches(&mut self, field: &str, policy: Policy, control: Policy) {
        let (Some(ours), Some(theirs)) = (policy.measure(), control.measure()) else {
            return;
        };
        if ours != theirs {
            let found = format!("{:?} beside {:?}", control.name(), policy.name());
            let all = Policy::ALL.into_iter();
            let others = all.filter(|other| other.measure().is_none_or(|other| other == ours));
            let names: Vec<&str> = others
                .filter(|other| *other != policy)
                .map(Policy::name)
                .collect();
            let kept = match ours {
                Measure::Usage => "how probably each expert is used",
                Measure::Direction => "directions",
            };
            let allowed = format!(
                "{}: of a model's running batches one thing is kept, here {kept}",
                names.join(", ")
            );
            self.mistake(field, &found, &allowed);
        }
    }
}
