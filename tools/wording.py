"""How numbers are written for people: 1,234.50, 134.6M, 2 saves, 3 min 5 s.

Knows no run. What is not known is written as nothing.
"""

import math

from training import terminal


def number(value: float | None, digits: int = 4) -> str:
    """A number for a table, with so many digits behind the point."""
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.{digits}f}"


def short(value: float | None) -> str:
    """A large number in few characters: 134.6M."""
    if value is None:
        return ""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 1000 * size:
            return f"{value / size:,.0f}{letter}"
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}"


def counted(count: int, thing: str) -> str:
    """1 save, 2 saves."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 42 s, 3 min 5 s, 2 h 10 min."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    return terminal.duration(seconds)


def perplexity(loss: float | None) -> str:
    """The perplexity that a loss in nats a token stands for."""
    if loss is None:
        return ""
    return number(math.exp(min(loss, 700)), 2)  # exp(710) is beyond a float


def visible(text: str) -> str:
    """Text in which a character that nobody can see is a dot."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\u00b7" for c in text)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in characters: the first column to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    shown = []
    for first, *others in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        shown.append("   ".join([f"{first:{widths[0]}}", *cells]))
    return "\n".join(shown)
