//! A scanner for one Structured Field Item (RFC 9651 §4.2) whose value is a Byte Sequence.
//!
//! It borrows from the input and leaves the base64 text alone, so that rows nobody asks for are never decoded.

use super::SignatureError;

/// Largest Structured Field integer: 15 digits (RFC 9651 §3.3.1).
pub(super) const MAX_INTEGER: u64 = 999_999_999_999_999;

/// A parameter's value; kinds that no parameter of ours has are checked and dropped.
#[derive(Debug, PartialEq)]
pub(super) enum Bare<'a> {
    Integer(i64),
    Token(&'a [u8]),
    /// Between the quotes, escapes untouched.
    String(&'a [u8]),
    Other,
}

pub(super) struct Scanner<'a> {
    input: &'a [u8],
    at: usize,
}

impl<'a> Scanner<'a> {
    pub(super) fn new(input: &'a [u8]) -> Self {
        Self { input, at: 0 }
    }

    /// The text between the colons, without leading spaces.
    pub(super) fn byte_sequence(&mut self) -> Result<&'a [u8], SignatureError> {
        self.skip_spaces();
        self.expect(b':', "`:` and a byte sequence")?;
        let text = self.rest();
        let Some(length) = memchr::memchr(b':', text) else {
            self.at = self.input.len();
            return Err(self.error("`:` that ends the byte sequence"));
        };
        self.at += length + 1;
        Ok(text.get(..length).unwrap_or_default())
    }

    /// The next `;key[=value]`, or `None` at the end of the field.
    pub(super) fn parameter(&mut self) -> Result<Option<(&'a [u8], Bare<'a>)>, SignatureError> {
        if self.peek() != Some(b';') {
            self.skip_spaces();
            return if self.peek().is_none() {
                Ok(None)
            } else {
                Err(self.error("`;` or the end"))
            };
        }
        self.at += 1;
        self.skip_spaces();
        if !self
            .peek()
            .is_some_and(|byte| byte.is_ascii_lowercase() || byte == b'*')
        {
            return Err(self.error("a parameter name"));
        }
        let key = self.take_while(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte)
        });
        if self.peek() != Some(b'=') {
            return Ok(Some((key, Bare::Other))); // Boolean true
        }
        self.at += 1;
        Ok(Some((key, self.bare_item()?)))
    }

    fn bare_item(&mut self) -> Result<Bare<'a>, SignatureError> {
        match self.peek() {
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b'"') => self.string(),
            Some(byte) if byte.is_ascii_alphabetic() || byte == b'*' => {
                Ok(Bare::Token(self.take_while(is_token)))
            }
            Some(b':') => {
                let text = self.byte_sequence()?;
                super::payload::check_base64(text)?;
                Ok(Bare::Other)
            }
            Some(b'?') => {
                self.at += 1;
                match self.peek() {
                    Some(b'0' | b'1') => self.at += 1,
                    _ => return Err(self.error("`0` or `1`")),
                }
                Ok(Bare::Other)
            }
            Some(b'@') => {
                self.at += 1;
                match self.number()? {
                    Bare::Integer(_) => Ok(Bare::Other),
                    _ => Err(self.error("a whole number of seconds")),
                }
            }
            Some(b'%') => self.display_string(),
            _ => Err(self.error("a parameter value")),
        }
    }

    /// Integer or Decimal (RFC 9651 §4.2.4).
    fn number(&mut self) -> Result<Bare<'a>, SignatureError> {
        let negative = self.peek() == Some(b'-');
        self.at += usize::from(negative);
        let digits = self.take_while(|byte| byte.is_ascii_digit());
        if self.peek() == Some(b'.') && (1..=12).contains(&digits.len()) {
            self.at += 1;
            let fraction = self.take_while(|byte| byte.is_ascii_digit());
            let valid = (1..=3).contains(&fraction.len());
            return if valid {
                Ok(Bare::Other)
            } else {
                Err(self.error("1 to 3 decimals"))
            };
        }
        if !(1..=15).contains(&digits.len()) {
            return Err(self.error("a number of 1 to 15 digits"));
        }
        let value = digits
            .iter()
            .fold(0, |value, digit| value * 10 + i64::from(digit - b'0'));
        Ok(Bare::Integer(if negative { -value } else { value }))
    }

    fn string(&mut self) -> Result<Bare<'a>, SignatureError> {
        self.at += 1;
        let text = self.rest();
        let start = self.at;
        loop {
            match self.peek() {
                Some(b'"') => {
                    let inside = text.get(..self.at - start).unwrap_or_default();
                    self.at += 1;
                    return Ok(Bare::String(inside));
                }
                Some(b'\\') => {
                    self.at += 1;
                    if !matches!(self.peek(), Some(b'"' | b'\\')) {
                        return Err(self.error("`\"` or `\\` after `\\`"));
                    }
                    self.at += 1;
                }
                Some(b' '..=b'~') => self.at += 1,
                _ => return Err(self.error("a printable ASCII character or `\"`")),
            }
        }
    }

    /// Percent-encoded UTF-8 in quotes (RFC 9651 §4.2.10).
    fn display_string(&mut self) -> Result<Bare<'a>, SignatureError> {
        self.at += 1;
        self.expect(b'"', "`\"` after `%`")?;
        let mut text = Vec::new();
        loop {
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return match std::str::from_utf8(&text) {
                        Ok(_) => Ok(Bare::Other),
                        Err(_) => Err(self.error("UTF-8 in a display string")),
                    };
                }
                Some(b'%') => {
                    self.at += 1;
                    let byte = self.hex_digit()? << 4 | self.hex_digit()?;
                    text.push(byte);
                }
                Some(byte @ b' '..=b'~') => {
                    text.push(byte);
                    self.at += 1;
                }
                _ => return Err(self.error("a printable ASCII character or `\"`")),
            }
        }
    }

    fn hex_digit(&mut self) -> Result<u8, SignatureError> {
        let digit = match self.peek() {
            Some(byte @ b'0'..=b'9') => byte - b'0',
            Some(byte @ b'a'..=b'f') => byte - b'a' + 10,
            _ => return Err(self.error("two lower-case hexadecimal digits")),
        };
        self.at += 1;
        Ok(digit)
    }

    fn rest(&self) -> &'a [u8] {
        self.input.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<u8> {
        self.input.get(self.at).copied()
    }

    fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), SignatureError> {
        if self.peek() == Some(byte) {
            self.at += 1;
            return Ok(());
        }
        Err(self.error(expected))
    }

    fn skip_spaces(&mut self) {
        self.take_while(|byte| byte == b' ');
    }

    fn take_while(&mut self, accept: impl Fn(u8) -> bool) -> &'a [u8] {
        let rest = self.rest();
        let length = rest
            .iter()
            .position(|&byte| !accept(byte))
            .unwrap_or(rest.len());
        self.at += length;
        rest.get(..length).unwrap_or_default()
    }

    fn error(&self, expected: &'static str) -> SignatureError {
        SignatureError::Syntax {
            at: self.at,
            expected,
        }
    }
}

/// Characters of a Token after its first (RFC 9651 §3.3.4, RFC 9110 `tchar`).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte)
}
