//! Builds the filter as the module Envoy loads. Always through cargo, so it is never stale.

use std::path::PathBuf;

use super::command::run;
use super::toolchain::{self, TARGET};
use super::{SetupError, say};

const HINT: &str = "the compiler's own messages are above";

/// Builds the filter for wasm, installing a toolchain for that first if none is there, and returns the module's path.
///
/// Safe to call from several processes at once: cargo's lock lets one build while the others wait and find it done.
pub fn wasm_module() -> Result<PathBuf, SetupError> {
    let toolchain = toolchain::find()?;
    let mut cargo = toolchain::cargo(toolchain, "rustc");
    cargo.args([
        "--package",
        "eldr-filter",
        "--crate-type",
        "cdylib",
        "--profile",
        "wasm",
    ]);
    run(&mut cargo, "building the filter for wasm", HINT)?;
    let module = toolchain::target_dir()
        .join(TARGET)
        .join("wasm/eldr_filter.wasm");
    if !module.is_file() {
        return Err(SetupError::new(
            format!("cargo succeeded, yet {} is missing", module.display()),
            "remove target/wasm and build again",
        ));
    }
    Ok(module)
}

/// Lints what runs inside Envoy, core and filter, as compiled for wasm; warnings are errors.
pub fn clippy() -> Result<(), SetupError> {
    let mut cargo = toolchain::cargo(toolchain::find()?, "clippy");
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
