//! Load generator: streaming OpenAI requests at Poisson arrivals, timed token by token.
//!
//! The load is open: a request is sent when it is due, however slow the answers are, and its times
//! count from then. The same seed gives the same arrivals, so policies can be compared request by
//! request. Half of the requests are completions, half chat completions.

mod arrivals;
mod events;
mod summary;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use eldr_calibrator::trace::Record;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode, Uri, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use crate::mock::prompt_for;

pub use arrivals::{Api, Arrival, arrivals};
pub use events::{Event, EventReader, EventTooLong};
pub use summary::{Summary, percentile};

/// How much of an error answer a failure quotes, bytes.
const QUOTED_BYTES: usize = 300;

/// Where the load goes.
#[derive(Clone, Debug)]
pub struct LoadConfig {
    /// Scheme and authority, such as `http://127.0.0.1:8080`.
    pub url: String,
    /// The `model` of every request.
    pub model: String,
    /// Most requests in flight; one that finds no room is late, and its times say so.
    pub in_flight_max: usize,
    /// A request that takes longer has failed.
    pub timeout: Duration,
}

/// What one request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    /// Trace id, the prompt's last word.
    pub id: String,
    /// Words of the prompt.
    pub prompt_tokens: u64,
    /// `max_tokens`.
    pub decode_tokens: u32,
}

impl LoadRequest {
    /// The request that a trace recorded; lengths that it lacks are 1.
    pub fn from_record(record: &Record) -> Self {
        let decode_tokens = record.decode_tokens.unwrap_or(1);
        LoadRequest {
            id: record.id.clone(),
            prompt_tokens: record.prompt_tokens.unwrap_or(1),
            decode_tokens: u32::try_from(decode_tokens).unwrap_or(u32::MAX),
        }
    }

    /// Path and body of the streaming request.
    fn encode(&self, api: Api, model: &str) -> (&'static str, Bytes) {
        let prompt = prompt_for(&self.id, self.prompt_tokens);
        let mut body = json!({
            "model": model,
            "max_tokens": self.decode_tokens,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let path = match api {
            Api::Completions => {
                body["prompt"] = prompt.into();
                "/v1/completions"
            }
            Api::Chat => {
                body["messages"] = json!([{"role": "user", "content": prompt}]);
                "/v1/chat/completions"
            }
        };
        (path, body.to_string().into())
    }
}

/// How one request went.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Trace id.
    pub id: String,
    /// When it was due, since the start of the load.
    pub at: Duration,
    /// From then to the first token.
    pub ttft: Option<Duration>,
    /// Mean time per token after the first; `None` for an answer of fewer than two.
    pub tpot: Option<Duration>,
    /// Tokens received.
    pub tokens: u32,
    /// Why the request failed, if it did.
    pub failure: Option<String>,
}

/// Sends `requests` as `arrivals` says and waits for all answers, in the order of arrival.
///
/// `progress` is told how many answers are complete, after each.
///
/// # Errors
/// Only if `config` is invalid; a request that fails says so in its [`Sample`].
pub async fn run(
    config: &LoadConfig,
    requests: &[LoadRequest],
    arrivals: &[Arrival],
    mut progress: impl FnMut(usize),
) -> anyhow::Result<Vec<Sample>> {
    let base: Uri = config
        .url
        .parse()
        .with_context(|| format!("`{}` is no URL", config.url))?;
    let authority = base
        .authority()
        .with_context(|| format!("`{base}` names no host"))?
        .to_string();
    ensure!(
        config.in_flight_max > 0,
        "in_flight_max is 0: at least one request must be let out"
    );
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client = Client::builder(TokioExecutor::new()).build(connector);
    let room = Arc::new(Semaphore::new(config.in_flight_max));
    let mut running = JoinSet::new();
    let mut samples: Vec<Option<Sample>> = vec![None; arrivals.len()];
    let mut completed = 0;
    let mut note = |joined: Result<(usize, Sample), tokio::task::JoinError>| {
        let (index, sample) = joined.context("a request's task died")?;
        samples[index] = Some(sample);
        completed += 1;
        progress(completed);
        anyhow::Ok(())
    };
    let start = Instant::now();
    for (index, arrival) in arrivals.iter().enumerate() {
        let request = requests
            .get(arrival.request)
            .with_context(|| format!("arrival {index} is of request {}", arrival.request))?;
        let (path, body) = request.encode(arrival.api, &config.model);
        let http = Request::post(format!("http://{authority}{path}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))?;
        let due = start + arrival.at;
        loop {
            tokio::select! {
                () = sleep_until(due) => break,
                Some(joined) = running.join_next() => note(joined)?,
            }
        }
        let permit = Arc::clone(&room).acquire_owned().await?;
        let (client, limit) = (client.clone(), config.timeout);
        let mut sample = Sample {
            id: request.id.clone(),
            at: arrival.at,
            ttft: None,
            tpot: None,
            tokens: 0,
            failure: None,
        };
        let expected = request.decode_tokens;
        running.spawn(async move {
            let _permit = permit;
            let exchange = exchange(&client, http, due, expected, &mut sample);
            let result = match timeout(limit, exchange).await {
                Ok(result) => result,
                Err(_) => Err(anyhow::anyhow!(
                    "no complete answer within {} s",
                    limit.as_secs_f64()
                )),
            };
            sample.failure = result.err().map(|error| format!("{error:#}"));
            (index, sample)
        });
    }
    while let Some(joined) = running.join_next().await {
        note(joined)?;
    }
    Ok(samples.into_iter().flatten().collect())
}

/// One request and its answer; what arrived before an error stays in `sample`.
async fn exchange(
    client: &Client<HttpConnector, Full<Bytes>>,
    request: Request<Full<Bytes>>,
    due: Instant,
    expected: u32,
    sample: &mut Sample,
) -> anyhow::Result<()> {
    let response = client
        .request(request)
        .await
        .context("sending the request")?;
    if response.status() != StatusCode::OK {
        bail!("status {}: {}", response.status(), quote(response).await);
    }
    let mut body = response.into_body();
    let mut reader = EventReader::default();
    let (mut first, mut last) = (None, None);
    let (mut done, mut counted) = (false, None);
    while let Some(frame) = body.frame().await {
        let frame = frame.context("reading the stream")?;
        let now = Instant::now();
        let Some(data) = frame.data_ref() else {
            continue;
        };
        for event in reader.push(data)? {
            match event {
                Event::Tokens(tokens) => {
                    first.get_or_insert(now);
                    last = Some(now);
                    sample.tokens = sample.tokens.saturating_add(tokens);
                }
                Event::Usage { completion_tokens } => counted = Some(completion_tokens),
                Event::Error(error) => bail!("the stream carried an error: {error}"),
                Event::Done => done = true,
                Event::Other => {}
            }
        }
    }
    sample.ttft = first.map(|first| first.duration_since(due));
    sample.tpot = match (first, last, sample.tokens) {
        (Some(first), Some(last), 2..) => Some(last.duration_since(first) / (sample.tokens - 1)),
        _ => None,
    };
    ensure!(
        done,
        "the stream ended after {} tokens without [DONE]",
        sample.tokens
    );
    ensure!(
        sample.tokens == expected,
        "{} tokens where {expected} were asked for",
        sample.tokens
    );
    if let Some(counted) = counted {
        ensure!(
            counted == u64::from(expected),
            "usage counts {counted} tokens, the stream {expected}"
        );
    }
    Ok(())
}

/// The beginning of an error answer.
async fn quote(response: Response<Incoming>) -> String {
    match Limited::new(response.into_body(), 1 << 20).collect().await {
        Ok(body) => {
            let body = body.to_bytes();
            String::from_utf8_lossy(&body[..body.len().min(QUOTED_BYTES)]).into_owned()
        }
        Err(error) => format!("(no body: {error})"),
    }
}
