//! Coefficients that are known come back, and what cannot be known is said.

use std::io::Write as _;

use proptest::prelude::*;

use super::*;

const QWEN: Setting<'static> = Setting {
    model: "Qwen3-30B-A3B",
    workers: 16,
    decode_tokens: 512,
    experts: 128,
    top_k: 8,
};

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

proptest! {
    /// Times made by a model give that model back.
    #[test]
    fn coefficients_come_back(t0 in 0.1f64..20.0, b in 0.01f64..1.0, c in 0.01f64..0.5, d in 0.01f64..0.1) {
        let samples: Vec<Sample> = (1..40).map(|n| {
            let (batch, experts) = (f64::from(n), f64::from(n * 7 % 100 + 8));
            let kv_tokens = f64::from(n * 13 % 50) * 1e3;
            Sample { experts, batch, kv_tokens, ms: t0 + b * experts + c * batch + d * kv_tokens / 1e3 }
        }).collect();
        let found = fit(&samples).unwrap();
        prop_assert!((found.step.t0_ms - t0).abs() < 1e-6);
        prop_assert!((found.step.b_ms - b).abs() < 1e-6);
        prop_assert!((found.step.c_ms - c).abs() < 1e-6);
        prop_assert!((found.step.kv_ms_per_1k - d).abs() < 1e-6);
        prop_assert!(found.r2 > 0.999_999 && found.is_identified());
    }
}

#[test]
fn experts_that_grow_with_the_batch_alone_do_not_tell_b_from_c() {
    let sample = |n: u32| {
        let batch = f64::from(n);
        Sample {
            experts: 2.0 * batch + f64::from(n % 2),
            batch,
            kv_tokens: 0.0,
            ms: 5.0 + batch,
        }
    };
    let samples: Vec<Sample> = (1..20).map(sample).collect();
    let found = fit(&samples).unwrap();
    assert!(!found.is_identified(), "{found:?}");
    assert!(found.step.b_ms >= 0.0 && found.step.c_ms >= 0.0);
}

#[test]
fn what_would_be_negative_is_left_out() {
    let sample = |n: u32| {
        let (batch, experts) = (f64::from(n), f64::from(n * 7 % 50));
        Sample {
            experts,
            batch,
            kv_tokens: 0.0,
            ms: 30.0 + 0.2 * experts - 0.1 * batch,
        }
    };
    let samples: Vec<Sample> = (1..40).map(sample).collect();
    let found = fit(&samples).unwrap();
    assert_eq!(found.step.c_ms, 0.0);
    assert!(
        (found.step.b_ms - 0.2).abs() < 0.05 && found.r2 < 1.0,
        "{found:?}"
    );
}

#[test]
fn measured_steps_are_read_by_the_names_of_their_columns() {
    let file = file("step_ms,gpu,experts,batch,kv_tokens\n9.5,0,20,4,100\n12,1,30.5,8,200\n");
    let samples = read(file.path(), QWEN).unwrap();
    assert_eq!(
        samples[1],
        Sample {
            experts: 30.5,
            batch: 8.0,
            kv_tokens: 200.0,
            ms: 12.0
        }
    );
    assert_eq!(samples.len(), 2);
}

#[test]
fn the_published_table_gives_the_published_fit() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("data/eldr-published.csv");
    let samples = read(
        &path,
        Setting {
            model: "GPT-OSS-120B",
            top_k: 4,
            ..QWEN
        },
    )
    .unwrap();
    assert_eq!(samples.len(), 2 * 5 * 4, "four load balancers");
    let found = fit(&samples).unwrap();
    let known = StepModel::GPT_OSS_120B;
    assert!((found.step.t0_ms - known.t0_ms).abs() < 1.0, "{found:?}");
    assert!((found.step.b_ms - known.b_ms).abs() < 0.02, "{found:?}");
    assert!(found.r2 > 0.98, "{found:?}");
}

#[test]
fn what_is_wrong_with_a_file_is_told_with_its_line() {
    for (text, expected) in [
        ("a,b\n", "no header that is known"),
        (
            "batch,experts,step_ms\n1,2\n",
            "2 fields where the header has 3",
        ),
        ("batch,experts,step_ms\n1,x,3\n", "experts \"x\": a number"),
        (
            "batch,experts,step_ms\n1,-1,3\n",
            "experts \"-1\": a number",
        ),
        ("batch,experts,step_ms\n", "no sample in it"),
        (
            "rate_rps,model,tpot_p50_ms\n20,Other,9\n",
            "no sample in it for Qwen3-30B-A3B",
        ),
    ] {
        let file = file(text);
        let error = read(file.path(), QWEN).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let one = Sample {
        experts: 1.0,
        batch: 1.0,
        kv_tokens: 0.0,
        ms: 1.0,
    };
    let error = fit(&[one; 9]).unwrap_err();
    assert!(
        error.to_string().contains("9 samples cannot tell 3"),
        "{error}"
    );
}
