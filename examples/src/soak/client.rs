//! A client that behaves badly at times.

use std::net::SocketAddr;
use std::time::Duration;

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// No answer takes longer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest that a client stays which leaves before its answer is complete.
const STAY: Duration = Duration::from_millis(400);

/// How a visit ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visit {
    /// With an answer of this status.
    Answered(u16),
    /// The client left first, on purpose.
    Left,
    /// The gateway closed the connection without an answer, or in the middle of one.
    Broken,
    /// No complete answer after half a minute.
    Hung,
    /// No connection could be made.
    Refused,
}

/// One connection, one request: mostly a streamed or plain completion, sometimes something that is refused or bypassed,
/// and a third of the clients leave at some moment.
pub async fn visit(gateway: SocketAddr, rng: &mut ChaCha8Rng) -> Visit {
    let (head, body) = request(rng);
    let leaves = rng.random_range(0..3) == 0;
    let sent = match (leaves, rng.random_range(0..4)) {
        // All headers, at least: what never was a request has no outcome.
        (true, 0) if !body.is_empty() => rng.random_range(1..=body.len()),
        _ => body.len(),
    };
    let Ok(mut socket) = TcpStream::connect(gateway).await else {
        return Visit::Refused;
    };
    let bytes = [head.as_bytes(), &body.as_bytes()[..sent]].concat();
    if socket.write_all(&bytes).await.is_err() {
        return Visit::Broken;
    }
    let mut answer = Vec::new();
    if leaves {
        let stay = STAY.mul_f64(rng.random_range(0.0..1.0));
        return match timeout(stay, socket.read_to_end(&mut answer)).await {
            Ok(Ok(_)) => end(&answer),
            Ok(Err(_)) => Visit::Broken,
            Err(_) => Visit::Left,
        };
    }
    match timeout(PATIENCE, socket.read_to_end(&mut answer)).await {
        Ok(Ok(_)) => end(&answer),
        Ok(Err(_)) => Visit::Broken,
        Err(_) => Visit::Hung,
    }
}

fn request(rng: &mut ChaCha8Rng) -> (String, String) {
    let prompt = "word ".repeat(rng.random_range(1..400));
    let tokens = rng.random_range(1..24);
    let stream = rng.random_range(0..3) > 0;
    let completion = json!({
        "model": "mock", "prompt": prompt, "max_tokens": tokens, "stream": stream,
    });
    let (method, path, body) = match rng.random_range(0..20) {
        0 => ("GET", "/v1/models", String::new()),
        1 => ("POST", "/v1/completions", "{\"model\": \"mock\", ".into()),
        2 => ("POST", "/v1/completions", {
            let mut steering = completion;
            steering["kv_transfer_params"] = json!({"do_remote_prefill": true});
            steering.to_string()
        }),
        3..7 => ("POST", "/v1/chat/completions", {
            let messages = json!([{"role": "user", "content": prompt}]);
            json!({"model": "mock", "messages": messages, "max_tokens": tokens, "stream": stream})
                .to_string()
        }),
        _ => ("POST", "/v1/completions", completion.to_string()),
    };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    (head, body)
}

/// What a complete answer is: one whose end was sent, by length or by last chunk.
fn end(answer: &[u8]) -> Visit {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return Visit::Broken;
    };
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        value.trim().parse::<usize>().ok().filter(|_| is_length)
    });
    let whole = match length {
        Some(length) => body.len() == length,
        None => body.ends_with("0\r\n\r\n"),
    };
    match status {
        Some(status) if whole => Visit::Answered(status),
        _ => Visit::Broken,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_by_its_length_or_by_its_last_chunk() {
        let end = |text: &str| end(text.as_bytes());
        assert_eq!(
            end("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"),
            Visit::Answered(200)
        );
        assert_eq!(
            end("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi"),
            Visit::Broken
        );
        let chunked = "HTTP/1.1 503 X\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n";
        assert_eq!(end(chunked), Visit::Broken);
        assert_eq!(end(&format!("{chunked}0\r\n\r\n")), Visit::Answered(503));
        assert_eq!(end(""), Visit::Broken);
    }
}
