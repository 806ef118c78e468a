//! `models`: one entry, what it should be refused for, and what it should become.

use arbitrary::Arbitrary;
use eldr_filter::config;
use eldr_filter::load::LoadUnit;
use serde_json::{Value, json};

use super::values::{Name, Number, Small, Word, visible};

const POLICIES: [&str; 9] = [
    "band",
    "top1",
    "marginal",
    "hybrid",
    "batch_band",
    "least_loaded",
    "p2c",
    "round_robin",
    "random",
];
/// Coefficients of a step and how large they may be.
const STEPS: [(&str, f64); 4] = [
    ("step_t0_ms", 10_000.0),
    ("step_b_ms", 1_000.0),
    ("step_c_ms", 1_000.0),
    ("step_kv_ms_per_1k", 1_000.0),
];
const UNITS: [&str; 2] = ["requests", "kv_tokens"];

#[derive(Arbitrary, Debug)]
pub(super) struct Model {
    name: Name,
    policy: Option<Word>,
    tau: Option<Small>,
    factor: Option<Factor>,
    load_unit: Option<Word>,
    rollout: Option<Rollout>,
    blob: Option<Option<Http>>,
    sample: Option<Small>,
    steps: [Option<Small>; 4],
    exponent: Option<Number>,
    candidates: Option<Number>,
    learn_steps: Option<bool>,
}

#[derive(Arbitrary, Debug)]
struct Http {
    cluster: Name,
    path: String,
    absolute: bool,
    interval: Option<Number>,
    authority: Option<Name>,
}

#[derive(Arbitrary, Debug)]
enum Factor {
    None,
    Number(Small),
    Word(String),
}

#[derive(Arbitrary, Debug)]
struct Rollout {
    kind: Kind,
    control: Option<Word>,
}

#[derive(Arbitrary, Debug)]
enum Kind {
    Shadow,
    Percentage(Number),
    Switchback {
        slice: Option<Number>,
        washout: Option<Number>,
    },
}

impl Http {
    fn path(&self) -> String {
        let slash = if self.absolute { "/" } else { "" };
        format!("{slash}{}", self.path)
    }

    fn interval(&self) -> Option<u64> {
        self.interval.map(|interval| interval.of(200, 3_600_000))
    }

    fn json(&self) -> Value {
        let mut source = json!({ "cluster": self.cluster.get(), "path": self.path() });
        if let Some(interval) = self.interval() {
            source["interval_ms"] = interval.into();
        }
        if let Some(authority) = &self.authority {
            source["authority"] = authority.get().into();
        }
        json!({ "http": source })
    }

    fn mistakes(&self, wrong: &mut impl FnMut(&str)) {
        let mut check = |field: &str, good: bool| {
            if !good {
                wrong(&format!("blob.http.{field}"));
            }
        };
        check("cluster", visible(&self.cluster.get()));
        let authority = self.authority.as_ref().unwrap_or(&self.cluster);
        check("authority", visible(&authority.get()));
        let path = self.path();
        check("path", path.starts_with('/') && visible(&path));
        let interval = self.interval();
        let in_range = interval.is_none_or(|ms| (200..=3_600_000).contains(&ms));
        check("interval_ms", in_range);
    }
}

impl Rollout {
    fn control(&self) -> &'static str {
        self.control
            .map_or("least_loaded", |word| word.of(&POLICIES))
    }

    /// Slice and wash-out.
    fn switchback(slice: Option<Number>, washout: Option<Number>) -> (u64, u64) {
        let slice = slice.map_or(600_000, |slice| slice.of(100, 86_400_000));
        let most = slice.saturating_sub(1);
        (slice, washout.map_or(60_000, |ms| ms.of(0, most)))
    }

    fn json(&self) -> Value {
        let mut value = match &self.kind {
            Kind::Shadow => json!({ "kind": "shadow" }),
            Kind::Percentage(percent) => {
                json!({ "kind": "percentage", "percent": percent.of(0, 100) })
            }
            Kind::Switchback { slice, washout } => {
                let (slice_ms, washout_ms) = Self::switchback(*slice, *washout);
                let mut value = json!({ "kind": "switchback" });
                if slice.is_some() {
                    value["slice_ms"] = slice_ms.into();
                }
                if washout.is_some() {
                    value["washout_ms"] = washout_ms.into();
                }
                value
            }
        };
        if self.control.is_some() {
            value["control"] = self.control().into();
        }
        value
    }

    fn mistakes(&self, policy: &str, wrong: &mut impl FnMut(&str)) {
        match self.kind {
            Kind::Shadow => {}
            Kind::Percentage(percent) => {
                if percent.of(0, 100) > 100 {
                    wrong("rollout.percent");
                }
            }
            Kind::Switchback { slice, washout } => {
                let (slice, washout) = Self::switchback(slice, washout);
                if !(100..=86_400_000).contains(&slice) {
                    wrong("rollout.slice_ms");
                }
                if washout > slice.saturating_sub(1) {
                    wrong("rollout.washout_ms");
                }
            }
        }
        let kept = |name: &str| match name {
            "marginal" | "hybrid" => Some("usage"),
            "batch_band" => Some("direction"),
            _ => None,
        };
        let both = kept(self.control()).zip(kept(policy));
        if self.control() == policy || both.is_some_and(|(one, other)| one != other) {
            wrong("rollout.control");
        }
    }
}

impl Model {
    pub(super) fn name(&self) -> String {
        self.name.get()
    }

    fn policy(&self) -> &'static str {
        self.policy.map_or("band", |word| word.of(&POLICIES))
    }

    fn load_unit(&self) -> &'static str {
        self.load_unit.map_or("requests", |word| word.of(&UNITS))
    }

    fn sample(&self) -> f64 {
        self.sample.map_or(0.0, Small::get)
    }

    fn exponent(&self) -> Option<u64> {
        self.exponent.map(|exponent| exponent.of(1, 16))
    }

    fn candidates(&self) -> Option<u64> {
        self.candidates.map(|drawn| drawn.of(1, 4096))
    }

    /// Whether the parser refuses it.
    pub(super) fn is_unreadable(&self) -> bool {
        let control = self.rollout.as_ref().and_then(|rollout| rollout.control);
        let words = [self.policy, self.load_unit, control];
        words.into_iter().flatten().any(Word::is_wrong)
    }

    pub(super) fn json(&self) -> Value {
        let mut value = json!({ "model": self.name() });
        if self.policy.is_some() {
            value["policy"] = self.policy().into();
        }
        if self.load_unit.is_some() {
            value["load_unit"] = self.load_unit().into();
        }
        if let Some(tau) = self.tau {
            value["tau"] = tau.get().into();
        }
        match &self.factor {
            Some(Factor::None) => value["max_load_factor"] = "none".into(),
            Some(Factor::Number(number)) => value["max_load_factor"] = number.get().into(),
            Some(Factor::Word(word)) => value["max_load_factor"] = word.as_str().into(),
            None => {}
        }
        if let Some(rollout) = &self.rollout {
            value["rollout"] = rollout.json();
        }
        match &self.blob {
            None => {}
            Some(None) => value["blob"] = json!({}),
            Some(Some(http)) => value["blob"] = http.json(),
        }
        if let Some(share) = self.sample {
            value["signature_sample"] = share.get().into();
        }
        for ((name, _), step) in STEPS.iter().zip(self.steps) {
            if let Some(step) = step {
                value[*name] = step.get().into();
            }
        }
        if let Some(exponent) = self.exponent() {
            value["step_exponent"] = exponent.into();
        }
        if let Some(drawn) = self.candidates() {
            value["candidates"] = drawn.into();
        }
        if let Some(learns) = self.learn_steps {
            value["learn_steps"] = learns.into();
        }
        value
    }

    /// Fields of it with a value that is not allowed.
    pub(super) fn mistakes(&self, mut wrong: impl FnMut(&str)) {
        let tau = self.tau.map(Small::get);
        if tau.is_some_and(|tau| !(0.0..=2.0).contains(&tau)) {
            wrong("tau");
        }
        let factor = match &self.factor {
            Some(Factor::Number(number)) => (1.0..=100.0).contains(&number.get()),
            Some(Factor::Word(word)) => word == "none",
            _ => true,
        };
        if !factor {
            wrong("max_load_factor");
        }
        for ((name, most), step) in STEPS.iter().zip(self.steps) {
            let step = step.map_or(1.0, Small::get);
            if !(0.0..=*most).contains(&step) || *name == "step_b_ms" && step == 0.0 {
                wrong(name);
            }
        }
        if self
            .exponent()
            .is_some_and(|exponent| !(1..=16).contains(&exponent))
        {
            wrong("step_exponent");
        }
        if self
            .candidates()
            .is_some_and(|drawn| !(1..=4096).contains(&drawn))
        {
            wrong("candidates");
        }
        if let Some(rollout) = &self.rollout {
            rollout.mistakes(self.policy(), &mut wrong);
        }
        match &self.blob {
            None => {}
            Some(None) => wrong("blob"),
            Some(Some(http)) => http.mistakes(&mut wrong),
        }
        let has_server = matches!(self.blob, Some(Some(_)));
        let sample = self.sample();
        if !(0.0..=1.0).contains(&sample) || sample > 0.0 && !has_server {
            wrong("signature_sample");
        }
    }

    /// What was accepted is what was said.
    pub(super) fn became(&self, model: &config::Model) {
        assert_eq!(model.name, self.name());
        assert_eq!(model.rule.policy.name(), self.policy());
        assert_eq!(model.rule.tau, self.tau.map_or(0.1, |tau| tau.get() as f32));
        let objective = model.rule.objective;
        let step = [
            objective.step.t0_ms,
            objective.step.b_ms,
            objective.step.c_ms,
            objective.step.kv_ms_per_1k,
        ];
        for (became, said) in step.into_iter().zip(self.steps) {
            assert!(said.is_none_or(|said| said.get() == became));
        }
        assert_eq!(u64::from(objective.exponent), self.exponent().unwrap_or(1));
        assert_eq!(model.rule.candidates.map(u64::from), self.candidates());
        assert_eq!(model.learns_steps, self.learn_steps.unwrap_or(true));
        let unit = match model.load_unit {
            LoadUnit::Requests => "requests",
            LoadUnit::KvTokens => "kv_tokens",
        };
        assert_eq!(unit, self.load_unit());
        assert_eq!(model.signature_sample, self.sample());
        match (&model.rollout, &self.rollout) {
            (None, None) => {}
            (Some((_, control)), Some(said)) => assert_eq!(control.name(), said.control()),
            _ => panic!("{:?} of {self:?}", model.rollout),
        }
    }
}
