"""How soon a training goes on after a loss, and a new rank trains: elastic beside a full restart.

    python -m bench.training.elastic

Three ranks train linear layers with Adam, by `gradwire.torch.elastic` over shared memory and over
gradwire's emulated links of 1 Gbit/s (`--ways 1gbit-int8`: with that codec), and as
DistributedDataParallel over gloo under torchrun, which restarts all processes. One rank is killed,
and after the others have gone on another is started. Times are from the kill to the next step of
the others, and from the start of the new process to its first step, and how much of that is over
once its imports are. torchrun's is from the kill to the first step of all; it loads no checkpoint.
Where torchft is installed, `--ways torchft` measures it too, over gloo, with torchft's own limits,
and `--ways torchft-1s` with 1 s in place of 5 after which a silent replica counts as dead.

With `--ways host torchft-host` each rank has a host of its own (a network namespace: needs root),
and one host's link is cut: nobody closes a socket, and no process ends.

The cost without change is that of a step in a session on two ranks, beside a step that averages
gradients and buffers in the same way without anything else of the session (no barrier of `commit`,
no copies of buffers, no sampler), and beside DistributedDataParallel with gradwire's hook:
short blocks, in turns, in the same processes. The model has normalised batches then.

    python -m bench.training.elastic --only cost

About 16 GB of memory do for 100 M parameters.

Writes bench/results/elastic-DATE.json, .md and .png.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python" / "support"))
from namespaces import Switch

from bench.collectives.compare import interval
from bench.common import report
from bench.common.machine import OtherLoad

RANKS, VICTIM = 3, 1
_LIMIT = 240.0  # seconds for one event
_PORT = 29500  # on a host of our own
_COSTS = {1: (20, 60), 25: (3, 25)}  # millions of parameters -> steps of a block, and blocks
_PROGRAM = [sys.executable, "-m", "bench.training.elastic_ranks"]
Loss = contextlib.AbstractContextManager[None]


class Line(NamedTuple):
    """A step, as a process reports it; step 0 says that its imports are over."""

    at: float  # of the machine's monotonic clock
    process: int
    step: int
    ranks: int


class Log:
    """The file in which all processes report."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self.path = path

    def lines(self) -> list[Line]:
        """All reports so far."""
        words = [
            line.split() for line in self.path.read_text().splitlines() if line.count(" ") == 3
        ]
        return [Line(float(at), int(pid), int(step), int(ranks)) for at, pid, step, ranks in words]

    def wait(self, wanted: Callable[[Line], bool]) -> Line:
        """The first report that is wanted."""
        limit = time.monotonic() + _LIMIT
        while time.monotonic() < limit:
            found = next(filter(wanted, self.lines()), None)
            if found is not None:
                return found
            time.sleep(0.01)
        raise TimeoutError(f"no such report within {_LIMIT:g} s; the last: {self.lines()[-3:]}")


def main() -> int:
    """Measures all cases, and writes what it found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 25, 100], help="parameters")
    ways = ["shm", "1gbit", "torchrun"]
    others = ["1gbit-fp16", "1gbit-int8", "1gbit-onebit", *_MEASURES]
    parser.add_argument("--ways", nargs="+", choices={*ways, *others}, default=ways)
    parser.add_argument("--repeats", type=int, default=3, help="losses of a case")
    parser.add_argument("--only", choices=("changes", "cost"), help="one half of it")
    parser.add_argument("--stem", type=Path, help="of the files")
    options = parser.parse_args()
    load = OtherLoad()
    found: dict[str, Any] = {"ranks": RANKS, "cases": [], "cost": []}
    if options.only != "cost":
        for millions in options.millions:
            for way in options.ways:
                print(f"{millions} M parameters, {way} …", file=sys.stderr, flush=True)
                measure = _MEASURES.get(way, _elastic)
                found["cases"].append(measure(millions, way, options.repeats))
    if options.only != "changes":
        for millions in _COSTS:
            print(f"{millions} M parameters, cost of a step …", file=sys.stderr, flush=True)
            found["cost"].append(_cost(millions))
    found["machine"] = load.describe()
    report.write(options.stem, "elastic", found, _document, draw if found["cases"] else None)
    return 0


def _environment(log: Log, millions: int, rank: int, **more: str) -> dict[str, str]:
    given = {"BENCH_LOG": str(log.path), "BENCH_MILLIONS": str(millions), "OMP_NUM_THREADS": "1"}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return {**os.environ, **given, **place, **more}


def _elastic(millions: int, way: str, repeats: int) -> dict[str, Any]:
    """The times of a training that goes on."""
    from gradwire._bootstrap.store import Address
    from gradwire._bootstrap.store_server import StoreServer

    job, secret = f"bench-{secrets.token_hex(4)}", secrets.token_hex(16)
    store = Address("unix", f"gradwire-{os.getuid()}-{job}")
    shared = {"GRADWIRE_STORE": str(store), "GRADWIRE_SECRET": secret, "GRADWIRE_JOB": job}
    size = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    link, _, codec = way.partition("-")
    if link != "shm":
        shared["GRADWIRE_LINK"] = f"{link},50us"
    if codec:
        shared["BENCH_CODEC"] = codec
    with tempfile.TemporaryDirectory() as scratch, StoreServer(store, job, secret.encode()):
        log = Log(Path(scratch) / "log")

        def start(rank: int, **more: str) -> subprocess.Popen[bytes]:
            environment = _environment(log, millions, rank, **shared, **size, **more)
            return subprocess.Popen(_PROGRAM, env=environment)

        return _case(millions, way, _changes(log, start, repeats), log)


class Hosts:
    """Hosts of one rank each, and one more; which rank's process is on which."""

    def __init__(self, network: Switch) -> None:
        self.network = network
        self._free = list(range(RANKS + 1))
        self._host_of: dict[int, int] = {}  # by process

    def start(self, environment: Callable[[str], Mapping[str, str]]) -> subprocess.Popen[bytes]:
        """Starts a rank on a free host; its environment depends on the host's address."""
        host = self._free.pop(0)
        given = environment(self.address(host))
        started = self.network.hosts[host].run(lambda: subprocess.Popen(_PROGRAM, env=given))
        self._host_of[started.pid] = host
        return started

    def address(self, host: int) -> str:
        """By which the others reach a host."""
        return f"10.77.0.{host + 1}"

    @contextlib.contextmanager
    def lose(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Meanwhile the host of the process is cut off; then the process ends."""
        host = self._host_of.pop(process.pid)
        with self.network.cut(host):
            yield
            process.kill()
            process.wait()
        self._free.append(host)


def _hosts(millions: int, way: str, repeats: int) -> dict[str, Any]:
    """The times of a training that goes on when a host is lost."""
    job, secret = f"bench-{secrets.token_hex(4)}", secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Switch(RANKS + 1)))
        hosts = Hosts(network)
        store = f"tcp://{hosts.address(0)}:{_PORT}"  # rank 0 serves it
        log = Log(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log")
        shared = {"GRADWIRE_STORE": store, "GRADWIRE_SECRET": secret, "GRADWIRE_JOB": job}
        size = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": "1"}

        def start(rank: int, **more: str) -> subprocess.Popen[bytes]:
            given = {**shared, **size, "LOCAL_RANK": "0", **more}
            return hosts.start(lambda _: {**_environment(log, millions, rank), **given})

        return _case(millions, way, _changes(log, start, repeats, hosts.lose), log)


def _torchft_hosts(millions: int, way: str, repeats: int) -> dict[str, Any]:
    """The same of torchft; its lighthouse is on the first rank's host."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Switch(RANKS + 1)))
        hosts = Hosts(network)
        lighthouse = network.hosts[0].run(lambda: _lighthouse(5000))
        stack.callback(lighthouse.shutdown)
        log = Log(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log")
        url = f"http://{hosts.address(0)}:{lighthouse.address().rpartition(':')[2]}"
        shared = {"BENCH_TORCHFT": "1", "TORCHFT_LIGHTHOUSE": url, "GLOO_SOCKET_IFNAME": "eth0"}

        def start(rank: int, **_: str) -> subprocess.Popen[bytes]:
            given = _environment(log, millions, rank, **shared)
            return hosts.start(lambda address: {**given, "BENCH_ADDRESS": address})

        return _case(millions, way, _changes(log, start, repeats, hosts.lose), log)


def _lighthouse(heartbeat_timeout_ms: int) -> Any:
    from torchft.coordination import LighthouseServer

    # The times of torchft's README. By LighthouseServer's own, 100 ms, two of three replicas form a
    # quorum without the third in each step, and each quorum costs a step: it never has all three.
    return LighthouseServer(
        bind="0.0.0.0:0",
        min_replicas=RANKS - 1,
        join_timeout_ms=10000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )


def _torchft(millions: int, way: str, repeats: int) -> dict[str, Any]:
    """The times of a training by torchft, over gloo."""
    lighthouse = _lighthouse(1000 if way == "torchft-1s" else 5000)
    port = lighthouse.address().rpartition(":")[2]
    with tempfile.TemporaryDirectory() as scratch:
        log = Log(Path(scratch) / "log")

        def start(rank: int, **_: str) -> subprocess.Popen[bytes]:
            shared = {"BENCH_TORCHFT": "1", "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
            environment = _environment(log, millions, rank, **shared, GLOO_SOCKET_IFNAME="lo")
            return subprocess.Popen(_PROGRAM, env=environment, stderr=subprocess.DEVNULL)

        try:
            return _case(millions, way, _changes(log, start, repeats), log)
        finally:
            lighthouse.shutdown()


@contextlib.contextmanager
def _kill(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.kill()
    yield


def _changes(
    log: Log,
    start: Callable[..., subprocess.Popen[bytes]],
    repeats: int,
    lose: Callable[[subprocess.Popen[bytes]], Loss] = _kill,
) -> list[dict[str, float]]:
    """The times of so many losses and joins of a training that is started here."""
    ranks = [start(rank) for rank in range(RANKS)]
    try:
        log.wait(lambda line: line.step >= 5 and line.ranks == RANKS)
        return [
            _lose_and_join(log, ranks, lose, lambda: start(0, GRADWIRE_JOIN="1"))
            for _ in range(repeats)
        ]
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def _lose_and_join(
    log: Log,
    ranks: list[subprocess.Popen[bytes]],
    lose: Callable[[subprocess.Popen[bytes]], Loss],
    start: Callable[[], subprocess.Popen[bytes]],
) -> dict[str, float]:
    killed = time.monotonic()
    with lose(ranks.pop(VICTIM)):
        next_step = log.wait(
            lambda line: line.at > killed and line.ranks == RANKS - 1 and line.step > 0
        )
    started = time.monotonic()
    ranks.append(start())
    new = ranks[-1].pid
    imported = log.wait(lambda line: line.process == new)
    first = log.wait(lambda line: line.process == new and line.step > 0)
    settled = log.wait(lambda line: line.process == new and line.step > first.step + 2)
    assert settled.ranks == RANKS
    return {
        "lost": next_step.at - killed,
        "joined": first.at - started,
        "imports": imported.at - started,
    }


def _restarted(millions: int, way: str, repeats: int) -> dict[str, Any]:
    """The times of torchrun, which restarts all processes."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Log(Path(scratch) / "log")
        program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        program += [
            "--max-restarts",
            str(repeats),
            "--standalone",
            "--monitor-interval",
            "0.1",
        ]
        program += ["-m", "bench.training.elastic_ranks"]
        environment = _environment(log, millions, 0, BENCH_DDP="1", GLOO_SOCKET_IFNAME="lo")
        # Restarted ranks of torch 2.13 wait for ever for the agent's store: rank 0 serves one.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        for name in ("RANK", "LOCAL_RANK"):  # the agent's to set
            del environment[name]
        agent = subprocess.Popen(program, env=environment, stderr=subprocess.DEVNULL)
        times = []
        try:
            after = 0.0
            for _ in range(repeats):
                at = log.wait(lambda line, after=after: line.at > after and line.step == 5)
                killed = time.monotonic()
                os.kill(at.process, 9)
                first = log.wait(lambda line, killed=killed: line.at > killed and line.step == 1)
                times.append({"lost": first.at - killed})
                after = first.at
            log.wait(lambda line: line.at > after and line.step == 5)
        finally:
            agent.terminate()
            agent.wait()
        return _case(millions, way, times, log)


_MEASURES = {
    "torchrun": _restarted,
    "torchft": _torchft,
    "torchft-1s": _torchft,
    "host": _hosts,
    "torchft-host": _torchft_hosts,
}


def _case(millions: int, way: str, times: list[dict[str, float]], log: Log) -> dict[str, Any]:
    lines = sorted(log.lines())
    own = [line for line in lines if line.process == lines[-1].process and line.step > 0]
    gaps = [b.at - a.at for a, b in itertools.pairwise(own)]
    begin = lines[0].at
    return {
        "millions": millions,
        "way": way,
        "step": statistics.median(gaps) if gaps else 0.0,
        **{name: statistics.median(each[name] for each in times) for name in times[0]},
        "times": times,
        "steps": [[line.at - begin, line.step, line.ranks] for line in lines if line.step > 0],
    }


def _cost(millions: int) -> dict[str, Any]:
    """The cost of a session where nothing changes, on two ranks."""
    steps, rounds = _COSTS[millions]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "cost")
        program = [sys.executable, "-m", "gradwire", "run", "-n", "2", "-m"]
        program += ["bench.training.elastic_ranks"]
        cost = f"{millions} {steps} {rounds} {path}"
        environment = {**os.environ, "BENCH_COST": cost, "OMP_NUM_THREADS": "1"}
        subprocess.run(program, env=environment, check=True, timeout=_LIMIT)
        times: dict[str, list[float]] = json.loads(path.read_text())
    found: dict[str, Any] = {"millions": millions, "steps_a_block": steps, "times": times}
    for other in ("bare", "hook"):
        ratios = [one / two for one, two in zip(times["session"], times[other], strict=True)]
        found[other] = {"median": statistics.median(ratios), "interval": interval(ratios)}
    return found


def _document(found: Mapping[str, Any], _: str) -> str:
    return "\n".join(_rows(found)) + "\n"


def _rows(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"On {found['machine']}.\n"
    if found["cases"]:
        yield from _case_rows(found["cases"])
    if found["cost"]:
        yield from _cost_rows(found["cost"])


def _case_rows(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "Three ranks; seconds, medians.\n"
    head = "parameters | way | a step | loss to next step | start to first step | of it imports"
    yield from report.table(head, map(_case_row, cases), "llllll")
    yield ""


def _case_row(each: dict[str, Any]) -> str:
    new = f"{each['joined']:.2f} | {each['imports']:.2f}" if "joined" in each else "(all) | "
    return f"{each['millions']} M | {each['way']} | {each['step']:.3f} | {each['lost']:.2f} | {new}"


def _cost_rows(costs: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "A step without change, two ranks, shared memory; medians of blocks in turns, and 95 %"
    yield "intervals of the ratio's.\n"
    head = "parameters | session, ms | beside its averages alone | beside the DDP hook"
    yield from report.table(head, map(_cost_row, costs), "llll")


def _cost_row(each: dict[str, Any]) -> str:
    row = f"{each['millions']} M | {statistics.median(each['times']['session']):.2f}"
    for other in ("bare", "hook"):
        low, high = each[other]["interval"]
        row += f" | {each[other]['median']:.4f} ({low:.4f} to {high:.4f})"
    return row


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Steps over time around the first loss and join, for the middle size."""
    middle = sorted({each["millions"] for each in found["cases"]})
    cases = [each for each in found["cases"] if each["millions"] == middle[len(middle) // 2]]
    size = (report.PAGE, 2.3 * len(cases))
    with report.picture(path, *size, len(cases), sharex=True) as (figure, axes):
        for axis, each in zip(axes[:, 0], cases, strict=True):
            killed, changes = _first_change(each)
            _draw_steps(axis, killed, each["steps"])
            for at, what in {0.0: "a rank is killed ", **changes}.items():
                axis.axvline(at, color=report.OTHERS, linestyle="--")
                side = "left" if at else "right"
                axis.text(at, 1.02, what, transform=axis.get_xaxis_transform(), ha=side)
            way = {"shm": "shared memory", "1gbit": "1 Gbit/s"}.get(each["way"], each["way"])
            axis.set_title(f"{each['millions']} M parameters, {way}", loc="left", pad=18)
        figure.supylabel("steps done", fontsize=11)
        axes[-1, 0].set_xlabel("seconds after the loss")


def _draw_steps(axis: Any, begin: float, steps: Sequence[tuple[float, int, int]]) -> None:
    """A line from step to step, which ends where all begin again."""
    restart = next((i for i in range(1, len(steps)) if steps[i][1] < steps[i - 1][1]), len(steps))
    for part in (steps[:restart], steps[restart:]):
        seconds = [at - begin for at, _, _ in part]
        axis.plot(seconds, [step for _, step, _ in part], ".-", color=report.OURS)


def _first_change(case: Mapping[str, Any]) -> tuple[float, dict[float, str]]:
    """When the first rank was killed, and what happened how many seconds after that."""
    steps, loss = case["steps"], case["times"][0]
    if "joined" not in loss:
        again = next(b[0] for a, b in itertools.pairwise(steps) if b[1] < a[1])
        return again - loss["lost"], {loss["lost"]: "all begin again"}
    alone = next(at for at, _, ranks in steps if ranks < RANKS)
    joined = next(at for at, _, ranks in steps if ranks == RANKS and at > alone)
    killed = alone - loss["lost"]
    started = joined - killed - loss["joined"]
    return killed, {started: "another starts", joined - killed: "it trains"}


if __name__ == "__main__":
    sys.exit(main())
