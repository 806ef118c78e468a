//! A run that is as small as one can be.

use super::*;

const TINY: Options = Options {
    size: Size {
        calibration: 48,
        requests: 48,
        seconds: 3,
    },
    rates: Vec::new(),
    ablations: false,
    cluster: crate::generate::CLUSTER,
    seed: 3,
};

#[test]
fn every_model_is_predicted_from_the_others_and_the_same_seed_says_the_same() {
    let options = Options {
        rates: vec![60],
        ..TINY
    };
    let pieces = std::cell::Cell::new(0);
    let found = reproduce(&options, |_| pieces.set(pieces.get() + 1)).unwrap();
    assert_eq!(pieces.get(), work(&options));
    assert_eq!(found.predictions.len(), 6);
    for of in &found.predictions {
        assert_eq!(of.cells.len(), published::POLICIES.len());
        for cell in &of.cells {
            assert!(cell.simulated.p50_ms > 0.0 && cell.simulated.p99_ms >= cell.simulated.p50_ms);
        }
        let (_, published) = of.change("band", 60).unwrap();
        assert_eq!(published.unwrap().p50, of.published.p50);
        assert_eq!(of.sensitivity.len(), 3);
    }
    let near = |of: &&Prediction| of.error().abs() <= NEAR;
    assert_eq!(found.near, found.predictions.iter().filter(near).count());
    let again = reproduce(&options, |_| ()).unwrap();
    assert_eq!(format!("{found:?}"), format!("{again:?}"));
}

#[test]
fn near_each_rate_the_engine_takes_the_published_time() {
    use crate::generate::{Generator, Strengths};
    let shape = Shape::GEMMA_4_26B_A4B;
    let growth = Kind::ALL.map(|kind| {
        let strengths = Strengths::fitted(&shape, kind);
        let requests = Generator::new(shape, kind, strengths, 1).gates(0..80);
        Growth::of(&requests, shape.geometry.layers)
    });
    let most = growth[0].experts(80.0);
    assert!(growth[0].experts(0.0) == 0.0 && (7.9..8.1).contains(&growth[0].experts(1.0)));
    assert!((30.0..128.0).contains(&most) && growth[0].experts(500.0) == most);
    let engine = Engine::new(&shape, growth.clone());
    assert!(engine.line().r2 > 0.9, "{:?}", engine.line());
    // The slower KV caches are read, the less of the growth is the experts', down to what their bytes cost.
    let costs = [0.0, 3.0, 6.0, 50.0].map(|slowdown| engine.expert_ms(slowdown));
    assert!(costs.is_sorted_by(|a, b| a > b), "{costs:?}");
    assert_eq!(costs[3], engine.floor_ms());
    // What is learned from one lesson is what it teaches.
    let curve = predict::Curve::line(-50.0);
    let lesson = Lesson {
        engine: &engine,
        curve: &curve,
        measured: -50.0 * costs[2],
    };
    let learned = predict::learn(&[lesson]);
    assert!((learned - 6.0).abs() < 0.1, "{learned}");
    for rate in RATES {
        let cell = published::cell(&shape, Kind::Task, "rr", rate).unwrap();
        for b_ms in [engine.floor_ms(), engine.line().b_ms, 9.0] {
            let step = engine.near(rate, Kind::Task, b_ms);
            assert!(step.t0_ms >= 0.0, "{step:?}");
            let batch = f64::from(rate) * 512.0 * cell.p50_ms / 1e3 / 16.0;
            let experts = growth[0].experts(batch);
            let ms = step.t0_ms + step.b_ms * experts + step.c_ms * batch;
            assert!(
                (ms / cell.p50_ms - 1.0).abs() < 0.08,
                "{rate}: {ms} for {}",
                cell.p50_ms
            );
        }
    }
}
