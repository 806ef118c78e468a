//! Where the experts of decode workers are: placements that `eldr place` wrote.

use std::path::Path;
use std::sync::Arc;

use eldr_core::engine::{Ranks, RanksError};
use eldr_core::signature::Geometry;
use serde::Deserialize;

use crate::error::Error;

/// What is read of a placement file of the format `eldr`.
#[derive(Deserialize)]
struct File {
    clusters: Vec<OfCluster>,
}

#[derive(Deserialize)]
struct OfCluster {
    cluster: String,
    /// `[layer][rank][slot]`.
    layers: Vec<Vec<Vec<u16>>>,
}

/// Equally many experts per rank in the order of their numbers, for all workers.
///
/// # Errors
/// There are more ranks than experts.
pub fn contiguous(geometry: Geometry, ranks: usize) -> Result<Arc<Ranks>, Error> {
    let ranks = Ranks::contiguous(geometry, ranks);
    ranks.map(Arc::new).map_err(|error| {
        let hint = format!("give --ep-ranks up to {}", geometry.experts);
        Error::new(error.to_string(), hint)
    })
}

/// The placement of each of `workers`.
///
/// # Errors
/// The file cannot be read or is no placement of this model, or lacks a worker.
pub fn read(path: &Path, geometry: Geometry, workers: &[String]) -> Result<Vec<Arc<Ranks>>, Error> {
    let file = path.display();
    let hint = "give the file that `eldr place --output` writes in its format `eldr`";
    let text = std::fs::read(path).map_err(|error| Error::new(format!("{file}: {error}"), hint))?;
    let read: File = serde_json::from_slice(&text)
        .map_err(|error| Error::new(format!("{file}: {error}"), hint))?;
    let of = |worker: &String| {
        let named = read.clusters.iter().find(|own| own.cluster == *worker);
        let own = named.ok_or_else(|| {
            let names: Vec<&str> = read
                .clusters
                .iter()
                .map(|own| own.cluster.as_str())
                .collect();
            Error::new(
                format!("{file}: no placement of the decode worker {worker}"),
                format!(
                    "it has {}: place the experts of the blob that is simulated",
                    names.join(", ")
                ),
            )
        })?;
        let ranks = Ranks::new(geometry, &own.layers);
        ranks.map(Arc::new).map_err(|error: RanksError| {
            let problem = format!("{file}: cluster {worker}: {error}");
            Error::new(
                problem,
                "place the experts of the model whose requests the trace has",
            )
        })
    };
    workers.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        layers: 1,
        experts: 4,
    };

    #[test]
    fn every_worker_has_its_own_placement() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.json");
        let text = r#"{"format":"eldr-placement-v1","gpus":2,"clusters":[
            {"cluster":"b","layers":[[[0,2],[1,3]]]},{"cluster":"a","layers":[[[3,2],[1,0]]]},
            {"cluster":"c","layers":[[[0,1],[2,2]]]}]}"#;
        std::fs::write(&path, text).unwrap();
        let read = |workers: &[&str]| {
            let workers: Vec<String> = workers.iter().map(|&w| w.to_owned()).collect();
            super::read(&path, GEOMETRY, &workers).map_err(|error| error.to_string())
        };
        let expected = Ranks::new(GEOMETRY, &[vec![vec![2, 3], vec![0, 1]]]).unwrap();
        assert_eq!(*read(&["a", "b"]).unwrap()[0], expected);
        let lacks = read(&["a", "d"]).unwrap_err();
        assert!(
            lacks.ends_with("no placement of the decode worker d"),
            "{lacks}"
        );
        let wrong = read(&["c"]).unwrap_err();
        assert!(
            wrong.contains("cluster c: layer 0 places expert 3 on no rank"),
            "{wrong}"
        );
        std::fs::write(&path, "{}").unwrap();
        assert!(
            read(&["a"])
                .unwrap_err()
                .contains("missing field `clusters`")
        );
    }
}
