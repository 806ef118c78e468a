use eldr_core::blob::Fit;
use eldr_core::signature::Geometry;
use proptest::prelude::*;

use super::*;
use crate::testing;

/// Two regions, for requests that use the one or the other of two experts.
fn blob() -> Blob {
    let geometry = Geometry {
        layers: 1,
        experts: 2,
    };
    let blob = testing::blob(geometry, 0, vec![1.0, 0.0, 0.0, 1.0], &[&["a"], &["b"]]);
    Blob {
        revision: 4,
        fit: Fit {
            quantiles: vec![vec![1.0; 7]; 2],
            rho: Some(0.5),
            ..blob.fit
        },
        source: Some("of before".into()),
        ..blob
    }
}

/// Unit vectors at these angles, in degrees: 0 is region 0, 90 region 1.
fn at(angles: &[f32]) -> Vec<f32> {
    let vector = |angle: &f32| [angle.to_radians().cos(), angle.to_radians().sin()];
    angles.iter().flat_map(vector).collect()
}

fn vectors(values: &[f32]) -> Vectors<'_> {
    Vectors {
        dimension: 2,
        values,
    }
}

#[test]
fn regions_follow_the_requests_and_stay_with_their_workers() {
    let values = at(&[60.0, 10.0, 70.0, 20.0]);
    let Refitted {
        blob: next,
        kept,
        converged,
        ..
    } = refit(&blob(), vectors(&values)).unwrap();
    assert!(converged);
    let expected = at(&[15.0, 65.0]);
    for (found, expected) in next.centroids.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-6);
    }
    assert!((kept[0] - 15f32.to_radians().cos()).abs() < 1e-6);
    let before = blob();
    assert_eq!((next.revision, next.fit.requests), (5, 4));
    assert_eq!(next.regions, before.regions);
    assert_eq!(next.transform, before.transform);
    assert_eq!(next.fit.rho, before.fit.rho);
    assert_eq!(next.source, None);
    next.to_bytes().unwrap();
}

#[test]
fn too_few_requests_and_no_revision_left_are_errors() {
    let error = refit(&blob(), vectors(&at(&[1.0]))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "too few requests to refit to: 1 for 2 regions"
    );
    let last = Blob {
        revision: u64::MAX,
        ..blob()
    };
    assert!(refit(&last, vectors(&at(&[1.0, 2.0]))).is_err());
}

#[test]
fn drift_is_none_on_the_traffic_of_the_fit_and_all_where_everything_moved() {
    let like_the_fit = Drift::of(&blob(), vectors(&at(&[0.0, 90.0])));
    assert_eq!(
        (like_the_fit.moved, like_the_fit.similarity_lost),
        (0.0, 0.0)
    );
    let one_sided = Drift::of(&blob(), vectors(&at(&[60.0, 60.0, 60.0])));
    assert_eq!(
        (one_sided.requests, &one_sided.shares[..]),
        (3, &[0.0, 1.0][..])
    );
    assert_eq!(one_sided.moved, 0.5);
    let lost = 1.0 - f64::from(60f32.to_radians().sin());
    assert!((one_sided.similarity_lost - lost).abs() < 1e-6);
    let nothing = Drift::of(&blob(), vectors(&[]));
    assert_eq!((nothing.requests, nothing.moved), (0, 0.0));
}

const LIMITS: Limits = Limits {
    age: 10.0,
    requests: 3,
    requests_per_region: 2,
    interval: 5.0,
};

#[test]
fn a_window_forgets_by_age_and_by_number() {
    let mut window = Window::new(1, LIMITS);
    for now in [0.0, 1.0, 2.0, 3.0] {
        window.push(now, &[now as f32 + 1.0]);
    }
    assert_eq!(window.vectors(), [2.0, 3.0, 4.0]);
    window.push(3.5, &[0.0]);
    assert_eq!(window.len(), 3, "a zero vector tells nothing");
    window.forget(12.5);
    assert_eq!(window.vectors(), [4.0]);
    window.forget(99.0);
    assert!(window.is_empty());
}

#[test]
fn a_refit_is_due_when_the_window_was_full_once_and_then_every_interval() {
    let mut window = Window::new(1, LIMITS);
    assert!(!window.due(100.0, 1), "nothing came");
    window.push(100.0, &[1.0]);
    window.push(109.0, &[1.0]);
    assert!(!window.due(109.9, 1));
    assert!(!window.due(110.0, 2), "too few for two regions");
    assert!(window.due(110.0, 1));
    assert!(!window.due(110.0, 1), "once");
    window.push(114.0, &[1.0]);
    assert!(!window.due(114.9, 1));
    assert!(window.due(115.0, 1));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_window_is_the_latest_that_are_young_enough(
        steps in prop::collection::vec((0.0f64..4.0, 0u8..3), 1..40),
    ) {
        let mut window = Window::new(1, LIMITS);
        let mut all: Vec<(f64, f32)> = Vec::new();
        let mut now = 0.0;
        for (pause, value) in steps {
            now += pause;
            let value = f32::from(value);
            window.push(now, &[value]);
            if value != 0.0 {
                all.push((now, value));
            }
            let young = all.iter().filter(|(time, _)| *time >= now - LIMITS.age);
            let mut expected: Vec<f32> = young.map(|&(_, value)| value).collect();
            expected.drain(..expected.len().saturating_sub(LIMITS.requests));
            prop_assert_eq!(window.vectors(), expected);
        }
    }
}
