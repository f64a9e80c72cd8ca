"""Builds, checks and times gradwire's CUDA part on the first GPU of this machine, in 12 minutes.

    python bench/gpu.py                    # writes bench/results/gpu-DATE.json and .md
    python bench/gpu.py --output FOLDER    # FOLDER/gpu.json and .md, where there is a FOLDER;
                                           # else FOLDER.json and .md
    python bench/gpu.py --only loopback kernels
    python bench/gpu.py --built FOLDER     # compiles nothing (bench/cuda/README.md)

Checks of the kernels need nvcc, cmake and ninja; all of it also pybind11, NumPy, ml_dtypes, pytest
and a torch with CUDA; no network. Each stage (cuda/stages.py) runs in processes of its own for a
limited time, so that one that crashes or hangs is one row, and results are written after each. A
stage whose time was not enough, or whose build failed, is incomplete, not failed. Exits with 1
where a check failed, and where there is no GPU: then it measures nothing; with 2 where none failed
but some stage is incomplete. `python -m tests.gpu` runs the checks over a simulated GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of bench and tests, from any folder

from bench.common import report
from bench.common.machine import describe
from bench.cuda import report as gpu_report
from bench.cuda.stages import BUILDS, stages
from tests.gpu import build
from tests.gpu.stages import Deadline, Ended, chosen, run_all, status

_CUDA_PROGRAMS = "/usr/local/cuda/bin"  # where PATH may not lead
_LOOK_SECONDS = 60.0

# What this Python's torch says of the first GPU, or why there is none.
_LOOK = """
import json
try:
    import torch
    if not torch.cuda.is_available():
        found = {"why_not": f"torch {torch.__version__} finds no GPU"}
    else:
        of = torch.cuda.get_device_properties(0)
        found = {
            "name": of.name, "capability": f"{of.major}{of.minor}", "memory": of.total_memory,
            "torch": torch.__version__, "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
except Exception as error:
    found = {"why_not": f"{type(error).__name__}: {error}"}
print(json.dumps(found))
"""


def main() -> int:
    """Runs the stages, writes and prints what they found."""
    options = _parse()
    deadline = Deadline(60 * options.minutes)
    gpu = look()
    if "why_not" in gpu:
        print(f"gpu: {gpu['why_not']}; nothing was measured", file=sys.stderr)
        return 1
    gpu |= {"driver": _driver(), "nvcc": _nvcc()}
    _told(", ".join(f"{name} {value}" for name, value in gpu.items()))

    def save(ended: Sequence[Ended]) -> str:
        found = _found(gpu, ended, 60 * options.minutes - deadline.remaining())
        text = gpu_report.document(found)
        if options.output or not options.only:
            report.save(_stem(options.output), found, text)
        return text

    ended = _run(options, deadline, gpu, save)
    print(save(ended))
    return status(ended)


def _found(gpu: Mapping[str, Any], ended: Sequence[Ended], seconds: float) -> dict[str, Any]:
    """What is written."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe(),
        "command": " ".join(["bench/gpu.py", *sys.argv[1:]]),
        "gpu": gpu,
        "seconds": seconds,
        "passed": all(each.passed for each in ended),
        "complete": all(each.complete for each in ended),
        "stages": [
            {"name": each.name, "seconds": each.seconds, "rows": each.rows} for each in ended
        ],
        "times": [row for each in ended for row in each.times],
    }


def _stem(output: str) -> Path:
    """The path without suffix of the files to write."""
    if not output:
        return report.stem_of(None, "gpu")
    into = output.endswith(os.sep) or Path(output).is_dir()
    return Path(output, "gpu") if into else Path(output)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=12.0, help="for everything; what is left is not run")
    add("--only", nargs="+", default=[], metavar="STAGE", help="after the build")
    add("--output", default="", help="a folder, or a path without suffix")
    add("--built", type=Path, help="a folder that tests/gpu/build.py has packed")
    add("--architectures", help="to compile for; the GPU's own by default")
    return parser.parse_args()


def look() -> dict[str, Any]:
    """Of the first GPU, or `why_not`; in a process of its own, since a driver may hang.

    Where torch finds none, nvidia-smi is asked, for the stages that need no torch.
    """
    found = _ask_torch()
    return _ask_smi() or found if "why_not" in found else found


def _ask_smi() -> dict[str, Any]:
    """What nvidia-smi says of the first GPU; empty where it says nothing."""
    line = _smi("name,compute_cap,memory.total")
    if line.count(",") != 2:
        return {}
    name, capability, memory = (each.strip() for each in line.split(","))
    return {
        "name": name,
        "capability": capability.replace(".", ""),
        "memory": memory,
        **dict.fromkeys(("torch", "CUDA", "NCCL"), "none"),
    }


def _smi(fields: str) -> str:
    """Its line about the first GPU; empty where there is none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    wish = [f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run([smi, *wish], capture_output=True, text=True, timeout=_LOOK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _ask_torch() -> dict[str, Any]:
    """What this Python's torch says."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=_LOOK_SECONDS
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"why_not": f"looking for a GPU failed: {type(error).__name__}"}
    return found


def _driver() -> str:
    """Its version; ? where nobody tells."""
    told = _smi("driver_version")
    if told:
        return told
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "?"
    number = re.search(r"\d+\.\d+\.\d+", text)
    return number[0] if number else "?"


def _nvcc() -> str:
    try:
        nvcc = shutil.which("nvcc") or f"{_CUDA_PROGRAMS}/nvcc"
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    except OSError:
        return "?"
    found = re.search(r"release ([\d.]+)", done.stdout)
    return found[1] if found else "?"


def _run(
    options: argparse.Namespace,
    deadline: Deadline,
    gpu: Mapping[str, Any],
    save: Callable[[Sequence[Ended]], object],
) -> list[Ended]:
    """All stages."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")
    }
    environment["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), _CUDA_PROGRAMS])
    folder = options.built.absolute() if options.built else build.BUILD
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(folder / build.PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    architectures = options.architectures or f"{gpu['capability']}-real"
    wanted = chosen(stages(folder, None if options.built else architectures), options.only, BUILDS)
    return run_all(wanted, deadline, environment, _told, save)


def _told(line: str) -> None:
    print(f"gpu: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
