use eldr_core::decide::Tie;
use eldr_core::signature::{Encoding, Geometry};
use proptest::prelude::*;

use super::*;
use crate::testing;

/// Regions on the axes of two experts and between them; b serves two, c is a region's second worker.
fn blob() -> Blob {
    let half = 0.5f32.sqrt();
    let centroids = vec![1.0, 0.0, half, half, 0.0, 1.0];
    let geometry = Geometry::new(1, 2).unwrap();
    testing::blob(geometry, 0, centroids, &[&["a"], &["b"], &["b", "c"]])
}

fn header(counts: [u16; 2]) -> String {
    let signature = Signature::dense(Geometry::new(1, 2).unwrap(), counts.to_vec(), None);
    signature.unwrap().encode(Encoding::U16)
}

fn situation(loads: &[(&str, f64)], out: &[&str]) -> Situation {
    Situation {
        loads: loads
            .iter()
            .map(|(name, load)| ((*name).to_owned(), *load))
            .collect(),
        out: out.iter().map(|name| (*name).to_owned()).collect(),
        ..Situation::default()
    }
}

fn asked(header: Option<&[u8]>) -> Asked {
    Asked {
        header: header.map(|header| String::from_utf8(header.to_vec()).unwrap()),
        prompt_tokens: Some(1),
    }
}

fn explained(counts: [u16; 2], rule: &Rule, situation: &Situation) -> Explanation {
    explain(
        &blob(),
        &asked(Some(header(counts).as_bytes())),
        rule,
        situation,
    )
    .unwrap()
}

#[test]
fn the_band_the_cap_and_the_choice_are_shown() {
    let rule = Rule {
        tau: 0.4,
        ..Rule::default()
    };
    let found = explained([1, 0], &rule, &situation(&[("a", 3.0), ("b", 1.0)], &[]));
    assert_eq!(
        (found.worker.as_str(), found.reason, found.region),
        ("b", "in_band", Some(1))
    );
    assert_eq!((found.band, found.widened), (2, false));
    assert_eq!(
        found
            .regions
            .iter()
            .map(|region| region.in_band)
            .collect::<Vec<_>>(),
        [true, true, false]
    );
    // The mean of 3, 1 and 0, times 1.25.
    assert!((found.load_limit.unwrap() - 5.0 / 3.0).abs() < 1e-9);
    assert!(found.regions[0].workers[0].capped && !found.regions[1].workers[0].capped);
    assert_eq!(found.problem, None);
}

#[test]
fn a_band_that_nobody_can_serve_is_widened() {
    let found = explained([1, 0], &Rule::default(), &situation(&[("a", 9.0)], &["b"]));
    assert_eq!(
        (found.worker.as_str(), found.region, found.widened),
        ("c", Some(2), true)
    );
    assert!(
        found.why.starts_with("c: every worker in the band"),
        "{}",
        found.why
    );
}

#[test]
fn what_cannot_be_compared_says_why() {
    let rule = Rule::default();
    let spare = situation(&[("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 0.5)], &[]);
    for (header, reason, problem) in [
        (None, "no_signature", None),
        (
            Some(&b"junk"[..]),
            "malformed_signature",
            Some("signature header, byte 0: expected "),
        ),
        (
            Some(b":AQA=:;l=1;e=1"),
            "geometry_mismatch",
            Some("the signature has 1 layers × 1 experts, the blob 1 layers × 2"),
        ),
    ] {
        let found = explain(&blob(), &asked(header), &rule, &spare).unwrap();
        assert_eq!((found.worker.as_str(), found.reason), ("d", reason));
        assert_eq!((found.threshold, found.spare[0].chosen), (None, true));
        let told = found.problem.unwrap_or_default();
        assert!(
            told.starts_with(problem.unwrap_or_default()) && told.is_empty() == problem.is_none(),
            "{told}"
        );
    }
}

#[test]
fn policies_that_do_not_look_still_show_similarities() {
    let rule = Rule {
        policy: Policy::RoundRobin,
        ..Rule::default()
    };
    let mut now = situation(&[], &["a"]);
    now.draw = 1;
    let found = explained([0, 1], &rule, &now);
    assert_eq!(
        (found.worker.as_str(), found.reason, found.band),
        ("c", "blind", 0)
    );
    assert!(found.regions[2].similarity.unwrap() > 0.99 && !found.regions[2].in_band);
}

#[test]
fn a_cluster_that_is_nowhere_cannot_be_out() {
    let error = explain(
        &blob(),
        &asked(None),
        &Rule::default(),
        &situation(&[], &["x"]),
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "x is to be out, but is no decode cluster of the blob"
    );
    assert_eq!(error.hint(), "the decode clusters are: a, b, c");
}

/// One request of each worker's, by the expert that it uses.
fn crowded(experts: [usize; 3]) -> Situation {
    let running = ["a", "b", "c"]
        .into_iter()
        .zip(experts)
        .map(|(name, expert)| {
            let counts = [0, 1].map(|other| u16::from(other == expert));
            (
                name.to_owned(),
                vec![asked(Some(header(counts).as_bytes()))],
            )
        });
    Situation {
        running: running.collect(),
        ..Situation::default()
    }
}

#[test]
fn running_batches_decide_and_are_shown() {
    let by = |policy| explained([0, 1], &Rule::of(policy), &crowded([0, 1, 0]));
    let of = |found: &Explanation, region: usize, worker: usize| {
        found.regions[region].workers[worker].batch.unwrap()
    };
    for (policy, reason) in [
        (Policy::Marginal, "marginal"),
        (Policy::Hybrid, "marginal"),
        (Policy::BatchBand, "in_band"),
    ] {
        let found = by(policy);
        assert_eq!(
            (found.worker.as_str(), found.reason),
            ("b", reason),
            "{policy:?}"
        );
        assert_eq!(found.threshold.is_some(), policy == Policy::Hybrid);
        assert_eq!(of(&found, 0, 0).requests, 1);
        // A worker's load is its requests where nobody says another.
        assert_eq!(found.regions[0].workers[0].load, 1.0);
        let text = found.text();
        assert!(text.contains("running"), "{text}");
    }
    let found = by(Policy::Marginal);
    let (like, unlike) = (of(&found, 1, 0), of(&found, 2, 1));
    assert!(like.extra_experts.unwrap() < 0.05 && unlike.extra_experts.unwrap() > 0.95);
    assert!(like.growth < unlike.growth);
    let found = by(Policy::BatchBand);
    let cosines = [of(&found, 1, 0), of(&found, 2, 1)].map(|batch| batch.cosine.unwrap());
    assert!(
        cosines[0] > 0.999 && cosines[1].abs() < 0.001,
        "{cosines:?}"
    );
}

#[test]
fn the_region_still_bounds_hybrid() {
    let rule = Rule {
        tau: 0.1,
        ..Rule::of(Policy::Hybrid)
    };
    let found = explained([1, 0], &rule, &crowded([1, 0, 0]));
    assert_eq!(
        (found.worker.as_str(), found.band),
        ("a", 1),
        "{}",
        found.why
    );
    let found = explained([1, 0], &Rule::of(Policy::Marginal), &crowded([1, 0, 0]));
    assert_eq!(found.worker, "b");
}

/// The rule once more, slow and obvious, from what the explanation shows.
fn told<'a>(found: &'a Explanation, tie: Tie) -> Option<String> {
    let able = |worker: &Candidate| !worker.out && !worker.capped;
    let able_of = |regions: &mut dyn Iterator<Item = &'a Region>| -> Vec<(&'a Candidate, f32)> {
        let of = |region: &'a Region| {
            let workers = region.workers.iter();
            workers.map(|worker| (worker, region.similarity.unwrap()))
        };
        let all = regions.flat_map(of);
        all.filter(|(worker, _)| able(worker)).collect()
    };
    let mut similar: Vec<&Region> = found.regions.iter().collect();
    similar.sort_by(|a, b| b.similarity.unwrap().total_cmp(&a.similarity.unwrap()));
    let in_band = similar.iter().filter(|region| region.in_band);
    let mut candidates = able_of(&mut in_band.copied());
    if candidates.is_empty() {
        let next = similar.iter().filter(|region| !region.in_band);
        let next = next
            .clone()
            .find(|region| region.workers.iter().any(able))?;
        let equal = similar
            .iter()
            .filter(|region| !region.in_band && region.similarity == next.similarity);
        candidates = able_of(&mut equal.copied());
    }
    let best = candidates.into_iter().min_by(|(a, x), (b, y)| {
        let by_similarity = match tie {
            Tie::Similar => y.total_cmp(x),
            Tie::Index => std::cmp::Ordering::Equal,
        };
        // Their names are in the order of their indices.
        a.load
            .total_cmp(&b.load)
            .then(by_similarity)
            .then(a.name.cmp(&b.name))
    });
    best.map(|(worker, _)| worker.name.clone())
}

proptest! {
    #[test]
    fn the_choice_follows_from_what_is_shown(
        counts in prop::array::uniform2(0u16..9),
        loads in prop::array::uniform3(0u8..6),
        out in prop::array::uniform3(any::<bool>()),
        tau in 0.0f32..1.0,
        top1 in any::<bool>(),
        cap in prop::option::of(1.0f64..2.0),
    ) {
        let policy = if top1 { Policy::Top1 } else { Policy::Band };
        let rule = Rule { policy, tau, max_load_factor: cap, ..Rule::default() };
        let names = ["a", "b", "c"];
        let loads: Vec<(&str, f64)> = names.iter().copied().zip(loads.map(f64::from)).collect();
        let out: Vec<&str> = names.iter().zip(out).filter(|(_, out)| *out).map(|(name, _)| *name).collect();
        let found = explained(counts, &rule, &situation(&loads, &out));
        match told(&found, rule.tie) {
            Some(worker) => prop_assert_eq!(&found.worker, &worker, "{:?}", found),
            None => prop_assert_eq!(found.reason, "all_ejected"),
        }
        prop_assert_eq!(found.band, found.regions.iter().filter(|region| region.in_band).count() * usize::from(found.reason != "all_ejected"));
    }
}
