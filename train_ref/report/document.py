"""A page as a list of blocks, which Markdown and HTML are both written from.

All text is plain: what would be markup in either is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str
    lead: str = ""  # bold, before the text


@dataclass(frozen=True)
class Points:
    items: tuple[Paragraph, ...]


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: bool = False  # all columns but the first are aligned to the right


@dataclass(frozen=True)
class Picture:
    file: str  # relative to the page
    caption: str
    figure: str  # its name in `figures.FIGURES`


@dataclass(frozen=True)
class Links:
    places: tuple[tuple[str, str], ...]  # text and target


Block = Heading | Paragraph | Points | Table | Picture | Links

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: .25em .8em; text-align: left; vertical-align: top }
table.numbers :is(th, td):not(:first-child) { text-align: right; white-space: nowrap }
figure { margin: 1em 0 } img { max-width: 100% } figcaption { color: #555 }
"""


def markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def page(title: str, blocks: Sequence[Block]) -> str:
    """A whole HTML file, which needs nothing but its pictures."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in a table's cell too."""
    for character in "\\`*|[":
        text = text.replace(character, f"\\{character}")
    return html.escape(text, quote=False)


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Paragraph(text, lead):
            return f"**{_plain(lead)}** {_plain(text)}".strip() if lead else _plain(text)
        case Points(items):
            return "\n".join(f"- {_markdown(item)}" for item in items)
        case Table(header, rows, numbers):
            rule = ["---"] + ["---:" if numbers else "---"] * (len(header) - 1)
            lines = [[_plain(cell) for cell in line] for line in (header, *rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))
        case Picture(file, caption, figure):
            return f"![{_plain(figure)}]({file})\n\n{_plain(caption)}"
        case Links(places):
            return " · ".join(f"[{_plain(text)}]({target})" for text, target in places)


def _html(block: Block) -> str:
    escape = html.escape
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Paragraph():
            return f"<p>{_inline(block)}</p>"
        case Points(items):
            return f"<ul>{''.join(f'<li>{_inline(item)}</li>' for item in items)}</ul>"
        case Table(header, rows, numbers):
            head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
            body = "\n".join(
                f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
            )
            return f"<table{' class=numbers' if numbers else ''}>\n<tr>{head}</tr>\n{body}\n</table>"
        case Picture(file, caption, figure):
            return (
                f'<figure><img src="{escape(file)}" alt="{escape(figure)}">'
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
        case Links(places):
            return " · ".join(f'<a href="{escape(target)}">{escape(text)}</a>' for text, target in places)


def _inline(paragraph: Paragraph) -> str:
    lead = f"<b>{html.escape(paragraph.lead)}</b> " if paragraph.lead else ""
    return lead + html.escape(paragraph.text)
