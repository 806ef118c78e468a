//! Builds the filter into the wasm module that Envoy loads.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use eldr_examples::setup;

/// Builds the filter into the wasm module that Envoy loads and prints the module's path.
///
/// A toolchain for the target is installed first where it lacks: `rustup target add`, or Debian's packages as root.
/// `ELDR_WASM_TOOLCHAIN=rustup` or `=debian` forces one of the two.
#[derive(Parser)]
#[command(name = "wasm", bin_name = "cargo wasm --")]
struct Args {
    /// Lint core and filter for the wasm target instead of building.
    #[arg(long, conflicts_with = "output")]
    clippy: bool,
    /// Also copy the module to this file and print that path.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

fn main() -> ExitCode {
    eldr_examples::exit(run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    if args.clippy {
        setup::clippy()?;
        return Ok(());
    }
    let built = setup::wasm_module()?;
    let path = match &args.output {
        None => built,
        Some(output) => {
            std::fs::copy(&built, output)
                .with_context(|| format!("cannot copy the module to {}", output.display()))?;
            output.clone()
        }
    };
    println!("{}", path.display());
    Ok(())
}
