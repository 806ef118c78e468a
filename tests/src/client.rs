//! Clients: one for HTTP as it is usually spoken, one that writes the bytes a test gives it.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::soon;

/// A complete answer.
#[derive(Debug, Clone)]
pub struct Reply {
    /// Status.
    pub status: StatusCode,
    /// Headers; values are bytes as they came.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

impl Reply {
    /// A header's value as text; empty when it is absent.
    pub fn header(&self, name: &str) -> String {
        let value = self
            .headers
            .get(name)
            .map(|value| value.as_bytes())
            .unwrap_or_default();
        String::from_utf8_lossy(value).into_owned()
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// One connection. Dropping it disconnects, whatever is in flight.
#[derive(Debug)]
pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
    driver: JoinHandle<()>,
}

impl Connection {
    /// Connects.
    pub async fn open(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address)
            .await
            .expect("the listener accepts connections");
        let _ = socket.set_nodelay(true);
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(4 << 20)
            .handshake(TokioIo::new(socket))
            .await
            .expect("an HTTP/1.1 connection needs no handshake");
        let driver = tokio::spawn(async {
            let _ = connection.await;
        });
        Self { sender, driver }
    }

    /// Sends a request; returns when the answer's head is there.
    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        let exchange = async {
            self.sender.ready().await?;
            self.sender.send_request(request).await
        };
        let response = soon("an answer begins", exchange).await;
        response.expect("the gateway answers")
    }

    /// Sends a request and reads the whole answer.
    pub async fn call(&mut self, request: Request<Full<Bytes>>) -> Reply {
        let (head, mut body) = self.send(request).await.into_parts();
        let mut whole = Vec::new();
        while let Some(piece) = next_piece(&mut body).await {
            whole.extend_from_slice(&piece);
        }
        Reply {
            status: head.status,
            headers: head.headers,
            body: whole.into(),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// The next piece of a streamed answer, as it arrives; none at its end.
pub async fn next_piece(body: &mut Incoming) -> Option<Bytes> {
    loop {
        let frame = soon("the next piece arrives", body.frame()).await?;
        let frame = frame.expect("the answer is not broken off");
        if let Ok(data) = frame.into_data() {
            return Some(data);
        }
    }
}

/// A JSON `POST`.
pub fn post(path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("host", "gateway")
        .header("content-type", "application/json")
        .body(Full::new(body.into()))
        .expect("a request")
}

/// A `GET`.
pub fn get(path: &str) -> Request<Full<Bytes>> {
    let request = Request::get(path).header("host", "gateway");
    request.body(Full::new(Bytes::new())).expect("a request")
}

/// Writes these bytes to a connection of its own and returns every byte that comes back until the other side closes;
/// so the request should say `connection: close`.
pub async fn raw(address: SocketAddr, request: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(address)
        .await
        .expect("the listener accepts connections");
    socket.write_all(request).await.expect("the gateway reads");
    let mut answer = Vec::new();
    let read = soon("the connection closes", socket.read_to_end(&mut answer)).await;
    read.expect("the gateway closes in order");
    answer
}
