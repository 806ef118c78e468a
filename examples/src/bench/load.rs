//! Closed-loop load: each connection sends its next request when the one before is answered.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Words of the prompt; a word is about a token.
const PROMPT_WORDS: usize = 512;

/// How a client talks to a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// One request; the gateway runs both legs.
    Plain,
    /// The client coordinates: a prefill leg, then a decode leg, with one id. Both together are one request.
    Coordinates,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed {
    /// How long it ran.
    pub elapsed: Duration,
    /// Of each request, ascending.
    pub latencies: Vec<Duration>,
}

impl Timed {
    /// Latency that this share of requests stays below.
    pub fn percentile(&self, share: f64) -> Duration {
        let last = self.latencies.len().saturating_sub(1);
        let index = (share * last as f64).round() as usize;
        self.latencies.get(index).copied().unwrap_or_default()
    }

    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.latencies.len() as f64 / self.elapsed.as_secs_f64()
    }
}

/// Keeps `connections` busy for as long as `lasts`.
///
/// # Errors
/// A request that was not answered with success: what fails is not measured.
pub async fn run(
    gateway: SocketAddr,
    client: Client,
    connections: u64,
    lasts: Duration,
) -> anyhow::Result<Timed> {
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for connection in 0..connections {
        tasks.spawn(async move {
            let mut connection = Connection::open(gateway, client, connection).await?;
            let mut latencies = Vec::new();
            while started.elapsed() < lasts {
                let sent = Instant::now();
                connection.request().await?;
                latencies.push(sent.elapsed());
            }
            anyhow::Ok(latencies)
        });
    }
    let mut latencies = Vec::new();
    while let Some(done) = tasks.join_next().await {
        latencies.extend(done??);
    }
    let elapsed = started.elapsed();
    latencies.sort_unstable();
    Ok(Timed { elapsed, latencies })
}

/// Whether requests get through.
pub(super) async fn serves(gateway: SocketAddr) -> bool {
    let call = async {
        let mut connection = Connection::open(gateway, Client::Plain, 0).await?;
        connection.request().await
    };
    call.await.is_ok()
}

struct Connection {
    sender: SendRequest<Full<Bytes>>,
    client: Client,
    name: u64,
    sent: u64,
    plain: Bytes,
    prefill: Bytes,
    decode: Bytes,
}

impl Connection {
    async fn open(gateway: SocketAddr, client: Client, name: u64) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(gateway)
            .await
            .context("cannot connect to the gateway")?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let prompt = "word ".repeat(PROMPT_WORDS);
        let plain = json!({"model": "m", "max_tokens": 64, "prompt": prompt});
        let with = |params: serde_json::Value| {
            let mut body = plain.clone();
            body["kv_transfer_params"] = params;
            Bytes::from(body.to_string())
        };
        Ok(Self {
            sender,
            client,
            name,
            sent: 0,
            prefill: with(json!({
                "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                "remote_block_ids": null, "remote_host": null, "remote_port": null,
            })),
            decode: with(json!({
                "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "e1",
                "remote_block_ids": [[1, 2, 4]], "remote_host": "10.0.0.42", "remote_port": 5600,
            })),
            plain: plain.to_string().into(),
        })
    }

    async fn request(&mut self) -> anyhow::Result<()> {
        self.sent += 1;
        match self.client {
            Client::Plain => self.call(self.plain.clone()).await,
            Client::Coordinates => {
                self.call(self.prefill.clone()).await?;
                self.call(self.decode.clone()).await
            }
        }
    }

    async fn call(&mut self, body: Bytes) -> anyhow::Result<()> {
        let request = Request::post("/v1/completions")
            .header("host", "gateway")
            .header("content-type", "application/json")
            .header("x-request-id", format!("{}-{}", self.name, self.sent))
            .body(Full::new(body))?;
        self.sender.ready().await?;
        let response = self.sender.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        ensure!(
            status.is_success(),
            "the gateway answered {status}: {}",
            String::from_utf8_lossy(&body)
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instant::Instant as Engine;

    #[tokio::test]
    async fn every_answer_is_timed_and_a_coordinators_two_legs_are_one_request() {
        let engine = Engine::start(None).await.unwrap();
        for client in [Client::Plain, Client::Coordinates] {
            let lasts = Duration::from_millis(50);
            let timed = run(engine.address, client, 2, lasts).await.unwrap();
            assert!(timed.elapsed >= lasts && !timed.latencies.is_empty());
            assert!(timed.percentile(0.5) <= timed.percentile(0.99));
        }
    }
}
