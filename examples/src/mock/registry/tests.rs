use super::*;

const LONG: Duration = Duration::from_secs(60);

fn owner(prompt: u64) -> Owner {
    Owner {
        prompt,
        request_id: Some(format!("r{prompt}")),
    }
}

fn hold(registry: &Registry, prompt: u64) -> Value {
    let address = ([127, 0, 0, 1], 5600).into();
    registry.hold(
        &"prefill-0".into(),
        address,
        "cmpl-a",
        20,
        owner(prompt),
        Vec::new(),
    )
}

fn report(registry: &Registry) -> (u64, u64, u64, u64) {
    let mut report = KvReport::default();
    registry.report("prefill-0", &mut report);
    (
        report.held_requests,
        report.held_blocks,
        report.stranded_requests,
        report.stranded_blocks,
    )
}

#[test]
fn blocks_are_fetched_once_by_the_request_they_were_computed_for() {
    let registry = Registry::new(LONG);
    let (a, b) = (hold(&registry, 1), hold(&registry, 2));
    assert_eq!(a["remote_block_ids"][0].as_array().unwrap().len(), 2);
    let refused = |params: &Value, owner: &Owner| registry.fetch(params, owner).unwrap_err();
    assert!(refused(&a, &owner(2)).contains("another prompt"));
    let strange = Owner {
        request_id: None,
        ..owner(1)
    };
    assert!(refused(&a, &strange).contains("x-request-id"));
    let mut changed = a.clone();
    changed["tp_size"] = json!(2);
    assert!(refused(&changed, &owner(1)).contains("were changed"));
    assert!(refused(&json!({}), &owner(1)).contains("nobody handed out"));
    assert_eq!(report(&registry), (2, 4, 0, 0));
    assert_eq!(registry.fetch(&a, &owner(1)), Ok(Fetched::InTime));
    assert!(refused(&a, &owner(1)).contains("fetched before"));
    assert_eq!(registry.fetch(&b, &owner(2)), Ok(Fetched::InTime));
    assert_eq!(registry.held(), 0);
    assert_eq!(report(&registry), (0, 0, 0, 0));
}

#[test]
fn a_release_frees_once_and_may_be_repeated() {
    let registry = Registry::new(LONG);
    let (a, b) = (hold(&registry, 1), hold(&registry, 2));
    let mut changed = a.clone();
    changed["remote_block_ids"] = json!([[7]]);
    assert_eq!(registry.release(&changed), Release::Unknown);
    assert_eq!(registry.release(&json!(null)), Release::Unknown);
    assert_eq!(registry.held(), 2);
    assert_eq!(registry.release(&a), Release::Freed);
    assert_eq!(registry.release(&a), Release::Again);
    assert!(
        registry
            .fetch(&a, &owner(1))
            .unwrap_err()
            .contains("released before")
    );
    assert_eq!(registry.fetch(&b, &owner(2)), Ok(Fetched::InTime));
    assert_eq!(registry.release(&b), Release::Again);
    assert_eq!(report(&registry), (0, 0, 0, 0));
}

#[test]
fn blocks_whose_lease_ran_out_are_stranded_and_fetched_late_once() {
    let registry = Registry::new(Duration::ZERO);
    let params = hold(&registry, 1);
    assert_eq!(report(&registry), (0, 0, 1, 2));
    assert_eq!(registry.release(&params), Release::Again);
    assert!(registry.fetch(&params, &owner(2)).is_err());
    assert_eq!(registry.fetch(&params, &owner(1)), Ok(Fetched::Late));
    assert!(
        registry
            .fetch(&params, &owner(1))
            .unwrap_err()
            .contains("fetched before")
    );
    assert_eq!(report(&registry), (0, 0, 1, 2), "stranded all the same");
    registry.restart_statistics();
    assert_eq!(report(&registry), (0, 0, 0, 0));
}

#[test]
fn what_was_freed_is_not_remembered_for_ever() {
    let registry = Registry::new(Duration::ZERO);
    let first = hold(&registry, 1);
    let kept: Vec<_> = (0..ENDED_MAX).map(|_| hold(&registry, 1)).collect();
    assert_eq!(report(&registry).2, ENDED_MAX as u64 + 1);
    assert_eq!(registry.release(&first), Release::Unknown);
    assert_eq!(registry.release(&kept[0]), Release::Again);
}
