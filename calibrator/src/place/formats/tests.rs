use serde_json::{Value, json};

use super::*;

const DEVICES: Devices = Devices {
    experts: 3,
    gpus: 2,
    redundant: 1,
    nodes: 1,
    groups: None,
};

fn layers() -> Vec<Slots> {
    vec![vec![0, 2, 1, 2], vec![0, 1, 0, 2]]
}

#[test]
fn sglang_gets_a_row_for_every_hidden_layer() {
    let map = Map {
        devices: DEVICES,
        dense_layers: 1,
        layers: &layers(),
    };
    let found: Value = serde_json::from_str(&map.sglang()).unwrap();
    let expected = json!({"physical_to_logical_map": [[0, 1, 2, 0], [0, 2, 1, 2], [0, 1, 0, 2]]});
    assert_eq!(found, expected);
}

#[test]
fn tensorrt_llm_gets_the_layers_by_their_index() {
    let map = Map {
        devices: DEVICES,
        dense_layers: 3,
        layers: &layers(),
    };
    let expected = "initial_global_assignments:\n  3: [0, 2, 1, 2]\n  4: [0, 1, 0, 2]\nnum_slots: 4\nlayer_updates_per_iter: 0\n";
    assert_eq!(map.tensorrt_llm(), expected);
}

#[test]
fn eplb_gets_all_three_maps_of_the_moe_layers() {
    let map = Map {
        devices: DEVICES,
        dense_layers: 1,
        layers: &layers(),
    };
    let found: Value = serde_json::from_str(&map.eplb()).unwrap();
    let expected = json!({
        "physical_to_logical_map": [[0, 2, 1, 2], [0, 1, 0, 2]],
        "logical_to_physical_map": [[[0, -1], [2, -1], [1, 3]], [[0, 2], [1, -1], [3, -1]]],
        "expert_count": [[1, 1, 2], [2, 1, 1]],
    });
    assert_eq!(found, expected);
}
