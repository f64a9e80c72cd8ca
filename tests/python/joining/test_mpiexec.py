"""Ranks started by a real MPI launcher find each other without any setting."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ranks import LIMIT, reserved_store

pytestmark = pytest.mark.usefixtures("bare_environment")

SCRIPT = """
import sys, numpy, gradwire
with gradwire.init(timeout=60) as comm:
    x = comm.all_reduce(numpy.full(1000, comm.rank + 1.0))
    sys.stdout.write(f"{comm.rank}/{comm.size} {x[999]}\\n")
"""


@pytest.fixture
def mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec.hydra")
    found = str(beside) if beside.exists() else shutil.which("mpiexec.hydra")
    return found or pytest.skip("no mpiexec.hydra: pip install mpich")


def run(*command: str | Path, **environment: str) -> str:
    """What the command writes, which must succeed."""
    ended = subprocess.run(
        [*command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=os.environ | environment,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_ranks_meet_under_mpiexec(mpiexec: str, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    said = run(mpiexec, "-n", "3", sys.executable, script)
    assert sorted(said.split("\n")) == ["", "0/3 6.0", "1/3 6.0", "2/3 6.0"]


def test_ranks_of_several_hosts_meet_under_mpiexec(mpiexec: str, tmp_path: Path) -> None:
    """Each host has a proxy of its own, with another number; here both are on this host."""
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    hosts = ["-launcher", "fork", "-hosts", "localhost,127.0.0.1", "-ppn", "2", "-n", "4"]
    with reserved_store() as store:
        setting = {"GRADWIRE_STORE": store, "GRADWIRE_SECRET": "0123456789abcdef"}
        said = run(mpiexec, *hosts, sys.executable, script, **setting)
    assert sorted(said.split()) == sorted(
        f"{r}/4 10.0".split()[i] for r in range(4) for i in (0, 1)
    )


def test_each_mpiexec_has_a_job_of_its_own(mpiexec: str) -> None:
    """Also beside another one, and where a shell stands between the proxy and the rank."""
    program = (
        "from gradwire._bootstrap.launch_info import from_environment as find\n"
        "import os, signal; os.write(1, (find().job + chr(10)).encode()); signal.pause()"
    )
    words = [mpiexec, "-n", "2", "sh", "-c", f"{sys.executable} -c '{program}'; true"]
    jobs = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            each = stack.enter_context(
                subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
            )
            stack.callback(each.terminate)
            assert each.stdout is not None
            names = {each.stdout.readline() for _ in range(2)}
            assert len(names) == 1
            jobs += names
    assert len(set(jobs)) == 2
    assert "gradwire\n" not in jobs


CONTAINED = """
import os, sys, gradwire
with gradwire.init(timeout=60) as comm:
    found = comm.all_gather_object((sys.argv[1], os.getppid()))
    os.write(1, f"{sorted({name for name, _ in found})} {len(found)} {os.getppid()}\\n".encode())
"""


def test_jobs_in_two_containers_with_one_network_do_not_mix(mpiexec: str, tmp_path: Path) -> None:
    """Where their processes have the same numbers."""
    contained = ["unshare", "--pid", "--fork", "--mount-proc"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*contained, "true"], check=False).returncode
    ):
        pytest.skip("unshare may not make process namespaces here")
    script = tmp_path / "ranks.py"
    script.write_text(CONTAINED)
    ranks = [mpiexec, "-n", "2", sys.executable, script]
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda name: run(*contained, *ranks, name), "AB"))
    lines = [each.splitlines() for each in said]
    assert [line.rpartition(" ")[0] for line in lines[0]] == ["['A'] 2"] * 2
    assert [line.rpartition(" ")[0] for line in lines[1]] == ["['B'] 2"] * 2
    assert lines[0][0].rpartition(" ")[2] == lines[1][0].rpartition(" ")[2]
