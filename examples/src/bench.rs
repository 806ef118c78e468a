//! What a gateway costs: closed-loop load on gateways before workers that answer at once.

mod contender;
mod load;
mod process;
mod router;

pub use contender::{Contender, Kind, Site};
pub use load::{Client, Timed, run};
pub use process::Usage;
pub use router::Product;
