//! The command line: arguments in, results to stdout, everything else to stderr.
//!
//! Exit codes: 0 done, 1 failed (`error:` and `hint:` on stderr), 2 wrong usage.

mod convert;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::Error;

/// Fits, inspects and converts what expert-locality routing needs.
#[derive(Debug, Parser)]
#[command(name = "eldr", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Turns recordings of other formats into traces
    #[command(subcommand)]
    Convert(convert::Convert),
}

/// Parses the arguments of the process, does what they ask for and says how it went.
pub fn run() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Convert(convert) => convert.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

fn report(error: &Error) -> ExitCode {
    eprintln!("error: {error}\nhint: {}", error.hint());
    ExitCode::FAILURE
}
