"""Pieces of HTML that several sections use. Their arguments are HTML already, unless they say text.

`escape` is how text comes into a page: every module that writes HTML uses it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from lockstep.core.contract.text import shown


def escape(text: str) -> str:
    """Text as HTML. Names that a client or a trace gave may have anything in them: what cannot be seen is spelt out.

    Line ends stay, which HTML takes for spaces.
    """
    return html.escape("\n".join(map(shown, text.split("\n"))))


def figure(chart: str, title: str, unit: str = "", caption: str = "", *, legend: str = "", empty: str = "") -> str:
    """One chart's place: title, legend, unit of the upright axis, chart, how to read it. All but `legend` is text.

    With `empty`, that sentence stands where the chart would.
    """
    if empty:
        place = f'<p class="empty">{escape(empty)}</p>'
    else:
        label = escape(f"{title}. Left and right arrow keys read the values.")
        place = f'<div class="plot" data-chart="{chart}" role="group" aria-label="{label}"></div>'
        if unit:
            place = f'<p class="axis-unit">{escape(unit)}</p>{place}'
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(title)}</h3>{'' if empty else legend}{place}{words}</figure>"


def legend(*entries: tuple[str, str]) -> str:
    """What each line or area is: (classes of the swatch, text), in the order in which they lie."""
    items = "".join(f'<li><span class="sw {swatch}"></span>{escape(text)}</li>' for swatch, text in entries)
    return f'<ul class="legend">{items}</ul>'


def table(head: str, rows: Iterable[str], label: str) -> str:
    """A table that scrolls sideways where the page is narrow, by keyboard too."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def unbroken(numbers: str) -> str:
    """Numbers with their units, such as `149 ms to 1.2 s`, that may only be broken beside the `to`."""
    return " to ".join(part.replace(" ", "&nbsp;") for part in numbers.split(" to "))
