//! JSON as Python's `json.dump(…, indent=2)` writes it, byte for byte.

/// A number as Python's `repr` gives it: the shortest digits that come back as the same number, with an
/// exponent below 1e-4 and from 1e16 on. Of two that are equally short and near it takes the even one, and
/// Rust the upper.
pub(super) fn float(value: f64) -> String {
    let shortest = format!("{value:e}");
    let Some((digits, exponent)) = shortest.split_once('e') else {
        return shortest; // no number: JSON has none
    };
    let after_first = digits.len() - digits.find('.').map_or(digits.len(), |point| point + 1);
    let exponent: i64 = exponent.parse().unwrap_or_default();
    if value == 0.0 || (-4..16).contains(&exponent) {
        let decimals = (after_first as i64 - exponent).max(1) as usize;
        let even = format!("{value:.decimals$}");
        return if even.parse() == Ok(value) {
            even
        } else {
            format!("{value:?}")
        };
    }
    let even = format!("{value:.after_first$e}");
    let (digits, _) = match even.parse() == Ok(value) {
        true => even.split_once('e').unwrap_or((digits, "")),
        false => (digits, ""),
    };
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// Numbers of single precision, each written as the double that it is.
pub(super) fn floats(values: &[f32]) -> impl Iterator<Item = String> {
    values.iter().map(|&value| float(value.into()))
}

/// A text, with everything but ASCII escaped.
pub(super) fn string(text: &str) -> String {
    let mut quoted = String::new();
    for c in serde_json::Value::from(text).to_string().chars() {
        if c.is_ascii() {
            quoted.push(c);
        } else {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                quoted += &format!("\\u{unit:04x}");
            }
        }
    }
    quoted
}

/// A list whose brackets stand at `depth`.
pub(super) fn list(items: impl Iterator<Item = String>, depth: usize) -> String {
    block(items, depth, '[', ']')
}

/// An object whose braces stand at `depth`.
pub(super) fn object<'a>(members: impl Iterator<Item = (&'a str, String)>, depth: usize) -> String {
    let members = members.map(|(key, value)| format!("{}: {value}", string(key)));
    block(members, depth, '{', '}')
}

fn block(items: impl Iterator<Item = String>, depth: usize, open: char, close: char) -> String {
    let indent = "  ".repeat(depth);
    let items: Vec<String> = items.collect();
    if items.is_empty() {
        return format!("{open}{close}");
    }
    let items = items.join(&format!(",\n{indent}  "));
    format!("{open}\n{indent}  {items}\n{indent}{close}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_look_as_python_prints_them() {
        for (value, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.5e-7, "-1.5e-07"),
            (1e-100, "1e-100"),
            (9_007_199_254_740_993.0, "9007199254740992.0"),
            (1e16, "1e+16"),
            (1.25e22, "1.25e+22"),
            (f64::from(0.1f32), "0.10000000149011612"),
            // Exactly between …812 and …813.
            (f64::from(0.028_108_597f32), "0.028108596801757812"),
        ] {
            assert_eq!(float(value), expected);
        }
    }

    #[test]
    fn texts_are_ascii() {
        assert_eq!(
            string("a\"\u{e9}\u{1f600}\n\u{7f}"),
            "\"a\\\"\\u00e9\\ud83d\\ude00\\n\u{7f}\""
        );
    }

    #[test]
    fn blocks_are_indented() {
        let inner = object([("b", "1".to_owned())].into_iter(), 1);
        let outer = list([inner, list(std::iter::empty(), 1)].into_iter(), 0);
        assert_eq!(outer, "[\n  {\n    \"b\": 1\n  },\n  []\n]");
    }

    proptest! {
        #[test]
        fn a_number_comes_back(bits in any::<u64>()) {
            let value = f64::from_bits(bits);
            prop_assume!(value.is_finite());
            let back: f64 = float(value).parse().unwrap();
            prop_assert_eq!(back.to_bits(), bits);
            let json: f64 = serde_json::from_str(&float(value)).unwrap();
            prop_assert_eq!(json.to_bits(), bits);
        }
    }
}
