//! A VM that traps takes its own thread's requests along, and nothing else.

use eldr_tests::client::{next_piece, post, raw};
use eldr_tests::upstream::Stream;
use eldr_tests::{Answer, Connection, Gateway, Options, eventually};
use hyper::body::Incoming;

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;
pub(crate) const TRAP: &[u8] =
    b"GET / HTTP/1.1\r\nhost: g\r\nconnection: close\r\nx-eldr-trap-for-tests: 1\r\n\r\n";

/// Open connections of the listener per worker thread.
async fn per_thread(gateway: &Gateway) -> [u64; 2] {
    let stats = gateway
        .envoy
        .stats(r"^listener\..*worker_[01]\.downstream_cx_active$");
    let values = stats.await.unwrap().values;
    [0, 1].map(|thread| {
        let of = format!(".worker_{thread}.");
        let found = values
            .iter()
            .find(|(name, _)| name.contains(&of) && !name.contains("admin"));
        found.map_or(0, |(_, count)| *count)
    })
}

/// A new connection beside the `open` ones, and the thread that serves it.
pub(crate) async fn connect(gateway: &Gateway, open: usize) -> (usize, Connection) {
    let now = async || per_thread(gateway).await;
    let are = |count: usize| move |now: &[u64; 2]| now.iter().sum::<u64>() == count as u64;
    let before = eventually("those that closed are counted out", now, are(open)).await;
    let connection = gateway.connect().await;
    let after = eventually("the connection is open", now, are(open + 1)).await;
    (usize::from(after[1] > before[1]), connection)
}

async fn hold(gateway: &mut Gateway, connection: &mut Connection) -> (Incoming, Stream) {
    let (answer, stream) = gateway.decode[0]
        .streams_to(connection.send(post("/v1/completions", BODY)))
        .await;
    (answer.into_body(), stream)
}

#[tokio::test]
async fn one_that_traps_is_reloaded_and_the_other_thread_goes_on() {
    let mut gateway = Gateway::start(Options {
        threads: 2,
        workers: 1,
        traps: true,
        ..Options::default()
    })
    .await;
    gateway.decode[0].by_hand();
    // Two held streams on each thread, and a free connection.
    let (mut held, mut free) = ([vec![], vec![]], [vec![], vec![]]);
    while held.iter().any(|held| held.len() < 2) || free.iter().any(Vec::is_empty) {
        let open =
            held.iter().map(Vec::len).sum::<usize>() + free.iter().map(Vec::len).sum::<usize>();
        let (thread, mut connection) = connect(&gateway, open).await;
        if held[thread].len() < 2 {
            let stream = hold(&mut gateway, &mut connection).await;
            held[thread].push((connection, stream));
        } else {
            free[thread].push(connection);
        }
    }
    gateway.expect_in_flight(4).await;

    // A trap on whichever thread takes the connection; the log says which VM, the counters which thread.
    let _ = raw(gateway.address, TRAP).await;
    let log = async || gateway.envoy.log_tail(usize::MAX);
    let trapped = |log: &String| log.contains("Function: proxy_on_request_headers failed");
    eventually("the VM traps", log, trapped).await;

    // What the dead VM counted is forgotten with its lease; what the other counted is not.
    gateway.expect_in_flight(2).await;

    // Streams of the other thread go on to their end.
    gateway.decode[0].answers(Answer::json("decode-0"));
    let mut alive = [0, 0];
    for (thread, held) in held.into_iter().enumerate() {
        for (connection, (mut body, stream)) in held {
            let whole = stream.offer("whole").await && {
                use http_body_util::BodyExt;
                matches!(body.frame().await, Some(Ok(_)))
            };
            if whole {
                stream.finish();
                assert_eq!(next_piece(&mut body).await, None);
                alive[thread] += 1;
            }
            drop(connection);
        }
    }
    assert!(
        alive.contains(&2),
        "streams that went on, by thread: {alive:?}"
    );
    gateway.expect_in_flight(0).await;

    let open = free.iter().map(Vec::len).sum();
    // Both threads serve: the one that went on, and the one whose VM is reloaded.
    for thread in [0, 1] {
        let answer = async || {
            let (on, mut connection) = connect(&gateway, open).await;
            let reply = connection.call(post("/v1/completions", BODY)).await;
            (on, reply.text())
        };
        eventually("each thread serves", answer, |(on, text)| {
            *on == thread && text == "decode-0"
        })
        .await;
    }
    gateway.expect_in_flight(0).await;
}
