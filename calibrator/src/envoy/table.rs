//! TOML, read so that every mistake is found and has its line.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use serde_json::Value;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::error::Error;
use crate::trace::shorten;

/// Collects what is wrong with a file.
pub(super) struct Mistakes<'t> {
    file: &'t str,
    text: &'t str,
    found: Vec<(usize, String)>,
}

impl<'t> Mistakes<'t> {
    pub(super) fn new(file: &'t str, text: &'t str) -> Self {
        Mistakes {
            file,
            text,
            found: Vec::new(),
        }
    }

    /// At byte `at` of the text, `field` is `what`; `hint` says what to do.
    pub(super) fn add(&mut self, at: usize, field: &str, what: impl AsRef<str>, hint: &str) {
        let before = self.text.as_bytes().get(..at).unwrap_or_default();
        let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
        let field = if field.is_empty() {
            String::new()
        } else {
            format!("{field}: ")
        };
        let text = format!("line {line}: {field}{}; {hint}", what.as_ref());
        if !self.found.iter().any(|(_, known)| *known == text) {
            self.found.push((at, text));
        }
    }

    /// All mistakes, in the order of the file; none if there are none.
    pub(super) fn told(mut self) -> Option<Error> {
        if self.found.is_empty() {
            return None;
        }
        self.found.sort_by_key(|(at, _)| *at);
        let lines: Vec<_> = self
            .found
            .iter()
            .map(|(_, text)| format!("\n  {text}"))
            .collect();
        let (file, n) = (self.file, lines.len());
        let plural = if n == 1 { "" } else { "s" };
        Some(Error::new(
            format!("{file}: {n} mistake{plural}{}", lines.concat()),
            "correct the file; `eldr envoy --help` shows all that it may say",
        ))
    }
}

/// The entries of one table, each of which must be asked for.
pub(super) struct Entries<'a, 't> {
    path: String,
    /// Where the table begins.
    pub(super) at: usize,
    table: Option<&'a DeTable<'t>>,
    known: BTreeSet<&'static str>,
}

impl<'a, 't> Entries<'a, 't> {
    pub(super) fn new(path: &str, at: usize, table: Option<&'a DeTable<'t>>) -> Self {
        Entries {
            path: path.to_owned(),
            at,
            table,
            known: BTreeSet::new(),
        }
    }

    /// The name of `key` in messages.
    pub(super) fn field(&self, key: &str) -> String {
        match self.path.as_str() {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        }
    }

    /// The value of `key` and where it stands.
    pub(super) fn get(&mut self, key: &'static str) -> Option<(usize, &'a DeValue<'t>)> {
        self.known.insert(key);
        let value = self.table?.get(key)?;
        Some((value.span().start, value.get_ref()))
    }

    pub(super) fn text(
        &mut self,
        told: &mut Mistakes<'_>,
        key: &'static str,
    ) -> Option<(usize, String)> {
        let (at, value) = self.get(key)?;
        let text = value.as_str();
        if text.is_none() {
            told.add(
                at,
                &self.field(key),
                format!("{} where a text was expected", show(value)),
                "put it in quotes",
            );
        }
        Some((at, text?.to_owned()))
    }

    pub(super) fn boolean(&mut self, told: &mut Mistakes<'_>, key: &'static str) -> Option<bool> {
        let (at, value) = self.get(key)?;
        if value.as_bool().is_none() {
            told.add(
                at,
                &self.field(key),
                show(value),
                "true or false is allowed",
            );
        }
        value.as_bool()
    }

    /// A number of the range.
    pub(super) fn number(
        &mut self,
        told: &mut Mistakes<'_>,
        key: &'static str,
        range: RangeInclusive<f64>,
    ) -> Option<f64> {
        let (at, value) = self.get(key)?;
        let number = to_number(value).filter(|number| range.contains(number));
        if number.is_none() {
            let allowed = format!("{} to {} is allowed", range.start(), range.end());
            told.add(at, &self.field(key), show(value), &allowed);
        }
        number
    }

    /// A whole number of the range.
    pub(super) fn whole(
        &mut self,
        told: &mut Mistakes<'_>,
        key: &'static str,
        range: RangeInclusive<u32>,
    ) -> Option<u32> {
        let (at, value) = self.get(key)?;
        let number = value.as_integer().and_then(|_| to_number(value));
        let number = number.filter(|number| {
            (f64::from(*range.start())..=f64::from(*range.end())).contains(number)
        });
        if number.is_none() {
            let allowed = format!(
                "a whole number from {} to {} is allowed",
                range.start(),
                range.end()
            );
            told.add(at, &self.field(key), show(value), &allowed);
        }
        number.map(|number| number as u32)
    }

    /// One of `choices`, by name; the first if nothing is said.
    pub(super) fn choice<T: Copy>(
        &mut self,
        told: &mut Mistakes<'_>,
        key: &'static str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let Some((at, value)) = self.get(key) else {
            return choices.first().map(|(_, choice)| *choice);
        };
        let found = value.as_str();
        let found = choices.iter().find(|(name, _)| Some(*name) == found);
        if found.is_none() {
            let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
            told.add(
                at,
                &self.field(key),
                show(value),
                &format!("one of these is allowed: {}", names.join(", ")),
            );
        }
        found.map(|(_, choice)| *choice)
    }

    /// The table `key`; empty if there is none.
    pub(super) fn table(&mut self, told: &mut Mistakes<'_>, key: &'static str) -> Entries<'a, 't> {
        let found = self.get(key);
        if let Some((at, value)) = found
            && !value.is_table()
        {
            told.add(
                at,
                &self.field(key),
                show(value),
                &format!("a table was expected: [{key}]"),
            );
        }
        let (at, table) = found.map_or((self.at, None), |(at, value)| (at, value.as_table()));
        Entries::new(&self.field(key), at, table)
    }

    /// The array `key` and where it stands.
    pub(super) fn array(
        &mut self,
        told: &mut Mistakes<'_>,
        key: &'static str,
        hint: &str,
    ) -> Option<(usize, &'a DeArray<'t>)> {
        let (at, value) = self.get(key)?;
        if value.as_array().is_none() {
            told.add(at, &self.field(key), show(value), hint);
        }
        Some((at, value.as_array()?))
    }

    /// Every entry in the order of the file, for tables whose keys are not this module's.
    pub(super) fn all(&self) -> Vec<(usize, &'a str, &'a Spanned<DeValue<'t>>)> {
        let entries = self.table.into_iter().flatten();
        let mut all: Vec<_> = entries
            .map(|(key, value)| (key.span().start, key.get_ref().as_ref(), value))
            .collect();
        all.sort_by_key(|(at, ..)| *at);
        all
    }

    /// Tells of keys that nobody asked for.
    pub(super) fn end(self, told: &mut Mistakes<'_>) {
        let known: Vec<&str> = self.known.iter().copied().collect();
        for (at, key, _) in self.all() {
            if !known.contains(&key) {
                told.add(
                    at,
                    &self.field(key),
                    "there is no such key",
                    &nearest(key, &known),
                );
            }
        }
    }
}

/// What may have been meant by `key`.
pub(super) fn nearest(key: &str, known: &[&str]) -> String {
    let likeness = |known: &&&str| strsim::jaro_winkler(key, known);
    let best = known
        .iter()
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    match best {
        Some(best) if strsim::jaro_winkler(key, best) > 0.8 => format!("did you mean `{best}`?"),
        _ => format!("these are: {}", known.join(", ")),
    }
}

/// A value as an error shows it.
pub(super) fn show(value: &DeValue<'_>) -> String {
    match value {
        DeValue::Table(_) => "a table".into(),
        DeValue::Array(_) => "a list".into(),
        value => shorten(
            &to_json(value).map_or_else(|| value.type_str().into(), |json| json.to_string()),
        ),
    }
}

fn to_number(value: &DeValue<'_>) -> Option<f64> {
    match value {
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .ok()
            .map(|number| number as f64),
        DeValue::Float(number) => number.as_str().parse().ok(),
        _ => None,
    }
}

/// The value as JSON; `None` where JSON has none: times, infinities, whole numbers beyond 64 bits.
pub(super) fn to_json(value: &DeValue<'_>) -> Option<Value> {
    Some(match value {
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .ok()?
            .into(),
        DeValue::Float(number) => {
            serde_json::Number::from_f64(number.as_str().parse().ok()?)?.into()
        }
        DeValue::Boolean(value) => Value::from(*value),
        DeValue::Datetime(_) => return None,
        DeValue::Array(items) => items
            .iter()
            .map(|item| to_json(item.get_ref()))
            .collect::<Option<Vec<_>>>()?
            .into(),
        DeValue::Table(table) => table
            .iter()
            .map(|(key, value)| Some((key.get_ref().to_string(), to_json(value.get_ref())?)))
            .collect::<Option<serde_json::Map<_, _>>>()?
            .into(),
    })
}
