//! Workers that take their time over everything, as long as a storm of clients lasts.

use std::time::Duration;

use eldr_tests::upstream::{Exchange, Received};
use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Upstream};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::time::sleep;

/// Longest that a worker takes for an answer or the next piece of it.
const WORK: Duration = Duration::from_millis(8);

/// Random numbers of one of those who take part.
pub(crate) fn rng(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

pub(crate) fn up_to(longest: Duration, rng: &mut ChaCha8Rng) -> Duration {
    longest.mul_f64(rng.random_range(0.0..1.0))
}

/// Runs `storm` while the gateway's prefill worker and its three decode workers work. The signature of a prefill answer is
/// what `sign` says of the request.
pub(crate) async fn while_they_work<T>(
    gateway: &mut Gateway,
    seed: u64,
    sign: impl Fn(&Received, &mut ChaCha8Rng) -> String,
    storm: impl AsyncFnOnce(&Gateway) -> T,
) -> T {
    gateway.prefill.by_hand();
    for worker in &gateway.decode {
        worker.by_hand();
    }
    let mut decode = std::mem::take(&mut gateway.decode);
    let idle = Upstream::start(Answer::status(500)).await;
    let mut prefill = std::mem::replace(&mut gateway.prefill, idle);
    let [first, second, third] = &mut decode[..] else {
        panic!("three decode workers");
    };
    let workers = async {
        tokio::join!(
            prefills(&mut prefill, rng(seed, 1 << 32), sign),
            decodes(first, rng(seed, (1 << 33) + 1)),
            decodes(second, rng(seed, (1 << 33) + 2)),
            decodes(third, rng(seed, (1 << 33) + 3))
        )
    };
    let result = tokio::select! {
        result = storm(gateway) => result,
        _ = workers => panic!("workers work for ever"),
    };
    (gateway.prefill, gateway.decode) = (prefill, decode);
    result
}

async fn prefills(
    worker: &mut Upstream,
    mut rng: ChaCha8Rng,
    sign: impl Fn(&Received, &mut ChaCha8Rng) -> String,
) {
    loop {
        let exchange = worker.next().await;
        let takes = up_to(WORK, &mut rng);
        let signature = sign(&exchange.request, &mut rng);
        tokio::spawn(async move {
            sleep(takes).await;
            exchange.answer(Answer::prefill(KV_TRANSFER_PARAMS, Some(&signature)));
        });
    }
}

async fn decodes(worker: &mut Upstream, mut rng: ChaCha8Rng) {
    loop {
        let exchange = worker.next().await;
        let pauses = [(); 5].map(|()| up_to(WORK, &mut rng));
        tokio::spawn(decode(exchange, pauses));
    }
}

async fn decode(exchange: Exchange, pauses: [Duration; 5]) {
    let stream = exchange.stream(Answer::event_stream());
    for pause in pauses {
        sleep(pause).await;
        if !stream.offer("data: a token\n\n").await {
            return;
        }
    }
    stream.finish();
}

/// How many requests have ended, whatever their outcome.
pub(crate) async fn outcomes(gateway: &Gateway) -> u64 {
    let stats = gateway.filter_stats().await.into_iter();
    let outcomes = stats.filter(|(name, _)| name.starts_with("eldr.outcome."));
    outcomes.map(|(_, count)| count).sum()
}
