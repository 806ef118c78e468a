//! Packing replicas into the slots of GPUs: greedy, then exchanges while they help.

/// One replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// Its expert; two replicas of one are never on the same GPU.
    pub expert: u16,
    /// What it adds to its GPU.
    pub cost: f64,
}

/// Items in GPUs with equally many slots each.
///
/// Everywhere and always: replicas of an expert are on different GPUs, and of its r replicas at most
/// ⌈r / nodes⌉ are on one node.
#[derive(Clone, Debug)]
pub struct Packing {
    gpus: Vec<Gpu>,
    gpus_per_node: usize,
    /// `[node][expert]`: how many more replicas the node may take.
    room: Vec<u16>,
    experts: usize,
}

#[derive(Clone, Debug, Default)]
struct Gpu {
    items: Vec<Item>,
    load: f64,
    /// One flag per expert.
    has: Vec<bool>,
}

/// An exchange must lower the busier GPU by more than rounding could.
const GAIN_MIN: f64 = 1e-12;

impl Packing {
    /// The costliest item first, each to the least loaded GPU that may take it. Where the last items
    /// find none, all are dealt in turn instead.
    ///
    /// `replicas` is the number of items of each expert, the same for the same experts next to each
    /// other; `gpus` divides the number of items, `nodes` divides `gpus`.
    pub fn greedy(items: &[Item], replicas: &[usize], gpus: usize, nodes: usize) -> Self {
        let mut items = items.to_vec();
        items.sort_by(|a, b| b.cost.total_cmp(&a.cost).then(a.expert.cmp(&b.expert)));
        let slots = items.len() / gpus;
        let empty = Packing {
            gpus: vec![
                Gpu {
                    has: vec![false; replicas.len()],
                    ..Gpu::default()
                };
                gpus
            ],
            gpus_per_node: gpus / nodes,
            room: (0..nodes)
                .flat_map(|_| replicas.iter().map(|count| count.div_ceil(nodes) as u16))
                .collect(),
            experts: replicas.len(),
        };
        let mut packing = empty.clone();
        for &item in &items {
            let free = (0..gpus).filter(|&gpu| packing.gpus[gpu].items.len() < slots);
            let least = free
                .filter(|&gpu| packing.may_take(gpu, item))
                .min_by(|&a, &b| packing.gpus[a].load.total_cmp(&packing.gpus[b].load));
            match least {
                Some(gpu) => packing.put(gpu, item),
                None => return empty.dealt(&items, nodes),
            }
        }
        packing
    }

    /// One item after the other to the next GPU, each time on the next node: as replicas of an expert
    /// follow each other, they meet neither on a GPU nor too often on a node.
    fn dealt(mut self, items: &[Item], nodes: usize) -> Self {
        for (turn, &item) in items.iter().enumerate() {
            let at = turn % self.gpus.len();
            self.put(at % nodes * self.gpus_per_node + at / nodes, item);
        }
        self
    }

    fn room(&mut self, gpu: usize, expert: u16) -> &mut u16 {
        &mut self.room[gpu / self.gpus_per_node * self.experts + usize::from(expert)]
    }

    fn may_take(&self, gpu: usize, item: Item) -> bool {
        let expert = usize::from(item.expert);
        let node = gpu / self.gpus_per_node;
        !self.gpus[gpu].has[expert] && self.room[node * self.experts + expert] > 0
    }

    fn put(&mut self, gpu: usize, item: Item) {
        *self.room(gpu, item.expert) -= 1;
        let gpu = &mut self.gpus[gpu];
        gpu.has[usize::from(item.expert)] = true;
        gpu.items.push(item);
        gpu.load += item.cost;
    }

    fn take(&mut self, gpu: usize, at: usize) -> Item {
        let item = self.gpus[gpu].items.swap_remove(at);
        *self.room(gpu, item.expert) += 1;
        let gpu = &mut self.gpus[gpu];
        gpu.has[usize::from(item.expert)] = false;
        gpu.load -= item.cost;
        item
    }

    /// Whether GPU `a` may give `x` to `b` for `y`.
    fn may_exchange(&self, (a, x): (usize, Item), (b, y): (usize, Item)) -> bool {
        let same_node = a / self.gpus_per_node == b / self.gpus_per_node;
        if same_node {
            !self.gpus[b].has[usize::from(x.expert)] && !self.gpus[a].has[usize::from(y.expert)]
        } else {
            self.may_take(b, x) && self.may_take(a, y)
        }
    }

    /// Exchanges items of the busiest GPU for cheaper ones of others, the best exchange each time, until
    /// none makes it less busy without making the other as busy.
    pub fn improve(&mut self) {
        // Every exchange lowers the loads in descending order, so none comes twice; the limit only
        // bounds time.
        for _ in 0..64 * self.gpus.len() * self.gpus[0].items.len() {
            let Some(best) = self.best_exchange() else {
                break;
            };
            let (x, y) = (self.take(best.a, best.x), self.take(best.b, best.y));
            self.put(best.b, x);
            self.put(best.a, y);
        }
    }

    fn best_exchange(&self) -> Option<Exchange> {
        let loads = self.gpus.iter().map(|gpu| gpu.load);
        let (a, load) = loads.enumerate().fold((0, f64::NEG_INFINITY), |most, at| {
            if at.1 > most.1 { at } else { most }
        });
        let mut least = load - load * GAIN_MIN;
        let mut best = None;
        for b in (0..self.gpus.len()).filter(|&b| b != a) {
            for (at_x, &x) in self.gpus[a].items.iter().enumerate() {
                for (at_y, &y) in self.gpus[b].items.iter().enumerate() {
                    let moved = x.cost - y.cost;
                    let busier = (load - moved).max(self.gpus[b].load + moved);
                    if busier < least && self.may_exchange((a, x), (b, y)) {
                        least = busier;
                        best = Some(Exchange {
                            a,
                            x: at_x,
                            b,
                            y: at_y,
                        });
                    }
                }
            }
        }
        best
    }

    /// Cost of the busiest GPU.
    pub fn busiest(&self) -> f64 {
        self.gpus.iter().map(|gpu| gpu.load).fold(0.0, f64::max)
    }

    /// The expert in each slot, GPU after GPU, ascending within a GPU.
    pub fn slots(&self) -> Vec<u16> {
        let mut slots = Vec::new();
        for gpu in &self.gpus {
            let begin = slots.len();
            slots.extend(gpu.items.iter().map(|item| item.expert));
            slots[begin..].sort_unstable();
        }
        slots
    }
}

/// Item `x` of GPU `a` for item `y` of GPU `b`.
struct Exchange {
    a: usize,
    x: usize,
    b: usize,
    y: usize,
}

/// Most items that [`even`] packs: 12 into 4 times 3 makes 15,400 packings.
const EVEN_ITEMS_MAX: usize = 12;

/// The best packing of few items into `bins` with equally many each, all packings tried: the sum of the
/// fullest bin, and the items of each. None if they are too many to try.
pub fn even(costs: &[f64], bins: usize) -> Option<(f64, Vec<Vec<usize>>)> {
    if costs.len() > EVEN_ITEMS_MAX {
        return None;
    }
    let mut best = (f64::INFINITY, Vec::new());
    fill(costs, 0, &mut vec![(0.0, Vec::new()); bins], &mut best);
    Some(best)
}

/// Tries every bin for `item` and those after it; `bins` are the sums and items so far.
fn fill(
    costs: &[f64],
    item: usize,
    bins: &mut [(f64, Vec<usize>)],
    best: &mut (f64, Vec<Vec<usize>>),
) {
    let fullest = bins.iter().map(|bin| bin.0).fold(0.0, f64::max);
    if fullest >= best.0 {
        return;
    }
    if item == costs.len() {
        let items = bins.iter().map(|bin| bin.1.clone()).collect();
        *best = (fullest, items);
        return;
    }
    for bin in 0..bins.len() {
        if bins[bin].1.len() == costs.len() / bins.len() {
            continue;
        }
        let (before, first) = (bins[bin].0, bins[bin].1.is_empty());
        bins[bin].0 += costs[item];
        bins[bin].1.push(item);
        fill(costs, item + 1, bins, best);
        bins[bin].0 = before;
        bins[bin].1.pop();
        if first {
            break; // the empty bins are alike
        }
    }
}
