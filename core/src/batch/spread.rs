//! Which layers batches look at.

/// Most layers that batches look at: what a request costs when it comes and when it goes is bounded by them, whatever the model.
pub const MAX_LAYERS: usize = 12;

/// Of some layers at most [`MAX_LAYERS`], evenly spread: the middle one of each of as many equal parts. All of them where they are few.
///
/// Which experts a request shares with others shows in any layer, so that a dozen tell nearly as much as all of them, and every sum,
/// comparison and message is that much smaller.
pub fn spread(layers: &[u16]) -> Vec<u16> {
    let (all, wanted) = (layers.len(), layers.len().min(MAX_LAYERS));
    let chosen = (0..wanted).filter_map(|n| layers.get((2 * n + 1) * all / (2 * wanted.max(1))));
    chosen.copied().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn of_48_layers_every_fourth() {
        let all: Vec<u16> = (0..48).collect();
        assert_eq!(spread(&all), [2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46]);
        assert_eq!(spread(&[1, 5, 9]), [1, 5, 9]);
        assert_eq!(spread(&[]), [0u16; 0]);
    }

    proptest! {
        #[test]
        fn steps_are_as_even_as_may_be_and_nothing_is_left_out_again(
            layers in proptest::collection::btree_set(0u16..600, 0..80),
        ) {
            let layers: Vec<u16> = layers.into_iter().collect();
            let some = spread(&layers);
            prop_assert_eq!(some.len(), layers.len().min(MAX_LAYERS));
            let at = some.iter().map(|layer| layers.binary_search(layer).unwrap());
            let at: Vec<usize> = at.collect();
            let steps: Vec<usize> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let (least, most) = (steps.iter().min(), steps.iter().max());
            prop_assert!(most.zip(least).is_none_or(|(most, least)| most - least <= 1), "{steps:?}");
            prop_assert!(steps.iter().all(|&step| step > 0));
            // As much before the first as after the last.
            if let (Some(first), Some(last)) = (at.first(), at.last()) {
                prop_assert!(first.abs_diff(layers.len() - 1 - last) <= 1, "{at:?}");
            }
            prop_assert_eq!(spread(&some), some);
        }
    }
}
