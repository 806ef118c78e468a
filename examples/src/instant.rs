//! An engine that answers at once, to see what a gateway costs: prefill legs with transfer params and a signature
//! header, other requests with one token, and what routers ask a worker before they use it. Nothing is simulated; [`mock`](crate::mock) does that.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use eldr_core::blob::{Blob, Fit};
use eldr_core::signature::{Encoding, Geometry, Signature, SignatureError};
use eldr_core::transform::Transform;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::gateway::decode_cluster;

const PREFILLED: &str = r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"instant","choices":[{"index":0,"text":" a","finish_reason":"length"}],"usage":{"prompt_tokens":512,"completion_tokens":1,"total_tokens":513},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,4]],"remote_engine_id":"e1","remote_request_id":"r1","remote_host":"10.0.0.42","remote_port":5600,"tp_size":1}}"#;
const DECODED: &str = r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"instant","choices":[{"index":0,"text":" a","finish_reason":"length"}],"usage":{"prompt_tokens":512,"completion_tokens":1,"total_tokens":513}}"#;
const MODELS: &str = r#"{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}"#;
/// What tells a prefill leg from the rest.
const PREFILL_LEG: &[u8] = br#""do_remote_decode":true"#;

/// The engine; it stops when dropped.
#[derive(Debug)]
pub struct Instant {
    /// Where it listens.
    pub address: SocketAddr,
    server: JoinHandle<()>,
}

impl Instant {
    /// Serves on a free port. `signature` is the header value of prefill answers.
    ///
    /// # Errors
    /// No port can be bound.
    pub async fn start(signature: Option<&str>) -> io::Result<Self> {
        let signature = signature
            .map(HeaderValue::from_str)
            .transpose()
            .map_err(io::Error::other)?;
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                let signature = signature.clone();
                let service = service_fn(move |request| answer(request, signature.clone()));
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Ok(Self { address, server })
    }
}

impl Drop for Instant {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn answer(
    request: Request<Incoming>,
    signature: Option<HeaderValue>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    if head.method == Method::GET {
        return Ok(probed(head.uri.path()));
    }
    let body = body.collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let prefills = body
        .windows(PREFILL_LEG.len())
        .any(|window| window == PREFILL_LEG);
    let text = if prefills { PREFILLED } else { DECODED };
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let (true, Some(signature)) = (prefills, signature) {
        headers.insert("x-eldr-signature", signature);
    }
    Ok(response)
}

/// A worker that is well and serves the model `m`, and does not say more.
fn probed(path: &str) -> Response<Full<Bytes>> {
    let (status, text) = match path {
        "/health" => (StatusCode::OK, ""),
        "/v1/models" => (StatusCode::OK, MODELS),
        _ => (StatusCode::NOT_FOUND, ""),
    };
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

/// The signature header of a prompt of 512 tokens with 8 experts each, spread as gates spread them: unevenly, and
/// with a region of its own. `layers` are those that the engine sends.
///
/// # Errors
/// The layers are not of the geometry.
pub fn signature(
    geometry: Geometry,
    layers: Vec<u16>,
    encoding: Encoding,
) -> Result<String, SignatureError> {
    let count = |i: usize| match i % 16 {
        3 => 200,
        _ => (i * 31 % 17) as u16,
    };
    let counts = (0..layers.len() * geometry.experts).map(count).collect();
    let signature = Signature::sparse(geometry, layers, counts, Some(512));
    signature.map(|signature| signature.encode(encoding))
}

/// Centroids that tell such signatures apart: region r, served by decode cluster r, prefers every 16th expert.
///
/// # Errors
/// The layers are not of the geometry.
pub fn blob(geometry: Geometry, layers: Vec<u16>, regions: usize) -> anyhow::Result<Blob> {
    let dimension = layers.len() * geometry.experts;
    let weights = (0..dimension).map(|i| 0.1 + (i % 7) as f32).collect();
    let mut centroids = Vec::with_capacity(regions * dimension);
    for region in 0..regions {
        let value = |i: usize| {
            let own = i % 16 == region % 16;
            let noise = (i * (region + 3) % 11) as f32 / 50.0;
            f32::from(u8::from(own)) + noise
        };
        let row: Vec<f32> = (0..dimension).map(value).collect();
        let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        centroids.extend(row.iter().map(|x| x / norm));
    }
    Ok(Blob {
        revision: 1,
        model: "instant".into(),
        transform: Transform::new(geometry, layers, weights)?,
        centroids,
        tau: 0.1,
        regions: (0..regions)
            .map(|region| vec![decode_cluster(region)])
            .collect(),
        fit: Fit {
            requests: 1_000,
            rho: None,
            seed: 1,
            shares: vec![1.0 / regions as f64; regions],
            quantiles: vec![vec![0.5; 7]; regions],
        },
        source: None,
    })
}
