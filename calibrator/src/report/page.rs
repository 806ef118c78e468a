//! HTML, written by hand: text that came from a blob or a trace goes through [`escape`].

use std::fmt::Write as _;

use super::theme;

/// A page that grows from top to bottom.
#[derive(Debug, Default)]
pub struct Page {
    body: String,
}

/// Text as HTML shows it.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

impl Page {
    fn push(&mut self, html: std::fmt::Arguments<'_>) {
        // Writing into a String cannot fail.
        let _ = self.body.write_fmt(html);
        self.body.push('\n');
    }

    /// The heading of a section.
    pub fn heading(&mut self, text: &str) {
        self.push(format_args!("<h2>{}</h2>", escape(text)));
    }

    /// A paragraph.
    pub fn text(&mut self, text: &str) {
        self.push(format_args!("<p>{}</p>", escape(text)));
    }

    /// A paragraph of less weight.
    pub fn note(&mut self, text: &str) {
        self.push(format_args!("<p class=\"note\">{}</p>", escape(text)));
    }

    /// A plot: its SVG, the names of its categories, and a caption that also says what it shows to those
    /// who do not see it.
    pub fn figure(&mut self, svg: &str, keys: &[&str], caption: &str) {
        let keys: String = keys
            .iter()
            .enumerate()
            .map(|(index, key)| format!("<span class=\"key c{index}\"></span>{}", escape(key)))
            .collect();
        let caption = escape(caption);
        let svg = svg.replacen(
            "<svg ",
            &format!("<svg role=\"img\" aria-label=\"{caption}\" "),
            1,
        );
        self.push(format_args!(
            "<figure>{svg}<figcaption><div>{keys}</div>{caption}</figcaption></figure>"
        ));
    }

    /// A table. The columns in `text` hold words, the others numbers.
    pub fn table(&mut self, header: &[&str], text: &[usize], rows: &[Vec<String>]) {
        let class = |column: usize| {
            if text.contains(&column) {
                " class=\"text\""
            } else {
                ""
            }
        };
        let cells = |tag: &str, cells: &mut dyn Iterator<Item = &str>| -> String {
            let cells = cells.enumerate();
            cells
                .map(|(column, cell)| format!("<{tag}{}>{}</{tag}>", class(column), escape(cell)))
                .collect()
        };
        let mut html = format!("<tr>{}</tr>\n", cells("th", &mut header.iter().copied()));
        for row in rows {
            let _ = writeln!(
                html,
                "<tr>{}</tr>",
                cells("td", &mut row.iter().map(String::as_str))
            );
        }
        self.push(format_args!(
            "<div class=\"scroll\"><table>\n{html}</table></div>"
        ));
    }

    /// The whole document. Its policy forbids scripts and everything from outside the file.
    pub fn html(self, title: &str) -> String {
        let title = escape(title);
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline'\">\n\
             <title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{}</body>\n</html>\n",
            theme::css(),
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_wrote_is_text_and_never_markup() {
        let evil = "<script>alert('1')</script>&\"";
        let mut page = Page::default();
        page.heading(evil);
        page.text(evil);
        page.note(evil);
        page.figure("<svg ></svg>", &[evil], evil);
        page.table(&[evil], &[0], &[vec![evil.into()]]);
        let html = page.html(evil);
        assert!(!html.contains("<script"), "{html}");
        assert!(!html.contains("\"<"), "{html}");
        let escaped = "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&amp;&quot;";
        assert_eq!(html.matches(escaped).count(), 10, "{html}");
    }
}
