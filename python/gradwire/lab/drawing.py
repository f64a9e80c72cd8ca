"""The space-time diagram of a schedule, as SVG text.

Ranks are horizontal lines, rounds are columns, time runs to the right; each edge is one arrow.
Within a round, the arrows of a rank are side by side in list order, the order in which reductions
fold. They are spread out only to be readable: all sends of a round read the state at its start.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gradwire import _core
from gradwire._schedules.report import Edge, Report

_ROW = 44  # px between two ranks
_LEFT = 84
_RIGHT = 56
_TOP = 116  # to the first rank's line
_BOTTOM = 34
_PAD = 12  # px on each side of a round
_DIGIT = 6.2  # px of one character of a label
_LEAST_WIDTH = 680  # px that the header needs
_PROBLEMS = 4  # sentences shown of a schedule that is wrong

_INK = "#1f2430"
_FAINT = "#687080"
_RULE = "#c3c9d4"
_BAND = "#f4f6fa"
_REDUCE = "#c8500a"
_COPY = "#1463b0"
_YES = "#1d7a3a"
_NO = "#b3123a"


Rounds: TypeAlias = Sequence[Sequence[Edge]]


def draw(schedule: _core.Schedule, rounds: Rounds, report: Report) -> str:
    """Draws the diagram; a long schedule makes it wider, never smaller."""
    return _Diagram(schedule, rounds, report).render()


class _Arrow(NamedTuple):
    edge: Edge
    round: int
    slot: int  # within the round


class _Column(NamedTuple):
    """One round: slots of equal width, side by side; at least one, even when it has no edges."""

    left: float
    slots: int
    slot: float  # px of one

    @property
    def right(self) -> float:
        return self.left + 2 * _PAD + self.slots * self.slot


@dataclass(frozen=True)
class _Point:
    x: float
    y: float

    def towards(self, other: _Point, distance: float) -> _Point:
        """The point `distance` px from here on the way to the other."""
        length = ((other.x - self.x) ** 2 + (other.y - self.y) ** 2) ** 0.5
        share = distance / length
        return _Point(self.x + (other.x - self.x) * share, self.y + (other.y - self.y) * share)


class _Diagram:
    def __init__(self, schedule: _core.Schedule, rounds: Rounds, report: Report) -> None:
        self._schedule, self._report = schedule, report
        self._arrows = _arrows(rounds)
        self._columns = _columns(schedule, rounds, self._arrows)
        self._title = _title(schedule, rounds)
        self._problems = () if self._report.ok else self._report.problems[:_PROBLEMS]
        self._top = _TOP + 18 * len(self._problems)

    def render(self) -> str:
        self._svg = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **self._size()})
        self._svg.set("font-family", "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif")
        self._rect(0, 0, self._width, self._height, "#ffffff")
        self._head()
        self._grid()
        for arrow in self._arrows:
            self._edge(arrow)
        for arrow in self._arrows:  # above all lines
            self._tag(arrow)
        ET.indent(self._svg)
        return ET.tostring(self._svg, encoding="unicode") + "\n"

    @property
    def _end(self) -> float:
        """The x coordinate of the end of the last round."""
        return self._columns[-1].right if self._columns else _LEFT + 2.0 * _PAD

    @property
    def _width(self) -> float:
        words = max([11.5 * len(self._title), *(7.5 * len(each) for each in self._problems)])
        return max(_LEAST_WIDTH, words + 32, self._end + _RIGHT)

    @property
    def _height(self) -> float:
        return self._y(self._schedule.ranks - 1) + _BOTTOM

    def _size(self) -> dict[str, str]:
        width, height = f"{self._width:.0f}", f"{self._height:.0f}"
        return {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}

    def _y(self, rank: int) -> float:
        return self._top + _ROW * rank

    def _ends(self, arrow: _Arrow) -> tuple[_Point, _Point]:
        edge, column = arrow.edge, self._columns[arrow.round]
        left = column.left + _PAD + arrow.slot * column.slot
        return _Point(left, self._y(edge.src)), _Point(left + column.slot - 8, self._y(edge.dst))

    def _head(self) -> None:
        self._text(16, 28, self._title, 17, _INK, "bold")
        x = 16.0
        for words, holds in _facts(self._report):
            self._text(x, 50, words, 12, _FAINT if holds is None else _YES if holds else _NO)
            x += 7.6 * len(words) + 12
        for index, problem in enumerate(self._problems):
            self._text(16, 68 + 18 * index, problem, 12, _NO)
        self._legend(72 + 18 * len(self._problems))

    def _legend(self, y: float) -> None:
        x = 16.0
        for words, reduces in (("reduce: added into", True), ("copy: replaces", False)):
            self._line(_Point(x, y - 4), _Point(x + 26, y - 4), reduces, self._svg)
            self._text(x + 34, y, words, 11, _INK)
            x += 48 + 6.4 * len(words)
        self._text(x, y, "label: chunk, or first:end of several; in a round, left folds first", 11)

    def _grid(self) -> None:
        bottom = self._y(self._schedule.ranks - 1) + 20
        for index, column in enumerate(self._columns):
            if index % 2 == 0:
                width = column.right - column.left
                self._rect(column.left, self._top - 34, width, bottom - self._top + 34, _BAND)
            middle = (column.left + column.right) / 2
            self._text(middle, self._top - 20, f"round {index}", 11, anchor="middle")
        for rank in range(self._schedule.ranks):
            self._rank(rank)

    def _rank(self, rank: int) -> None:
        y = f"{self._y(rank):.1f}"
        ends = {"x1": f"{_LEFT}", "y1": y, "x2": f"{self._end:.1f}", "y2": y}
        ET.SubElement(self._svg, "line", {"class": "rank", "stroke": _RULE, **ends})
        rooted = self._schedule.collective in _ROOTED and rank == self._schedule.root
        words, weight = (f"root {rank}", "bold") if rooted else (f"rank {rank}", "normal")
        self._text(_LEFT - 10, self._y(rank) + 4, words, 12, _INK, weight, "end")
        self._text(self._end + 8, self._y(rank) + 4, f"{rank}", 12)

    def _edge(self, arrow: _Arrow) -> None:
        group = ET.SubElement(self._svg, "g", {"class": f"edge {_landing(arrow.edge)}"})
        ET.SubElement(group, "title").text = _sentence(arrow)
        tail, tip = self._ends(arrow)
        ET.SubElement(
            group,
            "circle",
            {"cx": f"{tail.x:.1f}", "cy": f"{tail.y:.1f}", "r": "2.2", "fill": _colour(arrow.edge)},
        )
        self._line(tail, tip, arrow.edge.reduces, group)

    def _line(self, tail: _Point, tip: _Point, reduces: bool, parent: ET.Element) -> None:
        colour = _REDUCE if reduces else _COPY
        neck = tip.towards(tail, 8)
        path = f"M{tail.x:.1f} {tail.y:.1f}L{neck.x:.1f} {neck.y:.1f}"
        line = {"d": path, "stroke": colour, "stroke-width": "1.4", "fill": "none"}
        ET.SubElement(parent, "path", line)
        across = _Point(neck.x - (tip.y - neck.y), neck.y + (tip.x - neck.x))
        left, right = neck.towards(across, 3.2), neck.towards(across, -3.2)
        points = " ".join(f"{each.x:.1f},{each.y:.1f}" for each in (tip, left, right))
        ET.SubElement(parent, "polygon", {"points": points, "fill": colour})

    def _tag(self, arrow: _Arrow) -> None:
        """Labels an arrow's tail with its chunks, on the free side of the rank's line."""
        tail, tip = self._ends(arrow)
        y = tail.y - 4 if tip.y >= tail.y else tail.y + 12
        words = _label(arrow.edge, self._schedule)
        halo = self._text(tail.x, y, words, 10.5, "#ffffff")
        halo.set("stroke", "#ffffff")
        halo.set("stroke-width", "3")
        self._text(tail.x, y, words, 10.5, _colour(arrow.edge)).set("class", "chunks")

    def _rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        box = {"x": x, "y": y, "width": width, "height": height}
        ET.SubElement(self._svg, "rect", {k: f"{v:.1f}" for k, v in box.items()} | {"fill": fill})

    def _text(
        self,
        x: float,
        y: float,
        words: str,
        size: float,
        fill: str = _FAINT,
        weight: str = "normal",
        anchor: str = "start",
    ) -> ET.Element:
        style = {"font-size": f"{size}", "fill": fill, "font-weight": weight, "text-anchor": anchor}
        text = ET.SubElement(self._svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", **style})
        text.text = words
        return text


_ROOTED = ("reduce", "broadcast", "gather", "scatter")


def _arrows(rounds: Rounds) -> list[_Arrow]:
    return [
        _Arrow(edge, round, slot)
        for round, edges in enumerate(rounds)
        for edge, slot in _slots(edges)
    ]


def _columns(schedule: _core.Schedule, rounds: Rounds, arrows: list[_Arrow]) -> list[_Column]:
    longest = max((len(_label(arrow.edge, schedule)) for arrow in arrows), default=1)
    slots = [1] * len(rounds)
    for arrow in arrows:
        slots[arrow.round] = max(slots[arrow.round], arrow.slot + 1)
    columns: list[_Column] = []
    for round, edges in enumerate(rounds):
        left = columns[-1].right if columns else float(_LEFT)
        width = max(_slot_width(edges), 26 + _DIGIT * longest)
        columns.append(_Column(left, slots[round], width))
    return columns


def _slot_width(edges: Sequence[Edge]) -> float:
    """The width of a round's slots, larger if arrows span many ranks, to keep them apart."""
    spans = [abs(edge.src - edge.dst) for edge in edges]
    return 46 + min(80, 14 * max(0, sum(spans) / max(1, len(spans)) - 1))


def _slots(edges: Sequence[Edge]) -> Iterator[tuple[Edge, int]]:
    """Each edge with the first slot of its round where its sender and its receiver are free."""
    sends: dict[int, int] = defaultdict(int)
    receives: dict[int, int] = defaultdict(int)
    for edge in edges:
        slot = max(sends[edge.src], receives[edge.dst])
        sends[edge.src] = receives[edge.dst] = slot + 1
        yield edge, slot


def _landing(edge: Edge) -> str:
    return "reduce" if edge.reduces else "copy"


def _colour(edge: Edge) -> str:
    return _REDUCE if edge.reduces else _COPY


def _label(edge: Edge, schedule: _core.Schedule) -> str:
    chunks = edge.chunks
    if len(chunks) == schedule.chunks:
        return "all"
    return f"{chunks.start}" if len(chunks) == 1 else f"{chunks.start}:{chunks.stop}"


def _sentence(arrow: _Arrow) -> str:
    edge, chunks = arrow.edge, arrow.edge.chunks
    does = "reduces" if edge.reduces else "copies"
    what = f"chunk {chunks.start}" if len(chunks) == 1 else f"chunks {chunks.start}:{chunks.stop}"
    return f"round {arrow.round}: rank {edge.dst} {does} {what} from rank {edge.src}"


def _title(schedule: _core.Schedule, rounds: Rounds) -> str:
    counts = (("rank", schedule.ranks), ("round", len(rounds)), ("chunk", schedule.chunks))
    sizes = ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts)
    root = f", root {schedule.root}" if schedule.collective in _ROOTED else ""
    return f"{schedule.collective} by {schedule.name}: {sizes}{root}"


def _facts(report: Report) -> Iterator[tuple[str, bool | None]]:
    for name, holds in report.facts.items():
        words = name.replace("_", "-")
        yield f"{'✓' if holds else '✗'} {words}", holds
    yield f"a rank sends at most {report.max_sent:.4g} n", None
