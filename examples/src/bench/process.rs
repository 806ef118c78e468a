//! CPU time and memory of a running process, as Linux counts them (proc_pid_stat(5)).

use std::fs;
use std::io;
use std::time::Duration;

/// Kernel ticks per second in `/proc`: 100 on every Linux that Rust runs on.
const TICKS_PER_S: f64 = 100.0;

/// What a process has used so far.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// User and system time of all its threads.
    pub cpu: Duration,
    /// Resident memory now, MiB.
    pub resident_mib: f64,
}

impl Usage {
    /// Reads `/proc/PID`.
    ///
    /// # Errors
    /// The process is gone, or this is no Linux.
    pub fn of(pid: u32) -> io::Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        parse(&stat, &status).ok_or_else(|| io::Error::other("/proc is not as Linux writes it"))
    }
}

fn parse(stat: &str, status: &str) -> Option<Usage> {
    // The name in parentheses may have spaces; the state after it is field 3.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    let resident = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = resident.split_whitespace().next()?.parse().ok()?;
    Some(Usage {
        cpu: Duration::from_secs_f64(ticks / TICKS_PER_S),
        resident_mib: kib / 1024.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_after_the_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 4 0 100 0 0";
        let usage = parse(stat, "Name:\ta\nVmRSS:\t  2048 kB\n").unwrap();
        assert_eq!(usage.cpu, Duration::from_secs(3));
        assert!((usage.resident_mib - 2.0).abs() < 1e-9);
        assert!(parse("7 (a) S 1", "VmRSS: 1 kB").is_none());
    }

    #[test]
    fn this_process_uses_something() {
        let usage = Usage::of(std::process::id()).unwrap();
        assert!(usage.resident_mib > 1.0);
    }
}
