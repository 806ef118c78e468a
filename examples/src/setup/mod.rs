//! What a fresh machine lacks: a toolchain that builds the filter for wasm, Envoy itself, and a browser.
//!
//! Demo and tests call [`wasm_module`], [`envoy_binary`] and [`chromium`]; they find what is there, else fetch it, and say on
//! stderr what they do. What they fetch goes under `target/tools`, so `cargo clean` undoes it (Debian packages stay).

mod browser;
mod command;
mod envoy;
mod python;
mod toolchain;
mod wasm;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

pub use browser::chromium;
pub use envoy::{ENVOY_VERSIONS, EnvoyVersion, envoy_binary};
pub use python::python_tool;
pub use wasm::{clippy, timed_wasm_module, trapping_wasm_module, wasm_module};

/// Why a set-up step failed, and what the reader can do about it.
#[derive(Debug, thiserror::Error)]
#[error("{what}\nhint: {hint}")]
pub struct SetupError {
    what: String,
    hint: String,
}

impl SetupError {
    fn new(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            hint: hint.into(),
        }
    }

    fn io(doing: &str, path: &Path, error: &std::io::Error) -> Self {
        Self::new(
            format!("cannot {doing} {}: {error}", path.display()),
            "check that the disk has room and that this user may write there",
        )
    }
}

/// The root of the workspace that this crate was built from.
pub fn workspace_root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

/// One line on stderr about what set-up does. Written directly, so that a test run shows it too: a first run spends
/// minutes here.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "set-up: {line}");
}

fn tools_dir() -> Result<PathBuf, SetupError> {
    let dir = workspace_root().join("target/tools");
    std::fs::create_dir_all(&dir).map_err(|e| SetupError::io("create", &dir, &e))?;
    Ok(dir)
}

/// Held while something is fetched or installed, so that parallel test processes do it once. Released on drop and
/// when the process dies.
struct InstallLock(#[allow(dead_code, reason = "held for its lock")] File);

impl InstallLock {
    fn acquire() -> Result<Self, SetupError> {
        let path = tools_dir()?.join("setup.lock");
        let file = File::create(&path).map_err(|e| SetupError::io("create", &path, &e))?;
        if file.try_lock().is_err() {
            say("waiting for another process that sets up");
            file.lock().map_err(|e| SetupError::io("lock", &path, &e))?;
        }
        Ok(Self(file))
    }
}
