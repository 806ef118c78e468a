//! The gateway's Envoy configuration, made of a short file that lists its workers.
//!
//! What it makes is `envoy/envoy.yaml`, `relay.yaml` or `endpoint.yaml` with other workers in it: those files
//! are the template, and what it makes of the topologies beside them (`envoy/*.toml`) is those files byte for
//! byte. So settings are explained in one place, and none can be in one and not in the other.

mod models;
mod render;
mod table;
mod topology;
mod workers;

use std::path::Path;

use crate::error::Error;

pub use render::render;
pub use topology::{
    BlobSource, Destination, FILTER_FIELDS, Mode, Model, Prefill, Topology, Worker, parse,
};

/// Largest topology that is read, bytes.
const BYTES_MAX: u64 = 1 << 20;

/// Reads the topology at `path`; blobs are files beside it.
///
/// # Errors
/// The file cannot be read, or lists every mistake in it with its line.
pub fn read(path: &Path) -> Result<Topology, Error> {
    use std::io::Read as _;
    let failed = |what: String| {
        let hint = "give the path of a topology; `eldr envoy --help` shows one";
        Error::new(format!("{}: {what}", path.display()), hint)
    };
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(BYTES_MAX + 1).read_to_string(&mut text))
        .map_err(|error| failed(format!("reading the topology failed: {error}")))?;
    if text.len() as u64 > BYTES_MAX {
        return Err(failed(format!(
            "more than {BYTES_MAX} bytes are no topology"
        )));
    }
    parse(
        &path.display().to_string(),
        &text,
        path.parent().unwrap_or(Path::new(".")),
    )
}

#[cfg(test)]
mod tests;
