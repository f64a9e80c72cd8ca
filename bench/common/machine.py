"""What the benchmarks say of the machine they ran on."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from time import perf_counter


def describe() -> str:
    """Its processors and its kernel."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}"


class OtherLoad:
    """What else the machine did since this was made: it slows those most that sleep to wait."""

    def __init__(self) -> None:
        self._start, self._busy = perf_counter(), self._busy_elsewhere()

    def share(self) -> float:
        """The part of all cores' time that went to other processes."""
        elapsed = (perf_counter() - self._start) * (os.cpu_count() or 1)
        return max(0.0, self._busy_elsewhere() - self._busy) / elapsed

    def describe(self) -> str:
        """The machine, and that part."""
        return f"{describe()}, of whose time other work took about {self.share():.0%}"

    @staticmethod
    def _busy_elsewhere() -> float:
        """Seconds, of all processes but this one and its ended children."""
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, words)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return busy - sum(each.ru_utime + each.ru_stime for each in own)
