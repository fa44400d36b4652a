"""HTML fragments for several sections. Arguments are HTML already, except where a docstring calls them text.

Every module that writes HTML inserts text into a page with `escape`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from lockstep.core.contract.text import shown


def escape(text: str) -> str:
    """Return text as HTML. Names from clients or traces may contain any characters; invisible ones are spelt out.

    Line ends are kept; HTML treats them as spaces.
    """
    return html.escape("\n".join(map(shown, text.split("\n"))))


def figure(chart: str, title: str, unit: str = "", caption: str = "", *, legend: str = "", empty: str = "") -> str:
    """Return the place of a chart: title, legend, unit of the vertical axis, chart, caption. All but `legend` are text.

    Args:
        empty: a sentence that replaces the chart.
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
    """Return a legend: (CSS classes of the swatch, text) for each line or area, in stacking order."""
    items = "".join(f'<li><span class="sw {swatch}"></span>{escape(text)}</li>' for swatch, text in entries)
    return f'<ul class="legend">{items}</ul>'


def table(head: str, rows: Iterable[str], label: str) -> str:
    """Return a table that scrolls sideways on a narrow page, by keyboard too."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def unbroken(numbers: str) -> str:
    """Return numbers with units, such as `149 ms to 1.2 s`, that can only wrap beside the `to`."""
    return " to ".join(part.replace(" ", "&nbsp;") for part in numbers.split(" to "))
