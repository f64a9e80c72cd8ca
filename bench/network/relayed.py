"""How much of the relay's link a pair of ranks uses that only the relay joins.

    sudo .venv/bin/python -m bench.network.relayed     # half a minute

One inbound port leads to host 0, and none to hosts 1 and 2, which are network namespaces as host 0
is. `tc … tbf` holds host 0's link to a rate in both directions. What either rank sends to the other
goes in and out there, so each way has half of the rate; the headers of packets are a part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python" / "support"))
from hosts import PORT, Network

from bench.network.rates import all_reduce_rates, write
from bench.network.relayed_report import document


@contextlib.contextmanager
def relay_and_two_hosts(mbit: float) -> Iterator[Network]:
    """Host 0, whose link has this rate, and two hosts to which nobody connects."""
    with contextlib.closing(Network(3)) as network:
        network.let_in(0, PORT)
        shaped = f"qdisc add dev {{}} root tbf rate {mbit:g}mbit burst 64k latency 50ms"
        network.hosts[0].command("tc", *shaped.format("eth0").split())
        network.switch.command("tc", *shaped.format("eth0-0").split())
        for host in (1, 2):
            network.let_in(host)
        yield network


def all_reduces(network: Network, size: int, turns: int) -> list[float]:
    """The Mbit/s each way of each of some all_reduces of `size` bytes of the two hosts."""

    def body(comm: Any, pipe: Any) -> list[float]:
        pair = comm.split(int(comm.rank > 0))
        found = all_reduce_rates(pair, size, turns) if comm.rank else []
        comm.barrier()  # until then rank 0 relays
        return found

    def environment(rank: int) -> dict[str, str]:
        return {"GRADWIRE_ADVERTISE": "none"} if rank else {"GRADWIRE_PORT": str(PORT)}

    how = {"store": f"tcp://10.77.0.1:{PORT}", "environment": environment}
    _, *rates = network.values(range(3), body, **how)
    return [min(both) for both in zip(*rates, strict=True)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rates of all rounds, each of which has connections of its own."""
    rates: list[float] = []
    with relay_and_two_hosts(options.mbit) as network:
        for _ in range(options.rounds):
            rates += all_reduces(network, options.bytes, options.turns)
    return {"bytes": options.bytes, "mbit": options.mbit, "rates": rates}


def main() -> None:
    """Measures on the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    write("relayed", parser, measure, document, bytes=16 << 20, mbit=200.0, turns=5, rounds=3)


if __name__ == "__main__":
    main()
