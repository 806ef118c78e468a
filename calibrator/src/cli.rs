//! The command line: arguments in, results to stdout, everything else to stderr.
//!
//! Exit codes: 0 done, 1 failed (`error:` and `hint:` on stderr), 2 wrong usage.

mod advise;
mod convert;
mod envoy;
mod explain;
mod fit;
mod generate;
mod inspect;
mod place;
mod record;
mod refit;
mod remap;
mod report;
mod reproduce;
mod serve;
mod simulate;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::blob_file;
use crate::error::Error;
use crate::output::OutputFile;

/// Expert-locality routing: from recorded traffic to a gateway that knows which experts a request uses
#[derive(Debug, Parser)]
#[command(name = "eldr", version, max_term_width = 100)]
#[command(after_help = "From prompts to a gateway:
  eldr record --prefill http://10.0.0.1:8000 --prompts prompts.jsonl -o trace.jsonl --experts 128
  eldr fit trace.jsonl -o task.eldr --workers decode-0,decode-1
  eldr inspect task.eldr
  eldr envoy gateway.toml -o gateway
From the gateway's access log to a blob that all gateways get:
  eldr fit access.log -o task.eldr --workers decode-0,decode-1 --revision 2
  eldr serve --blob task.eldr")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fits a centroid blob to traces
    Fit(fit::FitArgs),
    /// Verifies a centroid blob or a trace and shows what it says
    Inspect(inspect::InspectArgs),
    /// Places the experts of each decode cluster on its GPUs, for the requests of its region
    Place(place::PlaceArgs),
    /// Shows why a request would be sent to which decode worker
    Explain(explain::ExplainArgs),
    /// Replays a trace on a simulated cluster and compares policies
    Simulate(Box<simulate::SimulateArgs>),
    /// Writes a trace of generated requests at the size of a published model
    Generate(generate::GenerateArgs),
    /// Simulates the published figures again and says how far apart the two are
    Reproduce(reproduce::ReproduceArgs),
    /// Says what to deploy for the traffic of a trace and what to expect, or why nothing
    Advise(Box<advise::AdviseArgs>),
    /// Lets the regions of a blob follow recent requests
    Refit(refit::RefitArgs),
    /// Brings back an older revision of a blob
    Rollback(refit::RollbackArgs),
    /// Writes an HTML page about a centroid blob, and about a trace as the blob sees it
    Report(report::ReportArgs),
    /// Sends prompts to a running engine and writes what its experts did as a trace
    Record(record::RecordArgs),
    /// Gives a fitted blob to other workers, without a new fit
    Remap(remap::RemapArgs),
    /// Serves centroid blobs to gateways over HTTP and reloads them when they change
    Serve(serve::ServeArgs),
    /// Makes the gateway's Envoy configuration of a short list of workers
    Envoy(envoy::EnvoyArgs),
    /// Turns recordings and centroids of other formats into ours, and centroids back
    #[command(subcommand)]
    Convert(convert::Convert),
    /// Prints what makes a shell complete this command's arguments
    Completions(CompletionsArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr completions bash > ~/.local/share/bash-completion/completions/eldr
  eldr completions zsh > \"${fpath[1]}/_eldr\"
  eldr completions fish > ~/.config/fish/completions/eldr.fish")]
struct CompletionsArgs {
    /// Shell to write for
    shell: Shell,
}

impl CompletionsArgs {
    fn run(&self) -> Result<String, Error> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "eldr", &mut script);
        Ok(String::from_utf8_lossy(&script).into_owned())
    }
}

/// Parses the arguments of the process, does what they ask for and says how it went.
pub fn run() -> ExitCode {
    // A number below 0 is a value that is out of range, and told so, not an option that nobody knows.
    let command = Cli::command().mut_subcommands(|command| command.allow_negative_numbers(true));
    let arguments = Cli::from_arg_matches(&command.get_matches());
    let done = match arguments.unwrap_or_else(|error| error.exit()).command {
        Command::Fit(fit) => match fit.check() {
            Ok(()) => fit.run(),
            Err(problem) => usage(&["fit"], problem),
        },
        Command::Inspect(inspect) => inspect.run(),
        Command::Place(place) => place.run(),
        Command::Explain(explain) => match explain.check() {
            Ok(()) => explain.run(),
            Err(problem) => usage(&["explain"], problem),
        },
        Command::Simulate(simulate) => match simulate.check() {
            Ok(()) => simulate.run(),
            Err(problem) => usage(&["simulate"], problem),
        },
        Command::Generate(generate) => generate.run(),
        Command::Reproduce(reproduce) => reproduce.run(),
        Command::Advise(advise) => match advise.check() {
            Ok(()) => advise.run(),
            Err(problem) => usage(&["advise"], problem),
        },
        Command::Refit(refit) => refit.run(),
        Command::Rollback(rollback) => rollback.run(),
        Command::Report(report) => report.run(),
        Command::Record(record) => match record.check() {
            Ok(engine) => record.run(engine),
            Err(problem) => usage(&["record"], problem),
        },
        Command::Remap(remap) => match remap.check() {
            Ok(()) => remap.run(),
            Err(problem) => usage(&["remap"], problem),
        },
        Command::Serve(serve) => match serve.check() {
            Ok(()) => serve.run(),
            Err(problem) => usage(&["serve"], problem),
        },
        Command::Envoy(envoy) => envoy.run(),
        Command::Completions(completions) => completions.run(),
        Command::Convert(convert) => match convert.check() {
            Ok(()) => convert.run(),
            Err((format, problem)) => usage(&["convert", format], problem),
        },
    };
    match done.and_then(|text| print(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}\nhint: {}", error.hint());
            ExitCode::FAILURE
        }
    }
}

/// Writes the result to stdout. A reader that has seen enough (`| head`) is no failure.
fn print(text: &str) -> Result<(), Error> {
    let mut stdout = std::io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::new(
            format!("writing the result failed: {error}"),
            "check where it goes",
        )),
        _ => Ok(()),
    }
}

/// Ends the process as clap does for what it finds itself: message and usage on stderr, exit code 2.
fn usage(subcommands: &[&str], problem: String) -> ! {
    let mut command = Cli::command();
    command.build();
    let command = subcommands.iter().fold(&mut command, |command, name| {
        let found = command.find_subcommand_mut(name);
        found.expect("the name of a subcommand")
    });
    command.error(ErrorKind::ValueValidation, problem).exit()
}

/// The file of a blob, as `fit` and `inspect` show it.
#[derive(Serialize)]
struct BlobFacts {
    blob: String,
    bytes: usize,
    sha256: String,
}

impl BlobFacts {
    fn new(path: &Path, bytes: &[u8]) -> Self {
        BlobFacts {
            blob: path.display().to_string(),
            bytes: bytes.len(),
            sha256: blob_file::sha256(bytes),
        }
    }

    fn text(&self) -> String {
        let BlobFacts {
            blob,
            bytes,
            sha256,
        } = self;
        format!("blob     {blob}, {bytes} bytes\nsha256   {sha256}\n")
    }
}

/// A file that is to be written when the work is done, and whose place is known to be good before.
struct Promised<'a> {
    path: &'a Path,
    what: &'a str,
    file: OutputFile,
}

impl<'a> Promised<'a> {
    fn new(path: &'a Path, what: &'a str) -> Result<Self, Error> {
        let file = OutputFile::create(path).map_err(|error| not_written(path, what, &error))?;
        Ok(Self { path, what, file })
    }

    /// It appears whole or not at all.
    fn write(mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = self.file.write_all(bytes);
        let written = written.and_then(|()| self.file.commit());
        written.map_err(|error| not_written(self.path, self.what, &error))
    }
}

/// Writes `what`, a file that appears whole or not at all.
fn write(path: &Path, what: &str, bytes: &[u8]) -> Result<(), Error> {
    Promised::new(path, what)?.write(bytes)
}

fn not_written(path: &Path, what: &str, error: &std::io::Error) -> Error {
    let hint = "check that the folder exists, may be written to and has space";
    let file = path.display();
    Error::new(format!("{file}: writing {what} failed: {error}"), hint)
}

/// A bar for the reading of traces, of which nobody knows how long they are.
fn reading() -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message("reading");
    bar.with_style(style("{spinner} {msg}: {pos} requests"))
}

/// A bar for work of which it is known how much there is.
fn working(total: u64) -> ProgressBar {
    ProgressBar::new(total).with_style(style("{msg:>20} {wide_bar} {pos}/{len} {elapsed}"))
}

/// How a progress bar looks.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn to_json(value: &impl Serialize) -> String {
    let json = serde_json::to_string_pretty(value);
    json.expect("numbers, strings and lists have a JSON form") + "\n"
}
