//! Plots as SVG text, in the stand-in colours of [`super::theme`].

use std::error::Error;
use std::ops::Range;

use plotters::chart::{ChartContext, MeshStyle};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::theme::{GRID, INK, MUTED, PAPER, category, shade};

/// SVG text. Drawing into a string fails only where a plot asks for something that cannot be drawn.
pub type Drawn = Result<String, Box<dyn Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const WIDTH: u32 = 900;
const FONT: f64 = 14.0;

fn style(color: RGBColor, horizontal: HPos) -> TextStyle<'static> {
    let style = TextStyle::from(("sans-serif", FONT).into_font());
    TextStyle {
        color: color.to_backend_color(),
        ..style
    }
    .pos(Pos::new(horizontal, VPos::Center))
}

fn draw(height: u32, paint: impl FnOnce(&Area<'_>) -> Result<(), Box<dyn Error>>) -> Drawn {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        paint(&area)?;
        area.present()?;
    }
    Ok(svg)
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// A chart with room for the labels of its axes.
fn chart<'a, 'b>(
    area: &'a Area<'b>,
    x: Range<f64>,
    y: Range<f64>,
) -> Result<Chart<'a, 'b>, Box<dyn Error>> {
    Ok(ChartBuilder::on(area)
        .margin(10)
        .x_label_area_size(44)
        .y_label_area_size(60)
        .build_cartesian_2d(x, y)?)
}

/// Axes and grid as in all charts, to be given labels and drawn.
fn mesh<'a, 'b, 'c>(
    chart: &'c mut Chart<'a, 'b>,
) -> MeshStyle<'a, 'c, RangedCoordf64, RangedCoordf64, SVGBackend<'b>> {
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(MUTED)
        .label_style(style(MUTED, HPos::Center))
        .axis_desc_style(style(MUTED, HPos::Center));
    mesh
}

/// A point of the map, with the region whose colour it has.
pub struct Point {
    /// Region.
    pub region: usize,
    /// Where it is.
    pub at: (f64, f64),
}

/// Requests as dots, and centroids as discs with the number of their region.
pub fn map(requests: &[Point], centroids: &[Point], explained: [f64; 2]) -> Drawn {
    let all = || requests.iter().chain(centroids).map(|point| point.at);
    let (x, y) = (range(all().map(|at| at.0)), range(all().map(|at| at.1)));
    let axis = |name: &str, share: f64| {
        format!("{name} component, {:.0} % of the variance", 100.0 * share)
    };
    draw(560, |area| {
        let mut chart = chart(area, x, y)?;
        mesh(&mut chart)
            .x_label_formatter(&tenth)
            .y_label_formatter(&tenth)
            .x_desc(axis("first", explained[0]))
            .y_desc(axis("second", explained[1]))
            .draw()?;
        chart.draw_series(
            requests
                .iter()
                .map(|point| Circle::new(point.at, 3, category(point.region).mix(0.6).filled())),
        )?;
        chart.draw_series(centroids.iter().map(|point| {
            let ring = Circle::new((0, 0), 13, PAPER.filled());
            let disc = Circle::new((0, 0), 11, category(point.region).filled());
            let number = Text::new(point.region.to_string(), (0, 0), style(PAPER, HPos::Center));
            EmptyElement::at(point.at) + ring + disc + number
        }))?;
        Ok(())
    })
}

/// A little more than from the least to the greatest of `values`.
fn range(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (least, greatest) = values.fold(
        (f64::INFINITY, f64::NEG_INFINITY),
        |(least, greatest), value| (least.min(value), greatest.max(value)),
    );
    let margin = (0.05 * (greatest - least)).max(1e-3);
    least - margin..greatest + margin
}

/// A coordinate of the map; plotters would call some zeros -0.0.
fn tenth(x: &f64) -> String {
    format!("{:.1}", (10.0 * x).round() / 10.0 + 0.0)
}

/// A number of an axis that only has whole ones.
fn whole(x: &f64) -> String {
    if (x - x.round()).abs() < 0.01 {
        format!("{:.0}", x.round())
    } else {
        String::new()
    }
}

/// Lines over the same whole positions, and a ring around the point `mark`.
pub fn lines(series: &[Vec<(f64, f64)>], axes: [&str; 2], mark: Option<(f64, f64)>) -> Drawn {
    let all = || series.iter().flatten();
    let x = range(all().map(|point| point.0));
    let y = range(all().map(|point| point.1));
    draw(340, |area| {
        let mut chart = chart(area, x, y)?;
        mesh(&mut chart)
            .x_label_formatter(&whole)
            .x_desc(axes[0])
            .y_desc(axes[1])
            .draw()?;
        for (index, points) in series.iter().enumerate() {
            let color = category(index);
            chart.draw_series(LineSeries::new(
                points.iter().copied(),
                color.stroke_width(2),
            ))?;
            chart.draw_series(points.iter().map(|&at| Circle::new(at, 3, color.filled())))?;
        }
        if let Some(at) = mark {
            chart.draw_series([Circle::new(at, 8, INK.stroke_width(2))])?;
        }
        Ok(())
    })
}

/// Bars of each series beside each other, for each region.
pub fn bars(series: &[Vec<f64>], even: f64) -> Drawn {
    let regions = series.first().map_or(0, Vec::len);
    let most = series.iter().flatten().copied().fold(even, f64::max);
    draw(300, |area| {
        let mut chart = chart(area, -0.5..regions as f64 - 0.5, 0.0..1.08 * most)?;
        mesh(&mut chart)
            .disable_x_mesh()
            .x_labels(regions.min(24))
            .x_label_formatter(&whole)
            .y_label_formatter(&|y| format!("{:.0} %", 100.0 * y))
            .x_desc("region")
            .y_desc("share of requests")
            .draw()?;
        let width = 0.8 / series.len() as f64;
        for (index, shares) in series.iter().enumerate() {
            chart.draw_series(shares.iter().enumerate().map(|(region, &share)| {
                let left = region as f64 - 0.4 + index as f64 * width;
                Rectangle::new(
                    [(left, 0.0), (left + 0.94 * width, share)],
                    category(index).filled(),
                )
            }))?;
        }
        let ends = [(-0.5, even), (regions as f64 - 0.5, even)];
        chart.draw_series([PathElement::new(ends.to_vec(), INK)])?;
        Ok(())
    })
}

/// One row of [`quantiles`]: name, category and the values at 0, 5, 25, 50, 75, 95 and 100 %.
pub struct Quantiles {
    /// What the values are of; empty continues the row before.
    pub name: String,
    /// Whose colour it has.
    pub category: usize,
    /// The values.
    pub values: [f64; 7],
}

/// Boxes from 25 to 75 %, whiskers from 5 to 95 %, a stroke at the median.
pub fn quantiles(rows: &[Quantiles], unit: &str) -> Drawn {
    let x = range(rows.iter().flat_map(|row| row.values[1..6].iter().copied()));
    let (left, right, top, step) = (110, WIDTH as i32 - 20, 10, 18);
    let height = top + step * rows.len() as i32 + 44;
    let at = |value: f64| {
        let part = (value.clamp(x.start, x.end) - x.start) / (x.end - x.start);
        left + (part * f64::from(right - left)).round() as i32
    };
    draw(height as u32, |area| {
        let bottom = top + step * rows.len() as i32 + 4;
        for tick in 0..=5 {
            let value = x.start + (x.end - x.start) * f64::from(tick) / 5.0;
            area.draw(&PathElement::new(
                vec![(at(value), top), (at(value), bottom)],
                GRID,
            ))?;
            let label = format!("{value:.2}");
            area.draw(&Text::new(
                label,
                (at(value), bottom + 12),
                style(MUTED, HPos::Center),
            ))?;
        }
        let middle = ((left + right) / 2, bottom + 30);
        area.draw(&Text::new(
            unit.to_owned(),
            middle,
            style(MUTED, HPos::Center),
        ))?;
        for (index, row) in rows.iter().enumerate() {
            let y = top + step * index as i32 + step / 2;
            let color = category(row.category);
            let [_, low, from, median, to, high, _] = row.values.map(at);
            area.draw(&Text::new(
                row.name.clone(),
                (left - 10, y),
                style(INK, HPos::Right),
            ))?;
            area.draw(&PathElement::new(
                vec![(low, y), (high, y)],
                color.stroke_width(2),
            ))?;
            area.draw(&Rectangle::new(
                [(from, y - 5), (to.max(from + 1), y + 5)],
                color.filled(),
            ))?;
            area.draw(&Rectangle::new(
                [(median - 1, y - 7), (median + 1, y + 7)],
                INK.filled(),
            ))?;
        }
        Ok(())
    })
}

/// Rows of shaded cells; values from 0 to 1.
pub fn heat_map(rows: &[(String, Vec<f64>)], columns: &[String], axes: [&str; 2]) -> Drawn {
    let count = rows.first().map_or(0, |row| row.1.len()).max(1);
    let (left, top) = (90, if columns.is_empty() { 6 } else { 60 });
    let wide = ((WIDTH as i32 - left - 10) / count as i32).clamp(1, 60);
    let high = if rows.len() > 24 { 10 } else { 20 };
    let bottom = top + high * rows.len() as i32;
    draw((bottom + 30) as u32, |area| {
        let vertical = style(MUTED, HPos::Left).transform(FontTransform::Rotate270);
        for (index, name) in columns.iter().enumerate() {
            let x = left + wide * index as i32 + wide / 2;
            area.draw(&Text::new(name.clone(), (x, top - 6), vertical.clone()))?;
        }
        for (index, (name, values)) in rows.iter().enumerate() {
            let y = top + high * index as i32;
            // Where rows are lower than text, every second has its name.
            if high >= 14 || index % 2 == 0 {
                let place = (left - 8, y + high / 2);
                area.draw(&Text::new(name.clone(), place, style(MUTED, HPos::Right)))?;
            }
            for (column, &value) in values.iter().enumerate() {
                let x = left + wide * column as i32;
                let cell = [(x, y), (x + wide, y + high)];
                area.draw(&Rectangle::new(cell, shade(value).filled()))?;
            }
        }
        let under = (left + wide * count as i32 / 2, bottom + 16);
        area.draw(&Text::new(
            axes[0].to_owned(),
            under,
            style(MUTED, HPos::Center),
        ))?;
        let beside = (12, top.max(40) + (bottom - top) / 2);
        let beside_style = style(MUTED, HPos::Center).transform(FontTransform::Rotate270);
        area.draw(&Text::new(axes[1].to_owned(), beside, beside_style))?;
        Ok(())
    })
}
