"""What ncu counts in the kernels that matter most, one job after the other.

A stage of bench/gpu.py, skipped where there is no ncu or it may not read the counters.
`python -m bench.cuda.counters run PLUGIN JOBS` only runs the jobs.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator

from tests.gpu.rows import Row, tell

_JOBS = (
    "fold",
    "fp16 encode",
    "fp16 decode-add",
    "int8 encode, feedback",
    "onebit encode, feedback",
    "onebit sum of 8",
)
_ELEMENTS = 1 << 26
_METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
    "launch__registers_per_thread": "registers",
}
_KERNELS = "regex:fold_kernel|encode|decode"


def main() -> int:
    """Prints the row, and what was counted of each kernel's last launch."""
    what, plugin, jobs = sys.argv[1:]
    if what == "run":
        _run_jobs(plugin, jobs)
        return 0
    with Row("ncu", f"{_ELEMENTS} elements") as row:
        ncu = shutil.which("ncu")
        if ncu is None:
            row.skip("there is no ncu")
            return 0
        command = [ncu, "--clock-control", "none", "--kernel-name", _KERNELS, "--csv"]
        command += [
            "--metrics",
            ",".join(_METRICS),
            sys.executable,
            "-m",
            "bench.cuda.counters",
        ]
        done = subprocess.run([*command, "run", plugin, jobs], capture_output=True, text=True)
        found = dict(_counted(done.stdout))
        if not found:
            row.skip(f"ncu counts nothing here: {(done.stdout + done.stderr).strip()[-200:]}")
            return 0
        for kernel, counts in found.items():
            tell(kernel=kernel, **counts)
        row.expect(done.returncode == 0, f"ncu ended with {done.returncode}")
    return 0


def _counted(output: str) -> Iterator[tuple[str, dict[str, float]]]:
    """By kernel, in the order of launches."""
    by_launch: dict[str, tuple[str, dict[str, float]]] = {}
    for line in csv.DictReader(each for each in output.splitlines() if each.startswith('"')):
        kernel = line["Kernel Name"].replace("void ", "").replace("unnamed>::", "")
        _, counts = by_launch.setdefault(line["ID"], (kernel.partition("(")[0], {}))
        counts[_METRICS[line["Metric Name"]]] = float(line["Metric Value"].replace(",", ""))
    yield from by_launch.values()


def _run_jobs(plugin: str, jobs: str) -> None:
    """Each twice, after which the second is warm."""
    from bench.cuda.speed import Jobs

    library = Jobs(jobs, plugin)
    for name in _JOBS:
        for _ in range(2):
            library.run(name, _ELEMENTS)


if __name__ == "__main__":
    sys.exit(main())
