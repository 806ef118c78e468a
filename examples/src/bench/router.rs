//! vllm-router from its Python wheel, in a virtual environment of its own.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::setup::python_tool;

/// The release that is compared.
pub(super) const VERSION: &str = "0.1.17";
const PATIENCE: Duration = Duration::from_secs(30);

/// A running router; it stops when dropped.
#[derive(Debug)]
pub(super) struct Router {
    child: Child,
    pub(super) address: SocketAddr,
}

impl Router {
    /// Path of the router, fetched if it is not there.
    pub(super) fn binary() -> anyhow::Result<PathBuf> {
        Ok(python_tool("vllm-router", VERSION)?)
    }

    /// Starts it with one worker thread, round robin, and waits until it serves.
    pub(super) async fn start(
        binary: &PathBuf,
        prefill: SocketAddr,
        decode: &[SocketAddr],
    ) -> anyhow::Result<Self> {
        let address = free_address()?;
        let mut command = Command::new(binary);
        command
            .env("TOKIO_WORKER_THREADS", "1")
            .args(["--host", "127.0.0.1", "--port", &address.port().to_string()])
            .args(["--prometheus-port", &free_address()?.port().to_string()])
            .args(["--vllm-pd-disaggregation", "--policy", "round_robin"])
            .args([
                "--log-level",
                "error",
                "--worker-startup-check-interval",
                "1",
            ])
            .args(["--prefill", &format!("http://{prefill}")]);
        for worker in decode {
            command.args(["--decode", &format!("http://{worker}")]);
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run {}", binary.display()))?;
        let router = Self { child, address };
        let started = Instant::now();
        while !super::load::serves(address).await {
            if started.elapsed() > PATIENCE {
                bail!("vllm-router {VERSION} does not serve after {PATIENCE:?}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(router)
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

/// A port that was free a moment ago: the router takes none that is 0.
fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?)
}
