//! Synthetic prompts: filler words that end in the id of the trace record they stand for.
//!
//! No recorded text is needed: the mock engine looks the record up by the last word and behaves as
//! the recorded model did. One word counts as one token, here and in the engine's `usage`.

/// Longest prompt that is made, in words, whatever a trace says.
pub const PROMPT_WORDS_MAX: u64 = 1 << 20;

/// A prompt of `tokens` words (at least one) whose last is `id`.
pub fn prompt_for(id: &str, tokens: u64) -> String {
    let filler = tokens.clamp(1, PROMPT_WORDS_MAX) - 1;
    let mut prompt = "word ".repeat(filler as usize);
    prompt.push_str(id);
    prompt
}

/// The trace id in a prompt: its last word.
pub fn trace_id_of(prompt: &str) -> Option<&str> {
    prompt.split_whitespace().next_back()
}

/// Tokens of a text as the mock engine counts them.
pub fn tokens_of(text: &str) -> u64 {
    text.split_whitespace().count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_has_the_tokens_of_its_record_and_gives_the_id_back() {
        for tokens in [1, 2, 309] {
            let prompt = prompt_for("t00170", tokens);
            assert_eq!(
                (tokens_of(&prompt), trace_id_of(&prompt)),
                (tokens, Some("t00170"))
            );
        }
        assert_eq!(prompt_for("t1", 0), "t1");
        assert_eq!(trace_id_of(" \n"), None);
    }

    #[test]
    fn a_prompt_is_bounded_whatever_the_trace_says() {
        assert_eq!(tokens_of(&prompt_for("t1", u64::MAX)), PROMPT_WORDS_MAX);
    }
}
