use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::shared::memory::Memory;

const CLOCK: Clock = Clock {
    now_ms: 1_000_000,
    ttl_ms: 60_000,
};

fn at(now_ms: u64) -> Clock {
    Clock { now_ms, ..CLOCK }
}

/// What the prefill answer of request `number` said.
fn said(number: u64) -> Kept {
    Kept {
        revision: number,
        fingerprint: !number,
        found: Ok(Found::Similarities(vec![
            number as f32,
            -0.25,
            f32::MIN_POSITIVE,
        ])),
        prompt_tokens: (number % 2 == 1).then_some(number),
    }
}

fn place(shared: &Memory, id: &str, token: u64) -> Ticket {
    match begin(shared, id.as_bytes(), token, CLOCK) {
        Begun::Place(ticket) => ticket,
        other => panic!("{other:?}"),
    }
}

/// Ids that share a key.
fn neighbours() -> impl Iterator<Item = String> {
    let key = fnv1a(b"0") % KEYS;
    let all = (0..).map(|number: u64| number.to_string());
    all.filter(move |id| fnv1a(id.as_bytes()) % KEYS == key)
}

#[test]
fn what_prefill_said_is_found_once_by_the_decode_request() {
    let shared = Memory::default();
    let ticket = place(&shared, "r", 1);
    assert!(put(&shared, &ticket, &said(7), CLOCK));
    assert_eq!(take(&shared, b"other", CLOCK), Taken::Missing);
    assert_eq!(take(&shared, b"r", CLOCK), Taken::Kept(said(7)));
    assert_eq!(take(&shared, b"r", CLOCK), Taken::Missing);
    place(&shared, "r", 2);
}

#[test]
fn why_there_is_no_similarity_is_kept_too() {
    let shared = Memory::default();
    for reason in [
        Reason::MalformedSignature,
        Reason::GeometryMismatch,
        Reason::NoBlob,
        Reason::NoSignature,
    ] {
        let ticket = place(&shared, "r", 1);
        let kept = Kept {
            found: Err(reason),
            ..said(1)
        };
        assert!(put(&shared, &ticket, &kept, CLOCK));
        assert_eq!(take(&shared, b"r", CLOCK), Taken::Kept(kept));
    }
}

#[test]
fn an_id_that_two_requests_use_is_good_for_neither() {
    let shared = Memory::default();
    let first = place(&shared, "r", 1);
    assert_eq!(begin(&shared, b"r", 2, CLOCK), Begun::Duplicate);
    assert!(!put(&shared, &first, &said(1), CLOCK));
    for _ in 0..3 {
        assert_eq!(take(&shared, b"r", CLOCK), Taken::Duplicate);
    }
    let later = at(CLOCK.now_ms + CLOCK.ttl_ms + 1);
    assert!(matches!(begin(&shared, b"r", 3, later), Begun::Place(_)));
}

#[test]
fn a_decode_request_that_precedes_the_answer_belongs_to_another_request() {
    let shared = Memory::default();
    let ticket = place(&shared, "r", 1);
    assert_eq!(take(&shared, b"r", CLOCK), Taken::Duplicate);
    assert!(!put(&shared, &ticket, &said(1), CLOCK));
    assert_eq!(take(&shared, b"r", CLOCK), Taken::Duplicate);
}

#[test]
fn a_leg_that_failed_leaves_its_id_free() {
    let shared = Memory::default();
    let ticket = place(&shared, "r", 1);
    withdraw(&shared, &ticket, CLOCK);
    let again = place(&shared, "r", 2);
    withdraw(&shared, &ticket, CLOCK);
    assert!(
        put(&shared, &again, &said(2), CLOCK),
        "it is not the first one's to withdraw"
    );
    withdraw(&shared, &again, CLOCK);
    assert_eq!(
        take(&shared, b"r", CLOCK),
        Taken::Kept(said(2)),
        "what is answered stays"
    );
}

#[test]
fn entries_are_forgotten_after_their_time_and_after_a_leap_of_the_clock() {
    for now_ms in [
        CLOCK.now_ms + CLOCK.ttl_ms + 1,
        CLOCK.now_ms - CLOCK.ttl_ms - 1,
    ] {
        let shared = Memory::default();
        let ticket = place(&shared, "r", 1);
        assert!(put(&shared, &ticket, &said(1), CLOCK));
        assert_eq!(take(&shared, b"r", at(now_ms)), Taken::Missing);
    }
}

#[test]
fn ids_that_share_a_key_do_not_mix_and_the_oldest_makes_room() {
    let shared = Memory::default();
    let ids: Vec<String> = neighbours().take(ENTRIES + 1).collect();
    let tickets: Vec<Ticket> = (0u64..)
        .zip(&ids)
        .map(|(n, id)| place(&shared, id, n))
        .collect();
    for (number, ticket) in (0u64..).zip(&tickets) {
        let kept = put(&shared, ticket, &said(number), CLOCK);
        assert_eq!(kept, number > 0, "the first one's place is taken");
    }
    for (number, id) in (0u64..).zip(&ids) {
        let expected = match number {
            0 => Taken::Missing,
            _ => Taken::Kept(said(number)),
        };
        assert_eq!(take(&shared, id.as_bytes(), CLOCK), expected);
    }
}

#[test]
fn whose_place_was_taken_does_not_speak_for_another_with_its_id() {
    let shared = Memory::default();
    let ids: Vec<String> = neighbours().take(ENTRIES + 1).collect();
    let evicted = place(&shared, &ids[0], 1);
    for id in &ids[1..] {
        place(&shared, id, 2);
    }
    place(&shared, &ids[0], 3);
    assert!(!put(&shared, &evicted, &said(1), CLOCK));
    assert_eq!(take(&shared, ids[0].as_bytes(), CLOCK), Taken::Duplicate);
}

#[test]
fn ids_of_no_use_have_no_place() {
    let shared = Memory::default();
    for id in [vec![], vec![b'x'; MAX_ID_BYTES + 1]] {
        assert_eq!(begin(&shared, &id, 1, CLOCK), Begun::NoPlace);
        assert_eq!(take(&shared, &id, CLOCK), Taken::Missing);
    }
    let longest = "x".repeat(MAX_ID_BYTES);
    let ticket = place(&shared, &longest, 1);
    assert!(put(&shared, &ticket, &said(1), CLOCK));
    assert_eq!(
        take(&shared, longest.as_bytes(), CLOCK),
        Taken::Kept(said(1))
    );
}

/// A store in which another thread writes before each of the first writes.
struct Contended {
    memory: Memory,
    defeats: std::cell::Cell<u32>,
}

impl Shared for Contended {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        self.memory.get(key)
    }

    fn set(&self, key: &str, value: &[u8], version: Option<u32>) -> bool {
        if version != Some(u32::MAX) && self.defeats.get() > 0 {
            self.defeats.set(self.defeats.get() - 1);
            let (now, _) = self.memory.get(key);
            self.memory.set(key, &now.unwrap_or_default(), None);
        }
        self.memory.set(key, value, version)
    }
}

#[test]
fn a_lost_race_is_run_again_and_one_that_is_always_lost_ends() {
    for (defeats, wins) in [(3, true), (1_000, false)] {
        let shared = Contended {
            memory: Memory::default(),
            defeats: defeats.into(),
        };
        let begun = begin(&shared, b"r", 1, CLOCK);
        assert_eq!(matches!(begun, Begun::Place(_)), wins, "{defeats}");
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    Begin,
    Put,
    Withdraw,
    Take,
}

/// Requests with few ids, each with its steps in order, in any interleaving.
fn interleavings() -> impl Strategy<Value = (Vec<usize>, Vec<(usize, Step)>)> {
    let ids = proptest::collection::vec(0usize..4, 1..12);
    let request = (any::<bool>(), 0usize..4);
    (ids, proptest::collection::vec(request, 12), any::<u64>()).prop_map(|(ids, kinds, seed)| {
        let mut left: Vec<(usize, Vec<Step>)> = (0..ids.len())
            .map(|index| {
                let (fails, cut) = kinds[index];
                let mut steps = match fails {
                    true => vec![Step::Begin, Step::Withdraw],
                    false => vec![Step::Begin, Step::Put, Step::Take],
                };
                // Some break off on the way.
                if cut == 0 {
                    steps.pop();
                }
                (index, steps)
            })
            .collect();
        let (mut order, mut seed) = (Vec::new(), seed);
        while !left.is_empty() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let which = (seed >> 33) as usize % left.len();
            let (index, steps) = &mut left[which];
            order.push((*index, steps.remove(0)));
            if steps.is_empty() {
                left.swap_remove(which);
            }
        }
        (ids, order)
    })
}

proptest! {
    /// The oracle: a decode request gets what its own prefill said if no other request with its id was between
    /// `begin` and `take` while it was, and nothing otherwise.
    #[test]
    fn a_request_gets_its_own_or_nothing((ids, order) in interleavings()) {
        let shared = Memory::default();
        let names: Vec<String> = neighbours().take(4).collect();
        let mut tickets = HashMap::new();
        // By id: requests between their legs, and whether two of them ever were at a time.
        let mut open: HashMap<usize, (Vec<usize>, bool)> = HashMap::new();
        for (request, step) in order {
            let (id, number) = (names[ids[request]].as_bytes(), request as u64);
            let (present, spoiled) = open.entry(ids[request]).or_default();
            match step {
                Step::Begin => {
                    *spoiled |= !present.is_empty();
                    present.push(request);
                    let begun = begin(&shared, id, number, CLOCK);
                    prop_assert_eq!(matches!(begun, Begun::Place(_)), !*spoiled);
                    if let Begun::Place(ticket) = begun {
                        tickets.insert(request, ticket);
                    }
                }
                Step::Put => {
                    if let Some(ticket) = tickets.get(&request) {
                        let kept = put(&shared, ticket, &said(number), CLOCK);
                        prop_assert_eq!(kept, !*spoiled);
                    }
                }
                Step::Withdraw => {
                    if let Some(ticket) = tickets.get(&request) {
                        withdraw(&shared, ticket, CLOCK);
                    }
                    if !*spoiled {
                        present.clear();
                    }
                }
                Step::Take => {
                    let taken = take(&shared, id, CLOCK);
                    if *spoiled {
                        prop_assert_eq!(taken, Taken::Duplicate);
                    } else {
                        prop_assert_eq!(taken, Taken::Kept(said(number)));
                        present.clear();
                    }
                }
            }
        }
    }

    #[test]
    fn entries_survive_their_bytes(
        entries in proptest::collection::vec(
            (proptest::collection::vec(any::<u8>(), 1..=256), any::<u64>(), any::<u64>(), 0usize..8,
             proptest::collection::vec(any::<f32>().prop_filter("equal to itself", |x| !x.is_nan()), 0..20)),
            0..9,
        ),
    ) {
        let entries: Vec<Entry> = entries.into_iter().map(|(id, token, touched_ms, kind, similarities)| {
            let prompt_tokens = Some(touched_ms).filter(|&tokens| tokens > 0);
            let ready = |found| State::Ready(Kept { fingerprint: !token, revision: token, found, prompt_tokens });
            let state = match kind {
                0 => State::Pending,
                1 => State::Ambiguous,
                2 => ready(Err(Reason::MalformedSignature)),
                3 => ready(Err(Reason::GeometryMismatch)),
                4 => ready(Err(Reason::NoBlob)),
                5 => ready(Err(Reason::NoSignature)),
                6 => ready(Ok(Found::Similarities(similarities))),
                _ => ready(Ok(Found::Signature(id.clone()))),
            };
            Entry { id, token, touched_ms, state }
        }).collect();
        let bytes = entry::write(&entries);
        prop_assert_eq!(entry::read(&bytes), &entries[..]);
        for length in 0..bytes.len().min(300) {
            let cut = entry::read(&bytes[..length]);
            prop_assert!(entries.starts_with(&cut));
        }
    }

    #[test]
    fn any_bytes_are_some_entries(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let entries = entry::read(&bytes);
        prop_assert!(entries.len() * 19 <= bytes.len());
    }
}
