//! Tables for people, all in one style.

use comfy_table::{CellAlignment, Row, Table, presets::UTF8_FULL_CONDENSED};

/// An empty table.
pub(crate) fn table(header: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(header);
    table
}

/// The table with column `first` and all after it aligned to the right, as numbers are.
pub(crate) fn right_from(first: usize, mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(first) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
