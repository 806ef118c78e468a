//! Everything the `eldr` command does, as a library: records and reads traces of expert counts, fits centroid blobs to them and lets
//! the blobs follow the traffic, explains and simulates decisions, places experts, serves blobs, and writes Envoy configurations.

pub mod advise;
pub mod assign;
pub mod blob_file;
pub mod cli;
pub mod convert;
pub mod envoy;
pub mod error;
pub mod explain;
pub mod fit;
pub mod generate;
pub mod held_out;
pub mod history;
pub mod inspect;
pub mod kmeans;
pub mod layers;
pub mod npz;
pub mod output;
pub mod place;
pub mod rank;
pub mod record;
pub mod refit;
pub mod regions;
pub mod report;
pub mod reproduce;
pub mod requests;
pub mod serve;
pub mod signatures;
pub mod simulate;
pub mod steps;
mod table;
#[cfg(test)]
mod testing;
pub mod trace;
pub mod weights;

pub use error::Error;
