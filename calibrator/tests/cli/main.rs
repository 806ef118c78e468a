//! The `eldr` binary: exit codes, what goes to stdout and what to stderr.

#![allow(missing_docs, unreachable_pub)]

mod bench;
mod commands;
mod errors;
mod serve;
