use super::*;
use crate::held_out::Alike;
use crate::trace::Phase;

fn trial(regions: usize, busiest: f64, in_region: f64) -> Trial {
    Trial {
        regions,
        busiest,
        chance: 0.0,
        shares: vec![1.0 / regions as f64; regions],
        alike: Alike {
            of: Phase::Decode,
            in_region,
            any: 0.5,
            placebo: 0.5,
            placebo_deviation: 0.004,
        },
    }
}

fn quality(rho: f64, trial: Trial) -> Quality {
    Quality {
        requests: 100,
        rho: Some(rho),
        trials: vec![trial],
        fitted_per_region: 12.0,
    }
}

#[test]
fn a_good_fit_has_no_warning() {
    assert!(quality(0.8, trial(4, 1.2, 0.7)).warnings().is_empty());
}

#[test]
fn each_weakness_is_told_with_a_next_step() {
    for (quality, expected) in [
        (
            quality(0.2, trial(4, 1.2, 0.7)),
            "signatures say little about decode: rank correlation 0.20",
        ),
        (
            quality(0.8, trial(4, 1.2, 0.511)),
            "no structure to exploit",
        ),
        (
            quality(0.8, trial(4, 1.5, 0.7)),
            "one worker would get 1.50 × the mean",
        ),
    ] {
        let warnings = quality.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(
            warnings[0].contains(expected) && warnings[0].contains("\nhint: "),
            "{}",
            warnings[0]
        );
    }
}

#[test]
fn one_region_is_not_asked_for_structure() {
    assert!(quality(0.8, trial(1, 1.0, 0.5)).warnings().is_empty());
}

#[test]
fn the_choice_says_what_it_rests_on() {
    let measured = |busiest, others: &[Trial], workers| {
        Choice::measured(Regions::Auto, &trial(2, busiest, 0.7), others, workers)
            .text()
            .to_owned()
    };
    assert_eq!(
        measured(1.1, &[], 2),
        "2, one worker each; held-out requests spread evenly: the busiest worker gets 1.10 × the mean, good is up to 1.25"
    );
    assert_eq!(
        measured(1.1, &[trial(4, 1.5, 0.8), trial(3, 1.4, 0.8)], 4),
        "2, 2 workers each; with more, held-out requests spread unevenly: the busiest worker, × the mean, would get 1.50 with 4, 1.40 with 3; now 1.10, good is up to 1.25"
    );
    assert_eq!(
        measured(1.35, &[trial(4, 1.5, 0.8)], 4),
        "2, 2 workers each; the most even of those tried: the busiest worker gets 1.35 × the mean of held-out requests; 1.50 with 4"
    );
    assert_eq!(
        measured(1.5, &[], 2),
        "2, one worker each; no other number is possible"
    );
    let fixed = |regions, workers| Choice::unmeasured(Regions::Fixed(regions), regions, workers);
    assert_eq!(fixed(4, 2).text(), "4, 2 per worker; as asked for");
    assert_eq!(
        fixed(3, 2).text(),
        "3 for 2 workers, neighbours share one; as asked for"
    );
    assert_eq!(
        Choice::unmeasured(Regions::Auto, 3, 3).text(),
        "3, one worker each; too few requests to try other numbers on"
    );
}
