"""Ranks that are processes on one GPU: over NCCL, by way of the host, both; and faults.

NCCL takes several ranks of one GPU since 2.30 when told to; before, each
process must say that it is a host of its own, and messages go through sockets: good for whether
results are right, and for nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from multiprocessing.sharedctypes import RawArray
from typing import Any

import gradwire
import numpy as np

from tests.gpu import arrays
from tests.gpu.calls import Case, problems
from tests.gpu.loopback import CODECS, COLLECTIVES
from tests.gpu.rows import Row

sys.path.append(str(arrays.SUPPORT))
import ranks
from stopwatch import own_time

_PATIENCE = 4.0  # seconds that a call may take when a rank is stopped
_LATE = 20.0  # seconds of a rank's own time within which it must know of every fault
_FLAG_SINCE = (2, 30)
_SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


def main() -> int:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", action="store_true")
    simulated = parser.parse_args().simulated
    if not simulated:
        ranks.LIMIT = 60.0  # which a simulated GPU may need on a busy machine

        import torch  # noqa: F401  # once, and not in every rank
    nccl = "" if simulated else nccl_version()
    check("host", 2, simulated)
    if nccl:
        for p in (2, 3, 4):
            check("nccl", p, simulated, nccl)
            check_native(p, nccl)
        check("nccl+host", 4, simulated, nccl, hosts=((0, 1), (2, 3)))
    else:
        with Row("ranks over nccl", "all") as row:
            row.skip("there is no NCCL")
    if not simulated:
        check("host", 4, simulated)
    for links in ("nccl", "host") if nccl else ("host",):
        for fault in FAULTS:
            check_fault(fault, links, 2 if links == "nccl" else 3, simulated, nccl)
    return 0


def nccl_version() -> str:
    """As gradwire finds it; in a process of its own, for what it reads of the environment."""
    program = "from gradwire._host import cuda; print(cuda.nccl_version())"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def nccl_environment(rank: int, version: str) -> dict[str, str]:
    """What lets several ranks of one GPU talk over that NCCL."""
    if not version:
        return {}
    if tuple(map(int, version.split(".")[:2])) >= _FLAG_SINCE:
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
    return {"NCCL_HOSTID": f"rank{rank}", **_SOCKETS}


def cases_of(p: int, simulated: bool) -> list[Case]:
    """Every collective, every algorithm of all_reduce, every codec."""
    lengths = (0, 101) if simulated else (0, 1001, 100_003)
    first = {each: gradwire.algorithms(each)[0] for each in COLLECTIVES}
    cases = [Case(each, first[each], n) for each, n in product(COLLECTIVES, lengths)]
    algorithms = [*gradwire.algorithms("all_reduce"), "gather"]
    cases += [Case("all_reduce", algorithm, n) for algorithm, n in product(algorithms, lengths)]
    codecs = ("int8", "onebit") if simulated else CODECS if p == 2 else CODECS[::2]
    for codec, algorithm, n in product(codecs, ("ring", "direct", "gather"), lengths[1:]):
        cases.append(
            Case("all_reduce", algorithm, n, op="avg", codec=codec, feedback=True, calls=3)
        )
    if p == 4:
        cases.append(Case("all_reduce", "hierarchical(ring,direct)", lengths[-1]))
    return cases


def check(
    links: str,
    p: int,
    simulated: bool,
    nccl: str = "",
    hosts: Sequence[Sequence[int]] | None = None,
) -> None:
    """A row of calls on p processes."""
    with Row(f"ranks over {links}", f"p={p}") as row:
        cases = cases_of(p, simulated)

        def body(comm: gradwire.Communicator) -> tuple[list[str], int, str]:
            prepare(comm, links, nccl)
            found, refused = problems(comm, cases, arrays.place(simulated))
            assert comm._gpu is not None
            return found, refused, comm._gpu.links

        setting: dict[str, Any] = {} if hosts is None else {"hosts": hosts}
        told = ranks.run(p, body, transport="tcp", processes=True, timeout=30, **setting)
        expected = "host+nccl" if links == "nccl+host" else links
        assert {used for *_, used in told} == {expected}, told
        refused = told[0][1]
        row.expect_none([each for found, *_ in told for each in found], len(cases) - refused)


def check_native(p: int, nccl: str) -> None:
    """A row of NCCL's own collectives, on whole numbers, whose sums are exact in any order."""
    with Row("NCCL's own collectives", f"p={p}") as row:
        lengths = (1, 1001, 1_000_003)

        def body(comm: gradwire.Communicator) -> list[str]:
            prepare(comm, "nccl", nccl)
            place = arrays.place(simulated=False)
            wrong = []
            with place.on_stream():
                for n, algorithm in product(lengths, ("nccl", "auto")):
                    x = place.put(np.arange(n, dtype=np.float32) % 100 + comm.rank)
                    comm.all_reduce(x, algorithm=algorithm)
                    expected = p * (np.arange(n) % 100) + p * (p - 1) / 2
                    if not np.array_equal(place.get(x), expected):
                        wrong.append(f"{n} elements by {algorithm}, rank {comm.rank}")
            return wrong

        told = ranks.run(p, body, transport="tcp", processes=True, timeout=30)
        row.expect_none([each for found in told for each in found], len(told) * len(lengths) * 2)


def prepare(comm: gradwire.Communicator, links: str, nccl: str) -> None:
    """Before the process has anything of CUDA."""
    os.environ["GRADWIRE_GPU_LINKS"] = links
    os.environ.update(nccl_environment(comm.rank, nccl if "nccl" in links else ""))


# ---- Faults: of rank 1, while the others make calls --------------------------------------------


def _killed(comm: gradwire.Communicator) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _aborting(comm: gradwire.Communicator) -> None:
    comm.abort("enough")


def _stopped(comm: gradwire.Communicator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# And the exception of the others.
FAULTS: dict[str, tuple[Callable[[gradwire.Communicator], None], type[Exception]]] = {
    "a killed rank": (_killed, gradwire.TransportError),
    "an abort": (_aborting, gradwire.Aborted),
    "a stopped rank": (_stopped, gradwire.Timeout),
}


def check_fault(fault: str, links: str, p: int, simulated: bool, nccl: str) -> None:
    """A row of one fault."""
    harm, expected = FAULTS[fault]
    ready = RawArray("b", p)  # which ranks are through with all calls before the fault
    knowing = RawArray("b", p)  # which ranks have had their error, or another one

    def body(comm: gradwire.Communicator) -> tuple[str, int | None, float] | None:
        prepare(comm, links, nccl)
        place = arrays.place(simulated)
        with place.on_stream():
            x = place.put(np.ones(1000, np.float32))
            pids = comm.all_gather(np.array([os.getpid()]))
            for _ in range(3):
                comm.all_reduce(x)
                place.wait()
            try:
                _let_all_finish(comm)
                ready[comm.rank] = True
                if comm.rank == 1:
                    # One that died at once could take a barrier along in which others still are.
                    ranks.eventually(lambda: sum(ready) == p)
                    harm(comm)
                    return None
                found = _until_it_fails(comm, x, place)
            finally:
                knowing[comm.rank] = True
            if comm.rank == 0:
                ranks.eventually(lambda: all(knowing[:1] + knowing[2:]))
                _end(int(pids[1]))
            return found

    with Row(f"faults over {links}", fault) as row:
        outcomes = ranks.outcomes(p, body, transport="tcp", processes=True, timeout=30)
        for rank, outcome in enumerate(outcomes):
            if rank == 1:
                continue
            if outcome.error is not None:
                raise outcome.error
            row.expect(outcome.value is not None, f"rank {rank} died with status {outcome.status}")
            name, peer, seconds = outcome.value or ("nothing", None, 0.0)
            row.expect(
                (name, peer) == (expected.__name__, 1) and seconds < _LATE,
                f"rank {rank} got {name} of rank {peer} after {seconds:.1f} s",
            )


def _let_all_finish(comm: gradwire.Communicator) -> None:
    """All calls so far, on every rank: one that GPUs are through with is not over before the ranks
    have compared it, and one that is not over has the timeout that it was made with."""
    assert comm._gpu is not None
    comm._gpu._core.finish(comm._timeout)
    comm.barrier()


def _until_it_fails(
    comm: gradwire.Communicator, x: Any, place: Any
) -> tuple[str, int | None, float]:
    """The error's name and rank, and after how many seconds it came."""
    start = own_time()
    found: tuple[str, int | None] = ("nothing", None)
    try:
        while True:
            comm.all_reduce(x, timeout=_PATIENCE)  # raises what came while it was waited for
            if own_time() - start >= _LATE:
                break
            place.wait()
            time.sleep(0.01)
    except gradwire.Error as error:
        found = type(error).__name__, getattr(error, "peer", None)
    return (*found, own_time() - start)


def _end(process: int) -> None:
    """Of a rank that may be stopped, a child of this process' parent, which has not joined it."""
    os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
