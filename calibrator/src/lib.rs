//! Everything the `eldr` command does, as a library: reads traces of expert counts, fits centroid
//! blobs from them and inspects blobs.

pub mod cli;
pub mod convert;
pub mod error;
pub mod npz;
pub mod trace;

pub use error::Error;
