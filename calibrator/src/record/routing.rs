//! What an answer says of its experts, in the three ways in which engines say it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::signature::{Encoding, Geometry, Signature, header_from_eldr_sig};
use serde::Deserialize;
use serde_json::Value;

use crate::npz::{Array, expert_ids};
use crate::trace::{Record, TopK};

/// What to do where an answer says nothing of its experts.
pub const NO_ROUTING: &str = "start the engine so that it says: vLLM with --enable-return-routed-experts (and say --experts here), the official ELDR fork as a prefill worker (and say --eldr-sig), or any engine with an adapter that answers with x-eldr-signature";

/// What the engine does not say of its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Routing {
    /// MoE layers; `eldr_sig` has no shape.
    pub layers: Option<usize>,
    /// Experts per layer; routed experts have ids only.
    pub experts: Option<usize>,
}

/// The body of an answer, as far as it is looked at.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Body {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    pub(super) kv_transfer_params: Option<Value>,
    prompt_routed_experts: Option<Vec<Vec<Vec<u16>>>>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    routed_experts: Option<String>,
    prompt_routed_experts: Option<Vec<Vec<Vec<u16>>>>,
}

#[derive(Debug, Deserialize)]
struct Usage {
    prompt_tokens: u64,
}

impl Routing {
    /// Puts what the answer says of its experts into `record`; `None` where it says nothing. The error says what
    /// does not fit.
    pub(super) fn read(
        self,
        header: Option<&str>,
        body: &Body,
        record: &mut Record,
    ) -> Result<Option<()>, String> {
        record.prompt_tokens = body.usage.as_ref().map(|usage| usage.prompt_tokens);
        let choice = body.choices.first();
        let listed = choice.and_then(|choice| choice.prompt_routed_experts.as_ref());
        let sig = body
            .kv_transfer_params
            .as_ref()
            .and_then(|params| params["eldr_sig"].as_str());
        if let Some(header) = header {
            let signature = Signature::decode(header.as_bytes())
                .map_err(|error| format!("x-eldr-signature: {error}"))?;
            record.prompt_tokens = record.prompt_tokens.or(signature.prompt_tokens());
            record.prefill = Some(header.to_owned());
        } else if let Some(text) = choice.and_then(|choice| choice.routed_experts.as_ref()) {
            let bytes = STANDARD.decode(text);
            let bytes = bytes.map_err(|error| format!("routed_experts: {error}"))?;
            let ids = expert_ids(&bytes, "routed_experts").map_err(|error| error.to_string())?;
            self.routed(&ids, record)?;
        } else if let Some(rows) = listed.or(body.prompt_routed_experts.as_ref()) {
            let layers = rows.first().map_or(0, Vec::len);
            let k = rows.first().and_then(|row| row.first()).map_or(0, Vec::len);
            if rows
                .iter()
                .any(|row| row.len() != layers || row.iter().any(|ids| ids.len() != k))
            {
                return Err("prompt_routed_experts: its rows are not alike".into());
            }
            let ids = Array {
                shape: vec![rows.len(), layers, k],
                data: rows.iter().flatten().flatten().copied().collect(),
            };
            self.routed(&ids, record)?;
        } else if let Some(sig) = sig {
            let (Some(layers), Some(experts)) = (self.layers, self.experts) else {
                return Err("eldr_sig has no shape: say --layers and --experts".into());
            };
            let geometry = Geometry::new(layers, experts).map_err(|error| error.to_string())?;
            let header = header_from_eldr_sig(sig.as_bytes(), geometry)
                .map_err(|error| format!("eldr_sig: {error}"))?;
            let tokens = record.prompt_tokens.map(|tokens| format!(";n={tokens}"));
            record.prefill = Some(header + &tokens.unwrap_or_default());
        } else {
            return Ok(None);
        }
        Ok(Some(()))
    }

    /// Takes `[tokens, layers, k]` expert ids apart: the prompt's rows come first, then those of generated tokens
    /// that were fed back.
    fn routed(self, ids: &Array<u16>, record: &mut Record) -> Result<(), String> {
        let &[tokens, layers, k] = &ids.shape[..] else {
            return Err(format!(
                "routed experts have the shape {:?}, not [tokens, layers, k]",
                ids.shape
            ));
        };
        let Some(experts) = self.experts else {
            return Err(
                "routed experts do not say how many experts there are: say --experts".into(),
            );
        };
        let geometry = Geometry::new(layers, experts).map_err(|error| error.to_string())?;
        let prompt = record
            .prompt_tokens
            .ok_or("the answer has no usage.prompt_tokens")?;
        let prompt_rows = usize::try_from(prompt).unwrap_or(usize::MAX);
        if tokens < prompt_rows || ids.data.len() != tokens * layers * k {
            return Err(format!(
                "routed experts have {tokens} rows for a prompt of {prompt} tokens: the engine leaves some out (routed_experts_prompt_start?)"
            ));
        }
        let (prefill, decode) = ids.data.split_at(prompt_rows * layers * k);
        let header = |topk: &TopK, tokens| {
            let counts = topk.counts().into_iter();
            let counts = counts.map(|count| u16::try_from(count).unwrap_or(u16::MAX));
            let signature = Signature::dense(geometry, counts.collect(), tokens);
            let signature = signature.map_err(|error| error.to_string())?;
            Ok::<_, String>(signature.encode(Encoding::Varint))
        };
        let prefill = TopK::new(geometry, k, prefill.to_vec())?;
        record.prefill = Some(header(&prefill, Some(prompt))?);
        if !decode.is_empty() {
            let decode = TopK::new(geometry, k, decode.to_vec())?;
            record.decode_tokens = Some(decode.tokens() as u64);
            record.decode = Some(header(&decode, None)?);
            record.decode_topk = Some(decode.encode());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use npyz::WriterBuilder as _;

    use super::*;

    fn read(routing: Routing, header: Option<&str>, body: &str) -> Result<Option<Record>, String> {
        let mut record = Record::default();
        let body: Body = serde_json::from_str(body).unwrap();
        let found = routing.read(header, &body, &mut record)?;
        Ok(found.map(|()| record))
    }

    const OF_THREE: Routing = Routing {
        layers: Some(1),
        experts: Some(3),
    };

    /// `[tokens, layers, k]` ids as vLLM sends them.
    fn npy<T: npyz::AutoSerialize + Copy>(shape: &[u64], ids: &[T]) -> String {
        let mut bytes = Vec::new();
        let builder = npyz::WriteOptions::new().default_dtype().shape(shape);
        let mut writer = builder.writer(&mut bytes).begin_nd().unwrap();
        writer.extend(ids.iter().copied()).unwrap();
        writer.finish().unwrap();
        STANDARD.encode(bytes)
    }

    #[test]
    fn a_header_is_taken_as_it_is_before_all_else() {
        let body = r#"{"usage":{"prompt_tokens":7},"choices":[{"routed_experts":"?"}]}"#;
        let found = read(Routing::default(), Some(":AQA=:;l=1;e=1;n=9"), body)
            .unwrap()
            .unwrap();
        assert_eq!(found.prefill.as_deref(), Some(":AQA=:;l=1;e=1;n=9"));
        assert_eq!(found.prompt_tokens, Some(7));
        let error = read(Routing::default(), Some("?"), "{}").unwrap_err();
        assert!(error.starts_with("x-eldr-signature: "), "{error}");
    }

    #[test]
    fn routed_experts_are_counted_up_to_the_prompt_and_beyond() {
        for text in [
            npy(&[4, 1, 2], &[0u8, 1, 0, 2, 1, 2, 2, 1]),
            npy(&[4, 1, 2], &[0u16, 1, 0, 2, 1, 2, 2, 1]),
        ] {
            let body = format!(
                r#"{{"usage":{{"prompt_tokens":2}},"choices":[{{"routed_experts":"{text}"}}]}}"#
            );
            let found = read(OF_THREE, None, &body).unwrap().unwrap();
            let prefill = found.prefill_signature().unwrap().unwrap();
            assert_eq!(
                (prefill.counts(), prefill.prompt_tokens()),
                (&[2, 1, 1][..], Some(2))
            );
            assert_eq!(
                found.decode_signature().unwrap().unwrap().counts(),
                [0, 2, 2]
            );
            assert_eq!(found.topk().unwrap().unwrap().step(1), [2, 1]);
        }
    }

    #[test]
    fn lists_of_ids_are_read_too() {
        let ids = r#""prompt_routed_experts":[[[0,1]],[[2,1]]]"#;
        for body in [
            format!(r#"{{"usage":{{"prompt_tokens":2}},{ids}}}"#),
            format!(r#"{{"usage":{{"prompt_tokens":2}},"choices":[{{{ids}}}]}}"#),
        ] {
            let found = read(OF_THREE, None, &body).unwrap().unwrap();
            assert_eq!(
                found.prefill_signature().unwrap().unwrap().counts(),
                [1, 2, 1]
            );
            assert_eq!((found.decode, found.decode_tokens), (None, None));
        }
    }

    #[test]
    fn eldr_sig_takes_its_shape_from_the_options() {
        let body = r#"{"usage":{"prompt_tokens":4},"kv_transfer_params":{"eldr_sig":"AQAAAAMA"}}"#;
        let found = read(OF_THREE, None, body).unwrap().unwrap();
        assert_eq!(found.prefill.as_deref(), Some(":AQAAAAMA:;l=1;e=3;n=4"));
        let error = read(Routing::default(), None, body).unwrap_err();
        assert_eq!(error, "eldr_sig has no shape: say --layers and --experts");
    }

    #[test]
    fn what_says_nothing_or_does_not_fit_is_told() {
        assert_eq!(
            read(OF_THREE, None, r#"{"choices":[{"text":"a"}]}"#),
            Ok(None)
        );
        let ids = npy(&[2, 1, 2], &[0u8, 1, 0, 3]);
        let wide = npy(&[2, 1, 2], &[0i64, 1, 0, 2]);
        let forged = STANDARD.encode(b"\x93NUMPY\x01\0\x50\0{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999999, 9999999999999), }");
        for (routing, routed, tokens, expected) in [
            (OF_THREE, &ids, 2, "expert 3 where 0 to 2 exist"),
            (
                OF_THREE,
                &ids,
                3,
                "routed experts have 2 rows for a prompt of 3 tokens",
            ),
            (
                Routing::default(),
                &ids,
                2,
                "routed experts do not say how many experts there are: say --experts",
            ),
            (
                OF_THREE,
                &wide,
                2,
                "routed_experts: its type is '<i8' where u8 or u16 was expected",
            ),
            (
                OF_THREE,
                &forged,
                2,
                "routed_experts: its header has the shape (9999999999999, 9999999999999)",
            ),
            (OF_THREE, &"?".to_owned(), 2, "routed_experts: Invalid"),
            (
                OF_THREE,
                &"AAAA".to_owned(),
                2,
                "routed_experts: its header cannot be read",
            ),
        ] {
            let body = format!(
                r#"{{"usage":{{"prompt_tokens":{tokens}}},"choices":[{{"routed_experts":"{routed}"}}]}}"#
            );
            let error = read(routing, None, &body).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
