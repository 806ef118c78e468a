//! Running other programs so that their progress is seen and their failures carry the command line.

use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::{SetupError, say};

/// Runs a command that may take long. Its output goes to our stderr as it comes: stdout is for data.
pub(super) fn run(command: &mut Command, what: &str, hint: &str) -> Result<(), SetupError> {
    say(&format!("{what}: {}", line(command)));
    let status = command
        .stdin(Stdio::null())
        .stdout(Stdio::from(io::stderr()))
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(SetupError::new(
            format!("{what} failed, {status}: {}", line(command)),
            hint,
        )),
        Err(error) => Err(SetupError::new(
            format!("{what} failed, {error}: {}", line(command)),
            hint,
        )),
    }
}

/// A command's stdout if it succeeds, trimmed; its stderr is dropped. For questions whose "no" is an answer.
pub(super) fn ask(command: &mut Command) -> Option<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// The first file of this name in the directories of `PATH`.
pub(super) fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// Whether Debian packages can be installed: root, with `apt-get` at hand.
pub(super) fn can_apt_get() -> bool {
    on_path("apt-get").is_some() && ask(Command::new("id").arg("-u")).as_deref() == Some("0")
}

/// An `apt-get` that asks nothing.
pub(super) fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    // Another apt-get may be at work on this machine: wait for it rather than fail.
    command
        .args(["-o", "DPkg::Lock::Timeout=600"])
        .args(["-o", "Dpkg::Use-Pty=0"]);
    command
        .arg("--no-install-recommends")
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}

fn line(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(
        command
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned()),
    );
    words.join(" ")
}
