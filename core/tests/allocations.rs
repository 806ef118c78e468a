//! Routing allocates nothing once a thread's buffers have grown.

use eldr_core::blob::{Blob, Fit};
use eldr_core::decide::{Draw, Policy, Rule, Worker};
use eldr_core::route::{Fleet, Map, Prompt, Scratch, route, route_running};
use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;

fn map(geometry: Geometry, layers: Vec<u16>, workers: &[String]) -> Map {
    let dimension = layers.len() * geometry.experts;
    let mut centroids = vec![0.0; dimension * workers.len()];
    for (region, row) in centroids.chunks_mut(dimension).enumerate() {
        row[region] = 1.0;
    }
    let blob = Blob {
        revision: 1,
        model: "m".into(),
        transform: Transform::new(geometry, layers, vec![1.0; dimension]).unwrap(),
        centroids,
        tau: 0.1,
        regions: workers.iter().map(|name| vec![name.clone()]).collect(),
        fit: Fit {
            quantiles: vec![vec![0.5; 7]; workers.len()],
            requests: 1,
            rho: None,
            seed: 1,
            shares: vec![1.0 / workers.len() as f64; workers.len()],
        },
        source: None,
    };
    Map::bind(blob, workers).unwrap()
}

#[test]
fn a_thread_that_has_routed_once_routes_without_allocating() {
    let geometry = Geometry::new(48, 128).unwrap();
    let names: Vec<String> = (0..16).map(|worker| format!("decode-{worker}")).collect();
    let map = map(geometry, vec![0, 1, 7, 40], &names);
    let workers = [Worker {
        load: 1.0,
        available: true,
    }; 16];
    let counts = |rows: usize| vec![300; rows * geometry.experts];
    let all = Signature::dense(geometry, counts(48), Some(9)).unwrap();
    let some = Signature::sparse(geometry, vec![0, 1, 2, 7, 40], counts(5), None).unwrap();
    let mut headers: Vec<String> = [Encoding::U16, Encoding::Varint]
        .iter()
        .flat_map(|&encoding| [all.encode(encoding), some.encode(encoding)])
        .collect();
    headers.push(":A!==:;l=48;e=128".into());
    let mut scratch = Scratch::default();
    let mut reasons = Vec::with_capacity(100);
    let mut all_once = || {
        for header in &headers {
            for policy in Policy::ALL {
                let rule = Rule {
                    policy,
                    ..Rule::default()
                };
                let draw = Draw {
                    sequence: 1,
                    entropy: 7,
                };
                let header = Some(header.as_bytes());
                let decision = route(&rule, Some(&map), header, &workers, draw, &mut scratch);
                reasons.push(decision.reason.name());
            }
        }
    };
    all_once();
    let after = allocation_counter::measure(all_once);
    assert_eq!(after.count_total, 0);
    let counted = |name: &str| reasons.iter().filter(|&&reason| reason == name).count();
    // Both rounds did what they look like: four good headers, one bad; hybrid is band where nobody keeps batches.
    assert_eq!(
        (counted("in_band"), counted("malformed_signature")),
        (16, 6)
    );
}

#[test]
fn policies_that_look_at_batches_allocate_only_what_stays_with_the_request() {
    let geometry = Geometry::new(48, 128).unwrap();
    let names: Vec<String> = (0..16).map(|worker| format!("decode-{worker}")).collect();
    let map = map(geometry, vec![0, 1, 7, 40], &names);
    let workers = [Worker {
        load: 1.0,
        available: true,
    }; 16];
    let counts = (0..geometry.counts())
        .map(|index| (index % 10) as u16)
        .collect();
    let signature = Signature::dense(geometry, counts, Some(9)).unwrap();
    let header = signature.encode(Encoding::U16);
    let prompt = Prompt {
        header: Some(header.as_bytes()),
        ..Prompt::default()
    };
    let draw = Draw {
        sequence: 1,
        entropy: 7,
    };
    for policy in [Policy::Marginal, Policy::Hybrid, Policy::BatchBand] {
        let mut batches = map.batches(policy.measure().unwrap(), workers.len());
        let mut scratch = Scratch::default();
        let mut once = || {
            let fleet = Fleet {
                workers: &workers,
                batches: &batches,
            };
            let rule = Rule::of(policy);
            let decision = route_running(&rule, Some(&map), prompt, fleet, draw, &mut scratch);
            let footprint = scratch.request().unwrap().footprint();
            batches.join(decision.target, &footprint);
            batches.leave(decision.target, &footprint);
        };
        once();
        let after = allocation_counter::measure(once);
        assert_eq!(after.count_total, 1, "{}: the footprint", policy.name());
    }
}
