"""How much faster two interfaces are than one, for gradwire's all_reduce, in turns.

    sudo .venv/bin/python -m bench.network.two_interfaces     # 1 minute

Two hosts, which are network namespaces, are joined by two pairs of veth devices, each of which
`tc … tbf` holds to a rate at both ends. In turns ranks use the first one alone, or both.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python" / "support"))
from hosts import Network

from bench.network.rates import all_reduce_rates, write
from bench.network.two_interfaces_report import document

SETTINGS = {"one": "=eth0", "both": "eth"}  # GRADWIRE_SOCKET_IFNAME


@contextlib.contextmanager
def two_links(mbit: float) -> Iterator[Network]:
    """Two hosts, joined by two links of this rate."""
    network = Network(2)
    with contextlib.closing(network):
        network.add_bridge("br1")
        shaped = f"qdisc add dev {{}} root tbf rate {mbit:g}mbit burst 128k latency 20ms"
        for host, there in enumerate(network.hosts):
            network.plug(host, "eth1", [f"10.78.0.{host + 1}/24"], "br1")
            for interface in ("eth0", "eth1"):
                there.command("tc", *shaped.format(interface).split())
        for there in network.hosts:
            there.await_states()
        yield network


def all_reduces(network: Network, pattern: str, size: int, turns: int) -> list[float]:
    """The Mbit/s each way of each of some all_reduces of `size` bytes."""

    def body(comm: Any, pipe: Any) -> list[float]:
        return all_reduce_rates(comm, size, turns, warm_up=2)

    setting = {"GRADWIRE_SOCKET_IFNAME": pattern}
    return list(network.values(range(2), body, environment=lambda _: setting)[0])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rates with one interface and with both, in turns."""
    rates: dict[str, list[float]] = {}
    with two_links(options.mbit) as network:
        for _ in range(options.rounds):
            for name, pattern in SETTINGS.items():
                found = all_reduces(network, pattern, options.bytes, options.turns)
                rates.setdefault(name, []).extend(found)
    return {"bytes": options.bytes, "mbit": options.mbit, "rates": rates}


def main() -> None:
    """Measures on the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    write(
        "two-interfaces", parser, measure, document, bytes=64 << 20, mbit=500.0, turns=3, rounds=3
    )


if __name__ == "__main__":
    main()
