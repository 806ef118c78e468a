//! A client's body in any spelling and a prefill answer with any status, headers and JSON: both legs' bodies are what editing
//! the list of members would give, the signature is the answer's, and the request ends in one outcome.

use super::json::{Json, Printer, Text, pairs, plugin};
use arbitrary::Arbitrary;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::{Outcome, Signature};
use eldr_filter::plugin::Plugin;
use eldr_filter::release::Form;
use eldr_filter::request::{Answer, OnBody, OnHeaders, OnPrefill, Request};

/// What the bytes stand for.
#[derive(Arbitrary, Debug)]
pub struct Input {
    style: Vec<u8>,
    client: Vec<(Text, Json)>,
    status: Option<Vec<u8>>,
    code: u16,
    header: Option<Vec<u8>>,
    answer: Vec<(Text, Json)>,
    /// Comes last, so it counts.
    hand_over: Option<HandOver>,
    decode_only: bool,
}

#[derive(Arbitrary, Debug)]
struct HandOver {
    params: Vec<(Text, Json)>,
    eldr_sig: Option<EldrSig>,
}

#[derive(Arbitrary, Debug)]
enum EldrSig {
    Counts([i16; 6]),
    Other(Json),
}

thread_local! {
    static PLUGINS: [Plugin; 2] = ["error", "decode_only"].map(plugin);
}

const KV: &str = "kv_transfer_params";
const ELDR_SIG: &str = "eldr_sig";

/// Members of the prefill leg's body, in order.
fn prefill_members(client: &[(String, String)]) -> Vec<(String, String)> {
    let replaced = |key: &str| match key {
        "stream" => Some("false"),
        "max_tokens" | "max_completion_tokens" | "best_of" | "n" => Some("1"),
        _ => None,
    };
    let mut members: Vec<(String, String)> = client
        .iter()
        .filter(|(key, _)| key != "stream_options" && key != "min_tokens")
        .map(|(key, raw)| {
            (
                key.clone(),
                replaced(key).map_or(raw.clone(), str::to_owned),
            )
        })
        .collect();
    for (key, value) in [("stream", "false"), ("max_tokens", "1")] {
        if client.iter().all(|(other, _)| other != key) {
            members.push((key.into(), value.into()));
        }
    }
    members
}

/// Counts in a value of `eldr_sig`, raw, for 3 layers × 2 experts; `None` where it is malformed.
fn counts(raw: &str) -> Option<Vec<u16>> {
    let text: String = serde_json::from_str(raw).ok()?;
    let bytes = STANDARD.decode(text).ok()?;
    let pairs = bytes
        .chunks(2)
        .map(|pair| pair.try_into().ok().map(i16::from_le_bytes));
    let counts: Option<Vec<u16>> = pairs.map(|count| u16::try_from(count?).ok()).collect();
    counts.filter(|counts| counts.len() == 6)
}

fn last<'p>(pairs: &'p [(String, String)], key: &str) -> Option<&'p str> {
    let found = pairs.iter().rev().find(|(other, _)| other == key);
    found.map(|(_, raw)| raw.as_str())
}

/// Panics where a promise is broken.
pub fn check(input: Input) {
    PLUGINS.with(|plugins| run(input, plugins));
}

fn run(input: Input, plugins: &[Plugin; 2]) {
    let plugin = &plugins[usize::from(input.decode_only)];
    let print = |members: &[(Text, Json)]| {
        let mut printer = Printer::new(&input.style);
        printer.space();
        let pairs = printer.object(members);
        printer.space();
        (printer.out, pairs)
    };
    let (client, client_members) = print(&input.client);
    let mut request = Request::default();
    let header = |name: &str, value: &[u8]| (name.to_owned(), value.to_vec());
    let headers = vec![
        header(":method", b"POST"),
        header(":path", b"/v1/completions"),
    ];
    assert_eq!(request.on_headers(headers, false), OnHeaders::ReadBody);
    let next = request.on_body(plugin, client.as_bytes());
    if client_members.iter().any(|(key, _)| key == KV) {
        assert!(matches!(next, OnBody::Reply(reply) if reply.status == 400));
        assert_eq!(request.outcome(), Some(Outcome::Refused));
        return;
    }
    if next == OnBody::Route {
        let prompt = last(&client_members, "prompt").expect("a batch has prompts");
        assert!(prompt.starts_with('['));
        return;
    }
    assert_eq!(next, OnBody::Prefill);
    let leg = pairs(&request.leg().body).expect("an object");
    let (kv, others): (Vec<_>, Vec<_>) = leg.into_iter().partition(|(key, _)| key == KV);
    assert_eq!(others, prefill_members(&client_members));
    assert!(kv.len() == 1 && kv[0].1.contains("\"do_remote_decode\":true"));

    let mut answer = input.answer;
    if let Some(HandOver {
        mut params,
        eldr_sig,
    }) = input.hand_over
    {
        let value = eldr_sig.map(|sig| match sig {
            EldrSig::Counts(counts) => {
                let bytes: Vec<u8> = counts
                    .iter()
                    .flat_map(|count| count.to_le_bytes())
                    .collect();
                Json::Text(Text::Any(STANDARD.encode(bytes)))
            }
            EldrSig::Other(json) => json,
        });
        params.extend(value.map(|value| (Text::Any(ELDR_SIG.into()), value)));
        answer.push((Text::Any(KV.into()), Json::Object(params)));
    }
    let (body, members) = print(&answer);
    let params = last(&members, KV).filter(|raw| raw.starts_with('{'));
    let code = 100 + input.code % 500;
    let mut headers = vec![header(":status", code.to_string().as_bytes())];
    let mut status = Some(code);
    if let Some(bytes) = input.status {
        status = std::str::from_utf8(&bytes)
            .ok()
            .and_then(|text| text.parse().ok());
        headers = vec![header(":status", &bytes)];
    }
    if let Some(signature) = &input.header {
        headers.push(header("x-eldr-signature", signature));
    }
    let answer = Answer {
        headers,
        body: body.into_bytes(),
    };
    match (request.on_prefill(&answer, plugin), status) {
        (OnPrefill::Route { signature, head }, Some(200..=299)) => {
            let params = params.map(|raw| (raw, pairs(raw).expect("an object")));
            let eldr_sig = params
                .as_ref()
                .and_then(|(_, params)| last(params, ELDR_SIG));
            match (signature, input.header, eldr_sig) {
                (found, Some(header), _) => assert_eq!(found.as_deref(), Some(header.as_slice())),
                (found, None, None | Some("null" | "\"\"")) => assert_eq!(found, None),
                (found, None, Some(raw)) => {
                    let found = Signature::decode(&found.expect("good or bad, it is there")).ok();
                    assert_eq!(found.map(|found| found.counts().to_vec()), counts(raw));
                }
            }
            assert_eq!(head.is_some(), params.is_some());
            assert_eq!(request.is_handed_over(), params.is_some());
            let (Some(head), Some((raw, params))) = (head, params) else {
                return;
            };
            let decode = pairs(&(head.bytes + &client[head.replaces..])).expect("an object");
            let (first, rest) = decode.split_first().expect("the params");
            assert_eq!(rest, client_members);
            assert_eq!(first.0, KV);
            let kept: Vec<_> = params
                .iter()
                .filter(|(key, _)| key != ELDR_SIG)
                .cloned()
                .collect();
            assert_eq!(pairs(&first.1).expect("an object"), kept);
            assert!(kept.len() < params.len() || first.1 == raw);
            let release = request
                .take_release(Form::Decode)
                .expect("nobody has the blocks");
            assert_eq!(
                last(&pairs(&release.body).expect("an object"), KV),
                Some(first.1.as_str())
            );
            assert!(request.take_release(Form::Decode).is_none());
        }
        (OnPrefill::Reply(reply), Some(status @ 400..=499)) => {
            assert_eq!(
                (reply.status, &reply.body),
                (u32::from(status), &answer.body)
            );
            assert!(
                reply
                    .headers
                    .iter()
                    .all(|(name, _)| name != "x-eldr-signature")
            );
            assert_eq!(request.outcome(), Some(Outcome::PrefillRejected));
        }
        (
            OnPrefill::Route {
                signature: None,
                head: None,
            },
            _,
        ) => assert!(input.decode_only),
        (OnPrefill::Reply(reply), _) => {
            assert!(!input.decode_only && matches!(reply.status, 502 | 504));
            assert_eq!(request.outcome(), Some(Outcome::PrefillFailed));
        }
        (next, status) => panic!("{next:?} after {status:?}"),
    }
}
