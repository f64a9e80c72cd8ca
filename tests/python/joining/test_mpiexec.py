"""Ranks started by a real MPI launcher find each other without any setting."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT

SCRIPT = """
import sys, numpy, gradwire
with gradwire.init(timeout=60) as comm:
    x = comm.all_reduce(numpy.full(1000, comm.rank + 1.0))
    sys.stdout.write(f"{comm.rank}/{comm.size} {x[999]}\\n")
"""


def test_ranks_meet_under_mpiexec(tmp_path: Path):
    mpiexec = Path(sys.executable).with_name("mpiexec.hydra")
    if not mpiexec.exists():
        found = shutil.which("mpiexec.hydra")
        if found is None:
            pytest.skip("no mpiexec.hydra: pip install mpich")
        mpiexec = Path(found)
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [mpiexec, "-n", "3", sys.executable, script], capture_output=True, text=True, timeout=LIMIT
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")) == ["", "0/3 6.0", "1/3 6.0", "2/3 6.0"]
