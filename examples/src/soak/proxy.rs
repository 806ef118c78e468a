//! A TCP proxy before a worker, which breaks when told to.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How a worker is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It is.
    None,
    /// New connections are cut at once; those that are open stay.
    Refuses,
    /// So are those that are open.
    Cuts,
}

/// A proxy on a free port; it stops when dropped.
#[derive(Debug)]
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    fault: Arc<watch::Sender<Fault>>,
    server: JoinHandle<()>,
}

impl Proxy {
    /// Passes on to `worker`.
    ///
    /// # Errors
    /// No port can be bound.
    pub async fn start(worker: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let fault = Arc::new(watch::Sender::new(Fault::None));
        let faults = Arc::clone(&fault);
        let server = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if *faults.borrow() == Fault::None {
                    tokio::spawn(pass(client, worker, faults.subscribe()));
                }
            }
        });
        Ok(Self {
            address,
            fault,
            server,
        })
    }

    /// From now on.
    pub fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn pass(mut client: TcpStream, worker: SocketAddr, mut faults: watch::Receiver<Fault>) {
    let Ok(mut worker) = TcpStream::connect(worker).await else {
        return;
    };
    let _ = (client.set_nodelay(true), worker.set_nodelay(true));
    tokio::select! {
        _ = copy_bidirectional(&mut client, &mut worker) => {}
        _ = faults.wait_for(|fault| *fault == Fault::Cuts) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Client, run};
    use crate::instant::Instant;
    use std::time::Duration;

    #[tokio::test]
    async fn it_passes_cuts_and_passes_again() {
        let engine = Instant::start(None).await.unwrap();
        let proxy = Proxy::start(engine.address).await.unwrap();
        let load = || run(proxy.address, Client::Plain, 1, Duration::from_millis(20));
        assert!(!load().await.unwrap().latencies.is_empty());
        proxy.set(Fault::Refuses);
        assert!(load().await.is_err());
        proxy.set(Fault::None);
        assert!(!load().await.unwrap().latencies.is_empty());
        let cut = run(proxy.address, Client::Plain, 1, Duration::from_secs(60));
        let (cut, ()) = tokio::join!(cut, async {
            tokio::task::yield_now().await;
            proxy.set(Fault::Cuts);
        });
        assert!(cut.is_err());
    }
}
