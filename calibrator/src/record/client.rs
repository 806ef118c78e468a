//! The engine, over HTTP.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{Request, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use super::Options;
use super::prompts::{Content, Prompt};
use super::routing::{Body, NO_ROUTING};
use crate::error::Error;
use crate::trace::{Record, shorten};

/// Longest answer that is read, bytes: routed experts of 100,000 tokens on 60 layers with top-8 in base64.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Pause before a request is sent once more; twice as long each time.
const PAUSE: Duration = Duration::from_millis(250);
const AGAIN: &str = "see the engine's log, and run it again: it goes on where it ended";

/// A running engine.
#[derive(Clone, Debug)]
pub struct Engine {
    client: Client<HttpConnector, Full<Bytes>>,
    base: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    timeout: Duration,
}

/// What became of a prompt.
#[derive(Debug)]
pub(super) enum Answered {
    Recorded(Box<Record>),
    Rejected(String),
}

/// How one attempt failed.
enum Failure {
    /// It may pass: sent once more.
    Passing(String),
    /// It will not.
    Lasting(Error),
}

struct Answer {
    status: StatusCode,
    signature: Option<String>,
    body: Bytes,
}

impl Engine {
    /// The engine at `url`, such as `http://127.0.0.1:8000`. Each request has these headers and this long to be
    /// answered.
    ///
    /// # Errors
    /// It is no URL that can be reached; the text is for a usage error.
    pub fn new(url: &str, headers: &[String], timeout: Duration) -> Result<Self, String> {
        let uri: Uri = url
            .parse()
            .map_err(|error| format!("{url:?} is no URL: {error}"))?;
        if uri.scheme_str() != Some("http") || uri.host().is_none() || uri.query().is_some() {
            return Err(format!(
                "{url:?} is no http:// URL of an engine\nhint: name it as http://HOST:PORT; if it speaks TLS, put a proxy before it"
            ));
        }
        let headers = headers.iter().map(|header| {
            let parts = header
                .split_once(':')
                .map(|(name, value)| (name.trim(), value.trim()));
            let parsed = parts.and_then(|(name, value)| {
                Some((
                    name.parse::<HeaderName>().ok()?,
                    HeaderValue::from_str(value).ok()?,
                ))
            });
            // Not shown: it may be a secret.
            parsed.ok_or_else(|| "--header: 'name: value' was expected".to_owned())
        });
        Ok(Engine {
            client: Client::builder(TokioExecutor::new()).build_http(),
            base: url.trim_end_matches('/').trim_end_matches("/v1").to_owned(),
            headers: headers.collect::<Result<_, _>>()?,
            timeout,
        })
    }

    /// Sends one prompt until it is answered, at most `1 + options.retries` times.
    pub(super) async fn ask(&self, prompt: &Prompt, options: &Options) -> Result<Answered, Error> {
        let (path, body) = request(prompt, options);
        let mut pause = PAUSE;
        let mut attempt = 0;
        loop {
            match self.attempt(path, &body, prompt, options).await {
                Ok(answered) => return Ok(answered),
                Err(Failure::Lasting(error)) => return Err(error),
                Err(Failure::Passing(why)) if attempt >= options.retries => {
                    let url = &self.base;
                    let times = match attempt {
                        0 => String::new(),
                        retries => format!(", {retries} retries included"),
                    };
                    return Err(Error::new(
                        format!("{url}: prompt {}: {why}{times}", prompt.id),
                        AGAIN,
                    ));
                }
                Err(Failure::Passing(_)) => {}
            }
            attempt += 1;
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    async fn attempt(
        &self,
        path: &str,
        body: &Value,
        prompt: &Prompt,
        options: &Options,
    ) -> Result<Answered, Failure> {
        let Answer {
            status,
            signature,
            body,
        } = self
            .post(path, body, &prompt.id)
            .await
            .map_err(Failure::Passing)?;
        let said = || shorten(String::from_utf8_lossy(&body).trim());
        let lasting = |what: String, hint: &str| {
            let text = format!("{}{path}: prompt {}: {what}", self.base, prompt.id);
            Failure::Lasting(Error::new(text, hint))
        };
        match status.as_u16() {
            200..=299 => {}
            // What the engine says of the prompt, and not of everything.
            400 | 413 | 422 => {
                let why = format!("prompt {}: {status}: {}", prompt.id, said());
                return Ok(Answered::Rejected(why));
            }
            408 | 429 | 500.. => return Err(Failure::Passing(format!("{status}: {}", said()))),
            _ => {
                let hint = "check --prefill, --model and --header";
                return Err(lasting(format!("{status}: {}", said()), hint));
            }
        }
        let parsed: Body = serde_json::from_slice(&body).map_err(|error| {
            lasting(
                format!("the answer is not JSON as vLLM's: {error}: {}", said()),
                AGAIN,
            )
        })?;
        if options.hand_over
            && let Some(params) = &parsed.kv_transfer_params
        {
            self.release(params, &prompt.id).await;
        }
        let mut record = Record {
            id: prompt.id.clone(),
            label: prompt.label.clone(),
            ..Record::default()
        };
        let read = options
            .routing
            .read(signature.as_deref(), &parsed, &mut record);
        let hint = "check --layers and --experts against the model's configuration";
        match read.map_err(|what| lasting(what, hint))? {
            Some(()) => Ok(Answered::Recorded(Box::new(record))),
            None => Err(lasting(
                "the answer says nothing of its experts".into(),
                NO_ROUTING,
            )),
        }
    }

    /// Frees the KV blocks of a hand-over that nobody will fetch. If it fails, their lease ends.
    async fn release(&self, params: &Value, id: &str) {
        let body = json!({ "kv_transfer_params": params });
        let _ = self.post("/v1/kv_transfer/release", &body, id).await;
    }

    async fn post(&self, path: &str, body: &Value, id: &str) -> Result<Answer, String> {
        let mut request =
            Request::post(format!("{}{path}", self.base)).header(CONTENT_TYPE, "application/json");
        if let Ok(id) = HeaderValue::from_str(id) {
            request = request.header("x-request-id", id);
        }
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request
            .body(Full::new(Bytes::from(body.to_string())))
            .map_err(|error| error.to_string())?;
        let exchange = async {
            let answer = self.client.request(request).await.map_err(|error| {
                // Only the innermost says what is the matter.
                let mut cause: &dyn std::error::Error = &error;
                while let Some(deeper) = cause.source() {
                    cause = deeper;
                }
                format!("the request failed: {cause}")
            })?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|error| format!("reading the answer failed: {error}"))?;
            let signature = head.headers.get("x-eldr-signature");
            Ok(Answer {
                status: head.status,
                signature: signature
                    .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()),
                body: body.to_bytes(),
            })
        };
        let seconds = self.timeout.as_secs_f64();
        tokio::time::timeout(self.timeout, exchange)
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {seconds} s")))
    }
}

/// Path and body of the request for a prompt.
fn request(prompt: &Prompt, options: &Options) -> (&'static str, Value) {
    let (path, key, content) = match &prompt.content {
        Content::Prompt(prompt) => ("/v1/completions", "prompt", prompt),
        Content::Messages(messages) => ("/v1/chat/completions", "messages", messages),
    };
    let mut body = json!({
        "model": options.model, "max_tokens": options.max_tokens, "temperature": 0, "stream": false,
    });
    body[key] = content.clone();
    if options.hand_over {
        body["kv_transfer_params"] = json!({
            "do_remote_decode": true, "do_remote_prefill": false,
            "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null,
        });
    }
    (path, body)
}
