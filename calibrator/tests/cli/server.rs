//! A running `eldr serve`, talked to over real sockets. Nothing here sleeps: what is waited for is a line that the server
//! prints, or its end, for at most [`LIMIT`].

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::bench::Bench;

/// Longest wait.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// A running server, which is killed if a test fails.
pub(crate) struct Server {
    process: Child,
    pub(crate) stdout: Receiver<String>,
    pub(crate) stderr: Receiver<String>,
    pub(crate) first_line: String,
    pub(crate) address: String,
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

/// The lines of `pipe` as they come; the sender goes when the pipe ends.
fn lines(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines() {
            let _ = sender.send(line.unwrap());
        }
    });
    receiver
}

impl Server {
    /// Starts `eldr serve` on a free port and waits until it listens.
    pub(crate) fn start(bench: &Bench, arguments: &str) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_eldr"))
            .args(format!("serve --listen 127.0.0.1:0 --poll-ms 5 {arguments}").split(' '))
            .current_dir(bench.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = lines(process.stdout.take().unwrap());
        let stderr = lines(process.stderr.take().unwrap());
        let first_line = stdout.recv_timeout(LIMIT).unwrap();
        let (_, url) = first_line.split_once("http://").unwrap();
        let address = url.split('"').next().unwrap().to_owned();
        Server {
            process,
            stdout,
            stderr,
            first_line,
            address,
        }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// One request on a connection of its own; `headers` are whole lines.
    pub(crate) fn request(&self, method: &str, path: &str, headers: &str) -> Answer {
        let mut stream = self.connect();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{headers}\r\n"
        )
        .unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let end = bytes
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
            .unwrap();
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let (status, fields) = head.split_once("\r\n").unwrap();
        let fields = fields
            .split("\r\n")
            .map(|field| field.split_once(": ").unwrap());
        Answer {
            status: status.split(' ').nth(1).unwrap().parse().unwrap(),
            headers: fields
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
            body: bytes[end + 4..].to_vec(),
        }
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> u16 {
        let length = body.len();
        self.request(
            "POST",
            path,
            &format!("content-length: {length}\r\n\r\n{body}"),
        )
        .status
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "")
    }

    /// The next line on stderr.
    pub(crate) fn told(&self) -> String {
        self.stderr.recv_timeout(LIMIT).unwrap()
    }

    /// The value of one line of `/metrics`.
    pub(crate) fn metric(&self, name_and_labels: &str) -> u64 {
        let text = String::from_utf8(self.get("/metrics").body).unwrap();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name_and_labels));
        line.unwrap_or_else(|| panic!("{name_and_labels} in {text}"))
            .trim()
            .parse()
            .unwrap()
    }

    /// Tells the server to end; its exit code, and what it said on stderr that no one has read.
    pub(crate) fn end(mut self, signal: &str) -> (Option<i32>, Vec<String>) {
        let kill = format!("kill -{signal} {}", self.process.id());
        assert!(
            Command::new("sh")
                .args(["-c", &kill])
                .status()
                .unwrap()
                .success()
        );
        // Its end closes stdout.
        let closed = loop {
            match self.stdout.recv_timeout(LIMIT) {
                Ok(_) => {}
                Err(end) => break end,
            }
        };
        assert_eq!(closed, RecvTimeoutError::Disconnected, "the server ends");
        let code = self.process.wait().unwrap().code();
        (code, self.stderr.iter().collect())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(found, _)| found == name);
        found.map_or("", |(_, value)| value)
    }
}
