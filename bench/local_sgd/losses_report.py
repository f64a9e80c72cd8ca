"""What came of trainings by local SGD, and its tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import report

SPARSE = "topk:density=0.015625,values=2bit"
DENSER = "topk:density=0.0625,values=2bit"
TWO_BITS = "topk:density=1,values=2bit"
SPARSE_WAYS = (  # codec, outer rate, decay of residuals
    (SPARSE, 1.0, 0.9),
    (SPARSE, 1.0, 1.0),
    (SPARSE, 2.0, 0.95),
    (SPARSE, 3.0, 0.8),
    (SPARSE, 3.0, 0.9),
    (DENSER, 1.0, 0.95),
    (DENSER, 3.0, 0.8),
)


class Way(NamedTuple):
    """How is trained."""

    inner: str  # adamw, or muon with AdamW for what is no matrix of a layer
    rate: float  # the highest of the inner optimizer
    ranks: int
    steps: int
    every: int = 0  # inner steps of a round; 0: one rank, which has all windows
    outer_rate: float = 0.7
    momentum: float = 0.9  # Nesterov's, of outer steps
    codec: str = "none"
    decay: float = 1.0  # what of residuals stays for the next round

    @property
    def is_sparse(self) -> bool:
        """Whether it is SparseLoCo, with whatever decay."""
        return self.codec.startswith("topk") and not self.momentum


class Outcome(NamedTuple):
    """What came of it."""

    way: Way
    seed: int
    loss: float  # on unseen text
    parameters: int
    bytes: float  # of a rank's payloads in a round
    rounds: int


class Row(NamedTuple):
    """A way, and what came of it with all seeds."""

    way: Way
    outcomes: list[Outcome]

    @property
    def loss(self) -> float:
        """Its mean."""
        return statistics.fmean(each.loss for each in self.outcomes)

    @property
    def losses(self) -> str:
        """Their mean and spread, and of how many seeds."""
        text = report.spread([each.loss for each in self.outcomes], 3)
        return text if len(self.outcomes) > 1 else f"{text} (1 seed)"

    @property
    def ratio(self) -> str:
        """Bytes of float32 parameters over those of a payload."""
        first = self.outcomes[0]
        return report.times(4 * first.parameters / first.bytes) if first.bytes else "–"

    def above(self, other: Row | None) -> str:
        """By how many percent the loss is above another's, of the seeds that both have."""
        if other is None:
            return "–"
        theirs = {each.seed: each.loss for each in other.outcomes}
        shares = [
            100 * (each.loss / theirs[each.seed] - 1)
            for each in self.outcomes
            if each.seed in theirs
        ]
        return f"{report.spread(shares, 1, sign=True)} %"


def read(path: Path) -> list[Outcome]:
    """Every outcome in a file, none if there is no file."""
    if not path.exists():
        return []
    lines = [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]
    return [Outcome(**{**each, "way": Way(**each["way"])}) for each in lines]


class Rows:
    """Outcomes by way."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        """Takes them in any order."""
        self.steps = max((each.way.steps for each in outcomes), default=0)
        self._rows: dict[Way, list[Outcome]] = {}
        for each in sorted(outcomes, key=lambda each: each.seed):
            self._rows.setdefault(each.way, []).append(each)

    def best(self, *, sparse: bool = False, **wanted: Any) -> Row | None:
        """Of the ways with such settings that of the least loss with the first seed."""
        found = [
            Row(way, its)
            for way, its in self._rows.items()
            if way.is_sparse == sparse
            and all(getattr(way, name) == value for name, value in wanted.items())
        ]
        return min(found, key=lambda row: row.outcomes[0].loss, default=None)

    def by_ranks(self) -> list[str]:
        """DiLoCo by number of ranks, beside training without local steps."""
        dense = self.best(inner="adamw", ranks=1)
        found = [dense, *(self._diloco(ranks) for ranks in (2, 4, 8, 16))]
        rows = []
        for row in filter(None, found):
            first = row is dense
            title = "averaged gradients" if first else f"DiLoCo, {row.way.ranks} ranks"
            above, momentum = ("", "") if first else (row.above(dense), str(row.way.momentum))
            rows.append([title, row.losses, above, str(row.way.rate), momentum])
        head = "AdamW inside | loss | above averaged gradients | best inner rate | outer momentum"
        return report.table(head, rows)

    def by_rounds(self) -> list[str]:
        """SparseLoCo beside DiLoCo, by length of a round."""
        rows = []
        for every in (15, 30, 50, 100, 250):
            dense, sparse = self._diloco(4, every), self._sparse(every)
            if dense is not None and sparse is not None:
                count = sparse.outcomes[0].rounds
                rows.append([every, count, dense.losses, sparse.losses, sparse.above(dense)])
        head = "inner steps of a round | rounds | DiLoCo | SparseLoCo | above DiLoCo"
        return report.table(head, rows, "r")

    def by_inner(self) -> list[str]:
        """Muon inside beside AdamW inside, by codec of outer gradients, with 8 ranks."""
        dense = self._diloco(8)
        rows = []
        for inner, title in (("adamw", "AdamW"), ("muon", "Muon")):
            for codec in ("none", "int4", TWO_BITS):
                row = self.best(inner=inner, ranks=8, every=30, codec=codec)
                if row is not None:
                    rows.append([title, f"`{codec}`", row.losses, row.above(dense), row.ratio])
        head = "inside | outer gradients | loss | above AdamW, dense | fewer bytes"
        return report.table(head, rows, "ll") if rows else []

    def variants(self) -> list[str]:
        """SparseLoCo by density, outer rate, and decay of residuals."""
        rows = []
        for codec, rate, decay in ((SPARSE, 1.0, 0.95), *SPARSE_WAYS):
            row = self.best(sparse=True, every=30, codec=codec, outer_rate=rate, decay=decay)
            if row is not None:
                above = row.above(self._diloco(4))
                rows.append([f"`{codec}`", str(rate), str(decay), row.losses, above])
        return report.table("SparseLoCo | outer rate | decay | loss | above DiLoCo", rows)

    def searched(self) -> list[str]:
        """Everything that was run."""
        rows = []
        for way, its in sorted(self._rows.items()):
            outer = f"{way.outer_rate}, {way.momentum}"
            cells = [way.inner, way.ranks, way.every or "–", str(way.rate), outer]
            rows.append([*cells, f"`{way.codec}`", str(way.decay), Row(way, its).losses])
        head = "inside | ranks | round | inner rate | outer rate, momentum | codec | decay | loss"
        return report.table(head, rows)

    def verdicts(self) -> Iterator[str]:
        """Whether the goals were reached."""
        dense, sparse = self._diloco(4), self._sparse(30)
        if dense is not None and sparse is not None:
            reached = report.reached(sparse.loss <= dense.loss)
            yield f"- SparseLoCo ≤ DiLoCo, rounds of 30, 4 ranks: {sparse.above(dense)}, {reached}."
        adamw = self._diloco(8)
        muon = self.best(inner="muon", ranks=8, every=30, codec=TWO_BITS)
        if adamw is not None and muon is not None:
            reached = report.reached(muon.loss < adamw.loss)
            yield f"- Muon in 2 bits < AdamW dense, 8 ranks: {muon.above(adamw)}, {reached}."

    def _diloco(self, ranks: int, every: int = 30) -> Row | None:
        return self.best(inner="adamw", ranks=ranks, every=every, codec="none")

    def _sparse(self, every: int) -> Row | None:
        return self.best(sparse=True, every=every, codec=SPARSE, outer_rate=1.0, decay=0.95)


def document(outcomes: Sequence[Outcome], command: str) -> str:
    """The report."""
    rows = Rows(outcomes)
    parameters = outcomes[0].parameters if outcomes else 0
    return report.document(
        "Local SGD of a language model",
        f"`{command}`: {parameters:,} parameters, {rows.steps:,} steps of 16 windows of 32 bytes, "
        "of all ranks together; loss on unseen text; mean ± standard deviation over seeds. "
        "Learning rates are searched with the first seed.",
        rows.verdicts(),
        report.section("By number of ranks", rows.by_ranks()),
        report.section("By length of a round, 4 ranks", rows.by_rounds()),
        report.section("SparseLoCo in other ways, rounds of 30", rows.variants()),
        report.section("By inner optimizer, 8 ranks", rows.by_inner()),
        report.section("Everything that was run", rows.searched()),
    )
