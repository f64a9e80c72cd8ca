"""A step of DDP at two sites with a long link between them, beside what its bytes take over that.

    make test-cpp && sudo .venv/bin/python -m bench.network.two_sites     # 6 minutes

Each site has some hosts around a switch, with one rank each; long_link.cc carries packets between
the two switches, with a rate and a delay. A step is that of a model which does next to nothing but
have gradients, under DDP with its usual buckets: it cannot take less than the gradients of one site
take to get to the other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python" / "support"))
from namespaces import Namespace, Switch

from bench.network.long_link import carried, values
from bench.network.rates import write
from bench.network.two_sites_report import document

PORT = 29500
STORE = "10.98.0.1"  # of the first host of the first site
LINK = 200.0, 60.0  # Mbit/s, round trip in ms
SETTINGS = {  # of a case: what the ranks are told of sites, and how gradients travel
    "one site": ("everywhere", "none"),
    "two sites": ("", "none"),
    "two sites, int8 between them": ("", "int8:between=sites"),
}


@contextlib.contextmanager
def two_sites(hosts: int, mbit: float, round_trip: float) -> Iterator[list[Switch]]:
    """Two switches with so many hosts each, and a link between them, by their devices far0."""
    with contextlib.ExitStack() as stack:
        sites = []
        for number in range(2):
            site = Switch(hosts, addresses=(f"10.98.{number}.{{}}/24",))
            stack.callback(site.close)
            sites.append(site)
        spaces = [site.switch for site in sites]
        stack.enter_context(carried(spaces, mbit, round_trip, 0.0))
        for number, site in enumerate(sites):
            site.switch.run(_forward)
            site.switch.ip(
                f"addr add 10.98.{number}.254/24 dev br0",
                f"route add 10.98.{1 - number}.0/24 dev far0",
            )
            for host in site.hosts:
                host.ip(f"route add default via 10.98.{number}.254")
        yield sites


def _forward() -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def hosts_of(sites: list[Switch]) -> list[Namespace]:
    """The hosts of the first site, then those of the second one."""
    return [host for site in sites for host in site.hosts]


def sent_between(sites: list[Switch]) -> int:
    """The bytes of all packets that have left the first site."""
    read = Path("/proc/thread-self/net/dev").read_text
    (counters,) = (
        line.partition(":")[2].split()
        for line in sites[0].switch.run(read).splitlines()
        if line.strip().startswith("far0")
    )
    return int(counters[8])


def steps(
    sites: list[Switch], setting: tuple[str, str], parameters: int, count: int
) -> list[float]:
    """The seconds of some steps, of the rank that takes longest."""
    (site, codec), hosts = setting, hosts_of(sites)

    def body(rank: int, pipe: Any) -> list[float]:
        os.environ.update(GRADWIRE_SECRET="0123456789abcdef", GRADWIRE_SITE=site)
        os.environ["GRADWIRE_TCP_TIMEOUT_SECONDS"] = "60"  # without sites the link may be jammed
        import gradwire.torch  # noqa: F401
        import torch.distributed as dist

        dist.init_process_group(
            "gradwire",
            init_method=f"tcp://{STORE}:{PORT}",
            rank=rank,
            world_size=len(hosts),
        )
        found = list(_steps(codec, parameters, count))
        dist.destroy_process_group()
        return found

    return [max(each) for each in zip(*values(hosts, body), strict=True)]


def _steps(codec: str, parameters: int, count: int) -> Iterator[float]:
    """Trains, and says how long each step took but the first one, which opens the windows."""
    import gradwire.torch
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    width, layers = 1024, max(1, parameters >> 20)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    trained = DistributedDataParallel(model)
    if codec != "none":
        gradwire.torch.register(trained, codec)
    for step in range(1 + count):
        dist.barrier()
        start = time.perf_counter()
        trained(torch.ones(1, width)).sum().backward()
        if step > 0:
            yield time.perf_counter() - start


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The steps of all settings, in turns."""
    import gradwire.torch  # noqa: F401  # once, before ranks are forked

    seconds: dict[str, list[float]] = {}
    parameters = options.parameters >> 20 << 20
    for _ in range(options.rounds):
        for name in options.settings:
            with two_sites(options.hosts, *LINK) as sites:
                found = steps(sites, SETTINGS[name], parameters, options.steps)
            seconds.setdefault(name, []).extend(found)
            print(name, [round(each, 2) for each in found])
    least = parameters * 32e-6 / LINK[0]
    return {"hosts": options.hosts, "link": LINK, "bytes": 4 * parameters, "least": least} | {
        "seconds": seconds
    }


def main() -> None:
    """Measures on the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4, help="of each site")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    write("two-sites", parser, measure, document, parameters=24 << 20, steps=3, rounds=3)


if __name__ == "__main__":
    main()
