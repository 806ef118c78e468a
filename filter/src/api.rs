//! Which of an engine's APIs a request speaks, and where in its body things are.

use std::borrow::Cow;

use serde::Deserialize;

use crate::body::{self, Edit, Object};
use crate::handover::KV_PARAMS;

/// An API of vLLM's that generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Api {
    /// `/v1/completions`.
    #[default]
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/responses`.
    Responses,
    /// `/inference/v1/generate`: token ids in, token ids out.
    Generate,
}

const SAMPLING_PARAMS: &str = "sampling_params";
const EXTRA_ARGS: &str = "extra_args";

impl Api {
    /// The API that an engine would take the path for: without its query and after percent-decoding.
    pub fn of(path: &[u8]) -> Option<Self> {
        match percent_decoded(path).as_slice() {
            b"/v1/completions" => Some(Self::Completions),
            b"/v1/chat/completions" => Some(Self::Chat),
            b"/v1/responses" => Some(Self::Responses),
            b"/inference/v1/generate" => Some(Self::Generate),
            _ => None,
        }
    }

    /// Raw JSON of what the model is to read.
    pub fn prompt<'a>(self, request: &Object<'a>) -> Option<&'a str> {
        request.get(match self {
            Self::Completions => "prompt",
            Self::Chat => "messages",
            Self::Responses => "input",
            Self::Generate => "token_ids",
        })
    }

    /// Whether a client's request sends transfer params of its own, or what an engine would take for them.
    pub fn has_params(self, request: &Object<'_>) -> bool {
        let inside = |key| {
            let raw = request.get(key).unwrap_or("0");
            !matches!(body::has_key_anywhere(raw.as_bytes(), KV_PARAMS), Ok(false))
        };
        // Engines put `vllm_xargs` where the params go in the end.
        request.has(KV_PARAMS)
            || request.has("vllm_xargs") && inside("vllm_xargs")
            || self == Self::Generate && inside(SAMPLING_PARAMS)
    }

    /// A request that one prefill leg cannot serve: several prompts in one, or one that a worker keeps a state for.
    pub fn goes_alone(self, request: &Object<'_>) -> bool {
        match self {
            Self::Completions => {
                let first = request.get("prompt").and_then(|raw| raw.strip_prefix('['));
                first.is_some_and(|rest| rest.trim_start().starts_with(['"', '[']))
            }
            Self::Responses => {
                let previous = request.get("previous_response_id");
                request.get("background") == Some("true")
                    || previous.is_some_and(|raw| raw != "null")
            }
            Self::Chat | Self::Generate => false,
        }
    }

    /// Raw JSON of a request's transfer params.
    pub fn params<'a>(self, request: &Object<'a>) -> Option<&'a str> {
        if self != Self::Generate {
            return request.get(KV_PARAMS);
        }
        let sampling = member(request, SAMPLING_PARAMS)?;
        member(&sampling, EXTRA_ARGS)?.get(KV_PARAMS)
    }

    /// The request with these params, in place of those it has.
    pub fn with_params(self, request: &Object<'_>, params: &str) -> String {
        let params = Edit::Set(params.to_owned());
        self.edit(request, vec![], vec![(KV_PARAMS, params)], vec![])
    }

    /// Body of the prefill leg: the client's, cut down to one token, one sequence and no stream, with these params.
    pub fn prefill_body(self, request: &Object<'_>, params: Option<&str>) -> String {
        let set = |value: &str| Edit::Set(value.to_owned());
        let replace = |value: &str| Edit::Replace(value.to_owned());
        let mut edits = vec![("stream", set("false")), ("stream_options", Edit::Remove)];
        let mut sampling = vec![];
        match self {
            // A limit of null is replaced too.
            Self::Completions | Self::Chat => edits.extend([
                ("max_tokens", set("1")),
                ("max_completion_tokens", replace("1")),
                ("n", replace("1")),
                ("best_of", replace("1")),
                ("min_tokens", Edit::Remove),
            ]),
            Self::Responses => edits.extend([
                ("max_output_tokens", set("1")),
                // The prefill worker is not to keep an answer that nobody will ask it for.
                ("store", set("false")),
                ("background", Edit::Remove),
            ]),
            Self::Generate => sampling.extend([
                ("max_tokens", set("1")),
                ("n", replace("1")),
                ("min_tokens", Edit::Remove),
            ]),
        }
        let params = params.map(|params| (KV_PARAMS, set(params)));
        self.edit(request, edits, params.into_iter().collect(), sampling)
    }

    /// Edits a request, its transfer params and its sampling params, wherever this API has these two.
    fn edit<'k>(
        self,
        request: &Object<'_>,
        mut edits: Vec<(&'k str, Edit)>,
        params: Vec<(&'k str, Edit)>,
        mut sampling: Vec<(&'k str, Edit)>,
    ) -> String {
        if self != Self::Generate {
            edits.extend(params);
            return request.edit(&edits);
        }
        let inner = member(request, SAMPLING_PARAMS);
        let inner = inner.as_ref();
        if !params.is_empty() {
            let extra = inner.and_then(|inner| member(inner, EXTRA_ARGS));
            sampling.push((EXTRA_ARGS, Edit::Set(edit_or_new(extra.as_ref(), &params))));
        }
        edits.push((SAMPLING_PARAMS, Edit::Set(edit_or_new(inner, &sampling))));
        request.edit(&edits)
    }

    /// Where the decode leg gets its params, so that what comes after stays where it is. `None` where
    /// there is no such place: the engine would refuse the request.
    pub fn place(self, request: &Object<'_>) -> Option<Place> {
        let text = request.text();
        let opening = |object: &Object<'_>| {
            let brace = object.text().find('{')? + 1;
            let start = (object.text().as_ptr() as usize).wrapping_sub(text.as_ptr() as usize);
            Some((start + brace, if object.is_empty() { "" } else { "," }))
        };
        let (at, before, after, until) = if self == Self::Generate {
            let sampling = member(request, SAMPLING_PARAMS)?;
            match (member(&sampling, EXTRA_ARGS), sampling.get(EXTRA_ARGS)) {
                (Some(extra), _) => {
                    let (at, comma) = opening(&extra)?;
                    (at, String::new(), comma.to_owned(), at)
                }
                // A member of this name that is no object, such as null, would win over one put in front.
                (None, Some(raw)) => {
                    let start = (raw.as_ptr() as usize).wrapping_sub(text.as_ptr() as usize);
                    (start, "{".into(), "}".into(), start + raw.len())
                }
                (None, None) => {
                    let (at, comma) = opening(&sampling)?;
                    (at, format!("\"{EXTRA_ARGS}\":{{"), format!("}}{comma}"), at)
                }
            }
        } else {
            let (at, comma) = opening(request)?;
            (at, String::new(), comma.to_owned(), at)
        };
        let head = text.get(..at)?;
        Some(Place {
            replaces: until,
            before: format!("{head}{before}\"{KV_PARAMS}\":"),
            after,
        })
    }

    /// Whether a prefill answer ended where its limit of one token was, which is when blocks are kept.
    pub fn ended_at_limit(self, answer: &Object<'_>) -> bool {
        #[derive(Deserialize)]
        struct Choice<'a> {
            #[serde(borrow)]
            finish_reason: Option<Cow<'a, str>>,
        }
        if self == Self::Responses {
            let status = answer.get("status").and_then(body::string);
            return status.as_deref() == Some("incomplete");
        }
        let choices = answer.get("choices").unwrap_or("[]");
        let choices: Vec<Choice<'_>> = serde_json::from_str(choices).unwrap_or_default();
        let ended = |choice: &Choice<'_>| choice.finish_reason.as_deref() == Some("length");
        !choices.is_empty() && choices.iter().all(ended)
    }

    /// Most tokens that one answer to this request may have; `None` where only the engine knows. Where there is no limit in a
    /// request of the older APIs, engines take 16.
    pub fn output_limit(self, request: &Object<'_>) -> Option<u64> {
        let number = |raw: &str| raw.parse().ok();
        let or_16 = |object: &Object<'_>| object.get("max_tokens").map_or(Some(16), number);
        match self {
            Self::Completions => or_16(request),
            Self::Chat => {
                let given = |key| request.get(key).and_then(number);
                given("max_completion_tokens").or_else(|| given("max_tokens"))
            }
            Self::Responses => request.get("max_output_tokens").and_then(number),
            Self::Generate => member(request, SAMPLING_PARAMS).and_then(|inner| or_16(&inner)),
        }
    }

    /// How many answers to its prompt the request asks for.
    pub fn sequences(self, request: &Object<'_>) -> Option<u64> {
        let n = |object: &Object<'_>| object.get("n")?.parse().ok();
        match self {
            Self::Completions | Self::Chat => n(request),
            Self::Responses => None,
            Self::Generate => n(&member(request, SAMPLING_PARAMS)?),
        }
    }

    /// Tokens of the prompt, by the `usage` of an answer.
    pub fn prompt_tokens(self, answer: &Object<'_>) -> Option<u64> {
        let usage = member(answer, "usage")?;
        let name = match self {
            Self::Responses => "input_tokens",
            Self::Completions | Self::Chat | Self::Generate => "prompt_tokens",
        };
        usage.get(name)?.parse().ok()
    }

    /// Name of the member of `usage` that says how the prompt was computed.
    pub fn prompt_details(self) -> &'static str {
        match self {
            Self::Responses => "input_tokens_details",
            Self::Completions | Self::Chat | Self::Generate => "prompt_tokens_details",
        }
    }
}

/// New first bytes of a body, around params that are not known yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// How many bytes of the old body they replace.
    pub replaces: usize,
    /// Before the params.
    pub before: String,
    /// After them.
    pub after: String,
}

/// An object's member that is an object.
pub(crate) fn member<'a>(object: &Object<'a>, key: &str) -> Option<Object<'a>> {
    Object::parse(object.get(key)?.as_bytes()).ok()
}

/// The object with these edits, or a new one of them.
pub(crate) fn edit_or_new(object: Option<&Object<'_>>, edits: &[(&str, Edit)]) -> String {
    match object {
        Some(object) => object.edit(edits),
        None => Object::parse(b"{}").map_or_else(|_| String::new(), |empty| empty.edit(edits)),
    }
}

fn percent_decoded(path: &[u8]) -> Vec<u8> {
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
    decoded
}

#[cfg(test)]
mod tests;
