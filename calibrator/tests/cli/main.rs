//! The `eldr` binary: exit codes, what goes to stdout and what to stderr.

mod advise;
mod bench;
mod commands;
mod convert;
mod envoy;
mod errors;
mod place;
mod record;
mod refit;
mod report;
mod serve;
mod server;
mod simulate;
