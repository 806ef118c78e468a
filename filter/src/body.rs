//! Edits of a JSON object that leave every other byte as it was.
//!
//! Big integers, floats, key order, white space and duplicates of other keys survive, because nothing is parsed and
//! printed again: members are found by `serde_json`, which hands out their raw text, and the object is spliced.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserializer;
use serde::de::{DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// One `"key": value` of the object.
struct Member<'a> {
    /// Unescaped.
    key: Cow<'a, str>,
    /// From the key's opening quote to the value's end.
    span: Range<usize>,
    value: &'a str,
}

/// A JSON object whose members can be looked at and edited; keys are compared after unescaping.
pub struct Object<'a> {
    text: &'a str,
    members: Vec<Member<'a>>,
    /// Where the closing brace is.
    end: usize,
}

/// What becomes of the members with a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// Every member with the key gets this value; without one it is added at the end.
    Set(String),
    /// Every member with the key gets this value; without one nothing happens.
    Replace(String),
    /// Every member with the key goes away.
    Remove,
}

impl<'a> Object<'a> {
    /// Reads the members of an object.
    ///
    /// # Errors
    /// The bytes are not one JSON object in UTF-8.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, NotAnObject> {
        let text = std::str::from_utf8(bytes).map_err(|error| NotAnObject(error.to_string()))?;
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let pairs = deserializer
            .deserialize_map(Pairs)
            .and_then(|pairs| deserializer.end().map(|()| pairs))
            .map_err(|error| NotAnObject(error.to_string()))?;
        let end = text
            .rfind('}')
            .ok_or_else(|| NotAnObject("no closing brace".into()))?;
        let mut members = Vec::with_capacity(pairs.len());
        let mut searched = 0;
        for (key, raw) in pairs {
            let value = raw.get();
            // The raw text borrows from `text`, so its address tells where it is.
            let start = (value.as_ptr() as usize).wrapping_sub(text.as_ptr() as usize);
            // Between the previous value and this key there are only white space, a comma or the brace.
            let quote = text
                .get(searched..start)
                .and_then(|gap| gap.find('"'))
                .unwrap_or_default();
            let span = searched + quote..start + value.len();
            searched = span.end;
            members.push(Member { key, span, value });
        }
        Ok(Self { text, members, end })
    }

    /// All of it, as it came.
    pub fn text(&self) -> &'a str {
        self.text
    }

    /// Raw text of the last member with this key, which is the one that most parsers take.
    pub fn get(&self, key: &str) -> Option<&'a str> {
        self.members
            .iter()
            .rev()
            .find(|member| member.key == key)
            .map(|member| member.value)
    }

    /// Whether any member has this key.
    pub fn has(&self, key: &str) -> bool {
        self.members.iter().any(|member| member.key == key)
    }

    /// Whether there are no members at all.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The object with the edits applied; everything else is copied as it is.
    pub fn edit(&self, edits: &[(&str, Edit)]) -> String {
        let grown: usize = edits
            .iter()
            .map(|(key, edit)| key.len() + edit.len() + 4)
            .sum();
        let mut out = String::with_capacity(self.text.len() + grown);
        let mut previous = self
            .members
            .first()
            .map_or(self.end, |first| first.span.start);
        out.push_str(self.slice(0..previous));
        let mut written = 0u32;
        for member in &self.members {
            let edit = edits
                .iter()
                .find(|(key, _)| *key == member.key)
                .map(|(_, edit)| edit);
            if edit != Some(&Edit::Remove) {
                if written > 0 {
                    // What stands between this member and the one before it in the source: a comma and white space.
                    out.push_str(self.slice(previous..member.span.start));
                }
                match edit {
                    Some(Edit::Set(value) | Edit::Replace(value)) => {
                        let value_start = member.span.end - member.value.len();
                        out.push_str(self.slice(member.span.start..value_start));
                        out.push_str(value);
                    }
                    _ => out.push_str(self.slice(member.span.clone())),
                }
                written += 1;
            }
            previous = member.span.end;
        }
        for (key, edit) in edits {
            if let Edit::Set(value) = edit
                && !self.has(key)
            {
                if written > 0 {
                    out.push(',');
                }
                // Keys that we add need no escapes.
                out.push('"');
                out.push_str(key);
                out.push_str("\":");
                out.push_str(value);
                written += 1;
            }
        }
        let tail = if self.members.is_empty() {
            self.end
        } else {
            previous
        };
        out.push_str(self.slice(tail..self.text.len()));
        out
    }

    fn slice(&self, range: Range<usize>) -> &'a str {
        self.text.get(range).unwrap_or_default()
    }
}

impl Edit {
    fn len(&self) -> usize {
        match self {
            Self::Set(value) | Self::Replace(value) => value.len(),
            Self::Remove => 0,
        }
    }
}

/// The text of a JSON string, or `None` for any other value.
pub fn string(raw: &str) -> Option<Cow<'_, str>> {
    if !raw.starts_with('"') {
        return None;
    }
    match raw.get(1..raw.len().saturating_sub(1)) {
        Some(plain) if !plain.contains('\\') => Some(Cow::Borrowed(plain)),
        _ => serde_json::from_str(raw).ok().map(Cow::Owned),
    }
}

/// Whether any object of a JSON text, at any depth, has this key, however it is spelled.
///
/// # Errors
/// The bytes are not JSON, or nested too deeply to tell.
pub fn has_key_anywhere(bytes: &[u8], key: &str) -> Result<bool, serde_json::Error> {
    // Hardly any body has the word or could hide it: behind escapes, or in UTF-16 that looks like UTF-8 with NULs.
    let may_hide = |text: &str| ["\\u", "\0", key].iter().any(|part| text.contains(part));
    if std::str::from_utf8(bytes).is_ok_and(|text| !may_hide(text)) {
        return Ok(false);
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let found = Search(key).deserialize(&mut deserializer)?;
    deserializer.end().map(|()| found)
}

#[derive(Clone, Copy)]
struct Search<'k>(&'k str);

impl<'de> DeserializeSeed<'de> for Search<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Search<'_> {
    type Value = bool;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut found = false;
        while let Some(Key(key)) = map.next_key()? {
            found |= key == self.0;
            found |= map.next_value_seed(self)?;
        }
        Ok(found)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<bool, A::Error> {
        let mut found = false;
        while let Some(inside) = seq.next_element_seed(self)? {
            found |= inside;
        }
        Ok(found)
    }

    fn visit_bool<E>(self, _: bool) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_i64<E>(self, _: i64) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_u64<E>(self, _: u64) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_f64<E>(self, _: f64) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_str<E>(self, _: &str) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }
}

/// The bytes are not one JSON object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a JSON object: {0}")]
pub struct NotAnObject(String);

struct Pairs;

impl<'de> Visitor<'de> for Pairs {
    type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(Key(key)) = map.next_key()? {
            pairs.push((key, map.next_value()?));
        }
        Ok(pairs)
    }
}

/// A key that borrows unless it has escapes.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests;
