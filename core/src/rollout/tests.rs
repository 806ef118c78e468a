use proptest::prelude::*;

use super::*;

/// The obvious way: walks from slice to slice instead of dividing. Arm at `at`, and how far into its slice that is.
fn walk(slice_ms: u64, at: u64) -> (Arm, u64) {
    let (mut arm, mut start) = (Arm::Control, 0);
    while start + slice_ms <= at {
        start += slice_ms;
        arm = match arm {
            Arm::Control => Arm::Treatment,
            Arm::Treatment => Arm::Control,
        };
    }
    (arm, at - start)
}

#[test]
fn a_shadow_never_goes_by_the_treatment() {
    for now in [0, 1, u64::MAX] {
        assert_eq!(Rollout::Shadow.arm(b"id", now), Arm::Control);
    }
}

#[test]
fn a_percentage_gets_its_share() {
    let ids: Vec<String> = (0..20_000).map(|id| format!("request-{id}")).collect();
    for percent in [0u8, 1, 10, 50, 99, 100] {
        let rollout = Rollout::Percentage { percent };
        let treated = ids
            .iter()
            .filter(|id| rollout.arm(id.as_bytes(), 0) == Arm::Treatment)
            .count();
        let expected = ids.len() * usize::from(percent) / 100;
        // Five standard deviations of a fair draw at one half; the ids are fixed, and so is the count.
        assert!(treated.abs_diff(expected) <= 354, "{percent}: {treated}");
        if percent % 100 == 0 {
            assert_eq!(treated, expected);
        }
    }
}

#[test]
fn a_slice_ends_to_the_millisecond() {
    let rollout = Rollout::Switchback {
        slice_ms: 1_000,
        washout_ms: 200,
    };
    let arm = |now| rollout.arm(b"", now);
    assert_eq!((arm(0), arm(999)), (Arm::Control, Arm::Control));
    assert_eq!((arm(1_000), arm(1_999)), (Arm::Treatment, Arm::Treatment));
    assert_eq!(arm(2_000), Arm::Control);
    assert!(!rollout.counts(1_199, 1_500), "in the wash-out");
    assert!(rollout.counts(1_200, 1_999));
    assert!(!rollout.counts(1_200, 2_000), "past the switch");
    assert!(!rollout.counts(1_500, 1_400), "the clock was set back");
    assert!(!rollout.counts(1_200, 3_300), "over a whole other slice");
}

proptest! {
    #[test]
    fn switchback_is_what_walking_the_slices_says(
        slice_ms in 1u64..50,
        washout_ms in 0u64..60,
        begin in 0u64..2_000,
        end in 0u64..2_000,
        id: Vec<u8>,
    ) {
        let rollout = Rollout::Switchback { slice_ms, washout_ms };
        let (arm, into) = walk(slice_ms, begin);
        prop_assert_eq!(rollout.arm(&id, begin), arm);
        let counts = begin <= end && into >= washout_ms && end - (begin - into) < slice_ms;
        prop_assert_eq!(rollout.counts(begin, end), counts);
    }

    #[test]
    fn two_slices_on_the_arm_is_the_same_and_one_on_the_other(
        slice_ms in 1u64..1 << 40,
        now in 0u64..1 << 50,
    ) {
        let rollout = Rollout::Switchback { slice_ms, washout_ms: 0 };
        let arm = |now| rollout.arm(b"", now);
        prop_assert_eq!(arm(now), arm(now + 2 * slice_ms));
        prop_assert_ne!(arm(now), arm(now + slice_ms));
    }

    #[test]
    fn a_retry_has_the_same_arm_and_a_higher_percentage_takes_none_away(
        id: Vec<u8>,
        percent in 0u8..100,
        now: u64,
        later: u64,
    ) {
        let arm = |percent, now| Rollout::Percentage { percent }.arm(&id, now);
        prop_assert_eq!(arm(percent, now), arm(percent, later));
        if arm(percent, now) == Arm::Treatment {
            prop_assert_eq!(arm(percent + 1, now), Arm::Treatment);
        }
    }

    #[test]
    fn any_numbers_give_an_arm(slice_ms: u64, washout_ms: u64, now: u64, end: u64) {
        let rollout = Rollout::Switchback { slice_ms, washout_ms };
        let arm = rollout.arm(b"", now);
        prop_assert!(["control", "treatment"].contains(&arm.name()));
        prop_assert!(!rollout.counts(now, end) || rollout.arm(b"", end) == arm);
    }
}
