//! The `eldr` command, where the acceptance tests find it: cargo tells a test only of the programs of its own package.

use std::process::ExitCode;

fn main() -> ExitCode {
    eldr_calibrator::cli::run()
}
