"""Markdown tables that are also readable in a terminal, and formatting of sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with aligned columns: text to the left, figures to the right. None is written as "-"."""
    lines = [list(head)]
    lines += [["-" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(head))]
    right = [len(lines) > 1 and all(_is_figure(line[i]) for line in lines[1:]) for i in range(len(head))]
    rule = ["-" * (width - 1) + ":" if r else "-" * width for width, r in zip(widths, right, strict=True)]
    aligned = [f"{{:{'>' if r else '<'}{width}}}" for width, r in zip(widths, right, strict=True)]
    return "\n".join(f"| {' | '.join(aligned)} |".format(*line) for line in (lines[0], rule, *lines[1:]))


def _is_figure(text: str) -> bool:
    return text == "-" or text[:1].isdigit() or text[:2] in {f"{sign}{digit}" for sign in "+-" for digit in range(10)}


def size(count: float, unit: str = "B") -> str:
    """1234567 -> "1.23 MB": decimal prefixes, three digits."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 999.5 or prefix == "P":
            break
        count /= 1000
    return f"{count:.3g} {prefix}{unit}"


def thousands(n: int) -> str:
    """65536 -> "64k"."""
    return f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)
