"""The rank pools, the clock that shows their time, and what is measured by default and in full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gradwire import algorithms
from gradwire.lab.tuning.measure import COLLECTIVES, Case, case_of_bytes

from bench.collectives.rank_pool import RankPool

_POOLS = [(2, "shm"), (4, "shm"), (2, "tcp"), (4, "tcp")]
_BYTES = [1 << 10, 1 << 18, 1 << 23]
_MORE_POOLS = [(p, transport) for transport in ("inproc", "shm", "tcp") for p in (2, 3, 4, 8)]
_MORE_BYTES = [4, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="every collective by every algorithm, p = 2, 3, 4, 8, 4 B to 64 MiB (hours)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pool" not in metafunc.fixturenames:
        return
    full = metafunc.config.getoption("--full")
    pools = _MORE_POOLS if full else _POOLS
    ids = [f"{transport}-p{ranks}" for ranks, transport in pools]
    metafunc.parametrize("pool", pools, indirect=True, ids=ids, scope="session")
    wanted = list(_everything() if full else _selection())
    ids = [f"{collective}-{algorithm}-{_size(size)}" for collective, algorithm, size in wanted]
    metafunc.parametrize(("collective", "algorithm", "nbytes"), wanted, ids=ids)


def _selection() -> Iterator[tuple[str, str, int]]:
    """all_reduce by every algorithm; the others as a user calls them."""
    for size in _BYTES:
        for algorithm in ("auto", *algorithms("all_reduce")):
            yield "all_reduce", algorithm, size
        for collective in COLLECTIVES[1:]:
            yield collective, "auto", size


def _everything() -> Iterator[tuple[str, str, int]]:
    for size in _MORE_BYTES:
        for collective in COLLECTIVES:
            for algorithm in ("auto", *algorithms(collective)):
                yield collective, algorithm, size


def _size(nbytes: int) -> str:
    for scale, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= scale:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks of one (p, transport); pytest orders the cases so that each pool starts once."""
    pool = RankPool(*request.param)
    yield pool
    pool.close()


@pytest.fixture
def case(pool: RankPool, collective: str, algorithm: str, nbytes: int) -> Case:
    """What to measure, in blocks that suit the pool's ranks."""
    return case_of_bytes(nbytes, pool.ranks, collective=collective, algorithm=algorithm)
