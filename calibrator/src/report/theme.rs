//! Colours, in light and in dark.
//!
//! Plots are drawn once, in stand-in colours that nothing else uses; the page's style sheet gives each its
//! real colour, by scheme. So a plot follows the reader's choice without a script.

use std::fmt::Write as _;

use plotters::style::RGBColor;

/// Text.
pub const INK: RGBColor = RGBColor(1, 0, 0);
/// Axes, and what is of less weight.
pub const MUTED: RGBColor = RGBColor(2, 0, 0);
/// Lines behind the data.
pub const GRID: RGBColor = RGBColor(3, 0, 0);
/// The page.
pub const PAPER: RGBColor = RGBColor(4, 0, 0);

/// Shades of a heat map, from nothing to most.
pub const SHADES: usize = 12;

/// The colour of a category; after ten they repeat.
pub fn category(index: usize) -> RGBColor {
    RGBColor(5, 0, (index % CATEGORIES.len()) as u8)
}

/// The shade of a value from 0 to 1.
pub fn shade(value: f64) -> RGBColor {
    let at = (value.clamp(0.0, 1.0) * SHADES as f64) as usize;
    RGBColor(6, 0, at.min(SHADES - 1) as u8)
}

type Color = [u8; 3];

/// One scheme's colours of [`INK`], [`MUTED`], [`GRID`], [`PAPER`], and of the least and greatest shade.
struct Scheme {
    ink: Color,
    muted: Color,
    grid: Color,
    paper: Color,
    shades: [Color; 2],
}

const LIGHT: Scheme = Scheme {
    ink: [0x1b, 0x1f, 0x24],
    muted: [0x57, 0x60, 0x6a],
    grid: [0xd5, 0xda, 0xe0],
    paper: [0xff, 0xff, 0xff],
    shades: [[0xe9, 0xef, 0xf7], [0x0a, 0x3a, 0x78]],
};

const DARK: Scheme = Scheme {
    ink: [0xe6, 0xed, 0xf3],
    muted: [0x9a, 0xa5, 0xb1],
    grid: [0x30, 0x38, 0x42],
    paper: [0x11, 0x15, 0x1a],
    shades: [[0x1d, 0x27, 0x33], [0xc4, 0xe2, 0xff]],
};

/// Categories, in light and in dark.
const CATEGORIES: [[Color; 2]; 10] = [
    [[0x00, 0x68, 0xa8], [0x58, 0xa6, 0xff]],
    [[0xb8, 0x4a, 0x00], [0xff, 0x9d, 0x4d]],
    [[0x00, 0x84, 0x5f], [0x3d, 0xdc, 0x97]],
    [[0xb3, 0x3f, 0x86], [0xf2, 0x8c, 0xc8]],
    [[0x8a, 0x6d, 0x00], [0xe8, 0xc5, 0x47]],
    [[0x6b, 0x46, 0xc1], [0xb6, 0x9c, 0xff]],
    [[0x56, 0x5f, 0x69], [0xb0, 0xb8, 0xc0]],
    [[0xa3, 0x34, 0x1f], [0xff, 0x7b, 0x6b]],
    [[0x3f, 0x7d, 0x20], [0xa3, 0xd9, 0x77]],
    [[0x00, 0x7d, 0x8f], [0x56, 0xd4, 0xdd]],
];

/// The style sheet: colours by scheme, and layout.
pub fn css() -> String {
    let mut css = String::from(":root{color-scheme:light dark}\n");
    let light = variables(&LIGHT, 0);
    let dark = variables(&DARK, 1);
    // Writing into a String cannot fail.
    let _ = write!(
        css,
        ":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    );
    let mut stand_in = |color: RGBColor, name: &str| {
        let hex = hex([color.0, color.1, color.2]);
        for attribute in ["fill", "stroke"] {
            let _ = writeln!(
                css,
                "svg [{attribute}=\"{hex}\"]{{{attribute}:var(--{name})}}"
            );
        }
    };
    stand_in(INK, "ink");
    stand_in(MUTED, "muted");
    stand_in(GRID, "grid");
    stand_in(PAPER, "paper");
    for index in 0..CATEGORIES.len() {
        stand_in(category(index), &format!("c{index}"));
    }
    for index in 0..SHADES {
        stand_in(RGBColor(6, 0, index as u8), &format!("s{index}"));
    }
    for index in 0..CATEGORIES.len() {
        let _ = writeln!(css, ".c{index}{{background:var(--c{index})}}");
    }
    css + include_str!("layout.css")
}

fn variables(scheme: &Scheme, which: usize) -> String {
    let mut text = String::new();
    let mut set = |name: &str, color: Color| {
        let _ = write!(text, "--{name}:{};", hex(color));
    };
    set("ink", scheme.ink);
    set("muted", scheme.muted);
    set("grid", scheme.grid);
    set("paper", scheme.paper);
    for (index, category) in CATEGORIES.iter().enumerate() {
        set(&format!("c{index}"), category[which]);
    }
    for index in 0..SHADES {
        set(&format!("s{index}"), shade_of(scheme, index));
    }
    text
}

fn shade_of(scheme: &Scheme, index: usize) -> Color {
    let [least, greatest] = scheme.shades;
    let part = index as f64 / (SHADES - 1) as f64;
    std::array::from_fn(|channel| {
        let (from, to) = (f64::from(least[channel]), f64::from(greatest[channel]));
        (from + (to - from) * part).round() as u8
    })
}

/// As the plots write colours.
fn hex([red, green, blue]: Color) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Contrast of two colours as WCAG 2.2 defines it, 1 to 21.
    fn contrast(a: Color, b: Color) -> f64 {
        let luminance = |color: Color| {
            let linear = color.map(|channel| {
                let channel = f64::from(channel) / 255.0;
                if channel <= 0.04045 {
                    channel / 12.92
                } else {
                    ((channel + 0.055) / 1.055).powf(2.4)
                }
            });
            0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        };
        let (a, b) = (luminance(a) + 0.05, luminance(b) + 0.05);
        a.max(b) / a.min(b)
    }

    #[test]
    fn text_and_data_stand_out_in_both_schemes() {
        for (which, scheme) in [LIGHT, DARK].iter().enumerate() {
            for text in [scheme.ink, scheme.muted] {
                assert!(contrast(text, scheme.paper) >= 4.5, "{text:x?}");
            }
            for category in CATEGORIES {
                let found = contrast(category[which], scheme.paper);
                assert!(found >= 4.5, "{category:x?}: {found}");
            }
            let [least, greatest] = scheme.shades;
            assert!(contrast(least, greatest) >= 7.0);
        }
    }

    #[test]
    fn shades_reach_from_nothing_to_most() {
        assert_eq!(
            (shade(-1.0), shade(0.0)),
            (RGBColor(6, 0, 0), RGBColor(6, 0, 0))
        );
        assert_eq!(
            (shade(1.0), shade(2.0)),
            (RGBColor(6, 0, 11), RGBColor(6, 0, 11))
        );
        assert_eq!(shade_of(&LIGHT, SHADES - 1), LIGHT.shades[1]);
    }
}
