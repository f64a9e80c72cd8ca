"""Tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns, two spaces apart: the first `left` to the left, the others to the right."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(_cells(line, widths, left)).rstrip() for line in lines)


def _cells(line: Sequence[str], widths: Sequence[int], left: int) -> Iterable[str]:
    for index, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.ljust(width) if index < left else cell.rjust(width)
