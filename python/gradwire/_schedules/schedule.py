"""Schedules as values: made by name, read from a text, or built edge by edge; checked and drawn.

A schedule lists, round by round, the edges along which chunks of the buffer move. Two rules define
it: sends read the buffer as it was when the round began, and landings happen after; several
reductions into one chunk fold in list order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields

from gradwire import _core
from gradwire._base import arguments
from gradwire._base.arguments import whole
from gradwire._errors import InvalidArgument
from gradwire._schedules.report import Edge, Report, Shape

BUTTERFLY = "butterfly"
OF_LARGE, OF_SMALL = "halving_doubling", "recursive_doubling"
BINOMIAL_TREE = "binomial_tree"


def algorithms(collective: str = "all_reduce") -> list[str]:
    """Names that `Schedule.generate` and `algorithm=` take for a collective, best known first.

    - ``ring``: p-1 rounds each half, 2(p-1)/p n sent by a rank (Patarasuk & Yuan 2009, sec. 3).
    - ``halving_doubling``: log2 p rounds each half, as few bytes as the ring (Rabenseifner 2004;
      Thakur, Rabenseifner & Gropp 2005, sec. 4.5).
    - ``recursive_doubling``: log2 p rounds of the whole buffer (Thakur et al. 2005, sec. 4.5).
    - ``binary_tree``: up a heap-shaped tree and down again, log2 p rounds each way.
    - ``double_binary_tree``: two trees, half of the buffer each (Sanders, Speck & Träff 2009).
    - ``direct``: every rank serves one shard to all others (Li et al. 2014).
    - ``star``: all ranks talk to one (Iandola et al. 2016).
    - ``pairwise``: all_to_all in p-1 rounds of one partner each (Thakur et al. 2005, sec. 4.3).

    all_reduce also has ``hierarchical(inner,outer)``: `inner` within each host, `outer` between
    them, two of the names above. ``butterfly`` is recursive_doubling for small arrays and
    halving_doubling for large ones; a schedule of that name is the latter.

    Raises InvalidArgument for an unknown collective.
    """
    return _core.algorithms(arguments.text(collective, "collective"))


class Schedule:
    """An algorithm as data; immutable, compared by value, and picklable.

    Make one with `generate`, `parse` or `builder`, and run it with
    ``comm.all_reduce(x, schedule=s)``; all ranks must pass equal ones.
    """

    __slots__ = ("_core", "_rounds")

    def __init__(self, core: _core.Schedule) -> None:
        self._core = core
        self._rounds: tuple[tuple[Edge, ...], ...] | None = None

    @staticmethod
    def generate(
        algorithm: str,
        ranks: int,
        *,
        collective: str = "all_reduce",
        root: int = 0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> Schedule:
        """Generates the schedule of a named algorithm, for any `ranks` ≥ 1.

        `algorithms(collective)` lists the names, with their sources. `groups` is for
        ``hierarchical(inner,outer)`` alone: the ranks of each host, every rank once. `root` is for
        reduce, broadcast, gather and scatter.

        ``binomial_tree`` is an all_reduce of whole arrays along one tree and back, to compare with:
        the reduction tree of Iandola et al. 2016 (FireCaffe), fig. 4.

        Raises ScheduleError for a name that the collective does not have, and InvalidArgument for
        an unknown collective.
        """
        if algorithm == BUTTERFLY:
            algorithm = OF_LARGE
        if algorithm == BINOMIAL_TREE and collective == "all_reduce":
            return _binomial_tree(whole(ranks, "ranks"))
        return Schedule(
            _core.Schedule.generate(
                arguments.text(collective, "collective"),
                arguments.text(algorithm, "algorithm"),
                whole(ranks, "ranks"),
                whole(root, "root"),
                _groups(groups),
            )
        )

    @staticmethod
    def parse(text: str) -> Schedule:
        """Parses the text form of a schedule, the inverse of `dump`::

            gradwire schedule 1
            all_reduce mine ranks=2 chunks=1 root=0
            round 0
              1 -> 0 reduce 0
            round 1
              0 -> 1 copy 0

        Chunks are one number or a range ``0:4``; ``#`` starts a comment. Raises ScheduleError,
        which names the line. It does not check whether the schedule is correct; `verify` does.
        """
        return Schedule(_core.Schedule.parse(arguments.text(text, "text")))

    @staticmethod
    def builder(
        collective: str = "all_reduce", *, ranks: int, chunks: int, name: str, root: int = 0
    ) -> ScheduleBuilder:
        """Makes an empty schedule to add edges to.

        The meaning of a chunk depends on the collective: all_reduce, reduce and broadcast cut their
        buffer evenly into `chunks`; reduce_scatter, scatter, all_gather and gather have a block for
        each rank (chunks = ranks); in all_to_all, block s·ranks + d goes from rank s to rank d.
        Raises InvalidArgument.
        """
        return ScheduleBuilder(collective, ranks=ranks, chunks=chunks, name=name, root=root)

    @property
    def collective(self) -> str:
        """The name of the collective, as in ``comm.all_reduce``."""
        return self._core.collective

    @property
    def name(self) -> str:
        """The algorithm's name, or the user's own."""
        return self._core.name

    @property
    def ranks(self) -> int:
        """The number of ranks that take part."""
        return self._core.ranks

    @property
    def chunks(self) -> int:
        """The number of chunks that the operation is cut into."""
        return self._core.chunks

    @property
    def root(self) -> int:
        """The root of reduce, broadcast, gather and scatter; 0 for other collectives."""
        return self._core.root

    @property
    def rounds(self) -> tuple[tuple[Edge, ...], ...]:
        """The edges of each round, in list order."""
        if self._rounds is None:
            self._rounds = tuple(tuple(map(_edge, each)) for each in self._core.rounds)
        return self._rounds

    def verify(self) -> Report:
        """Executes the schedule symbolically and reports which facts hold; never raises."""
        found = self._core.verify()
        values = {each.name: getattr(found, each.name) for each in fields(Report)}
        return Report(**{**values, "problems": tuple(found.problems)})

    def closed_form(self) -> Shape | None:
        """Rounds and data sent by the textbook formula; None without one."""
        known = self._core.closed_form()
        return None if known is None else Shape(*known)

    def dump(self) -> str:
        """Writes the text form, from which `parse` makes an equal schedule."""
        return self._core.to_text()

    def draw(self) -> str:
        """Draws a space-time diagram as SVG text: ranks downwards, rounds to the right."""
        from gradwire.lab.drawing import draw

        return draw(self._core, self.rounds, self.verify())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.dump() == other.dump()

    def __hash__(self) -> int:
        return hash(self.dump())

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Schedule.parse, (self.dump(),)

    def __repr__(self) -> str:
        root = f" root={self.root}" if self.root else ""
        rounds = len(self.rounds)
        return f"<Schedule {self.collective} {self.name} p={self.ranks}{root} rounds={rounds}>"


class ScheduleBuilder:
    """Collects edges; `build` makes the Schedule.

    Both ways of adding return the builder::

        s = (
            Schedule.builder("all_reduce", ranks=2, chunks=1, name="mine")
            .reduce(0, src=1, dst=0, chunks=0)
            .copy(1, src=0, dst=1, chunks=0)
            .build()
        )
    """

    def __init__(self, collective: str, *, ranks: int, chunks: int, name: str, root: int) -> None:
        self._head = (
            arguments.text(collective, "collective"),
            arguments.text(name, "name"),
            whole(ranks, "ranks"),
            whole(chunks, "chunks"),
            whole(root, "root"),
        )
        self._edges: list[tuple[int, int, int, int, int, bool]] = []

    def copy(self, round: int, src: int, dst: int, chunks: int | range | slice) -> ScheduleBuilder:
        """Adds a copy: in `round`, src's chunks replace dst's.

        `chunks` is one number, or a range without gaps. Nothing else may land in the same round on
        the same chunk of the same rank. Raises InvalidArgument.
        """
        return self._add(round, src, dst, chunks, reduces=False)

    def reduce(
        self, round: int, src: int, dst: int, chunks: int | range | slice
    ) -> ScheduleBuilder:
        """Adds a reduction: in `round`, src's chunks are added (min-ed, …) into dst's."""
        return self._add(round, src, dst, chunks, reduces=True)

    def build(self) -> Schedule:
        """Makes the schedule of all edges so far; the builder can be used further.

        Raises ScheduleError, which names round and ranks, for an edge out of range. It does not
        check whether the schedule is correct; `Schedule.verify` does.
        """
        return Schedule(_core.Schedule.from_edges(*self._head, self._edges))

    def _add(
        self, round: int, src: int, dst: int, chunks: int | range | slice, *, reduces: bool
    ) -> ScheduleBuilder:
        first, last = _bounds(chunks)
        ends = whole(round, "round"), whole(src, "src"), whole(dst, "dst")
        self._edges.append((*ends, first, last, reduces))
        return self

    def __repr__(self) -> str:
        collective, name, ranks, chunks, _ = self._head
        edges = len(self._edges)
        return f"<ScheduleBuilder {collective} {name} p={ranks} chunks={chunks} edges={edges}>"


def _edge(core: _core.Edge) -> Edge:
    return Edge(core.src, core.dst, range(core.first, core.last), core.reduces)


def _bounds(chunks: int | range | slice) -> tuple[int, int]:
    if not isinstance(chunks, range | slice):
        one = whole(chunks, "chunks", least=0)
        return one, one + 1
    if chunks.step not in (None, 1) or chunks.start is None or chunks.stop is None:
        raise InvalidArgument(f"chunks={chunks!r} is not one chunk or a range without gaps")
    return whole(chunks.start, "chunks"), whole(chunks.stop, "chunks")


def _binomial_tree(ranks: int) -> Schedule:
    """Odd multiples of 2^k send to the rank that is 2^k below, in round k; then back."""
    tree = Schedule.builder(ranks=ranks, chunks=1, name=BINOMIAL_TREE)
    steps = [1 << k for k in range((ranks - 1).bit_length())]
    pairs = [[(r, r - step) for r in range(step, ranks, 2 * step)] for step in steps]
    for index, each in enumerate(pairs):
        for child, parent in each:
            tree.reduce(index, child, parent, 0)
            tree.copy(2 * len(pairs) - 1 - index, parent, child, 0)
    return tree.build()


def _groups(given: Sequence[Sequence[int]] | None) -> list[list[int]]:
    wanted = "a list of the ranks of each host"
    hosts = [] if given is None else arguments.items(given, "groups", wanted)
    return [
        [whole(rank, "groups") for rank in arguments.items(host, "groups", wanted)]
        for host in hosts
    ]


def gathering(algorithm: str) -> str | None:
    """The all_gather that "gather(ring)" names, "" for "gather"; None for other algorithms."""
    found = re.fullmatch(r"gather(?:\((.*)\))?", algorithm)
    return None if found is None else found[1] or ""


def groups_of(ranks: int, size: int) -> list[list[int]]:
    """Groups ranks in order, `size` on each host; the last host may have fewer."""
    return [list(range(first, min(first + size, ranks))) for first in range(0, ranks, size)]


def edges_of(schedule: Schedule) -> Iterable[tuple[int, Edge]]:
    """Every edge with its round, in list order."""
    return ((index, edge) for index, each in enumerate(schedule.rounds) for edge in each)
