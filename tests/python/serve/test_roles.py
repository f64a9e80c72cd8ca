"""Roles under launchers: of the processes of one launch, some serve and the others train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire import InvalidArgument, serve
from gradwire._base.deadline import Deadline
from gradwire.serve import _roles
from ranks import LIMIT

PROGRAM = """
import os, signal, sys
import numpy as np
from gradwire import InvalidArgument, serve
secret = os.environ.get("SECRET")
me = serve.role(servers=2, secret=secret, snapshot=os.environ.get("SNAPSHOT"))
if me is None:
    sys.exit()
if sys.argv[1:] == ["die"] and me.index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
pushing = me.replicas - (sys.argv[1:] == ["die"])
if "GRADWIRE_SERVERS" not in os.environ:
    try:
        serve.role(servers=2)
    except InvalidArgument as error:
        assert "role() was called before" in str(error)
    else:
        raise AssertionError
values = [np.zeros(1000, np.float32)]
with serve.connect(values, serve.SGD(lr=1.0), secret=secret) as ps:
    ps.push([np.ones(1000, np.float32)])
    ps.wait(pushing)
    ps.pull(values)
    assert values[0].tolist() == [-pushing] * 1000 and ps.shards == me.servers == 2
sys.stdout.write(f"{me.index} of {me.replicas}\\n")
"""
SLURM = {"SLURM_NTASKS": "4", "SLURM_NNODES": "1", "SLURM_JOB_ID": f"roles{os.getpid()}"}
BOTH = ["0 of 2", "1 of 2"]


@pytest.fixture
def program(tmp_path: Path, bare_environment: None) -> Path:
    """A file with the program of all processes."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def lines(*command: str | Path) -> list[str]:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.split("\n")[:-1])


def said_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT).stdout


def test_under_torchrun(program: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert lines(*torchrun, "--nproc-per-node=4", program) == BOTH


def test_under_mpirun(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "secret given to role() and connect()")
    mpirun = shutil.which("mpiexec.hydra", path=str(Path(sys.executable).parent))
    if mpirun is None:
        pytest.skip("no mpiexec.hydra: pip install mpich")
    assert lines(mpirun, "-n", "4", sys.executable, program) == BOTH


def test_under_open_mpis_mpirun(program: Path) -> None:
    mpirun = next((each for each in map(shutil.which, ("mpirun.openmpi", "mpirun")) if each), None)
    if mpirun is None or "open-mpi.org" not in said_by(mpirun, "--version"):
        pytest.skip("no Open MPI: apt-get install openmpi-bin")
    crowd = ["--allow-run-as-root", "--oversubscribe"]
    assert lines(mpirun, *crowd, "-n", "4", sys.executable, program) == BOTH


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_under_srun(program: Path, mpi: str) -> None:
    if shutil.which("srun") is None or " up " not in said_by("sinfo", "--noheader"):
        pytest.skip("no Slurm")
    srun = ["srun", "--overcommit", "--mpi", mpi, "-n", "4"]
    assert lines(*srun, sys.executable, program) == BOTH


def test_under_gradwire_run_the_servers_are_there(program: Path) -> None:
    run = [sys.executable, "-m", "gradwire", "run", "-n", "2", "--servers", "2"]
    assert lines(*run, program) == BOTH


def test_under_srun_a_replica_may_die_alone(program: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, program, "die"],
            env={**os.environ, **SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    ended = [(each.communicate(timeout=LIMIT)[0].strip(), each.returncode) for each in processes]
    assert ended == [("", 0), ("", 0), (BOTH[0], 0), ("", -9)]


def test_a_last_snapshot_that_fails_is_an_error_of_its_server(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    spoil = f"os.rmdir({str(snapshot)!r}); open({str(snapshot)!r}, 'w').close()\nvalues = ["
    text = PROGRAM.replace("servers=2", "servers=1").replace("== 2", "== 1")
    program.write_text(text.replace("values = [", spoil, 1))
    for name, value in {**SLURM, "SLURM_NTASKS": "2", "SNAPSHOT": str(snapshot)}.items():
        monkeypatch.setenv(name, value)
    processes = [
        subprocess.Popen(
            [sys.executable, program],
            env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [each.communicate(timeout=LIMIT)[1] for each in processes]
    assert [each.returncode for each in processes] == [1, 0], errors
    assert "gradwire.Error: the last snapshot failed: " in errors[0]


def test_somebody_must_train(monkeypatch: pytest.MonkeyPatch, bare_environment: None) -> None:
    with pytest.raises(InvalidArgument, match="no launcher started 1 in all: no process is left"):
        serve.role(servers=1)
    for name, value in {**SLURM, "SLURM_PROCID": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=r"srun started 4 in all: .* start 5 or more"):
        serve.role(servers=4)
    with pytest.raises(InvalidArgument, match="servers=0"):
        serve.role(servers=0)


def test_servers_end_where_a_replica_died_before_its_last_will() -> None:
    store, patience = FakeStore(), Deadline(0)
    lives = _roles._Lives(store, range(2, 4), patience)  # type: ignore[arg-type]
    store.keys = {_roles._begun(2)}
    assert lives()
    store.keys.add(_roles._ended(2))
    assert not lives()  # rank 3 never began
    assert _roles._Lives(store, range(2, 4), Deadline(100))()  # type: ignore[arg-type]


class FakeStore:
    """A store that has some keys."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def get(self, key: str, _: float) -> bytes:
        if key not in self.keys:
            raise TimeoutError
        return b""


def test_gradwire_runs_number_counts(
    monkeypatch: pytest.MonkeyPatch, bare_environment: None
) -> None:
    monkeypatch.setenv("GRADWIRE_SERVERS", "3")
    with pytest.raises(InvalidArgument, match="`gradwire run --servers 3` has started 3"):
        serve.role(servers=2)
    assert serve.role(servers=3) == serve.Replica(index=0, replicas=1, servers=3)
