//! Load with faults for as long as one likes, and what must be true at its end.

mod client;
mod proxy;

pub use client::{Visit, visit};
pub use proxy::{Fault, Proxy};
