//! Other gateways from their Python wheels, each in a virtual environment of its own.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpStream;

use crate::setup::python_tool;

const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at a router that starts.
const PAUSE: Duration = Duration::from_millis(50);

/// A router that can serve prefill and decode apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    /// vLLM's.
    VllmRouter,
    /// Shepherd Model Gateway, with vLLM workers.
    Smg,
    /// SGLang's, which knows SGLang's way only: both legs at once, with a room to meet in.
    SglangRouter,
}

impl Product {
    /// Every one once.
    pub(super) const ALL: [Self; 3] = [Self::VllmRouter, Self::Smg, Self::SglangRouter];

    /// Package, which is the program's name too, and the release that is compared.
    fn package(self) -> (&'static str, &'static str) {
        match self {
            Self::VllmRouter => ("vllm-router", "0.1.17"),
            Self::Smg => ("smg", "1.13.0"),
            Self::SglangRouter => ("sglang-router", "0.3.2"),
        }
    }

    pub(super) fn describe(self) -> String {
        let (name, version) = self.package();
        let legs = match self {
            Self::VllmRouter | Self::Smg => "both legs",
            Self::SglangRouter => "both legs at once",
        };
        format!("{name} {version}, {legs}, no signature")
    }

    /// Path of the program, fetched if it is not there.
    pub(super) fn binary(self) -> anyhow::Result<PathBuf> {
        let (package, version) = self.package();
        Ok(python_tool(package, version)?)
    }

    fn command(self, binary: &Path, prefill: SocketAddr, decode: &[SocketAddr]) -> Command {
        let mut command = Command::new(binary);
        command.args(match self {
            Self::VllmRouter => ["--vllm-pd-disaggregation"].as_slice(),
            Self::Smg => &["launch", "--pd-disaggregation", "--backend", "vllm"],
            Self::SglangRouter => &["launch", "--pd-disaggregation"],
        });
        if self != Self::Smg {
            command.args(["--prefill", &format!("http://{prefill}")]);
            for worker in decode {
                command.args(["--decode", &format!("http://{worker}")]);
            }
        }
        command
    }
}

/// A running router; it stops when dropped.
#[derive(Debug)]
pub(super) struct Router {
    child: Child,
    pub(super) address: SocketAddr,
}

impl Router {
    /// Starts it with one worker thread, round robin, and waits until it serves.
    pub(super) async fn start(
        product: Product,
        binary: &Path,
        prefill: SocketAddr,
        decode: &[SocketAddr],
    ) -> anyhow::Result<Self> {
        let address = free_address()?;
        let mut command = product.command(binary, prefill, decode);
        command
            .env("TOKIO_WORKER_THREADS", "1")
            .args(["--host", "127.0.0.1", "--port", &address.port().to_string()])
            .args(["--prometheus-port", &free_address()?.port().to_string()])
            .args(["--policy", "round_robin", "--log-level", "error"])
            .args(["--worker-startup-check-interval", "1"]);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run {}", binary.display()))?;
        let router = Self { child, address };
        let started = Instant::now();
        if product == Product::Smg {
            for (worker, kind, role) in std::iter::once((prefill, "prefill", "kv_producer"))
                .chain(decode.iter().map(|&to| (to, "decode", "kv_consumer")))
            {
                while let Err(error) = register(address, worker, kind, role).await {
                    router.is_patient(product, started).context(error)?;
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        while !super::load::serves(address).await {
            router.is_patient(product, started)?;
            tokio::time::sleep(PAUSE).await;
        }
        Ok(router)
    }

    fn is_patient(&self, product: Product, started: Instant) -> anyhow::Result<()> {
        if started.elapsed() > PATIENCE {
            let (name, version) = product.package();
            let address = self.address;
            bail!("{name} {version} does not serve at {address} after {PATIENCE:?}");
        }
        Ok(())
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tells smg of a worker and its KV connector, which no option of its command line says: without it the legs get no params.
async fn register(
    router: SocketAddr,
    worker: SocketAddr,
    kind: &str,
    role: &str,
) -> anyhow::Result<()> {
    let (mut sender, connection) =
        handshake(TokioIo::new(TcpStream::connect(router).await?)).await?;
    tokio::spawn(connection);
    let body = json!({
        "url": format!("http://{worker}"), "worker_type": kind, "runtime_type": "vllm",
        "kv_connector": "NixlConnector", "kv_role": role,
    });
    let request = Request::post("/workers")
        .header("host", "router")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))?;
    let status = sender.send_request(request).await?.status();
    ensure!(status.is_success(), "a worker was not taken: {status}");
    Ok(())
}

/// A port that was free a moment ago: routers take none that is 0.
fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?)
}
