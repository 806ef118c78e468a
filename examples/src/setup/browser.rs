//! Finds Chromium: `CHROMIUM_BIN`, else what `PATH` has, else Debian's package.

use std::path::PathBuf;

use super::command::{apt_get, can_apt_get, on_path, run};
use super::{InstallLock, SetupError};

const VARIABLE: &str = "CHROMIUM_BIN";
/// Names that distributions and vendors give it.
const NAMES: [&str; 4] = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
];

/// A Chromium that can be run headless, installed if it is not there.
///
/// # Errors
/// There is none, and it cannot be installed here.
pub fn chromium() -> Result<PathBuf, SetupError> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        let named = PathBuf::from(named);
        return if named.is_file() {
            Ok(named)
        } else {
            Err(SetupError::new(
                format!("{VARIABLE} names no file: {}", named.display()),
                format!("unset {VARIABLE} to let set-up find one"),
            ))
        };
    }
    let installed = || NAMES.iter().find_map(|name| on_path(name));
    if let Some(found) = installed() {
        return Ok(found);
    }
    let hint =
        format!("install it (on Debian: apt-get install chromium), or name one in {VARIABLE}");
    if !can_apt_get() {
        return Err(SetupError::new("no Chromium on this machine", hint));
    }
    let _lock = InstallLock::acquire()?;
    // Whoever held the lock may have installed it.
    if installed().is_none() {
        run(
            apt_get().args(["-q", "update"]),
            "refreshing the package lists",
            &hint,
        )?;
        // Without a font a page would have no letters.
        run(
            apt_get().args(["-q", "install", "-y", "chromium", "fonts-dejavu-core"]),
            "installing Chromium",
            &hint,
        )?;
    }
    installed().ok_or_else(|| SetupError::new("apt-get succeeded, yet there is no Chromium", hint))
}
