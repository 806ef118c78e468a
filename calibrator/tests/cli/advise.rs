//! `eldr advise`: what it advises, and what a person is told when it cannot.

use insta::assert_snapshot;
use serde_json::Value;

use eldr_core::signature::{Encoding, Geometry, Signature};

use crate::bench::Bench;
use crate::errors::transcript;

const GEOMETRY: Geometry = Geometry {
    layers: 2,
    experts: 16,
};
const TOP_K: usize = 2;

/// `count` requests of two kinds, each of which uses `own` of the 16 experts: with 8 nothing is shared, with 16 both use all.
fn trace(count: usize, own: usize) -> String {
    // Numbers that look random are enough here (Knuth's constants).
    let mut state = 1u64;
    let mut draw = move |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut header = |kind: usize, tokens: usize| {
        let mut counts = vec![0u16; GEOMETRY.counts()];
        for layer in counts.chunks_mut(GEOMETRY.experts) {
            for _ in 0..tokens {
                let first = draw(own);
                let second = (first + 1 + draw(own - 1)) % own;
                layer[(kind * 8 + first) % 16] += 1;
                layer[(kind * 8 + second) % 16] += 1;
            }
        }
        assert_eq!(
            counts.iter().map(|&n| usize::from(n)).sum::<usize>(),
            tokens * TOP_K * 2
        );
        Signature::dense(GEOMETRY, counts, Some(tokens as u64))
            .unwrap()
            .encode(Encoding::U16)
    };
    let lines = (0..count).map(|n| {
        let (prefill, decode) = (header(n % 2, 60), header(n % 2, 40));
        format!(
            "{{\"id\":\"{n}\",\"label\":\"{}\",\"prompt_tokens\":60,\"decode_tokens\":40,\"prefill\":\"{prefill}\",\"decode\":\"{decode}\"}}\n",
            ["x", "y"][n % 2]
        )
    });
    lines.collect()
}

fn bench() -> Bench {
    let bench = Bench::new();
    bench
        .write("two.jsonl", trace(200, 8))
        .write("one.jsonl", trace(200, 16))
        .write("few.jsonl", trace(20, 8));
    bench
}

const QUICK: &str = "--quick --decode 4 --rate 40 --duration 10 --b-ms 1";

fn json(bench: &Bench, command: &str) -> Value {
    let ran = bench.eldr(&format!("{command} --json"));
    serde_json::from_str(&ran.succeeded().stdout).unwrap()
}

#[test]
fn requests_that_share_experts_by_kind_are_worth_a_deployment() {
    let bench = bench();
    let command = format!("advise two.jsonl {QUICK} --slo-tpot-ms 20");
    let ran = bench.eldr(&command);
    let shown = &ran.succeeded().stdout;
    assert_snapshot!(format!("$ eldr {command}\n{shown}"));
    let again = shown
        .lines()
        .find_map(|line| line.strip_prefix("again    eldr "));
    assert_eq!(&bench.eldr(again.unwrap()).succeeded().stdout, shown);
}

#[test]
fn what_it_says_to_fit_can_be_fitted_and_does_what_it_said() {
    let bench = bench();
    let advice = json(&bench, &format!("advise two.jsonl {QUICK}"));
    assert_eq!(advice["verdict"]["deploy"], true);
    let gain = |judged: &Value| judged["against_best"]["mean"]["mean"].as_f64().unwrap();
    assert!(gain(&advice["judged"][0]) < -5.0);
    assert!(gain(&advice["placebo"]).abs() < 2.0);
    assert!(
        advice["never_worse"]
            .as_array()
            .unwrap()
            .iter()
            .all(|harm| harm["holds"] == true)
    );
    let tuned = advice["tuned"].as_array().unwrap();
    let with_regions = tuned.iter().position(|tuned| tuned["fit"].is_object());
    assert!(with_regions.is_some(), "{tuned:?}");
    // Other policies need the blob that the first one may not need.
    let fit = "fit two.jsonl -o advised.eldr --workers decode-0,decode-1,decode-2,decode-3 --regions auto --layers auto";
    if let Some(said) = advice["deploy"]["fit"].as_str() {
        assert_eq!(said, format!("eldr {fit}"));
    }
    assert_eq!(bench.eldr(fit).code, 0);
    let policy = tuned[0]["spec"].as_str().unwrap();
    let command = format!(
        "simulate two.jsonl --blob advised.eldr --rate 40 --duration 10 --b-ms 1 --policies least_loaded,{policy}"
    );
    let simulated = json(&bench, &command);
    let change = &simulated["policies"][1]["against_best_balancer"]["tpot_mean_ms"]["mean"];
    assert!(change.as_f64().unwrap() < -5.0, "{change}");
}

#[test]
fn requests_that_are_all_alike_are_not() {
    let bench = bench();
    let shown = bench.eldr(&format!("advise one.jsonl {QUICK}"));
    assert_snapshot!(shown.succeeded().stdout);
}

#[test]
fn low_load_is_not_worth_a_deployment() {
    let advice = json(
        &bench(),
        "advise two.jsonl --quick --decode 8 --rate 1 --duration 60 --b-ms 1",
    );
    let verdict = &advice["verdict"];
    assert_eq!(verdict["deploy"], false, "{verdict}");
    let reasons = verdict["reasons"].to_string();
    assert!(reasons.contains("load is low"), "{reasons}");
    assert_eq!(advice["deploy"]["fit"], Value::Null);
}

#[test]
fn a_topology_says_how_many_workers_there_are_and_how_they_are_called() {
    let bench = bench();
    bench.write(
        "g.toml",
        "[decode]\nworkers = [\"10.0.0.1:8000\", { name = \"b\", address = \"b:8000\" }, { address = \"c:8000\", drain = true }]\n\
         [prefill]\nworkers = [\"p:8000\"]\n[[model]]\nname = \"*\"\n",
    );
    let ran =
        bench.eldr("advise two.jsonl --quick --topology g.toml --rate 20 --duration 10 --b-ms 1");
    let shown = &ran.succeeded().stdout;
    assert!(
        shown.contains("cluster  1 prefill and 2 decode workers, 1 gateway(s)"),
        "{shown}"
    );
}

#[test]
fn advice_that_cannot_be_given() {
    let bench = bench();
    bench.write("other.jsonl", crate::bench::trace(true));
    let commands = [
        "advise few.jsonl",
        "advise two.jsonl --other other.jsonl",
        "advise two.jsonl --topology g.toml --decode 4",
        "advise two.jsonl --topology missing.toml",
        "advise two.jsonl --splits 1",
        "advise two.jsonl --policies band,p2c",
    ];
    assert_snapshot!(transcript(&bench, &commands));
}
