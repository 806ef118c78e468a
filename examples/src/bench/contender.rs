//! The gateways that are compared, each before the same workers.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::signature::{Encoding, Geometry};
use serde_json::{Value, json};

use super::Usage;
use super::load::Client;
use super::router::{Product, Router};
use crate::envoy::Envoy;
use crate::gateway::{Gateway, LISTENER, decode_cluster};
use crate::instant::{self, Instant};
use crate::setup::{envoy_binary, wasm_module};

/// Decode workers.
const DECODE: usize = 16;
/// MoE layers and experts of Qwen3-30B-A3B.
const LAYERS: u16 = 48;
const EXPERTS: usize = 128;

/// Who is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Envoy alone; one leg.
    Envoy,
    /// Envoy with a wasm filter that does nothing; one leg.
    Noop,
    /// Our filter, both legs, signature of all layers.
    Orchestrate48,
    /// The same as an engine sends it that knows no `varint`.
    Orchestrate48U16,
    /// The same with the twelve layers that calibration selected.
    Orchestrate12,
    /// Our filter between a coordinator and its workers, twelve layers.
    Relay12,
    /// A router from its Python wheel, both legs, round robin, no signature.
    Router(Product),
}

impl Kind {
    /// In the order of the table.
    pub const ALL: [Self; 9] = [
        Self::Envoy,
        Self::Noop,
        Self::Orchestrate12,
        Self::Orchestrate48,
        Self::Orchestrate48U16,
        Self::Relay12,
        Self::Router(Product::VllmRouter),
        Self::Router(Product::Smg),
        Self::Router(Product::SglangRouter),
    ];

    /// What the table calls it.
    pub fn name(self) -> String {
        match self {
            Self::Envoy => "Envoy, decode leg only".into(),
            Self::Noop => "Envoy, decode leg only, wasm filter that does nothing".into(),
            Self::Orchestrate12 => "eldr, orchestrate, signature of 12 layers".into(),
            Self::Orchestrate48 => "eldr, orchestrate, signature 48×128".into(),
            Self::Orchestrate48U16 => "eldr, orchestrate, signature 48×128, enc=u16".into(),
            Self::Relay12 => "eldr, relay, signature of 12 layers (both legs by the client)".into(),
            Self::Router(product) => product.describe(),
        }
    }

    /// Layers in the signature.
    fn layers(self) -> Vec<u16> {
        match self {
            Self::Orchestrate48 | Self::Orchestrate48U16 => (0..LAYERS).collect(),
            _ => (0..LAYERS).step_by(4).collect(),
        }
    }

    /// How the engine writes it.
    fn encoding(self) -> Encoding {
        match self {
            Self::Orchestrate48U16 => Encoding::U16,
            _ => Encoding::Varint,
        }
    }

    /// How its clients behave.
    pub fn client(self) -> Client {
        match self {
            Self::Relay12 => Client::Coordinates,
            _ => Client::Plain,
        }
    }
}

/// What all contenders need, set up once.
#[derive(Debug)]
pub struct Site {
    envoy: PathBuf,
    filter: PathBuf,
    routers: Vec<(Product, PathBuf)>,
    /// Where the module that does nothing is written to.
    dir: tempfile::TempDir,
}

impl Site {
    /// Builds and fetches what is missing.
    ///
    /// # Errors
    /// What could not be set up.
    pub fn set_up() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir().context("cannot make a temporary directory")?;
        let noop = wat::parse_str(include_str!("noop.wat")).context("noop.wat")?;
        std::fs::write(dir.path().join("noop.wasm"), noop)?;
        let mut routers = Vec::new();
        for product in Product::ALL {
            routers.push((product, product.binary()?));
        }
        Ok(Self {
            envoy: envoy_binary()?,
            filter: wasm_module()?,
            routers,
            dir,
        })
    }
}

#[derive(Debug)]
enum Process {
    Envoy(Box<Envoy>),
    Router(Router),
}

/// A running gateway and its workers.
#[derive(Debug)]
pub struct Contender {
    /// Who it is.
    pub kind: Kind,
    /// Where clients connect.
    pub address: SocketAddr,
    process: Process,
    _workers: Vec<Instant>,
}

impl Contender {
    /// Starts it with one worker thread.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start(kind: Kind, site: &Site) -> anyhow::Result<Self> {
        let geometry = Geometry::new(LAYERS.into(), EXPERTS)?;
        let signature = match kind {
            Kind::Envoy | Kind::Noop | Kind::Router(_) => None,
            _ => Some(instant::signature(
                geometry,
                kind.layers(),
                kind.encoding(),
            )?),
        };
        let mut workers = Vec::new();
        for _ in 0..=DECODE {
            workers.push(Instant::start(signature.as_deref()).await?);
        }
        let addresses: Vec<_> = workers.iter().map(|worker| worker.address).collect();
        let (prefill, decode) = (addresses[0], &addresses[1..]);
        let (address, process) = if let Kind::Router(product) = kind {
            let router = site.routers.iter().find(|(found, _)| *found == product);
            let (_, binary) = router.context("a router that was not set up")?;
            let router = Router::start(product, binary, prefill, decode).await?;
            (router.address, Process::Router(router))
        } else {
            let bootstrap = bootstrap(kind, site, prefill, decode)?;
            let envoy = Envoy::start(&site.envoy, &bootstrap, 1).await?;
            (
                envoy.listener(LISTENER).await?,
                Process::Envoy(Box::new(envoy)),
            )
        };
        Ok(Self {
            kind,
            address,
            process,
            _workers: workers,
        })
    }

    /// CPU and memory of the gateway so far.
    ///
    /// # Errors
    /// It is gone.
    pub fn usage(&self) -> std::io::Result<Usage> {
        let pid = match &self.process {
            Process::Envoy(envoy) => envoy.pid(),
            Process::Router(router) => Some(router.pid()),
        };
        Usage::of(pid.ok_or(std::io::ErrorKind::NotFound)?)
    }
}

fn bootstrap(
    kind: Kind,
    site: &Site,
    prefill: SocketAddr,
    decode: &[SocketAddr],
) -> anyhow::Result<String> {
    let geometry = Geometry::new(LAYERS.into(), EXPERTS)?;
    let blob = instant::blob(geometry, kind.layers(), decode.len())?;
    let names: Vec<_> = (0..decode.len()).map(decode_cluster).collect();
    let noop = kind == Kind::Noop;
    let gateway = Gateway {
        listen: ([127, 0, 0, 1], 0).into(),
        module: if noop {
            site.dir.path().join("noop.wasm")
        } else {
            site.filter.clone()
        },
        vm_id: "bench".into(),
        filter: json!({
            "models": [{"model": "*", "blob": {"inline": STANDARD.encode(blob.to_bytes()?)}}],
            "decode_clusters": names,
            "prefill_clusters": ["prefill"],
            "mode": if kind == Kind::Relay12 { "relay" } else { "orchestrate" },
        }),
        prefill: vec![prefill],
        decode: decode.to_vec(),
        access_log: None,
    };
    let bootstrap = gateway.bootstrap();
    if kind != Kind::Envoy {
        return Ok(bootstrap);
    }
    let mut config: Value = serde_json::from_str(&bootstrap)?;
    let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0];
    let filters = manager["typed_config"]["http_filters"].as_array_mut();
    filters.context("the configuration has filters")?.remove(0);
    Ok(config.to_string())
}
