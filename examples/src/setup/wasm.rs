//! Builds the filter as the module Envoy loads. Always through cargo, so it is never stale.

use std::path::{Path, PathBuf};

use super::command::run;
use super::toolchain::{self, TARGET};
use super::{SetupError, say};

const HINT: &str = "the compiler's own messages are above";

/// Builds the filter for wasm, installing a toolchain for that first if none is there, and returns the module's path.
///
/// Safe to call from several processes at once: cargo's lock lets one build while the others wait and find it done.
pub fn wasm_module() -> Result<PathBuf, SetupError> {
    build(&toolchain::target_dir(), &[])
}

/// Builds a filter that traps at a request with the header `x-eldr-trap-for-tests`. In a directory of its own, so that
/// nobody ever loads it by mistake.
pub fn trapping_wasm_module() -> Result<PathBuf, SetupError> {
    let dir = toolchain::target_dir().with_file_name("wasm-trap");
    build(&dir, &["--features", "trap-for-tests"])
}

/// Builds a filter that times each stage of a request, in a directory of its own.
pub fn timed_wasm_module() -> Result<PathBuf, SetupError> {
    let dir = toolchain::target_dir().with_file_name("wasm-timed");
    build(&dir, &["--features", "time-stages"])
}

fn build(target_dir: &Path, features: &[&str]) -> Result<PathBuf, SetupError> {
    let toolchain = toolchain::find()?;
    let mut cargo = toolchain::cargo(toolchain, "rustc", target_dir);
    cargo.args(features);
    cargo.args([
        "--package",
        "eldr-filter",
        "--crate-type",
        "cdylib",
        "--profile",
        "wasm",
    ]);
    run(
        &mut cargo,
        "building the filter for wasm, minutes the first time",
        HINT,
    )?;
    let module = target_dir.join(TARGET).join("wasm/eldr_filter.wasm");
    if !module.is_file() {
        return Err(SetupError::new(
            format!("cargo succeeded, yet {} is missing", module.display()),
            format!("remove {} and build again", target_dir.display()),
        ));
    }
    Ok(module)
}

/// Lints what runs inside Envoy, core and filter, as compiled for wasm; warnings are errors.
pub fn clippy() -> Result<(), SetupError> {
    let mut cargo = toolchain::cargo(toolchain::find()?, "clippy", &toolchain::target_dir());
    // The same profile as the build: Debian's way then compiles the standard library once for both.
    cargo.args([
        "--profile",
        "wasm",
        "--package",
        "eldr-core",
        "--package",
        "eldr-filter",
    ]);
    cargo.args(["--", "-D", "warnings"]);
    run(&mut cargo, "linting core and filter for wasm", HINT)?;
    say("core and filter are clean");
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_filter_builds_into_a_wasm_module() {
        let module = super::wasm_module().unwrap();
        let bytes = std::fs::read(module).unwrap();
        // Magic and binary format version 1.
        assert_eq!(bytes[..8], *b"\0asm\x01\0\0\0");
    }
}
