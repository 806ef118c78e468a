//! Which toolchain builds for `wasm32-unknown-unknown`: the one in use, or Debian's beside it.
//!
//! rustc needs that target's standard library. Where rustup can fetch it, that is one command. Where only a
//! distribution's mirror is reached, Debian and Ubuntu package a second, newer toolchain (`rustc-web`) without the
//! library but with its source, and that toolchain's cargo builds it (`-Zbuild-std`, 25 s once).

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::command::{apt_get, ask, can_apt_get, on_path, run};
use super::{InstallLock, SetupError, say, workspace_root};

/// The target Envoy's wasm runtime and browsers share: no WASI imports.
pub(super) const TARGET: &str = "wasm32-unknown-unknown";
/// Forces one way: `rustup` or `debian`.
const VARIABLE: &str = "ELDR_WASM_TOOLCHAIN";
const DEBIAN_PACKAGES: [&str; 5] = [
    "rustc-web",
    "cargo-web",
    "rust-web-src",
    "rust-web-clippy",
    "rust-web-llvm",
];
/// A link to the lld that fits Debian's LLVM; the package is named like the link's target, such as `lld-22`.
const DEBIAN_LLD: &str = "/usr/bin/rust-lld";

/// A toolchain that can build for [`TARGET`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Toolchain {
    /// The cargo that runs us (or the one on `PATH`); its rustc has the target's standard library.
    InUse,
    /// Debian's `/usr/bin/cargo`, which builds the standard library itself.
    Debian,
}

/// What the machine has, gathered once, so that the choice below is a pure function.
#[derive(Debug, Clone, Copy, Default)]
struct Facts {
    forced: Option<Forced>,
    target_installed: bool,
    rustup: bool,
    debian_complete: bool,
    /// Root, with `apt-get` at hand.
    can_apt_get: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Forced {
    Rustup,
    Debian,
}

/// One thing to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    Use(Toolchain),
    RustupTargetAdd,
    AptGetInstall,
}

/// What to try, in order; the first success ends it. What is already there comes before what has to be fetched.
fn attempts(facts: Facts) -> Vec<Attempt> {
    let (rustup, debian) = match facts.forced {
        None => (true, true),
        Some(Forced::Rustup) => (true, false),
        Some(Forced::Debian) => (false, true),
    };
    if rustup && facts.target_installed {
        return vec![Attempt::Use(Toolchain::InUse)];
    }
    if debian && facts.debian_complete {
        return vec![Attempt::Use(Toolchain::Debian)];
    }
    let mut attempts = Vec::new();
    if rustup && facts.rustup {
        attempts.push(Attempt::RustupTargetAdd);
    }
    if debian && facts.can_apt_get {
        attempts.push(Attempt::AptGetInstall);
    }
    attempts
}

impl Facts {
    fn gather() -> Result<Self, SetupError> {
        Ok(Self {
            forced: forced(std::env::var_os(VARIABLE).as_deref())?,
            target_installed: target_installed(),
            rustup: on_path("rustup").is_some(),
            debian_complete: debian_complete(),
            can_apt_get: can_apt_get(),
        })
    }
}

fn forced(value: Option<&OsStr>) -> Result<Option<Forced>, SetupError> {
    match value.map(OsStr::to_string_lossy).as_deref() {
        None | Some("") => Ok(None),
        Some("rustup") => Ok(Some(Forced::Rustup)),
        Some("debian") => Ok(Some(Forced::Debian)),
        Some(other) => Err(SetupError::new(
            format!("{VARIABLE} is {other:?}; allowed: rustup, debian"),
            format!("unset {VARIABLE} to let set-up choose"),
        )),
    }
}

/// Finds a toolchain for [`TARGET`], installing what lacks.
pub(super) fn find() -> Result<Toolchain, SetupError> {
    let facts = Facts::gather()?;
    if let Some(&Attempt::Use(toolchain)) = attempts(facts).first() {
        return Ok(toolchain);
    }
    let _lock = InstallLock::acquire()?;
    // Whoever held the lock may have installed it, so the facts are gathered anew.
    for attempt in attempts(Facts::gather()?) {
        let result = match attempt {
            Attempt::Use(toolchain) => Ok(toolchain),
            Attempt::RustupTargetAdd => rustup_target_add(),
            Attempt::AptGetInstall => apt_get_install(),
        };
        match result {
            Ok(toolchain) => return Ok(toolchain),
            Err(error) => say(&error.what),
        }
    }
    Err(SetupError::new(
        format!("no toolchain on this machine builds for {TARGET}"),
        format!(
            "run `rustup target add {TARGET}`; or, on Debian or Ubuntu and as root, run this command again \
             to install the packages {} and the lld that {DEBIAN_LLD} names{}",
            DEBIAN_PACKAGES.join(" "),
            match facts.forced {
                Some(_) => format!("; {VARIABLE} forbids one of the two ways now"),
                None => String::new(),
            }
        ),
    ))
}

fn rustup_target_add() -> Result<Toolchain, SetupError> {
    let mut rustup = Command::new("rustup");
    rustup
        .args(["target", "add", TARGET])
        .current_dir(workspace_root());
    run(&mut rustup, "adding the wasm target", "")?;
    if target_installed() {
        Ok(Toolchain::InUse)
    } else {
        Err(SetupError::new(
            "rustup added the target to another toolchain than the one in use",
            "",
        ))
    }
}

fn apt_get_install() -> Result<Toolchain, SetupError> {
    let what = "installing Debian's wasm toolchain";
    run(
        apt_get().args(["-q", "update"]),
        "refreshing the package lists",
        "",
    )?;
    run(
        apt_get()
            .args(["-q", "install", "-y"])
            .args(DEBIAN_PACKAGES),
        what,
        "",
    )?;
    let lld = debian_lld().ok_or_else(|| {
        SetupError::new(
            format!("{DEBIAN_LLD} is no link that names an lld package"),
            "",
        )
    })?;
    run(
        apt_get().args(["-q", "install", "-y", &lld]),
        "installing its linker",
        "",
    )?;
    if debian_complete() {
        Ok(Toolchain::Debian)
    } else {
        Err(SetupError::new(
            "apt-get succeeded, yet a part of the toolchain is missing",
            "",
        ))
    }
}

fn target_installed() -> bool {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command
        .args(["--print", "target-libdir", "--target", TARGET])
        .current_dir(workspace_root());
    ask(&mut command).is_some_and(|dir| Path::new(&dir).is_dir())
}

fn debian_complete() -> bool {
    let mut query = Command::new("dpkg-query");
    query
        .args(["-W", "-f", "${db:Status-Abbrev}\n"])
        .args(DEBIAN_PACKAGES);
    // `metadata` follows the link, so a link whose package is missing counts as missing.
    ask(&mut query).is_some_and(|s| s.lines().all(|l| l.starts_with("ii")))
        && std::fs::metadata(DEBIAN_LLD).is_ok()
}

fn debian_lld() -> Option<String> {
    lld_package(&std::fs::read_link(DEBIAN_LLD).ok()?)
}

/// `lld-22` from a link to `lld-22` or `../lib/…/lld-22`; none unless it looks like that.
fn lld_package(link: &Path) -> Option<String> {
    let name = link.file_name()?.to_str()?;
    let version = name.strip_prefix("lld-")?;
    version
        .chars()
        .all(|c| c.is_ascii_digit())
        .then(|| name.to_owned())
}

/// A cargo (or cargo-clippy) command for `toolchain`, its environment cleared of what the outer cargo and rustup put
/// there. `subcommand` comes first; then the flags the toolchain needs.
pub(super) fn cargo(toolchain: Toolchain, subcommand: &str, target_dir: &Path) -> Command {
    let mut command = match (toolchain, subcommand) {
        (Toolchain::InUse, _) => {
            Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        }
        // cargo would look the subcommand up in ~/.cargo/bin first and find rustup's.
        (Toolchain::Debian, "clippy") => Command::new("/usr/bin/cargo-clippy"),
        (Toolchain::Debian, _) => Command::new("/usr/bin/cargo"),
    };
    command
        .current_dir(workspace_root())
        .arg(subcommand)
        .arg("--locked");
    command
        .args(["--target", TARGET])
        .arg("--target-dir")
        .arg(target_dir);
    for (name, _) in std::env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| is_inherited(name, toolchain))
        {
            command.env_remove(name);
        }
    }
    // The flags that count, whatever `RUSTFLAGS` or a configuration file say. Host code is not affected: `--target`.
    let mut flags = vec!["-Ctarget-feature=+simd128"];
    if toolchain == Toolchain::Debian {
        flags.push("-Clinker-flavor=wasm-ld");
        command
            .arg("-Zbuild-std=std,panic_abort")
            .env("RUSTC_BOOTSTRAP", "1");
        command.env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", "rust-lld");
        command
            .env("CARGO", "/usr/bin/cargo")
            .env("RUSTC", "/usr/bin/rustc");
        command.env("PATH", path_with_usr_bin_first());
    }
    command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    command
}

/// A directory of its own, so that a build inside `cargo test` never waits for the outer cargo's lock.
pub(super) fn target_dir() -> PathBuf {
    workspace_root().join("target/wasm")
}

/// Whether a variable of ours would lead the inner cargo astray: another compiler, other flags, another directory.
fn is_inherited(name: &str, toolchain: Toolchain) -> bool {
    let always = name.starts_with("CARGO_BUILD_")
        || name.starts_with("CARGO_PROFILE_")
        || name.starts_with("CARGO_TARGET_")
        || name.starts_with("CARGO_PKG_")
        || name.starts_with("CARGO_MANIFEST_")
        || name.starts_with("CARGO_BIN_")
        || [
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_INCREMENTAL",
            "CARGO_PRIMARY_PACKAGE",
            "RUSTFLAGS",
        ]
        .contains(&name)
        || [
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "CLIPPY_ARGS",
            "OUT_DIR",
        ]
        .contains(&name);
    // The outer toolchain's own libraries, and the variables with which rustup steers its proxies.
    let debian = [
        "CARGO",
        "RUSTC",
        "RUSTDOC",
        "LD_LIBRARY_PATH",
        "RUSTUP_TOOLCHAIN",
    ];
    always || (toolchain == Toolchain::Debian && debian.contains(&name))
}

fn path_with_usr_bin_first() -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::iter::once(PathBuf::from("/usr/bin")).chain(std::env::split_paths(&path));
    std::env::join_paths(dirs).unwrap_or_else(|_| "/usr/bin:/bin".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRESH: Facts = Facts {
        forced: None,
        target_installed: false,
        rustup: true,
        debian_complete: false,
        can_apt_get: true,
    };

    #[test]
    fn a_fresh_machine_tries_rustup_then_debian() {
        assert_eq!(
            attempts(FRESH),
            [Attempt::RustupTargetAdd, Attempt::AptGetInstall]
        );
    }

    #[test]
    fn what_is_there_is_used_before_anything_is_fetched() {
        let installed = Facts {
            target_installed: true,
            debian_complete: true,
            ..FRESH
        };
        assert_eq!(attempts(installed), [Attempt::Use(Toolchain::InUse)]);
        let debian = Facts {
            debian_complete: true,
            ..FRESH
        };
        assert_eq!(attempts(debian), [Attempt::Use(Toolchain::Debian)]);
    }

    #[test]
    fn a_forced_way_never_falls_back_on_the_other() {
        let both = Facts {
            target_installed: true,
            debian_complete: true,
            ..FRESH
        };
        let with = |facts: Facts, forced| {
            attempts(Facts {
                forced: Some(forced),
                ..facts
            })
        };
        assert_eq!(with(both, Forced::Rustup), [Attempt::Use(Toolchain::InUse)]);
        assert_eq!(
            with(both, Forced::Debian),
            [Attempt::Use(Toolchain::Debian)]
        );
        assert_eq!(with(FRESH, Forced::Rustup), [Attempt::RustupTargetAdd]);
        assert_eq!(with(FRESH, Forced::Debian), [Attempt::AptGetInstall]);
    }

    #[test]
    fn nothing_is_tried_that_cannot_succeed() {
        assert_eq!(
            attempts(Facts {
                rustup: false,
                can_apt_get: false,
                ..FRESH
            }),
            []
        );
    }

    #[test]
    fn an_unknown_way_names_the_value_and_the_allowed_ones() {
        assert_eq!(forced(None).unwrap(), None);
        assert_eq!(
            forced(Some("debian".as_ref())).unwrap(),
            Some(Forced::Debian)
        );
        let error = forced(Some("nix".as_ref())).unwrap_err().to_string();
        assert!(
            error.contains("\"nix\"") && error.contains("rustup, debian"),
            "{error}"
        );
    }

    #[test]
    fn the_linker_package_is_named_by_the_link_and_nothing_else() {
        let package = |link: &str| lld_package(Path::new(link));
        assert_eq!(package("lld-22").as_deref(), Some("lld-22"));
        assert_eq!(
            package("../lib/llvm-22/bin/lld-22").as_deref(),
            Some("lld-22")
        );
        assert_eq!(package("../lib/llvm-22/bin/lld"), None);
        assert_eq!(package("lld-22 -o evil"), None);
    }

    #[test]
    fn debians_cargo_never_sees_the_outer_toolchain() {
        for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "LD_LIBRARY_PATH"] {
            assert!(is_inherited(name, Toolchain::Debian), "{name}");
            assert!(!is_inherited(name, Toolchain::InUse), "{name}");
        }
        for name in [
            "RUSTFLAGS",
            "CARGO_TARGET_DIR",
            "CARGO_BUILD_TARGET",
            "RUSTC_WRAPPER",
        ] {
            assert!(is_inherited(name, Toolchain::InUse), "{name}");
        }
        for name in [
            "PATH",
            "HOME",
            "CARGO_HOME",
            "CARGO_NET_OFFLINE",
            "CARGO_TERM_COLOR",
        ] {
            assert!(!is_inherited(name, Toolchain::Debian), "{name}");
        }
    }
}
