//! Server-sent events of an OpenAI stream, read as they come.

use serde::Deserialize;
use serde_json::Value;

/// Longest event that is read, bytes.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// What an event says.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// This many choices got text.
    Tokens(u32),
    /// What the engine counted.
    Usage {
        /// Tokens of the answer.
        completion_tokens: u64,
    },
    /// The engine gave up.
    Error(String),
    /// The stream is complete.
    Done,
    /// A role, a comment, a chunk without text.
    Other,
}

/// An event exceeded 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {EVENT_BYTES_MAX} bytes")]
pub struct EventTooLong;

/// Splits a stream into events, however its bytes are cut.
#[derive(Debug, Default)]
pub struct EventReader {
    pending: Vec<u8>,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u64,
}

impl EventReader {
    /// Takes the next bytes; gives the events that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<Event>, EventTooLong> {
        self.pending.extend_from_slice(bytes);
        let mut events = Vec::new();
        let mut start = 0;
        while let Some(length) = self.pending[start..]
            .windows(2)
            .position(|pair| pair == b"\n\n")
        {
            events.push(parse(&self.pending[start..start + length]));
            start += length + 2;
        }
        self.pending.drain(..start);
        if self.pending.len() > EVENT_BYTES_MAX {
            Err(EventTooLong)
        } else {
            Ok(events)
        }
    }
}

fn parse(event: &[u8]) -> Event {
    let data = event
        .split(|&byte| byte == b'\n')
        .find_map(|line| line.strip_prefix(b"data:"))
        .map(<[u8]>::trim_ascii);
    let Some(data) = data else {
        return Event::Other;
    };
    if data == b"[DONE]" {
        return Event::Done;
    }
    let chunk: Chunk = match serde_json::from_slice(data) {
        Ok(chunk) => chunk,
        Err(error) => return Event::Error(format!("a chunk is no JSON: {error}")),
    };
    if let Some(error) = chunk.error {
        return Event::Error(error.to_string());
    }
    let with_text = chunk.choices.iter().filter(|choice| {
        let delta = choice
            .delta
            .as_ref()
            .and_then(|delta| delta.content.as_ref());
        choice
            .text
            .as_ref()
            .or(delta)
            .is_some_and(|text| !text.is_empty())
    });
    match (with_text.count(), chunk.usage) {
        (0, Some(usage)) => Event::Usage {
            completion_tokens: usage.completion_tokens,
        },
        (0, None) => Event::Other,
        (tokens, _) => Event::Tokens(u32::try_from(tokens).unwrap_or(u32::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" w\u{e9}\"}}]}\n\n",
        ": keep-alive\n\n",
        "data: {\"choices\":[{\"index\":0,\"text\":\" w1\",\"finish_reason\":\"length\"}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\":{\"completion_tokens\":2}}\n\n",
        "data: [DONE]\n\n",
    );

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        let expected = [
            Event::Other,
            Event::Tokens(1),
            Event::Other,
            Event::Tokens(1),
            Event::Usage {
                completion_tokens: 2,
            },
            Event::Done,
        ];
        for size in 1..=STREAM.len() {
            let mut reader = EventReader::default();
            let chunks = STREAM.as_bytes().chunks(size);
            let events: Vec<_> = chunks
                .flat_map(|chunk| reader.push(chunk).unwrap())
                .collect();
            assert_eq!(events, expected, "cut every {size} bytes");
        }
    }

    #[test]
    fn errors_in_the_stream_are_errors() {
        let mut reader = EventReader::default();
        let events = reader
            .push(b"data: {\"error\":{\"message\":\"no\"}}\n\ndata: {\n\n")
            .unwrap();
        assert!(
            matches!(&events[..], [Event::Error(_), Event::Error(_)]),
            "{events:?}"
        );
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut reader = EventReader::default();
        assert_eq!(
            reader.push(&vec![b'a'; EVENT_BYTES_MAX + 1]),
            Err(EventTooLong)
        );
    }
}
