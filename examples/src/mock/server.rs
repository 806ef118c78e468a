//! The HTTP side of a worker.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use hyper::body::Frame;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::KvProtocol;
use super::answer::{Answer, Usage};
use super::metrics;
use super::registry::{Fetched, Owner, Release};
use super::request::{Api, ApiError, GenerationRequest, KvTransfer, release_params};
use super::steps::Tokens;
use super::worker::Worker;

/// Largest request body, bytes.
const BODY_BYTES_MAX: usize = 16 << 20;
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(10);
const SIGNATURE: &str = "x-eldr-signature";
const REQUEST_ID: &str = "x-request-id";

/// Serves `worker` until the future is dropped; then all its connections are cut.
pub(crate) async fn serve(listener: TcpListener, worker: Arc<Worker>) -> Infallible {
    let router = Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/responses", post(responses))
        .route("/inference/v1/generate", post(generate_tokens))
        .route("/v1/kv_transfer/release", post(release))
        .route("/v1/models", get(models))
        .route("/health", get(|| async { StatusCode::OK }))
        .route("/metrics", get(show_metrics))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(worker);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                // The client was gone already, or no descriptor is free, which may pass.
                let Ok((stream, _)) = accepted else {
                    tokio::time::sleep(ACCEPT_AGAIN_AFTER).await;
                    continue;
                };
                // Tokens are small and must not wait for the one before to be acknowledged.
                let _ = stream.set_nodelay(true);
                let service = TowerToHyperService::new(router.clone());
                connections.spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn completions(
    State(worker): State<Arc<Worker>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    generate(&worker, Api::Completions, &headers, &body).await
}

async fn chat(
    State(worker): State<Arc<Worker>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    generate(&worker, Api::Chat, &headers, &body).await
}

async fn responses(
    State(worker): State<Arc<Worker>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    generate(&worker, Api::Responses, &headers, &body).await
}

async fn generate_tokens(
    State(worker): State<Arc<Worker>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    generate(&worker, Api::Generate, &headers, &body).await
}

/// Frees KV blocks that no decode worker will fetch, as the official ELDR fork does.
async fn release(State(worker): State<Arc<Worker>>, body: Bytes) -> Result<Response, ApiError> {
    let released = match worker.release(&release_params(&body)?) {
        Release::Unknown => return Err(ApiError::not_found("no such KV blocks were handed out")),
        release => release == Release::Freed,
    };
    Ok(json_response(
        json!({ "released": released }).to_string().into(),
    ))
}

async fn models(State(worker): State<Arc<Worker>>) -> Response {
    let shared = &worker.shared;
    let model = json!({
        "id": shared.limits.model,
        "object": "model",
        "created": shared.created,
        "owned_by": "eldr",
        "max_model_len": shared.limits.context_tokens,
    });
    json_response(
        json!({ "object": "list", "data": [model] })
            .to_string()
            .into(),
    )
}

async fn show_metrics(State(worker): State<Arc<Worker>>) -> Response {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], metrics::render(&worker)).into_response()
}

async fn generate(
    worker: &Worker,
    api: Api,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Response, ApiError> {
    let shared = &worker.shared;
    let request = GenerationRequest::parse(api, body, &shared.limits)?;
    if worker.speaks(KvProtocol::SharedStorage) && request.kv != KvTransfer::None {
        let message = "the shared storage connector takes no kv_transfer_params";
        return Err(ApiError::bad_request(message));
    }
    worker.counters().requests += 1;
    let request_id = headers
        .get(REQUEST_ID)
        .map(|id| String::from_utf8_lossy(id.as_bytes()).into_owned());
    let answer = answer(worker, api, &request, request_id.as_deref());
    let owner = Owner {
        prompt: request
            .prompts
            .iter()
            .fold(0, |all, prompt| all.rotate_left(1) ^ prompt.hash),
        request_id,
    };
    let prompt_tokens = request.prompts.iter().map(|prompt| prompt.tokens).sum();
    let (signature, cached_tokens) = match &request.kv {
        KvTransfer::RemoteDecode => {
            let prefilled = worker.prefill(&request.prompts).await;
            let lengths = worker.lengths(&request);
            let decoded = lengths.iter().copied().map(u64::from).sum();
            let usage = Usage::new(prompt_tokens, prefilled.cached_tokens, decoded);
            let signature = worker.signature_header(&prefilled);
            let id = request.transfer_id.as_deref();
            let params = worker.hold(&answer.id, prompt_tokens, owner, prefilled, id)?;
            let response = json_response(answer.whole(&lengths, usage, params.as_ref()));
            return Ok(signed(response, signature));
        }
        KvTransfer::RemotePrefill(params) if worker.fetch(params, &owner)? == Fetched::InTime => {
            (None, 0)
        }
        KvTransfer::None if worker.finds_stored(owner.prompt) => (None, 0),
        KvTransfer::RemotePrefill(_) | KvTransfer::None => {
            let prefilled = worker.prefill(&request.prompts).await;
            (worker.signature_header(&prefilled), prefilled.cached_tokens)
        }
    };
    let tokens = worker.decode(&request);
    let lengths = worker.lengths(&request);
    let response = if request.stream {
        let usage = request
            .include_usage
            .then_some((prompt_tokens, cached_tokens));
        let body = EventStream {
            answer,
            tokens,
            done: vec![false; lengths.len()],
            sent: 0,
            usage,
            prompt: (prompt_tokens, cached_tokens),
        };
        let kind = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")];
        (kind, Body::new(body)).into_response()
    } else {
        let decoded = decode_all(tokens, lengths.len()).await?;
        let sum = decoded.iter().copied().map(u64::from).sum();
        let usage = Usage::new(prompt_tokens, cached_tokens, sum);
        json_response(answer.whole(&decoded, usage, None))
    };
    Ok(signed(response, signature))
}

fn answer(
    worker: &Worker,
    api: Api,
    request: &GenerationRequest,
    request_id: Option<&str>,
) -> Answer {
    let shared = &worker.shared;
    let prefix = match api {
        Api::Completions => "cmpl",
        Api::Chat => "chatcmpl",
        Api::Responses => "resp",
        Api::Generate => "gen",
    };
    let id = match request_id {
        Some(id) => format!("{prefix}-{id}"),
        None => format!(
            "{prefix}-{:016x}",
            shared.next_request.fetch_add(1, Ordering::Relaxed)
        ),
    };
    Answer {
        api,
        id,
        created: shared.created,
        model: shared.limits.model.clone(),
        finish_reason: if request.max_tokens.is_some() {
            "length"
        } else {
            "stop"
        },
    }
}

/// How many tokens each sequence got; an error if the worker stops in between.
async fn decode_all(mut tokens: Tokens, sequences: usize) -> Result<Vec<u32>, ApiError> {
    let (mut decoded, mut left) = (vec![0; sequences], sequences);
    while left > 0 {
        let token = tokens
            .next()
            .await
            .ok_or_else(|| ApiError::internal("the worker stopped"))?;
        decoded[token.sequence] += 1;
        left -= usize::from(token.last);
    }
    Ok(decoded)
}

/// A stream of server-sent events, one per token. If the client goes away it is dropped, and with it
/// the request's place in the batch.
struct EventStream {
    answer: Answer,
    tokens: Tokens,
    /// Which sequences are complete.
    done: Vec<bool>,
    /// Tokens sent.
    sent: u64,
    /// The prompt's tokens and how many of them were cached, if the client wants the usage told.
    usage: Option<(u64, u64)>,
    /// The same two, for those who want it told at the end.
    prompt: (u64, u64),
}

impl hyper::body::Body for EventStream {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        if this.done.iter().all(|&done| done) {
            return Poll::Ready(None);
        }
        let Some(token) = ready!(this.tokens.poll(context)) else {
            return Poll::Ready(Some(Err("the worker stopped")));
        };
        let mut events = match token.token {
            0 => this.answer.opening(token.sequence).unwrap_or_default(),
            _ => String::new(),
        };
        events += &this.answer.token(token.sequence, token.token, token.last);
        this.sent += 1;
        this.done[token.sequence] |= token.last;
        if this.done.iter().all(|&done| done) {
            if let Some((prompt_tokens, cached_tokens)) = this.usage {
                events += &this
                    .answer
                    .usage(Usage::new(prompt_tokens, cached_tokens, this.sent));
            }
            let (prompt_tokens, cached_tokens) = this.prompt;
            let usage = Usage::new(prompt_tokens, cached_tokens, this.sent);
            events += &this.answer.end(usage);
        }
        Poll::Ready(Some(Ok(Frame::data(events.into()))))
    }
}

fn json_response(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn signed(mut response: Response, signature: Option<HeaderValue>) -> Response {
    if let Some(signature) = signature {
        response.headers_mut().insert(SIGNATURE, signature);
    }
    response
}
