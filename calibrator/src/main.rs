//! The `eldr` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    eldr_calibrator::cli::run()
}
