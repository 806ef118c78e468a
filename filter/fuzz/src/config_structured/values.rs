//! Values around what is allowed.

use arbitrary::Arbitrary;

/// A name, often one that others have too.
#[derive(Arbitrary, Debug)]
pub(super) enum Name {
    Usual(u8),
    Any(String),
}

impl Name {
    pub(super) fn get(&self) -> String {
        match self {
            Self::Usual(index) => format!("cluster-{}", index % 8),
            Self::Any(text) => text.clone(),
        }
    }
}

/// A number that may have a fraction.
#[derive(Arbitrary, Debug, Clone, Copy)]
pub(super) enum Small {
    Tenths(i8),
    Any(f64),
}

impl Small {
    pub(super) fn get(self) -> f64 {
        match self {
            Self::Tenths(tenths) => f64::from(tenths) / 10.0,
            Self::Any(number) if number.is_finite() => number,
            Self::Any(_) => 1.0,
        }
    }
}

/// A whole number, told by the range that it should be in.
#[derive(Arbitrary, Debug, Clone, Copy)]
pub(super) enum Number {
    Least,
    Most,
    Below,
    Above,
    Inside(u32),
    Any(u32),
}

impl Number {
    pub(super) fn of(self, least: u64, most: u64) -> u64 {
        match self {
            Self::Least => least,
            Self::Most => most,
            Self::Below => least.saturating_sub(1),
            Self::Above => most + 1,
            Self::Inside(offset) => least + u64::from(offset) % (most.saturating_sub(least) + 1),
            Self::Any(number) => number.into(),
        }
    }
}

/// One of some words, rarely another.
#[derive(Arbitrary, Debug, Clone, Copy)]
pub(super) struct Word(u8);

impl Word {
    pub(super) fn of(self, words: &[&'static str]) -> &'static str {
        match self.0 {
            u8::MAX => "neither",
            index => words[usize::from(index) % words.len()],
        }
    }

    /// A word that the parser itself refuses, which hides all other mistakes.
    pub(super) fn is_wrong(self) -> bool {
        self.0 == u8::MAX
    }
}

pub(super) fn visible(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| (0x21..0x7f).contains(&byte))
}
