//! Everything the `eldr` command does, as a library: reads traces of expert counts, fits centroid
//! blobs from them and inspects blobs.

pub mod trace;
