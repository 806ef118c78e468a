//! An explanation as text.

use comfy_table::{CellAlignment, Table};

use super::{Candidate, Explanation, Region, Standing};
use crate::table::table;

impl Explanation {
    /// The decision as lines, and a table of regions and workers, the most similar first.
    pub fn text(&self) -> String {
        let cap = match (self.max_load_factor, self.load_limit) {
            (Some(factor), Some(limit)) => format!("{factor} × the mean load: {limit:.2}"),
            (Some(factor), None) => format!("{factor} × the mean load"),
            (None, _) => "none".into(),
        };
        let mut text = format!(
            "decision {}; reason {}\nwhy      {}\npolicy   {}, tau {}, load cap {cap}\n",
            self.worker, self.reason, self.why, self.policy, self.tau,
        );
        if let Some(problem) = &self.problem {
            text += &format!("problem  {problem}\n");
        }
        if let Some(threshold) = self.threshold {
            text += &format!(
                "band     {} region(s) from similarity {threshold:.4}\n",
                self.band
            );
        }
        text + &format!("\n{}\n", self.table())
    }

    fn table(&self) -> Table {
        let batches = self.workers().any(|worker| worker.batch.is_some());
        let mut header = vec!["region", "similarity", "band", "worker", "load"];
        if batches {
            header.extend(["running", self.measured()]);
        }
        header.extend(["", "chosen"]);
        let mut table = table(header);
        let mut order: Vec<(usize, &Region)> = self.regions.iter().enumerate().collect();
        // Stable: equal ones, and all where nothing was compared, stay in the blob's order.
        order.sort_by(|(_, a), (_, b)| {
            let value = |region: &Region| region.similarity.unwrap_or(f32::NEG_INFINITY);
            value(b).total_cmp(&value(a))
        });
        let mut row = |region: String,
                       similarity: Option<f32>,
                       band: &str,
                       worker: &Candidate,
                       through: bool| {
            let state = match (worker.out, worker.capped) {
                (true, _) => "out",
                (_, true) => "above the cap",
                _ => "",
            };
            let mut cells = vec![
                region,
                similarity.map_or("none".into(), |similarity| format!("{similarity:.4}")),
                band.into(),
                worker.name.clone(),
                worker.load.to_string(),
            ];
            if batches {
                cells.extend(standing(worker.batch));
            }
            cells.push(state.into());
            let chosen = worker.chosen && through;
            cells.push(if chosen { "chosen" } else { "" }.into());
            table.add_row(cells);
        };
        for (index, region) in order {
            let through = self.region.is_none_or(|chosen| chosen == index);
            for worker in &region.workers {
                let band = if region.in_band { "in" } else { "" };
                row(index.to_string(), region.similarity, band, worker, through);
            }
        }
        for worker in &self.spare {
            row("none".into(), None, "", worker, true);
        }
        let numbers: &[usize] = if batches {
            &[0, 1, 4, 5, 6]
        } else {
            &[0, 1, 4]
        };
        for &column in numbers {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    fn workers(&self) -> impl Iterator<Item = &Candidate> {
        let regions = self.regions.iter().flat_map(|region| &region.workers);
        regions.chain(&self.spare)
    }

    /// What a running batch is judged by.
    fn measured(&self) -> &'static str {
        match self
            .workers()
            .find_map(|worker| worker.batch?.extra_experts)
        {
            Some(_) => "experts, cost",
            None => "cosine",
        }
    }
}

fn standing(batch: Option<Standing>) -> [String; 2] {
    let Some(batch) = batch else {
        return Default::default();
    };
    let judged = match (batch.extra_experts, batch.growth, batch.cosine) {
        // Step times to the 16th power have many digits.
        (Some(experts), Some(growth), _) if growth >= 1e6 => format!("+{experts:.2}, {growth:.4e}"),
        (Some(experts), Some(growth), _) => format!("+{experts:.2}, {growth:.3}"),
        (.., Some(cosine)) => format!("{cosine:.4}"),
        _ => "none".into(),
    };
    [batch.requests.to_string(), judged]
}
