//! Which of an engine's APIs a request speaks.

use crate::body::Object;

/// Paths of requests that are routed.
const PATHS: [&[u8]; 2] = [b"/v1/completions", b"/v1/chat/completions"];

/// Whether an engine would take the path for one of ours: without its query and after percent-decoding.
pub fn is_generation(path: &[u8]) -> bool {
    let path = path.split(|&byte| byte == b'?').next().unwrap_or_default();
    let mut decoded = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((&byte, tail)) = rest.split_first() {
        let hex = |at: usize| Some(char::from(*tail.get(at)?).to_digit(16)? as u8);
        match (byte, hex(0), hex(1)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push(high << 4 | low);
                rest = tail.get(2..).unwrap_or_default();
            }
            _ => {
                decoded.push(byte);
                rest = tail;
            }
        }
    }
    PATHS.contains(&decoded.as_slice())
}

/// Several prompts in one request: an array of strings or of token arrays.
pub fn is_batch(object: &Object<'_>) -> bool {
    let first = object.get("prompt").and_then(|raw| raw.strip_prefix('['));
    first.is_some_and(|rest| rest.trim_start().starts_with(['"', '[']))
}
