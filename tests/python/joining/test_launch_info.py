"""Rank, size and store of a process, as its launcher says in the environment."""

from __future__ import annotations

import os

import pytest
from gradwire._bootstrap.launch_info import LaunchInfo, explicit, from_environment
from gradwire._errors import InvalidArgument, RendezvousError

pytestmark = pytest.mark.usefixtures("bare_environment")


def set_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for pair in text.split():
        name, _, value = pair.partition("=")
        monkeypatch.setenv(name, value)


TORCHRUN = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500"


def test_without_a_launcher_there_is_one_rank() -> None:
    assert (from_environment().rank, from_environment().size) == (0, 1)


def test_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(
        monkeypatch, TORCHRUN + " TORCHELASTIC_RUN_ID=run7 TORCHELASTIC_RESTART_COUNT=2"
    )
    launch = from_environment()
    assert launch == LaunchInfo(
        3, 4, "torchrun", "run7", 2, 2, store="torch://node0:29500", restarts=True
    )
    assert launch.several_hosts


def test_a_store_in_the_environment_goes_before_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, TORCHRUN + " GRADWIRE_STORE=tcp://node0:7")
    launch = from_environment()
    assert (launch.store, launch.rank_0_hosts) == ("tcp://node0:7", True)


ONE_HOST = {
    "openmpi": "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-7",
    "mpich": "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
    "srun": "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NNODES=1 SLURM_JOB_ID=7",
    "srun --mpi=pmi2": "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NNODES=1 "
    "SLURM_JOB_ID=7 PMI_RANK=1 PMI_SIZE=2 PMI_JOBID=7.0 PMI_FD=11",
}
SEVERAL_HOSTS = {
    "openmpi": "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2",
    "mpich": "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
    "mpich without local ranks": "PMI_RANK=1 PMI_SIZE=4",
    "srun": "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NNODES=2 SLURM_JOB_ID=7",
}


@pytest.mark.parametrize("text", ONE_HOST.values(), ids=ONE_HOST)
def test_a_launch_on_one_host_meets_on_a_socket_of_its_user(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    set_environment(monkeypatch, text)
    launch = from_environment()
    assert (launch.rank, launch.size, launch.local_size) == (1, 2, 2)
    assert launch.store is not None
    assert launch.store.startswith(f"unix:///tmp/gradwire-{os.getuid()}/gradwire-")
    assert launch.rank_0_hosts


@pytest.mark.parametrize("text", SEVERAL_HOSTS.values(), ids=SEVERAL_HOSTS)
def test_a_launch_on_several_hosts_needs_a_store(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    set_environment(monkeypatch, text)
    with pytest.raises(RendezvousError, match="set GRADWIRE_STORE=tcp://HOST:PORT"):
        from_environment()
    monkeypatch.setenv("GRADWIRE_STORE", "tcp://node0:7")
    launch = from_environment()
    assert (launch.rank, launch.size, launch.rank_0_hosts) == (1, 4, True)


@pytest.mark.parametrize(
    ("mpi", "name"), [("openmpi", "Open MPI's mpirun"), ("mpich", "MPICH's mpirun")]
)
def test_mpirun_inside_a_slurm_allocation_is_mpirun(
    monkeypatch: pytest.MonkeyPatch, mpi: str, name: str
) -> None:
    set_environment(monkeypatch, ONE_HOST[mpi] + " " + SEVERAL_HOSTS["srun"])
    assert from_environment().launcher == name


def test_a_slurm_step_is_not_its_whole_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, ONE_HOST["srun"] + " SLURM_STEP_NUM_TASKS=3 SLURM_STEP_ID=5")
    launch = from_environment()
    assert (launch.size, launch.job) == (3, "7.5")


@pytest.mark.parametrize(
    ("text", "job"),
    [
        (TORCHRUN + " TORCHELASTIC_RUN_ID=run7 TORCHELASTIC_RESTART_COUNT=2", "run7"),
        (ONE_HOST["openmpi"], "prterun-7"),
        (SEVERAL_HOSTS["openmpi"] + " OMPI_MCA_ess_base_jobid=3 GRADWIRE_STORE=tcp://a:1", "3"),
        (ONE_HOST["srun"] + " SLURM_STEP_ID=5", "7.5"),
        (ONE_HOST["mpich"], "gradwire"),  # which is no child of one of Hydra's proxies
    ],
)
def test_the_jobs_name_is_one_that_the_launcher_gives_to_all_ranks(
    monkeypatch: pytest.MonkeyPatch, text: str, job: str
) -> None:
    """And nothing of this process or host, such as its parent's number."""
    set_environment(monkeypatch, text)
    assert from_environment().job == job


def test_the_job_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, ONE_HOST["mpich"] + " GRADWIRE_JOB=mine")
    assert from_environment().job == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RANK=4 WORLD_SIZE=4", "RANK='4' is not a rank within WORLD_SIZE='4'"),
        ("RANK=x WORLD_SIZE=4", "RANK='x' is not a number"),
        ("RANK=0 WORLD_SIZE=4", "MASTER_ADDR and MASTER_PORT are not"),
        ("WORLD_SIZE=4", "WORLD_SIZE is set and RANK is not"),
    ],
)
def test_a_wrong_environment_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    set_environment(monkeypatch, text)
    with pytest.raises(RendezvousError, match=message):
        from_environment()


def test_explicit_arguments_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="rank=2 is not within ranks=2"):
        explicit(2, 2, "tcp://a:1")
    with pytest.raises(InvalidArgument, match="need store="):
        explicit(0, 2, None)
