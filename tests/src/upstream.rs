//! An HTTP/1.1 server whose answers a test scripts, and which keeps what it received.
//!
//! By default each request gets the same [`Answer`]. After [`Upstream::by_hand`] each request waits as an
//! [`Exchange`] until the test answers it, piece by piece if it likes.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::soon;

/// What an upstream received.
#[derive(Debug, Clone)]
pub struct Received {
    /// Method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// Headers; values are bytes as they came.
    pub headers: HeaderMap,
    /// Body, as it came.
    pub body: Bytes,
}

impl Received {
    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the upstream received a body that is not UTF-8")
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("the upstream received no JSON, {e}: {:?}", self.body))
    }
}

/// A scripted answer.
#[derive(Debug, Clone)]
pub struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    /// An answer with this status and an empty body.
    pub fn status(status: u16) -> Self {
        Self {
            status,
            headers: HeaderMap::new(),
            body: Bytes::new(),
        }
    }

    /// A 200 answer with a JSON body.
    pub fn json(body: impl Into<Bytes>) -> Self {
        Self::status(200)
            .header("content-type", "application/json")
            .body(body)
    }

    /// The head of a 200 answer that streams events.
    pub fn event_stream() -> Self {
        Self::status(200).header("content-type", "text/event-stream")
    }

    /// A prefill worker's answer: its transfer parameters (JSON text) and, as a header, the signature.
    pub fn prefill(kv_transfer_params: &str, signature: Option<&str>) -> Self {
        let answer = Self::json(format!(
            r#"{{"id":"cmpl-1","object":"text_completion","choices":[],"usage":{{"prompt_tokens":7}},"kv_transfer_params":{kv_transfer_params}}}"#
        ));
        match signature {
            Some(signature) => answer.header("x-eldr-signature", signature),
            None => answer,
        }
    }

    /// Adds a header; the value may be any bytes that HTTP allows, UTF-8 or not.
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a header name");
        let value = HeaderValue::from_bytes(value.as_ref()).expect("a header value");
        self.headers.append(name, value);
        self
    }

    /// Replaces the body.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    fn response(self, body: AnswerBody) -> Response<AnswerBody> {
        let mut response = Response::new(body);
        *response.status_mut() = self.status.try_into().expect("a status code");
        *response.headers_mut() = self.headers;
        response
    }

    fn complete(self) -> Response<AnswerBody> {
        let body = Full::new(self.body.clone()).map_err(|never: Infallible| match never {});
        self.response(body.boxed())
    }
}

type AnswerBody = BoxBody<Bytes, io::Error>;

/// A request that waits for the test to answer it. Dropping it resets the connection.
#[derive(Debug)]
pub struct Exchange {
    /// What was received.
    pub request: Received,
    responder: oneshot::Sender<Response<AnswerBody>>,
}

impl Exchange {
    /// Answers in one piece.
    pub fn answer(self, answer: Answer) {
        // The other side may have gone, which is what some tests are about.
        let _ = self.responder.send(answer.complete());
    }

    /// Sends the head now, the body as the test releases it.
    pub fn stream(self, head: Answer) -> Stream {
        let (sender, receiver) = mpsc::channel(1);
        let _ = self.responder.send(head.response(Pieces(receiver).boxed()));
        Stream { sender }
    }

    /// Waits until the requester goes away, before an answer.
    pub async fn abandoned(&mut self) {
        soon("the requester goes away", self.responder.closed()).await;
    }
}

/// A body that the test releases piece by piece.
#[derive(Debug)]
pub struct Stream {
    sender: mpsc::Sender<io::Result<Bytes>>,
}

impl Stream {
    /// Releases the next piece.
    pub async fn send(&self, piece: impl Into<Bytes>) {
        assert!(
            self.offer(piece).await,
            "the reader of this stream has gone"
        );
    }

    /// Releases the next piece; false if the reader has gone.
    pub async fn offer(&self, piece: impl Into<Bytes>) -> bool {
        let sent = self.sender.send(Ok(piece.into()));
        soon("the upstream takes a piece", sent).await.is_ok()
    }

    /// Ends the body as it should end.
    pub fn finish(self) {}

    /// Breaks the connection off in the middle of the body.
    pub async fn reset(self) {
        let _ = self
            .sender
            .send(Err(io::Error::other("scripted reset")))
            .await;
    }

    /// Waits until the reader goes away.
    pub async fn abandoned(&self) {
        soon("the reader goes away", self.sender.closed()).await;
    }
}

struct Pieces(mpsc::Receiver<io::Result<Bytes>>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0
            .poll_recv(context)
            .map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}

/// A running upstream. Dropping it closes its port and its connections.
#[derive(Debug)]
pub struct Upstream {
    /// Where it listens, on loopback.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    exchanges: mpsc::UnboundedReceiver<Exchange>,
    server: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    received: Mutex<Vec<Received>>,
    script: Mutex<Script>,
    /// Paths with an answer of their own, whose requests are not kept.
    aside: Mutex<BTreeMap<String, Answer>>,
    by_hand: mpsc::UnboundedSender<Exchange>,
}

#[derive(Debug)]
enum Script {
    Answer(Answer),
    ByHand,
}

impl Upstream {
    /// Listens on a free loopback port and gives every request this answer.
    pub async fn start(answer: Answer) -> Self {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), answer).await
    }

    /// As [`Upstream::start`], on an address that may have been another upstream's before.
    pub async fn start_at(address: SocketAddr, answer: Answer) -> Self {
        let listener = TcpListener::bind(address)
            .await
            .expect("a free port on loopback");
        let address = listener
            .local_addr()
            .expect("a bound listener has an address");
        let (by_hand, exchanges) = mpsc::unbounded_channel();
        let script = Mutex::new(Script::Answer(answer));
        let shared = Arc::new(Shared {
            received: Mutex::default(),
            script,
            aside: Mutex::default(),
            by_hand,
        });
        let server = tokio::spawn(serve(listener, Arc::clone(&shared)));
        Self {
            address,
            shared,
            exchanges,
            server,
        }
    }

    /// From now on every request gets this answer.
    pub fn answers(&self, answer: Answer) {
        *lock(&self.shared.script) = Script::Answer(answer);
    }

    /// From now on requests for this path get this answer and are neither kept nor waiting for the test.
    pub fn answers_aside(&self, path: &str, answer: Answer) {
        lock(&self.shared.aside).insert(path.to_owned(), answer);
    }

    /// Closes its port and its connections: from now on it refuses.
    pub fn close(&self) {
        self.server.abort();
    }

    /// From now on every request waits for the test: see [`Upstream::next`].
    pub fn by_hand(&self) {
        *lock(&self.shared.script) = Script::ByHand;
    }

    /// The next request that waits for the test.
    pub async fn next(&mut self) -> Exchange {
        let next = soon("a request reaches the upstream", self.exchanges.recv()).await;
        next.expect("the server holds the other end")
    }

    /// Answers the next request, which `client` sends, with the head of an event stream; what the client got, and the stream.
    pub async fn streams_to<T>(&mut self, client: impl Future<Output = T>) -> (T, Stream) {
        let stream = async { self.next().await.stream(Answer::event_stream()) };
        tokio::join!(client, stream)
    }

    /// All requests received so far, in order.
    pub fn received(&self) -> Vec<Received> {
        lock(&self.shared.received).clone()
    }

    /// The only request received so far.
    pub fn only(&self) -> Received {
        let mut received = self.received();
        assert_eq!(
            received.len(),
            1,
            "expected exactly one request: {received:?}"
        );
        received.remove(0)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .expect("no test thread panics while it holds this lock")
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    // Aborted with this task, so that a dropped upstream also closes its connections.
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((socket, _)) = listener.accept().await {
        let _ = socket.set_nodelay(true);
        let shared = Arc::clone(&shared);
        let service = service_fn(move |request| handle(Arc::clone(&shared), request));
        let connection = hyper::server::conn::http1::Builder::new()
            .max_buf_size(4 << 20)
            .serve_connection(TokioIo::new(socket), service);
        connections.spawn(async {
            // An error here is a connection that a test broke.
            let _ = connection.await;
        });
    }
}

async fn handle(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, io::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let path = head.uri.to_string();
    if let Some(answer) = lock(&shared.aside).get(&path) {
        return Ok(answer.clone().complete());
    }
    let received = Received {
        method: head.method,
        path,
        headers: head.headers,
        body,
    };
    lock(&shared.received).push(received.clone());
    let pending = match &*lock(&shared.script) {
        Script::Answer(answer) => return Ok(answer.clone().complete()),
        Script::ByHand => {
            let (responder, response) = oneshot::channel();
            let _ = shared.by_hand.send(Exchange {
                request: received,
                responder,
            });
            response
        }
    };
    pending
        .await
        .map_err(|_| io::Error::other("the test dropped the exchange"))
}
