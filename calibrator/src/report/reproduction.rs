//! A page about the published figures and their simulation.

use super::drawn;
use super::page::Page;
use super::plot;
use crate::error::Error;
use crate::reproduce::predict::NEAR;
use crate::reproduce::published::{GUESS, POLICIES};
use crate::reproduce::{Cell, Prediction, Reproduction};

/// Policies whose times are drawn, with what both kinds of figures are called.
const DRAWN: [(&str, &str, &str); 2] = [
    (
        "round robin",
        "round robin, simulated",
        "round robin, published",
    ),
    ("band", "ELDR's rule, simulated", "ELDR's rule, published"),
];

/// The page, which repeats the command that made it.
///
/// # Errors
/// A plot cannot be drawn.
pub fn reproduction(of: &Reproduction, command: &str) -> Result<String, Error> {
    let mut page = Page::default();
    page.text("What the ELDR paper (arXiv 2607.00466) measured with 8 prefill and 16 decode workers, and what a simulation of it says. Measured figures are single runs; differences under about 2 % are noise. Everything called simulated was computed, on generated requests; nothing here ran on a GPU.");
    page.heading("Prediction");
    page.text(&format!(
        "Change of the median time per output token under ELDR's rule against round robin, in %, mean over rates. Each model is predicted from the two others: {} of {} predictions are within {NEAR} points; their mean error is {:.1} points, that of the constant guess {GUESS} % is {:.1}, that of step times out of the two other models alone {:.1}.",
        of.near,
        of.predictions.len(),
        of.error,
        of.guess_error,
        of.transferred_error
    ));
    let rows: Vec<Vec<String>> = of.predictions.iter().map(headline).collect();
    page.table(
        &[
            "model",
            "workload",
            "published",
            "simulated",
            "error",
            "step times from others",
            "guess's error",
        ],
        &[0, 1],
        &rows,
    );
    page.heading("Change by rate");
    for prediction in &of.predictions {
        let change = |published: bool| -> Vec<(f64, f64)> {
            let rates = of.rates.iter().filter_map(|&rate| {
                let (simulated, measured) = prediction.change("band", rate)?;
                let change = if published { measured? } else { simulated };
                Some((rate.into(), change.p50))
            });
            rates.collect()
        };
        let series = [change(false), change(true)];
        let svg = drawn(plot::lines(
            &series,
            ["requests per second", "change of P50, %"],
            None,
        ))?;
        let caption = format!(
            "{}, {}: change of the median against round robin under ELDR's rule, by rate.",
            prediction.model,
            prediction.workload.name()
        );
        page.figure(&svg, &["simulated", "published"], &caption);
    }
    page.heading("Times");
    for prediction in &of.predictions {
        times(&mut page, prediction, "median", |cell| cell.p50_ms)?;
        times(&mut page, prediction, "99th percentile", |cell| cell.p99_ms)?;
    }
    page.heading("What an expert costs");
    page.text("Times under load balancers hardly tell what an expert costs from what a request costs. A request costs at least what reading its KV cache does; how many times more slowly than the memory can that goes is learned from two models. Here is what other costs would give.");
    let rows: Vec<Vec<String>> = of.predictions.iter().map(sensitivity).collect();
    page.table(
        &[
            "model",
            "workload",
            "KV slowdown",
            "b, ms",
            "change",
            "at the bandwidth's floor",
            "half of b",
            "double",
        ],
        &[0, 1],
        &rows,
    );
    if !of.ablations.is_empty() {
        page.heading("Ablations");
        let rows: Vec<Vec<String>> = of
            .ablations
            .iter()
            .map(|row| {
                vec![
                    row.model.to_owned(),
                    row.workload.name().to_owned(),
                    row.ablation.to_owned(),
                    row.variant.to_owned(),
                    signed(row.simulated.p50),
                    row.published
                        .map_or_else(String::new, |change| signed(change.p50)),
                    match row.agrees() {
                        Some(true) => "agrees".into(),
                        Some(false) => "differs".into(),
                        None => String::new(),
                    },
                ]
            })
            .collect();
        page.table(
            &[
                "model",
                "workload",
                "what",
                "variant",
                "simulated",
                "published",
                "sign",
            ],
            &[0, 1, 2, 3, 6],
            &rows,
        );
    }
    page.note(&format!("Again: {command}"));
    Ok(page.html("The published figures, simulated"))
}

fn headline(of: &Prediction) -> Vec<String> {
    vec![
        of.model.to_owned(),
        of.workload.name().to_owned(),
        signed(of.published.p50),
        signed(of.simulated.p50),
        signed(of.error()),
        signed(of.transferred_p50),
        signed(of.guess_error()),
    ]
}

fn sensitivity(of: &Prediction) -> Vec<String> {
    let mut row = vec![
        of.model.to_owned(),
        of.workload.name().to_owned(),
        format!("{:.1}", of.kv_slowdown),
        format!("{:.3}", of.b_ms),
        signed(of.simulated.p50),
    ];
    row.extend(of.sensitivity.iter().map(|other| signed(other.p50)));
    row
}

/// Times of the drawn policies over rates.
fn times(
    page: &mut Page,
    of: &Prediction,
    what: &str,
    value: fn(&Cell) -> f64,
) -> Result<(), Error> {
    let (mut series, mut keys) = (Vec::new(), Vec::new());
    for (policy, simulated, published) in DRAWN {
        let own = || of.cells.iter().filter(|cell| cell.policy == policy);
        let here = own().map(|cell| (f64::from(cell.rate), value(&cell.simulated)));
        series.push(here.collect());
        keys.push(simulated);
        let there =
            own().filter_map(|cell| Some((f64::from(cell.rate), value(cell.published.as_ref()?))));
        series.push(there.collect());
        keys.push(published);
    }
    let svg = drawn(plot::lines(
        &series,
        ["requests per second", "time per output token, ms"],
        None,
    ))?;
    let caption = format!(
        "{}, {}: {what} of the time per output token over {} policies' common arrivals.",
        of.model,
        of.workload.name(),
        POLICIES.len()
    );
    page.figure(&svg, &keys, &caption);
    Ok(())
}

fn signed(percent: f64) -> String {
    match percent.is_nan() {
        true => String::new(),
        false => format!("{:+.1}", (percent * 10.0).round() / 10.0 + 0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::fixture::small;

    #[test]
    fn the_page_has_every_plot_and_asks_for_nothing_outside_itself() {
        let page = reproduction(&small(), "eldr reproduce --html <page>").unwrap();
        // Changes, medians and tails of the one model and workload.
        assert_eq!(page.matches("<figure>").count(), 3);
        assert_eq!(page.matches("</table>").count(), 3);
        for text in [
            "eldr reproduce --html &lt;page&gt;",
            "Qwen3-30B-A3B, task: median of the time per output token",
            "round robin, published",
            "<td>+2.0</td>",
            "differs",
        ] {
            assert!(page.contains(text), "{text}");
        }
        for outside in ["<script", "http://", "https://", "url("] {
            let svg_namespace = "http://www.w3.org/2000/svg";
            assert!(
                !page.replace(svg_namespace, "").contains(outside),
                "{outside}"
            );
        }
    }
}
