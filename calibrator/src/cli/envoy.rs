//! `eldr envoy`.

use std::path::PathBuf;

use clap::Args;

use crate::envoy;
use crate::error::Error;
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr envoy gateway.toml -o gateway
  envoy --mode validate -c gateway/envoy.yaml

All that a topology may say; only the workers are needed:

  listen = \"0.0.0.0:10000\"
  admin = \"127.0.0.1:9901\"
  module = \"/etc/envoy/eldr_filter.wasm\"
  access_log = \"stdout\"           # or the path of a file
  mode = \"orchestrate\"            # or \"relay\": somebody else sends both legs

  [decode]
  destination = \"cluster\"         # or \"endpoint\": workers are IP addresses in one cluster
  workers = [\"10.0.0.1:8000\", { name = \"big\", address = \"b:8000\", weight = 2, drain = false }]

  [prefill]
  policy = \"round_robin\"          # or \"least_loaded\", \"prefix_hash\"
  workers = [\"prefill-0:8000\"]    # for mooncake also bootstrap_addr and engine_id

  [[model]]
  name = \"*\"
  policy = \"band\"
  tau = 0.1
  max_load_factor = 1.25          # or \"none\"
  candidates = 2                  # choose among so many drawn workers, not all: for many gateways
  step_t0_ms = 5.84               # for policies that look at running batches (marginal, hybrid):
  step_b_ms = 0.144               # a decode step takes t0 + b for each distinct expert + c for each
  step_c_ms = 0.026               # request + step_kv_ms_per_1k for each 1,000 tokens of KV cache;
  learn_steps = true              # what they learn from is the times of event streams
  step_exponent = 1               # 1 serves the mean, 4 the tail
  blob = \"task.eldr\"              # beside this file, or { server = \"eldr-serve:8089\",
                                  #   path = \"/v1/blob\", interval_ms = 5000 }
  rollout = { kind = \"shadow\" }

  [limits]
  body_bytes = 33554432           # longest request that is held
  header_kb = 96                  # longest headers, signatures included

  [filter]                        # the other fields of the plugin configuration, see README
  log_signatures = true

Workers without a name are called decode-0, decode-1, … and prefill-0, …; `eldr fit --workers` names
decode workers so. What is made of envoy/envoy.toml is envoy/envoy.yaml, where each setting is
explained. A mistake in the file is told with its line, all of them at once.")]
pub(super) struct EnvoyArgs {
    /// Topology: which workers there are (TOML)
    topology: PathBuf,
    /// Folder for envoy.yaml; it is made if it is not there
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
}

impl EnvoyArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        let topology = envoy::read(&self.topology)?;
        let source = self
            .topology
            .file_name()
            .unwrap_or_default()
            .to_string_lossy();
        let text = format!(
            "# Made by `eldr envoy` of {}: change that and make this again.\n#\n{}",
            source.escape_default(),
            envoy::render(&topology)
        );
        let path = self.output.join("envoy.yaml");
        let written = std::fs::create_dir_all(&self.output)
            .and_then(|()| output::write(&path, text.as_bytes()));
        let path = path.display();
        written.map_err(|error| {
            let hint = "check that the folder may be written to";
            Error::new(
                format!("{path}: writing the configuration failed: {error}"),
                hint,
            )
        })?;
        Ok(format!(
            "{path}: {} decode and {} prefill workers, {} models\ncheck it: envoy --mode validate -c {path}\n",
            topology.decode.len(),
            topology.prefill.workers.len(),
            topology.models.len(),
        ))
    }
}
