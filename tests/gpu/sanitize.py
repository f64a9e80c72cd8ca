"""compute-sanitizer on the kernels' checks with few elements; skipped where there is none, and
where it says that it can't work on the device.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.rows import Row

_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_ENDED = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}
# What it says of the device, and not of a call that the device does not support.
_UNABLE = re.compile(r"^=+ *(?:Error|Warning): .*\bdevice (?:is )?not supported", re.I | re.M)
_FINDING = re.compile(r"^=+ *(?:Invalid|Misaligned|Program hit|(?:Error|Warning): Race)", re.M)
_BROKEN = "Internal Sanitizer Error"
_TO_TELL = 3.0  # seconds


def main() -> int:
    """Prints the row."""
    tool, kernels, library, seconds = sys.argv[1:]
    with Row(f"compute-sanitizer {tool}", "small") as row:
        sanitizer = shutil.which("compute-sanitizer") or _elsewhere()
        if sanitizer is None:
            row.skip("there is no compute-sanitizer")
            return 0
        command = [sanitizer, "--tool", tool, kernels, library, "small"]
        judge(row, tool, *_run(command, float(seconds) - _TO_TELL))
    return 0


def _run(command: list[str], seconds: float) -> tuple[str, int | None]:
    """What it printed, and its status; None where the time was not enough."""
    status = None
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # No pipe: what the sanitizer has started may outlive it, until the stage has ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        output.seek(0)
        return output.read(), status


def judge(row: Row, tool: str, output: str, status: int | None) -> None:
    """By what the sanitizer and the program printed."""
    found = _ENDED[tool].search(output)
    told = [line for line in output.splitlines() if line.startswith("{")]
    failed = [line for line in told if '"passed": true' not in line]
    hits = int(found[1]) if found else len(_FINDING.findall(output))
    if _UNABLE.search(output) and not hits and not failed:
        row.skip(f"{tool} does not work here: {_words(output)}")
        return
    row.expect(hits == 0, f"{found[0] if found else 'findings'}: {_words(output)}")
    row.expect(not failed, f"the kernels' checks fail: {''.join(failed[:1])}")
    if status is None:
        row.incomplete(f"{tool} was ended after {len(told)} groups of checks")
    else:
        ended = found and told and _BROKEN not in output
        row.expect(ended, f"{tool} did not end well: {_words(output)}")
        row.expect(status == 0, f"{tool} ended with status {status}: {_words(output)}")
        row.note(f"{len(told)} groups of checks ran")


def _elsewhere() -> str | None:
    paths = (Path(place) / "compute-sanitizer" for place in _PLACES)
    return next((str(path) for path in paths if path.exists()), None)


def _words(output: str) -> str:
    """The first of the sanitizer's lines that say something."""
    lines = [line.lstrip("= ") for line in output.splitlines() if line.startswith("=====")]
    said = [line for line in lines if line and not line.startswith("COMPUTE-SANITIZER")]
    return " | ".join(said[:3]) or " | ".join(output.strip().splitlines()[-2:])


if __name__ == "__main__":
    sys.exit(main())
