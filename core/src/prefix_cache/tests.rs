use proptest::prelude::*;

use super::*;

const BLOCK: usize = 3;
const COUNTS: usize = 5;
const CAPACITY: usize = 7;

/// What the gate says about the last token of `prefix`: any function of the whole prefix. Large, so that sums saturate.
fn gate(prefix: &[u8]) -> [u16; COUNTS] {
    let mut state = prefix.iter().fold(7u64, |state, &token| {
        (state + u64::from(token)).wrapping_mul(6_364_136_223_846_793_005)
    });
    std::array::from_fn(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 50) as u16
    })
}

/// The obvious way: every token of the prompt, nothing cached.
fn recount(prompt: &[u8]) -> Vec<u16> {
    let mut sum = vec![0u32; COUNTS];
    for end in 1..=prompt.len() {
        for (sum, count) in sum.iter_mut().zip(gate(&prompt[..end])) {
            *sum += u32::from(count);
        }
    }
    sum.into_iter()
        .map(|count| count.min(u32::from(u16::MAX)) as u16)
        .collect()
}

/// Prefixes name themselves.
fn keys(prompt: &[u8]) -> Vec<Vec<u8>> {
    (1..=prompt.len() / BLOCK)
        .map(|blocks| prompt[..blocks * BLOCK].to_vec())
        .collect()
}

/// Computes the next `tokens` tokens, in chunks that end where blocks end.
fn compute(
    cache: &mut PrefixCache<Vec<u8>>,
    prompt: &[u8],
    sequence: &mut Sequence<Vec<u8>>,
    mut tokens: usize,
) {
    while tokens > 0 && sequence.remaining() > 0 {
        let chunk = tokens.min(sequence.room());
        let from = prompt.len() - sequence.remaining();
        let mut counts = vec![0; COUNTS];
        for end in from + 1..=from + chunk {
            add_saturating(&mut counts, &gate(&prompt[..end]));
        }
        cache.add(sequence, chunk, &counts).unwrap();
        tokens -= chunk;
    }
}

fn run(cache: &mut PrefixCache<Vec<u8>>, prompt: &[u8]) -> usize {
    let mut sequence = cache.begin(keys(prompt), prompt.len()).unwrap();
    compute(cache, prompt, &mut sequence, usize::MAX);
    assert_eq!(cache.signature(&sequence), recount(prompt));
    let cached = sequence.cached_blocks();
    cache.release(sequence);
    cached
}

#[derive(Debug, Clone)]
enum Event {
    Begin(Vec<u8>),
    /// A chunk of a running request.
    Chunk(prop::sample::Index, usize),
    /// A running request ends, wherever it is.
    End(prop::sample::Index),
}

fn event() -> impl Strategy<Value = Event> {
    // Two tokens, so that prompts often begin alike.
    let prompt = proptest::collection::vec(0u8..2, 0..12);
    prop_oneof![
        2 => prompt.prop_map(Event::Begin),
        4 => (any::<prop::sample::Index>(), 1usize..7).prop_map(|(who, tokens)| Event::Chunk(who, tokens)),
        1 => any::<prop::sample::Index>().prop_map(Event::End),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_sum_of_blocks_equals_a_recount_under_any_interleaving(
        events in proptest::collection::vec(event(), 1..80),
    ) {
        let mut cache = PrefixCache::new(CAPACITY, BLOCK, COUNTS);
        let mut running: Vec<(Vec<u8>, Sequence<Vec<u8>>)> = Vec::new();
        for event in events {
            match event {
                Event::Begin(prompt) => {
                    let free = cache.free();
                    match cache.begin(keys(&prompt), prompt.len()) {
                        Ok(sequence) => running.push((prompt, sequence)),
                        Err(error) => {
                            let no_room = matches!(error, PrefixCacheError::NoRoom { .. });
                            prop_assert!(no_room, "{error}");
                            prop_assert_eq!(cache.free(), free);
                        }
                    }
                }
                Event::Chunk(who, tokens) if !running.is_empty() => {
                    let at = who.index(running.len());
                    let (prompt, sequence) = &mut running[at];
                    compute(&mut cache, prompt, sequence, tokens);
                }
                Event::End(who) if !running.is_empty() => {
                    let (_, sequence) = running.swap_remove(who.index(running.len()));
                    cache.release(sequence);
                }
                _ => {}
            }
            // Every request's sum is that of the tokens done, however often its neighbours came and went.
            for (prompt, sequence) in &running {
                let done = &prompt[..prompt.len() - sequence.remaining()];
                prop_assert_eq!(cache.signature(sequence), recount(done));
            }
            let mut used: Vec<usize> =
                running.iter().flat_map(|(_, sequence)| sequence.blocks().to_vec()).collect();
            used.sort_unstable();
            used.dedup();
            prop_assert_eq!(used.len() + cache.free(), CAPACITY);
            prop_assert!(cache.cached() <= CAPACITY);
        }
        for (_, sequence) in running {
            cache.release(sequence);
        }
        prop_assert_eq!(cache.free(), CAPACITY);
    }
}

#[test]
fn leading_full_blocks_are_found_up_to_the_first_that_is_missing() {
    let mut cache = PrefixCache::new(CAPACITY, BLOCK, COUNTS);
    assert_eq!(run(&mut cache, &[0, 0, 0, 1, 1, 1, 2]), 0);
    assert_eq!(run(&mut cache, &[0, 0, 0, 1, 1, 1, 2]), 2);
    assert_eq!(run(&mut cache, &[0, 0, 0, 2, 2, 2]), 1);
    assert_eq!(run(&mut cache, &[1, 1, 1]), 0);
    assert_eq!(run(&mut cache, &[0, 0]), 0);
}

#[test]
fn the_least_recently_used_goes_first_and_of_a_prompt_its_end() {
    let mut cache = PrefixCache::new(4, BLOCK, COUNTS);
    run(&mut cache, &[0; 9]); // three blocks
    run(&mut cache, &[1; 3]); // the fourth
    run(&mut cache, &[2; 3]); // in place of the third of [0; 9]
    assert_eq!(run(&mut cache, &[1; 3]), 1);
    assert_eq!(run(&mut cache, &[0; 6]), 2);
    run(&mut cache, &[3; 3]); // in place of [2; 3]
    assert_eq!(run(&mut cache, &[1; 3]), 1);
    assert_eq!(run(&mut cache, &[2; 3]), 0);
}

#[test]
fn blocks_in_use_are_never_evicted() {
    let mut cache = PrefixCache::new(2, BLOCK, COUNTS);
    let mut held = cache.begin(keys(&[0; 3]), 3).unwrap();
    compute(&mut cache, &[0; 3], &mut held, 3);
    run(&mut cache, &[1; 3]);
    run(&mut cache, &[2; 3]);
    assert_eq!(run(&mut cache, &[0; 3]), 1);
    let error = cache.begin(keys(&[0; 9]), 9).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 more KV blocks are needed and 1 are free"
    );
    assert_eq!(cache.signature(&held), recount(&[0; 3]));
    cache.release(held);
}

#[test]
fn the_cached_hits_of_a_request_do_not_count_as_room_for_its_own_rest() {
    let mut cache = PrefixCache::new(2, BLOCK, COUNTS);
    run(&mut cache, &[0; 6]);
    let error = cache.begin(keys(&[0; 9]), 9).unwrap_err();
    assert_eq!(error, PrefixCacheError::NoRoom { needed: 1, free: 0 });
    assert_eq!(run(&mut cache, &[0; 6]), 2);
}

#[test]
fn a_block_that_two_requests_compute_at_once_is_shared_once() {
    let mut cache = PrefixCache::new(2, BLOCK, COUNTS);
    let prompt = [0; 3];
    let mut both = [(); 2].map(|()| cache.begin(keys(&prompt), 3).unwrap());
    for sequence in &mut both {
        compute(&mut cache, &prompt, sequence, 3);
        assert_eq!(cache.signature(sequence), recount(&prompt));
    }
    assert_eq!(cache.cached(), 1);
    for sequence in both {
        cache.release(sequence);
    }
    assert_eq!((cache.cached(), cache.free()), (1, 2));
    run(&mut cache, &[1; 3]); // in place of the copy
    assert_eq!(run(&mut cache, &prompt), 1);
}

#[test]
fn a_block_is_not_found_without_those_before_it() {
    let mut cache = PrefixCache::new(4, BLOCK, COUNTS);
    let (short, long) = ([0; 3], [0; 6]);
    let mut first = cache.begin(keys(&short), 3).unwrap();
    let mut second = cache.begin(keys(&long), 6).unwrap();
    compute(&mut cache, &short, &mut first, 3);
    compute(&mut cache, &long, &mut second, 6);
    cache.release(first);
    cache.release(second);
    for token in 1..4 {
        run(&mut cache, &[token; 3]); // the last one in place of the first block
    }
    assert!(cache.cached.contains_key(&long[..]) && !cache.cached.contains_key(&short[..]));
    assert_eq!(run(&mut cache, &long), 0);
}

#[test]
fn what_does_not_fit_is_refused_with_its_numbers() {
    let mut cache: PrefixCache<u8> = PrefixCache::new(2, BLOCK, COUNTS);
    let keys = cache.begin(vec![1], 7).unwrap_err().to_string();
    assert_eq!(
        keys,
        "1 block keys for a prompt of 7 tokens, which has 2 full blocks"
    );
    let mut sequence = cache.begin(vec![1], 4).unwrap();
    let chunk = cache.add(&mut sequence, 4, &[0; COUNTS]).unwrap_err();
    assert_eq!(
        chunk.to_string(),
        "a chunk of 4 tokens where the block takes 3"
    );
    let counts = cache.add(&mut sequence, 1, &[0; 2]).unwrap_err();
    assert_eq!(counts.to_string(), "2 counts where the model has 5");
    assert_eq!(sequence.remaining(), 4);
    cache.release(sequence);
}
