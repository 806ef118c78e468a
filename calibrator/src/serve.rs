//! The other end of the gateways' blob updates: blobs over HTTP, reloaded when their files change.
//!
//! | path | answer |
//! |---|---|
//! | `/v1/blob`, `/v1/blobs/NAME` | the blob's bytes with a strong `ETag`; 304 to an `If-None-Match` that has it (RFC 9110 §13.1.2) |
//! | the blob's path and `/signatures` | with [`Online`]: POST of signature header values, one per line; 204, or 503 when there is no room |
//! | `/healthz` | 200 while the process lives: it always has a good blob |
//! | `/metrics` | Prometheus metrics |
//!
//! A file is verified before it replaces what is served, so a gateway never gets a bad blob from here.

mod metrics;
mod online;
mod source;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};

use crate::error::Error;
use metrics::Metrics;
use online::{Follower, Inbox};
pub use online::{Online, Outcome};
pub use source::{Change, Served, Source};

/// How long a request that is under way may still take when the server is told to end.
const GRACE: Duration = Duration::from_secs(2);

/// What to serve, and where.
#[derive(Debug)]
pub struct Options {
    /// Address and port; port 0 takes any free one.
    pub listen: SocketAddr,
    /// The blobs, each with its path, such as `/v1/blob`. No two paths are equal.
    pub blobs: Vec<(String, Source)>,
    /// Time between two looks at a file.
    pub poll: Duration,
    /// Whether and when to refit to samples of the traffic.
    pub online: Option<Online>,
}

/// What there is to tell while serving.
#[derive(Debug)]
pub enum Event<'a> {
    /// Requests are answered from now on, and signals are heeded.
    Listening {
        /// The bound address.
        address: SocketAddr,
        /// The blobs with their paths.
        blobs: &'a [(String, Source)],
    },
    /// A file changed.
    Changed {
        /// The blob's path.
        path: &'a str,
        /// What became of it.
        change: &'a Change,
        /// What was served before.
        before: &'a Served,
        /// Its file, and what is served now.
        source: &'a Source,
    },
    /// A refit was due.
    Refit {
        /// The blob's path.
        path: &'a str,
        /// What came of it.
        outcome: Outcome,
    },
}

/// Serves until the process is told to end (SIGTERM, SIGINT); `on_event` hears what happens.
///
/// # Errors
/// The address cannot be bound, or the system gives no sockets, threads or signals.
pub fn run(
    options: Options,
    on_event: impl Fn(Event<'_>) + Send + Sync + 'static,
) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| failed("starting", &error))?;
    runtime.block_on(serve(options, on_event))
}

async fn serve(
    options: Options,
    on_event: impl Fn(Event<'_>) + Send + Sync + 'static,
) -> Result<(), Error> {
    let Options {
        listen,
        blobs,
        poll,
        online,
    } = options;
    let hint = "choose another address with --listen; port 0 takes any free one";
    let listener = TcpListener::bind(listen)
        .await
        .map_err(|error| Error::new(format!("listening on {listen} failed: {error}"), hint))?;
    let told = |error| failed("listening", &error);
    let address = listener.local_addr().map_err(told)?;
    let mut terminated = signal(SignalKind::terminate()).map_err(told)?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(told)?;

    let metrics = Arc::new(Metrics::new());
    let paths: Vec<&str> = blobs.iter().map(|(path, _)| path.as_str()).collect();
    let (inboxes, batches) = online::queue(&paths, &metrics);
    let inboxes = online.map(|_| inboxes);
    let (app, published) = app(&blobs, inboxes, &metrics);
    on_event(Event::Listening {
        address,
        blobs: &blobs,
    });
    let on_event = Arc::new(on_event);
    if let Some(online) = online {
        let follower =
            |((path, source), published): (&(String, Source), &watch::Sender<Served>)| {
                Follower::new(
                    path.clone(),
                    source.path().to_owned(),
                    published.subscribe(),
                )
            };
        let followers = blobs.iter().zip(&published).map(follower).collect();
        let (metrics, on_event) = (Arc::clone(&metrics), Arc::clone(&on_event));
        let told = move |path: &str, outcome| on_event(Event::Refit { path, outcome });
        thread::Builder::new()
            .name("refit".into())
            .spawn(move || online::follow(followers, &batches, online, &metrics, told))
            .map_err(|error| failed("starting", &error))?;
    }
    // Not a task: reading files blocks. The thread ends with the process.
    thread::Builder::new()
        .name("reload".into())
        .spawn(move || watch_files(blobs, &published, &metrics, poll, &*on_event))
        .map_err(|error| failed("starting", &error))?;

    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    let server =
        axum::serve(listener, app).with_graceful_shutdown(async move { stopped.notified().await });
    let told_to_end = async {
        tokio::select! {
            _ = terminated.recv() => {}
            _ = interrupted.recv() => {}
        }
        stop.notify_one();
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        served = server => served.map_err(|error| failed("serving", &error)),
        () = told_to_end => Ok(()),
    }
}

fn failed(doing: &str, error: &std::io::Error) -> Error {
    let hint = "check the limits of the process, such as open files and threads";
    Error::new(format!("{doing} failed: {error}"), hint)
}

/// The routes, and per blob the end that replaces it.
fn app(
    blobs: &[(String, Source)],
    inboxes: Option<Vec<Inbox>>,
    metrics: &Arc<Metrics>,
) -> (Router, Vec<watch::Sender<Served>>) {
    let mut router = Router::new();
    let mut published = Vec::new();
    let mut paths = Vec::new();
    for (path, source) in blobs {
        let (sender, receiver) = watch::channel(source.served().clone());
        metrics.serves(path, source.served().revision);
        router = router.route(path, get(blob).with_state(receiver));
        published.push(sender);
        paths.push(path.as_str());
    }
    for ((path, _), inbox) in blobs.iter().zip(inboxes.into_iter().flatten()) {
        let limit = DefaultBodyLimit::max(online::BATCH_BYTES_MAX);
        let route = post(online::take).with_state(inbox).layer(limit);
        router = router.route(&format!("{path}/signatures"), route);
    }
    let not_found = format!("no such path; blobs are at: {}\n", paths.join(" "));
    let router = router
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/metrics", get(show).with_state(Arc::clone(metrics)))
        .fallback(|| async { (StatusCode::NOT_FOUND, not_found) })
        .layer(middleware::from_fn_with_state(Arc::clone(metrics), count));
    (router, published)
}

async fn blob(State(served): State<watch::Receiver<Served>>, request: HeaderMap) -> Response {
    let served = served.borrow().clone();
    let etag = format!("\"{}\"", served.sha256);
    let known = knows(&request, &etag);
    let headers = [
        (header::ETAG, etag),
        // It may be kept, and must be asked for again before each use.
        (header::CACHE_CONTROL, "no-cache".to_owned()),
    ];
    if known {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    (headers, served.bytes).into_response()
}

/// Whether `If-None-Match` lists `etag` or is `*`. The comparison is the weak one, as for every
/// If-None-Match: a proxy that compresses turns a tag into a weak one.
fn knows(request: &HeaderMap, etag: &str) -> bool {
    let values = request.get_all(header::IF_NONE_MATCH).into_iter();
    let tags = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|list| list.split(','));
    tags.map(str::trim)
        .any(|tag| tag == "*" || tag.strip_prefix("W/").unwrap_or(tag) == etag)
}

async fn show(State(metrics): State<Arc<Metrics>>) -> Response {
    (
        [(header::CONTENT_TYPE, metrics::CONTENT_TYPE)],
        metrics.text(),
    )
        .into_response()
}

async fn count(State(metrics): State<Arc<Metrics>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let path = path.as_ref().map_or("other", MatchedPath::as_str);
    metrics.answered(path, response.status().as_u16());
    response
}

fn watch_files(
    mut blobs: Vec<(String, Source)>,
    published: &[watch::Sender<Served>],
    metrics: &Metrics,
    poll: Duration,
    on_event: impl Fn(Event<'_>),
) {
    loop {
        thread::sleep(poll);
        for ((path, source), published) in blobs.iter_mut().zip(published) {
            let before = source.served().clone();
            let Some(change) = source.poll() else {
                continue;
            };
            match &change {
                Change::Reloaded => {
                    published.send_replace(source.served().clone());
                    metrics.reloaded(path, source.served().revision);
                }
                Change::Refused(_) => metrics.refused(path),
            }
            on_event(Event::Changed {
                path,
                change: &change,
                before: &before,
                source,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_none_match_is_a_list_compared_weakly() {
        let knows = |values: &[&[u8]]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::IF_NONE_MATCH, value[..].try_into().unwrap());
            }
            knows(&headers, "\"a\"")
        };
        for yes in [
            &b"\"a\""[..],
            b"W/\"a\"",
            b"*",
            b"\"b\", \"a\"",
            b" W/\"b\" ,W/\"a\" ",
        ] {
            assert!(knows(&[yes]), "{}", yes.escape_ascii());
        }
        assert!(knows(&[b"\"b\"", b"\"\xff\"", b"\"a\""]), "several lines");
        for no in [
            &b""[..],
            b"a",
            b"\"A\"",
            b"\"b\"",
            b"w/\"a\"",
            b"\"a",
            b"\xff",
        ] {
            assert!(!knows(&[no]), "{}", no.escape_ascii());
        }
        assert!(!knows(&[]));
    }
}
