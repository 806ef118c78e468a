//! Bodies of generation requests: raw JSON in, valid requests or vLLM's errors out.

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::catalog::fnv1a;
use super::prompt::{tokens_of, trace_id_of};

/// Which endpoint was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    Completions,
    Chat,
    Responses,
    Generate,
}

/// A valid request.
#[derive(Debug, PartialEq)]
pub(crate) struct GenerationRequest {
    /// One per prompt; each is answered `choices` times.
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) choices: usize,
    /// `None` leaves the length to the trace.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) kv: KvTransfer,
    /// MooncakeConnector's name of the transfer.
    pub(crate) transfer_id: Option<String>,
}

/// What the engine needs to know of a prompt.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Prompt {
    /// The trace record it stands for.
    pub(crate) id: String,
    pub(crate) tokens: u64,
    /// Tells prompts apart.
    pub(crate) hash: u64,
}

/// The request's part in a prefill/decode pair.
#[derive(Debug, PartialEq)]
pub(crate) enum KvTransfer {
    /// Prefill and decode both happen here.
    None,
    /// Prefill only, and hold the KV blocks for the decode worker.
    RemoteDecode,
    /// Decode only, with the KV blocks that these params name.
    RemotePrefill(Value),
}

/// Bounds that an engine puts on requests.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) model: String,
    /// Longest prompt and answer together, tokens.
    pub(crate) context_tokens: u64,
}

/// Most sequences that one request may ask for.
const SEQUENCES_MAX: usize = 128;

/// An error answer in vLLM's shape.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    pub(crate) param: Option<&'static str>,
}

impl ApiError {
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        ApiError {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            message: message.into(),
            param: None,
        }
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        ApiError {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError",
            message: message.into(),
            param: None,
        }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        ApiError {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "InternalServerError",
            message: message.into(),
            param: None,
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let error = json!({
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status.as_u16(),
        });
        let body = Body::from(json!({ "error": error }).to_string());
        (
            self.status,
            [(header::CONTENT_TYPE, "application/json")],
            body,
        )
            .into_response()
    }
}

#[derive(Deserialize)]
struct Raw {
    model: Option<String>,
    prompt: Option<RawPrompt>,
    messages: Option<Vec<Message>>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    min_tokens: Option<u64>,
    n: Option<u64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    kv_transfer_params: Option<Value>,
    input: Option<RawInput>,
    max_output_tokens: Option<u64>,
    previous_response_id: Option<String>,
    background: Option<bool>,
    token_ids: Option<Vec<u64>>,
    sampling_params: Option<Sampling>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawInput {
    Text(String),
    Items(Vec<Message>),
}

#[derive(Deserialize)]
struct Sampling {
    max_tokens: Option<u64>,
    min_tokens: Option<u64>,
    n: Option<u64>,
    extra_args: Option<ExtraArgs>,
}

#[derive(Deserialize)]
struct ExtraArgs {
    kv_transfer_params: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawPrompt {
    Text(String),
    Ids(Vec<u64>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<u64>>),
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Option<Content>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    text: Option<String>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

impl GenerationRequest {
    /// Reads the body of a call to `api`, with the checks that vLLM makes and a gateway can trip over.
    pub(crate) fn parse(api: Api, body: &[u8], limits: &Limits) -> Result<Self, ApiError> {
        // By way of `Value`, where the last of several equal keys wins, as in Python.
        let mut raw: Raw = serde_json::from_slice::<Value>(body)
            .and_then(serde_json::from_value)
            .map_err(|error| ApiError::bad_request(format!("the body is invalid: {error}")))?;
        if api == Api::Generate {
            raw.take_sampling()?;
        }
        if raw.previous_response_id.is_some() {
            let message = "Response with that id not found: this worker stores none.";
            return Err(ApiError::not_found(message));
        }
        if raw.background == Some(true) {
            return Err(ApiError::bad_request(
                "background needs a store of responses",
            ));
        }
        if let Some(model) = raw.model.filter(|model| *model != limits.model) {
            return Err(ApiError {
                param: Some("model"),
                ..ApiError::not_found(format!("The model `{model}` does not exist."))
            });
        }
        let prompts = match (api, raw.prompt, raw.messages) {
            (Api::Completions, Some(prompt), _) => prompts(prompt),
            (Api::Completions, None, _) => return Err(missing("prompt")),
            (Api::Chat, _, Some(messages)) => vec![conversation(&messages)],
            (Api::Chat, _, None) => return Err(missing("messages")),
            (Api::Responses, ..) => match raw.input.ok_or_else(|| missing("input"))? {
                RawInput::Text(text) => vec![text_prompt(&text)],
                RawInput::Items(items) => vec![conversation(&items)],
            },
            (Api::Generate, ..) => {
                vec![id_prompt(
                    &raw.token_ids.ok_or_else(|| missing("token_ids"))?,
                )]
            }
        };
        if prompts.is_empty() || prompts.iter().any(|prompt| prompt.tokens == 0) {
            return Err(ApiError::bad_request("The decoder prompt cannot be empty"));
        }
        let choices = raw.n.unwrap_or(1);
        let sequences = choices.saturating_mul(prompts.len() as u64);
        if choices == 0 || sequences > SEQUENCES_MAX as u64 {
            return Err(ApiError::bad_request(format!(
                "n={choices} with {} prompts: 1 to {SEQUENCES_MAX} sequences can be generated",
                prompts.len(),
            )));
        }
        let stream = raw.stream.unwrap_or(false);
        if raw.stream_options.is_some() && !stream {
            let message = "Stream options can only be defined when `stream=True`.";
            return Err(ApiError::bad_request(message));
        }
        let max_tokens = match api {
            Api::Completions | Api::Generate => raw.max_tokens,
            Api::Responses => raw.max_output_tokens,
            Api::Chat => raw.max_completion_tokens.or(raw.max_tokens),
        };
        check_lengths(max_tokens, raw.min_tokens, &prompts, limits)?;
        let transfer_id = raw
            .kv_transfer_params
            .as_ref()
            .and_then(|params| Some(params.get("transfer_id")?.as_str()?.to_owned()));
        let kv = transfer(raw.kv_transfer_params)?;
        if kv == KvTransfer::RemoteDecode && stream {
            return Err(ApiError::bad_request(
                "do_remote_decode with stream=true: a stream carries no kv_transfer_params",
            ));
        }
        Ok(GenerationRequest {
            prompts,
            choices: choices as usize,
            // Within the context, which `check_lengths` saw to.
            max_tokens: max_tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX)),
            stream,
            include_usage: raw
                .stream_options
                .and_then(|options| options.include_usage)
                .unwrap_or(false),
            kv,
            transfer_id,
        })
    }
}

impl Raw {
    /// Puts what token requests have in `sampling_params` where others have it.
    fn take_sampling(&mut self) -> Result<(), ApiError> {
        let Some(sampling) = self.sampling_params.take() else {
            return Err(missing("sampling_params"));
        };
        if self.kv_transfer_params.is_some() {
            let message = "kv_transfer_params belong into sampling_params.extra_args";
            return Err(ApiError::bad_request(message));
        }
        if sampling.n.is_some_and(|n| n != 1) {
            return Err(ApiError::bad_request("n must be 1 for token requests"));
        }
        (self.max_tokens, self.min_tokens) = (sampling.max_tokens, sampling.min_tokens);
        let extra_args = sampling.extra_args;
        self.kv_transfer_params = extra_args.and_then(|extra| extra.kv_transfer_params);
        Ok(())
    }
}

/// The params in the body of a release.
pub(crate) fn release_params(body: &[u8]) -> Result<Value, ApiError> {
    #[derive(Deserialize)]
    struct Body {
        kv_transfer_params: serde_json::Map<String, Value>,
    }
    serde_json::from_slice(body)
        .map(|body: Body| Value::Object(body.kv_transfer_params))
        .map_err(|error| ApiError::bad_request(format!("the body is invalid: {error}")))
}

fn missing(field: &'static str) -> ApiError {
    ApiError {
        param: Some(field),
        ..ApiError::bad_request(format!("{field}: Field required"))
    }
}

fn check_lengths(
    max_tokens: Option<u64>,
    min_tokens: Option<u64>,
    prompts: &[Prompt],
    limits: &Limits,
) -> Result<(), ApiError> {
    if max_tokens == Some(0) {
        return Err(ApiError::bad_request(
            "max_tokens must be at least 1, got 0.",
        ));
    }
    if let (Some(min), Some(max)) = (min_tokens, max_tokens)
        && min > max
    {
        return Err(ApiError::bad_request(format!(
            "min_tokens must be less than or equal to max_tokens={max}, got {min}."
        )));
    }
    let prompt = prompts
        .iter()
        .map(|prompt| prompt.tokens)
        .max()
        .unwrap_or(0);
    let answer = max_tokens.unwrap_or(1);
    if prompt.saturating_add(answer) > limits.context_tokens {
        return Err(ApiError::bad_request(format!(
            "This model's maximum context length is {} tokens. However, you requested {answer} output \
             tokens and your prompt contains {prompt} input tokens.",
            limits.context_tokens,
        )));
    }
    Ok(())
}

fn transfer(params: Option<Value>) -> Result<KvTransfer, ApiError> {
    let Some(params) = params else {
        return Ok(KvTransfer::None);
    };
    let Some(object) = params.as_object() else {
        return Err(ApiError::bad_request(
            "kv_transfer_params: Input should be a valid dictionary",
        ));
    };
    let is = |key| object.get(key).and_then(Value::as_bool).unwrap_or(false);
    Ok(match (is("do_remote_decode"), is("do_remote_prefill")) {
        (true, true) => {
            return Err(ApiError::bad_request(
                "kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other",
            ));
        }
        (true, false) => KvTransfer::RemoteDecode,
        (false, true) => KvTransfer::RemotePrefill(params),
        (false, false) => KvTransfer::None,
    })
}

fn prompts(raw: RawPrompt) -> Vec<Prompt> {
    match raw {
        RawPrompt::Text(text) => vec![text_prompt(&text)],
        RawPrompt::Texts(texts) => texts.iter().map(|text| text_prompt(text)).collect(),
        RawPrompt::Ids(ids) => vec![id_prompt(&ids)],
        RawPrompt::IdLists(lists) => lists.iter().map(|ids| id_prompt(ids)).collect(),
    }
}

fn text_prompt(text: &str) -> Prompt {
    Prompt {
        id: trace_id_of(text).unwrap_or_default().to_owned(),
        tokens: tokens_of(text),
        hash: fnv1a(text.as_bytes()),
    }
}

/// A prompt of token ids: nothing the trace could know, so its hash is its id.
fn id_prompt(ids: &[u64]) -> Prompt {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let hash = fnv1a(&bytes);
    Prompt {
        id: format!("{hash:016x}"),
        tokens: ids.len() as u64,
        hash,
    }
}

/// A conversation is all its texts; the trace id is in the last message of the user.
fn conversation(messages: &[Message]) -> Prompt {
    let text = |message: &Message| match &message.content {
        Some(Content::Text(text)) => text.clone(),
        Some(Content::Parts(parts)) => parts
            .iter()
            .filter_map(|part| part.text.as_deref())
            .collect::<Vec<_>>()
            .join(" "),
        None => String::new(),
    };
    let user = messages
        .iter()
        .rev()
        .find(|message| message.role == "user")
        .map(text);
    let all = messages.iter().map(text).collect::<Vec<_>>().join("\n");
    let id = user
        .as_deref()
        .and_then(trace_id_of)
        .unwrap_or_default()
        .to_owned();
    Prompt {
        id,
        ..text_prompt(&all)
    }
}

#[cfg(test)]
mod tests;
