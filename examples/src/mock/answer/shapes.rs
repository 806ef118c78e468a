//! Answers of `/v1/responses` and `/inference/v1/generate`, whole and as events.

use serde_json::{Value, json};

use super::{Answer, DONE, Usage, word};
use crate::mock::request::Api;

impl Answer {
    /// The whole answer to a response or token request.
    pub(super) fn whole_value(
        &self,
        tokens: &[u32],
        usage: Usage,
        params: Option<&Value>,
    ) -> Value {
        match self.api {
            Api::Generate => json!({
                "request_id": self.id,
                "choices": tokens.iter().enumerate().map(|(index, &tokens)| json!({
                    "index": index, "logprobs": null, "finish_reason": self.finish_reason,
                    "token_ids": (0..tokens).collect::<Vec<_>>(),
                })).collect::<Vec<_>>(),
                "prompt_logprobs": null,
                "kv_transfer_params": params,
            }),
            _ => self.response(tokens.first().copied(), Some(usage), params),
        }
    }

    /// A Response object; without tokens one that is under way.
    fn response(&self, tokens: Option<u32>, usage: Option<Usage>, params: Option<&Value>) -> Value {
        let is_cut = tokens.is_some() && self.finish_reason == "length";
        let status = match tokens {
            None => "in_progress",
            Some(_) if is_cut => "incomplete",
            Some(_) => "completed",
        };
        let text: String = (0..tokens.unwrap_or_default()).map(word).collect();
        let content =
            json!({"type": "output_text", "text": text, "annotations": [], "logprobs": null});
        let message = json!({
            "id": format!("msg_{}", self.id), "type": "message", "role": "assistant",
            "status": status, "content": [content],
        });
        let usage = usage.map(|usage| {
            json!({
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.prompt_tokens_details.map_or(0, |all| all.cached_tokens),
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            })
        });
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "model": self.model,
            "status": status,
            "incomplete_details": is_cut.then(|| json!({"reason": "max_output_tokens"})),
            "output": tokens.map_or_else(Vec::new, |_| vec![message]),
            "usage": usage,
            "kv_transfer_params": params,
        })
    }

    /// The event that carries one token.
    pub(super) fn token_event(&self, index: usize, token: u32, last: bool) -> String {
        if self.api == Api::Generate {
            let finish_reason = last.then_some(self.finish_reason);
            let choice = json!({
                "index": index, "logprobs": null, "finish_reason": finish_reason, "token_ids": [token],
            });
            return format!(
                "data: {}\n\n",
                json!({"request_id": self.id, "choices": [choice]})
            );
        }
        let delta = json!({
            "type": "response.output_text.delta", "item_id": format!("msg_{}", self.id),
            "output_index": 0, "content_index": 0, "delta": word(token),
        });
        event(&delta)
    }

    /// The event before the first token of a response.
    pub(super) fn created(&self) -> String {
        let response = self.response(None, None, None);
        event(&json!({"type": "response.created", "response": response}))
    }

    /// The end of a stream: responses end with the whole, others as they do everywhere.
    pub(crate) fn end(&self, usage: Usage) -> String {
        if self.api != Api::Responses {
            return DONE.to_owned();
        }
        let tokens = u32::try_from(usage.completion_tokens).unwrap_or(u32::MAX);
        let response = self.response(Some(tokens), Some(usage), None);
        let kind = format!(
            "response.{}",
            response["status"].as_str().unwrap_or_default()
        );
        event(&json!({"type": kind, "response": response}))
    }
}

/// Events of responses have their type as name, too.
fn event(data: &Value) -> String {
    let name = data["type"].as_str().unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n")
}
