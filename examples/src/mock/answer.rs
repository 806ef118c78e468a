//! Answers in the shapes of vLLM's OpenAI server: whole JSON, or chunks of a stream.
//!
//! The same request gives the same bytes: ids come from `x-request-id`, `created` is the engine's
//! start, token `i` of every answer is the word ` w{i}`.

mod shapes;

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use super::request::Api;

/// The end of a stream of server-sent events.
const DONE: &str = "data: [DONE]\n\n";

/// What all chunks of one answer share.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) api: Api,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    /// `length` where the client set the length, `stop` where the trace did.
    pub(crate) finish_reason: &'static str,
}

/// Token counts of an answer.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) total_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// Only where some were cached, as vLLM does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_tokens_details: Option<PromptTokensDetails>,
}

/// How the prompt was computed.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct PromptTokensDetails {
    pub(crate) cached_tokens: u64,
}

impl Usage {
    /// `cached_tokens` are part of the prompt's.
    pub(crate) fn new(prompt_tokens: u64, cached_tokens: u64, completion_tokens: u64) -> Self {
        let total_tokens = prompt_tokens + completion_tokens;
        Usage {
            prompt_tokens,
            total_tokens,
            completion_tokens,
            prompt_tokens_details: (cached_tokens > 0)
                .then_some(PromptTokensDetails { cached_tokens }),
        }
    }
}

/// An answer or a chunk of one; field order as vLLM's.
#[derive(Serialize)]
struct Envelope<'a> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a Value>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    #[serde(flatten)]
    content: Content<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'a str>,
    stop_reason: Option<()>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content<'a> {
    Text(String),
    Message { role: &'a str, content: String },
    Delta(Delta<'a>),
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'a str>,
    content: String,
}

/// The text of token `token`.
pub(crate) fn word(token: u32) -> String {
    format!(" w{token}")
}

impl Answer {
    /// The whole answer, one entry of `tokens` per choice.
    pub(crate) fn whole(&self, tokens: &[u32], usage: Usage, params: Option<&Value>) -> Bytes {
        if matches!(self.api, Api::Responses | Api::Generate) {
            return self.whole_value(tokens, usage, params).to_string().into();
        }
        let choices = tokens
            .iter()
            .enumerate()
            .map(|(index, &tokens)| {
                let text: String = (0..tokens).map(word).collect();
                let content = match self.api {
                    Api::Chat => Content::Message {
                        role: "assistant",
                        content: text,
                    },
                    _ => Content::Text(text),
                };
                self.choice(index, content, true)
            })
            .collect();
        let object = match self.api {
            Api::Chat => "chat.completion",
            _ => "text_completion",
        };
        self.json(object, choices, Some(usage), params).into()
    }

    /// The event that opens a choice of a chat stream; completions have none.
    pub(crate) fn opening(&self, index: usize) -> Option<String> {
        match self.api {
            Api::Completions | Api::Generate => None,
            Api::Responses => Some(self.created()),
            Api::Chat => {
                let delta = Delta {
                    role: Some("assistant"),
                    content: String::new(),
                };
                Some(self.event(vec![self.choice(index, Content::Delta(delta), false)], None))
            }
        }
    }

    /// The event that carries one token.
    pub(crate) fn token(&self, index: usize, token: u32, last: bool) -> String {
        let content = match self.api {
            Api::Responses | Api::Generate => return self.token_event(index, token, last),
            Api::Completions => Content::Text(word(token)),
            Api::Chat => Content::Delta(Delta {
                role: None,
                content: word(token),
            }),
        };
        self.event(vec![self.choice(index, content, last)], None)
    }

    /// The event that `stream_options.include_usage` asks for.
    pub(crate) fn usage(&self, usage: Usage) -> String {
        self.event(Vec::new(), Some(usage))
    }

    fn choice<'a>(&'a self, index: usize, content: Content<'a>, last: bool) -> Choice<'a> {
        let finish_reason = last.then_some(self.finish_reason);
        Choice {
            index,
            content,
            logprobs: None,
            finish_reason,
            stop_reason: None,
        }
    }

    fn event(&self, choices: Vec<Choice<'_>>, usage: Option<Usage>) -> String {
        let object = match self.api {
            Api::Chat => "chat.completion.chunk",
            _ => "text_completion",
        };
        format!("data: {}\n\n", self.json(object, choices, usage, None))
    }

    fn json(
        &self,
        object: &str,
        choices: Vec<Choice<'_>>,
        usage: Option<Usage>,
        kv_transfer_params: Option<&Value>,
    ) -> String {
        let envelope = Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            kv_transfer_params,
        };
        serde_json::to_string(&envelope).expect("strings, integers and JSON values are JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(api: Api) -> Answer {
        Answer {
            api,
            id: "x-1".into(),
            created: 7,
            model: "m".into(),
            finish_reason: "length",
        }
    }

    #[test]
    fn completions_have_the_shape_of_vllm() {
        let answer = answer(Api::Completions);
        assert_eq!(answer.opening(0), None);
        assert_eq!(
            answer.token(1, 3, false),
            "data: {\"id\":\"x-1\",\"object\":\"text_completion\",\"created\":7,\"model\":\"m\",\"choices\":\
             [{\"index\":1,\"text\":\" w3\",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null}]}\n\n"
        );
        let whole = answer.whole(
            &[2],
            Usage::new(5, 0, 2),
            Some(&serde_json::json!({"tp_size": 1})),
        );
        assert_eq!(
            whole,
            "{\"id\":\"x-1\",\"object\":\"text_completion\",\"created\":7,\"model\":\"m\",\"choices\":\
             [{\"index\":0,\"text\":\" w0 w1\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}],\
             \"usage\":{\"prompt_tokens\":5,\"total_tokens\":7,\"completion_tokens\":2},\
             \"kv_transfer_params\":{\"tp_size\":1}}"
        );
    }

    #[test]
    fn chat_has_the_shape_of_vllm() {
        let answer = answer(Api::Chat);
        assert_eq!(
            answer.opening(0).unwrap(),
            "data: {\"id\":\"x-1\",\"object\":\"chat.completion.chunk\",\"created\":7,\"model\":\"m\",\"choices\":\
             [{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\
             \"finish_reason\":null,\"stop_reason\":null}]}\n\n"
        );
        assert!(answer.token(0, 0, true).contains(
            "{\"index\":0,\"delta\":{\"content\":\" w0\"},\"logprobs\":null,\"finish_reason\":\"length\""
        ));
        assert!(
            answer
                .usage(Usage::new(1, 0, 2))
                .contains("\"choices\":[],\"usage\":{\"prompt_tokens\":1")
        );
        let whole = answer.whole(&[1, 1], Usage::default(), None);
        let whole: Value = serde_json::from_slice(&whole).unwrap();
        assert_eq!(whole["object"], "chat.completion");
        assert_eq!(whole["choices"][1]["message"]["content"], " w0");
    }
}
