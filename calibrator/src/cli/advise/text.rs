//! The advice for people.

use comfy_table::Table;

use super::Report;
use crate::advise::Advice;
use crate::advise::adapt::KEPT_MIN;
use crate::advise::judge::{Changes, Judged};
use crate::simulate::Cluster;
use crate::simulate::compare::Estimate;
use crate::table::{right_from, table};

pub(super) fn text(report: &Report<'_>, cluster: &Cluster) -> String {
    let advice = report.advice;
    let mut text = verdict(report);
    text += &format!(
        "\nrequests {} calibrate, {} evaluate; {} splits of {} runs, ± 95 %\ncluster  {} prefill and {} decode workers, {} gateway(s); step {} + {}·U + {}·B ms\n",
        advice.requests.0,
        advice.requests.1,
        advice.runs.0,
        advice.runs.1,
        cluster.prefill_workers,
        cluster.decode_workers,
        cluster.gateways,
        cluster.step.t0_ms,
        cluster.step.b_ms,
        cluster.step.c_ms,
    );
    text += &format!(
        "\nTPOT on the evaluation requests; change in % against the best load balancer in each column: {}\n{}\n",
        advice
            .judged
            .first()
            .map_or_else(String::new, |judged| judged.best.join(", ")),
        judged(advice)
    );
    if !advice.harmful.is_empty() {
        text += &format!(
            "no candidate keeps the bound: {}\n",
            advice.harmful.join(", ")
        );
    }
    text += &format!(
        "\n{} where signatures mislead, change in % against least_loaded\n{}\n",
        advice.judged.first().map_or("", |first| &first.policy),
        never_worse(advice)
    );
    text += &change(advice);
    text += &rest(advice);
    text + &format!("\nagain    {}\n", report.command)
}

/// What to do, first.
fn verdict(report: &Report<'_>) -> String {
    let verdict = &report.advice.verdict;
    let model = report.deploy.model.to_string();
    if !verdict.deploy {
        let reasons = verdict.reasons.join("\n         ");
        return format!(
            "advice   do not deploy; keep {}\nbecause  {reasons}\nfilter   {{\"models\":[{model}], …}}\n",
            verdict.policy
        );
    }
    let changes = report
        .advice
        .judged
        .first()
        .map(|first| &first.against_best);
    let gain = changes.map_or_else(String::new, |changes| {
        format!(
            "TPOT mean {} %, P50 {} %, P99 {} % against the best load balancer",
            percent(changes.mean),
            percent(changes.p50),
            percent(changes.p99)
        )
    });
    let fit = report.deploy.fit.as_ref();
    let fit = fit.map_or_else(String::new, |fit| format!("fit      {fit}\n"));
    let serve = report.deploy.serve.as_ref();
    let serve = serve.map_or_else(String::new, |serve| format!("serve    {serve}\n"));
    let warnings = verdict.warnings.iter();
    let warnings: String = warnings
        .map(|warning| format!("warning  {warning}\n"))
        .collect();
    format!(
        "advice   deploy {}\nexpect   {gain}\n{warnings}{fit}{serve}filter   {{\"models\":[{model}], …}}\n",
        verdict.policy
    )
}

fn judged(advice: &Advice) -> Table {
    let titles = [
        "policy", "mean ms", "P50", "P99", "mean %", "P50 %", "P99 %", "experts",
    ];
    let mut table = table(titles);
    let unbounded = advice.tuned.len();
    for (place, judged) in advice.judged.iter().enumerate() {
        let name = match place == unbounded {
            true => format!("{} (unbounded)", judged.policy),
            false => judged.policy.clone(),
        };
        let changes =
            |of: fn(&Changes) -> Estimate, at: usize| match judged.best[at] == judged.policy {
                true => "–".to_owned(),
                false => percent(of(&judged.against_best)),
            };
        table.add_row([
            name,
            format!("{:.2}", judged.mean_ms),
            format!("{:.2}", judged.p50_ms),
            format!("{:.2}", judged.p99_ms),
            changes(|changes| changes.mean, 0),
            changes(|changes| changes.p50, 1),
            changes(|changes| changes.p99, 2),
            format!("{:.1}", judged.experts),
        ]);
    }
    right_from(1, table)
}

fn never_worse(advice: &Advice) -> Table {
    let mut table = table(["case", "mean %", "P50 %", "P99 %", "within 1 %"]);
    for harm in &advice.never_worse {
        let name = harm.case.name().to_owned();
        table.add_row(match &harm.against_least_loaded {
            Some(changes) => [
                name,
                percent(changes.mean),
                percent(changes.p50),
                percent(changes.p99),
                if harm.holds { "yes" } else { "NO" }.into(),
            ],
            None => [
                name,
                "".into(),
                "".into(),
                "".into(),
                "not tried: one kind of request".into(),
            ],
        });
    }
    right_from(1, table)
}

/// Before and after an abrupt change.
fn change(advice: &Advice) -> String {
    let Some(adaptation) = &advice.adaptation else {
        return "change   not tried: one kind of request\n".into();
    };
    let changes = |changes: &Changes| {
        let [mean, p50, p99] = [changes.mean, changes.p50, changes.p99].map(percent);
        format!("{mean}, {p50}, {p99} %")
    };
    let share = |kept: Option<Estimate>| match kept {
        Some(Estimate { mean, plus_minus }) => match plus_minus {
            Some(plus_minus) => format!("{mean:.0} ± {plus_minus:.0}"),
            None => format!("{mean:.0}"),
        },
        None => "–".into(),
    };
    let kept = match adaptation.kept {
        [None, None, _] => "there was no gain to keep".to_owned(),
        kept => format!(
            "kept {} % of its gain (aim: {KEPT_MIN} %)",
            kept.map(share).join(", ")
        ),
    };
    format!(
        "change   mean, P50, P99 against the best load balancer: {} before, {} after other traffic came\n         {kept}\n",
        changes(&adaptation.before),
        changes(&adaptation.after),
    )
}

/// Against band, placebo, ceiling and goodput, a line or two each.
fn rest(advice: &Advice) -> String {
    let Judged { against_best, .. } = &advice.placebo;
    let ceiling = &advice.ceiling;
    let goodput = &advice.goodput;
    let rate = |(name, rate): &(String, Option<f64>)| match rate {
        Some(rate) => format!("{name} {rate:.1}/s"),
        None => format!("{name} at no rate that was tried"),
    };
    let gain = match (goodput.balancer.1, goodput.policy.1) {
        (Some(balancer), Some(policy)) => format!(" ({:+.1} %)", (policy / balancer - 1.0) * 100.0),
        _ => String::new(),
    };
    format!(
        "band     against band without the bound, in points: mean {}, P50 {}, P99 {}\n\
         placebo  signatures exchanged at random: mean {} %, P99 {} % against the best load balancer\n\
         ceiling  batches of {:.1} use {:.1} of {} experts per layer (top-{:.1}; {:.1} at random, {:.1} if all were alike): no policy gains over {:.1} %\n\
         goodput  P99 TPOT ≤ {:.2} ms{}: {}, {}{gain}\n",
        percent(advice.ahead_of_band.mean),
        percent(advice.ahead_of_band.p50),
        percent(advice.ahead_of_band.p99),
        percent(against_best.mean),
        percent(against_best.p99),
        ceiling.batch,
        ceiling.now,
        ceiling.experts,
        ceiling.top_k,
        ceiling.random,
        ceiling.alike,
        ceiling.percent,
        goodput.slo_tpot_ms,
        if goodput.asked {
            ""
        } else {
            " (the best load balancer's)"
        },
        rate(&goodput.balancer),
        rate(&goodput.policy),
    )
}

fn percent(Estimate { mean, plus_minus }: Estimate) -> String {
    // −0.0 is no change either.
    let mean = (mean * 10.0).round() / 10.0 + 0.0;
    match plus_minus {
        Some(plus_minus) => format!("{mean:+.1} ± {plus_minus:.1}"),
        None => format!("{mean:+.1}"),
    }
}
