//! The traces in `examples/data/small-moe` are what their README says.

use std::collections::BTreeMap;
use std::path::Path;

use eldr_calibrator::trace::{self, Record};
use eldr_core::signature::Geometry;

fn shipped(name: &str) -> Vec<Record> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/small-moe");
    trace::read(data.join(name))
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

#[test]
fn every_request_has_what_the_readme_promises() {
    let expected: [(&str, &[(&str, usize)]); 4] = [
        (
            "task_calibration",
            &[
                ("code", 170),
                ("legal", 121),
                ("math", 153),
                ("medical", 136),
            ],
        ),
        (
            "task_evaluation",
            &[
                ("code", 200),
                ("legal", 142),
                ("math", 180),
                ("medical", 160),
            ],
        ),
        (
            "language_calibration",
            &[("en", 153), ("fr", 51), ("ru", 51), ("zh", 153)],
        ),
        (
            "language_evaluation",
            &[("en", 180), ("fr", 60), ("ru", 60), ("zh", 180)],
        ),
    ];
    let geometry = Geometry {
        layers: 6,
        experts: 64,
    };
    for (name, labels) in expected {
        let mut found = BTreeMap::new();
        for record in shipped(&format!("{name}.jsonl.gz")) {
            let prefill = record.prefill_signature().unwrap().unwrap();
            let tokens = record.prompt_tokens.unwrap();
            assert_eq!(
                (prefill.geometry(), prefill.prompt_tokens()),
                (geometry, Some(tokens))
            );
            for layer in prefill.counts().chunks_exact(64) {
                assert_eq!(
                    layer.iter().map(|&count| u64::from(count)).sum::<u64>(),
                    tokens * 8
                );
            }
            // `topk` verifies steps, shape and, expert by expert, the decode counts.
            let topk = record.topk().unwrap();
            assert_eq!(topk.is_some(), name.ends_with("evaluation"));
            assert!(topk.is_none_or(|topk| topk.k() == 8 && topk.geometry() == geometry));
            *found.entry(record.label.unwrap()).or_insert(0) += 1;
        }
        let found: Vec<_> = found
            .iter()
            .map(|(label, count)| (label.as_str(), *count))
            .collect();
        assert_eq!(found, labels, "{name}");
    }
}
