//! `eldr serve`.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::blob_file;
use crate::error::Error;
use crate::refit::Limits;
use crate::serve::{self, Change, Event, Online, Options, Outcome, Served, Source};
use crate::signatures::Space;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr serve --blob task.eldr
  eldr serve --blob chat=chat.eldr --blob code=code.eldr --listen 0.0.0.0:8089
  eldr serve --blob task.eldr --online --if-moved 0.1

GET /v1/blob, or /v1/blobs/NAME, answers with the blob and an ETag, its sha256; 304 if the request
has it in If-None-Match. GET /healthz answers 200, GET /metrics for Prometheus.

A file that changes is verified and then served; a bad one is refused with a word on stderr, and the
one before stays. Replace it by renaming, as `eldr fit -o` does, and give each publication a higher
--revision: gateways take no other.

With --online, gateways post samples of their signatures (`signature_sample` in the filter's
configuration) to the blob's path and /signatures. The regions follow them, as `eldr refit` does it:
each refit replaces the blob's file and keeps the one before beside it. SIGTERM or Ctrl-C ends the server.")]
pub(super) struct ServeArgs {
    /// Blob to serve at /v1/blob, or at /v1/blobs/NAME; may be given several times
    #[arg(long = "blob", required = true, value_name = "[NAME=]FILE")]
    blobs: Vec<String>,
    /// Address and port to listen on; port 0 takes any free one
    #[arg(long, default_value = "127.0.0.1:8089", value_name = "IP:PORT", value_parser = address)]
    listen: SocketAddr,
    /// Milliseconds between two looks at a file
    #[arg(long, default_value_t = 1000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    poll_ms: u64,
    /// Refit the blobs to samples that gateways post
    #[arg(long)]
    online: bool,
    /// Seconds of traffic that a refit looks at
    #[arg(long, default_value_t = 300, value_name = "S", requires = "online", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    window_s: u64,
    /// Most requests that a refit looks at
    #[arg(long, default_value_t = 4096, value_name = "N", requires = "online", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    window_requests: u64,
    /// Fewest requests per region that a refit needs
    #[arg(long, default_value_t = 20, value_name = "N", requires = "online", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    requests_per_region: u64,
    /// Seconds between two refits of a blob, at least
    #[arg(long, default_value_t = 60, value_name = "S", requires = "online", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    refit_every_s: u64,
    /// Refit only if this share of the traffic has moved to other regions, 0 to 1; 0 refits whenever it is time
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", requires = "online", value_parser = super::refit::share)]
    if_moved: f64,
    /// Old revisions to keep beside each blob
    #[arg(long, default_value_t = 5, value_name = "N", requires = "online")]
    keep: usize,
    /// Print the first line as a JSON object
    #[arg(long)]
    json: bool,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let expected = "an IP address and a port were expected, such as 127.0.0.1:8089 or 0.0.0.0:8089";
    text.parse().map_err(|_| expected.to_owned())
}

/// The path under which `--blob` text asks for a file to be served, and the file. What stands before
/// `=` is a name only if it has the letters of one: ./a=b is a file.
fn route(blob: &str) -> (String, PathBuf) {
    let in_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    match blob.split_once('=') {
        Some((name, file)) if !name.is_empty() && name.chars().all(in_name) => {
            (format!("/v1/blobs/{name}"), file.into())
        }
        _ => ("/v1/blob".to_owned(), blob.into()),
    }
}

/// The first line of `--json`.
#[derive(Serialize)]
struct Listening<'a> {
    listening: String,
    blobs: Vec<Blob<'a>>,
}

#[derive(Serialize)]
struct Blob<'a> {
    path: &'a str,
    file: String,
    revision: u64,
    sha256: &'a str,
}

impl ServeArgs {
    /// What clap cannot check on its own; the text is for a usage error.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut files = BTreeMap::new();
        for blob in &self.blobs {
            let (path, file) = route(blob);
            if let Some(other) = files.insert(path.clone(), file.clone()) {
                return Err(format!(
                    "--blob: {path} is to serve both {} and {}\nhint: name them: --blob NAME=FILE, letters, digits, '.', '_' and '-' in a name, each name once",
                    other.display(),
                    file.display(),
                ));
            }
        }
        Ok(())
    }

    pub(super) fn run(&self) -> Result<String, Error> {
        let open = |blob: &String| {
            let (path, file) = route(blob);
            Ok((path, Source::open(file)?))
        };
        let options = Options {
            listen: self.listen,
            blobs: self.blobs.iter().map(open).collect::<Result<_, Error>>()?,
            poll: Duration::from_millis(self.poll_ms),
            online: self.online.then(|| self.online()),
        };
        if self.online {
            for (_, source) in &options.blobs {
                let blob = blob_file::verify(source.path(), &source.served().bytes)?;
                Space::of(&blob)?;
            }
        }
        let json = self.json;
        serve::run(options, move |event| match event {
            Event::Listening { address, blobs } => {
                let text = if json {
                    listening_json(address, blobs)
                } else {
                    listening(address, blobs)
                };
                // A server does not end because nobody reads what it says.
                let _ = super::print(&text);
            }
            Event::Changed {
                path,
                change,
                before,
                source,
            } => {
                let _ =
                    std::io::stderr().write_all(changed(path, change, before, source).as_bytes());
            }
            Event::Refit { path, outcome } => {
                let _ = std::io::stderr().write_all(refit(path, &outcome).as_bytes());
            }
        })?;
        Ok(String::new())
    }

    fn online(&self) -> Online {
        Online {
            limits: Limits {
                age: self.window_s as f64,
                requests: self.window_requests as usize,
                requests_per_region: self.requests_per_region as usize,
                interval: self.refit_every_s as f64,
            },
            if_moved: self.if_moved,
            keep: self.keep,
        }
    }
}

fn listening(address: SocketAddr, blobs: &[(String, Source)]) -> String {
    let mut text = format!("listening on http://{address}\n");
    for (path, source) in blobs {
        let file = source.path().display();
        text += &format!("{path}: {file}, {}\n", facts(source.served()));
    }
    text
}

fn listening_json(address: SocketAddr, blobs: &[(String, Source)]) -> String {
    let blobs = blobs.iter().map(|(path, source)| Blob {
        path,
        file: source.path().display().to_string(),
        revision: source.served().revision,
        sha256: &source.served().sha256,
    });
    let line = Listening {
        listening: format!("http://{address}"),
        blobs: blobs.collect(),
    };
    let json = serde_json::to_string(&line);
    json.expect("numbers, strings and lists have a JSON form") + "\n"
}

fn facts(served: &Served) -> String {
    let Served {
        bytes,
        sha256,
        revision,
        model,
        regions,
    } = served;
    let bytes = bytes.len();
    format!("revision {revision}, model {model}, {regions} regions, {bytes} bytes, sha256 {sha256}")
}

/// What is said on stderr of a refit.
fn refit(path: &str, outcome: &Outcome) -> String {
    match outcome {
        Outcome::Refitted(drift) => format!(
            "refitted: {path}: to {} requests, {:.1} % of them in other regions than fitted, median similarity {:+.3}\n",
            drift.requests,
            100.0 * drift.moved,
            -drift.similarity_lost,
        ),
        Outcome::Failed(error) => {
            format!(
                "refit failed: {path}: {error}; what is served stays\nhint: {}\n",
                error.hint()
            )
        }
    }
}

/// What is said on stderr of a file that changed.
fn changed(path: &str, change: &Change, before: &Served, source: &Source) -> String {
    let (file, now) = (source.path().display(), source.served());
    match change {
        Change::Refused(error) => {
            let old = before.revision;
            format!(
                "refused: {path}: {error}; revision {old} stays\nhint: {}\n",
                error.hint()
            )
        }
        Change::Reloaded => {
            let mut text = format!("reloaded: {path}: {file}, {}\n", facts(now));
            if now.revision <= before.revision && now.sha256 != before.sha256 {
                text += &format!(
                    "note: {path}: revision {} comes after {}; a gateway takes only a higher one than it has\nhint: publish with eldr fit --revision {}\n",
                    now.revision,
                    before.revision,
                    before.revision.saturating_add(1),
                );
            }
            text
        }
    }
}
