//! Centroids that follow the traffic, as `eldr serve --online` makes them do: a window of recent signatures, refitted now and then.

use std::str::FromStr;

use eldr_core::blob::Blob;
use eldr_core::route::Map;

use crate::error::Error;
use crate::kmeans::Vectors;
use crate::refit::{Limits, Window, refit};
use crate::signatures::Space;

/// Most requests of a window.
const REQUESTS_MAX: usize = 4096;

/// How often, and to what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Refit {
    /// Time between two refits, seconds.
    pub every_s: f64,
    /// Requests older than this are forgotten, seconds.
    pub window_s: f64,
}

impl FromStr for Refit {
    type Err = String;

    /// `2` or `2/5`: seconds between refits, seconds of the window, 5 unless said.
    fn from_str(text: &str) -> Result<Self, String> {
        let (every, window) = text.split_once('/').unwrap_or((text, "5"));
        let seconds = |text: &str| {
            let seconds = text.parse().ok();
            seconds.filter(|seconds| (0.1..=1e6).contains(seconds))
        };
        let (every_s, window_s) = seconds(every)
            .zip(seconds(window))
            .ok_or("seconds from 0.1 on were expected, and those of the window, as in 2/5")?;
        Ok(Refit { every_s, window_s })
    }
}

/// A blob that is refitted, and the map of its latest revision. All gateways have it at once.
#[derive(Debug)]
pub(super) struct Follower {
    blob: Blob,
    workers: Vec<String>,
    map: Map,
    space: Space,
    window: Window,
    vector: Vec<f32>,
}

impl Follower {
    pub(super) fn new(blob: Blob, workers: Vec<String>, every: Refit) -> Result<Self, Error> {
        let limits = Limits {
            age: every.window_s,
            requests: REQUESTS_MAX,
            requests_per_region: 1,
            interval: every.every_s,
        };
        let space = Space::of(&blob)?;
        Ok(Follower {
            map: Map::bind(blob.clone(), &workers)?,
            window: Window::new(space.transform().dimension(), limits),
            space,
            blob,
            workers,
            vector: Vec::new(),
        })
    }

    /// A request with this signature header is to be decided: it belongs to the window from now on.
    pub(super) fn see(&mut self, now: f64, header: &[u8]) {
        if self.space.vector(header, &mut self.vector).is_err() {
            return;
        }
        self.window.push(now, &self.vector);
        if !self.window.due(now, self.blob.regions.len()) {
            return;
        }
        let vectors = Vectors {
            values: self.window.vectors(),
            dimension: self.space.transform().dimension(),
        };
        // What cannot be fitted or bound leaves the blob as it is.
        let refitted = refit(&self.blob, vectors).ok();
        let bound = refitted.and_then(|refitted| {
            let map = Map::bind(refitted.blob.clone(), &self.workers).ok()?;
            Some((refitted.blob, map))
        });
        if let Some((blob, map)) = bound {
            (self.blob, self.map) = (blob, map);
        }
    }

    /// The map of the latest revision.
    pub(super) fn map(&self) -> &Map {
        &self.map
    }
}
