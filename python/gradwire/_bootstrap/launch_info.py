"""The rank, size and store of this process, as its launcher says in the environment."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradwire._base import arguments, environment
from gradwire._errors import InvalidArgument, RendezvousError
from gradwire._host.own_folder import own_folder

DEFAULT_JOB = "gradwire"


@dataclass(frozen=True)
class LaunchInfo:
    """The place of one process in its job, as its launcher says."""

    rank: int
    size: int
    launcher: str = "init()"
    job: str = DEFAULT_JOB
    epoch: int = 0  # how often this rank's agent has restarted ranks
    local_size: int | None = None  # None: unknown
    store: str | None = None  # URL; torch://HOST:PORT is torch's own store
    rank_0_hosts: bool = False  # whether rank 0 serves the store during the rendezvous
    restarts: bool = False  # whether agents restart ranks, of which each counts on its own

    @property
    def several_hosts(self) -> bool:
        """Whether some rank is known to be on another host."""
        return self.local_size is not None and self.local_size < self.size


@dataclass(frozen=True)
class _Launcher:
    """A launcher's environment variables; of several names, the first one that is set counts."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_size: str
    nodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


_TORCHRUN = _Launcher(
    "torchrun",
    rank="RANK",
    size=("WORLD_SIZE",),
    local_size="LOCAL_WORLD_SIZE",
    job=("TORCHELASTIC_RUN_ID",),
)
_MPICH = _Launcher(
    "MPICH's mpirun",
    rank="PMI_RANK",
    size=("PMI_SIZE",),
    local_size="MPI_LOCALNRANKS",
    job=("PMI_JOBID",),
)
# mpirun inside a Slurm allocation sees Slurm's variables too, and those describe its daemons.
_LAUNCHERS = (
    _TORCHRUN,
    _Launcher(
        "Open MPI's mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _MPICH,
    _Launcher(
        "srun",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_size="",
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        job=("SLURM_JOB_ID",),
    ),
)


def from_environment() -> LaunchInfo:
    """Reads what torchrun, `gradwire run`, mpirun or srun set; without any of them, one rank alone.

    Raises RendezvousError for an environment that contradicts itself or that lacks a store.
    """
    for launcher in _LAUNCHERS:
        if launcher.rank in os.environ and _first(launcher.size) is not None:
            if launcher is _MPICH and _is_sruns_pmi():
                continue
            return _read(launcher)
        if launcher is _TORCHRUN and "WORLD_SIZE" in os.environ:
            raise RendezvousError(
                "WORLD_SIZE is set and RANK is not: start with a launcher, or unset it"
            )
    return LaunchInfo(0, 1, "no launcher")


def started_by_launcher() -> bool:
    """Whether this process is one of several that a launcher has started together.

    RANK and WORLD_SIZE alone may be a container's, where the process was started by hand beside
    the ranks of a job: a store of its own, or torchrun's name of the run, has to be there too.
    """
    here = from_environment()
    sure = here.launcher != _TORCHRUN.name or here.restarts
    return here.size > 1 and (sure or environment.text("GRADWIRE_STORE") is not None)


def explicit(rank: int, ranks: int, store: str | None) -> LaunchInfo:
    """Checks rank, ranks and store as given by the caller; raises InvalidArgument."""
    rank, size = arguments.whole(rank, "rank"), arguments.whole(ranks, "ranks")
    if not 0 <= rank < size:
        raise InvalidArgument(f"rank={rank} is not within ranks={size}")
    if store is not None:
        arguments.text(store, "store")
    store = store or environment.text("GRADWIRE_STORE")
    if size > 1 and store is None:
        raise InvalidArgument(f"ranks={size} need store='tcp://HOST:PORT', on rank 0's host")
    return LaunchInfo(
        rank,
        size,
        job=environment.text("GRADWIRE_JOB") or DEFAULT_JOB,
        store=store,
        rank_0_hosts=_rank_0_hosts(store),
    )


def _read(launcher: _Launcher) -> LaunchInfo:
    rank, size = _integer(launcher.rank), _integer(*launcher.size)
    if rank is None or size is None or not 0 <= rank < size:
        raise RendezvousError(
            f"{launcher.rank}={os.environ.get(launcher.rank)!r} is not a rank within "
            f"{launcher.size[0]}={_first(launcher.size)!r}; {launcher.name} sets both"
        )
    local_size = _integer(launcher.local_size)
    if local_size is None and _integer(*launcher.nodes) == 1:
        local_size = size
    job, store = _job(launcher), environment.text("GRADWIRE_STORE")
    rank_0_hosts = _rank_0_hosts(store)
    if store is None and size > 1:
        store = _default_store(launcher, job, size, local_size)
        rank_0_hosts = launcher is not _TORCHRUN
    return LaunchInfo(
        rank,
        size,
        launcher.name,
        job,
        _integer("TORCHELASTIC_RESTART_COUNT") or 0,
        local_size,
        store,
        rank_0_hosts,
        restarts=launcher is _TORCHRUN and "TORCHELASTIC_RUN_ID" in os.environ,
    )


def _default_store(launcher: _Launcher, job: str, size: int, local_size: int | None) -> str:
    if launcher is _TORCHRUN:
        host, port = os.environ.get("MASTER_ADDR"), _integer("MASTER_PORT")
        if not host or not port:
            raise RendezvousError(
                "RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not: "
                "start with torchrun, or set GRADWIRE_STORE=tcp://HOST:PORT with rank 0's host"
            )
        return f"torch://[{host}]:{port}" if ":" in host else f"torch://{host}:{port}"
    if local_size != size:
        known = f"does not say that all {size} ranks are on this host"
        if local_size:
            known = f"puts {local_size} of {size} ranks on this host"
        raise RendezvousError(
            f"{launcher.name} {known}, and gives no address to meet at: "
            "set GRADWIRE_STORE=tcp://HOST:PORT with rank 0's host and a free port, on all ranks"
        )
    digest = hashlib.sha256(job.encode()).hexdigest()[:16]
    return f"unix://{own_folder()}/gradwire-{digest}"


def _is_sruns_pmi() -> bool:
    """Whether MPICH's variables are srun's, which sets some with --mpi=pmi2 for its own tasks."""
    own = os.environ.get("SLURM_PROCID") == os.environ[_MPICH.rank]
    return own and "MPI_LOCALRANKID" not in os.environ


def _rank_0_hosts(store: str | None) -> bool:
    """Whether rank 0 serves the store: one at unix:// is served by whoever started the ranks."""
    return store is not None and store.startswith("tcp:")


def _job(launcher: _Launcher) -> str:
    """The job's name: the same on all ranks of a launch, and a new one for the next if possible.

    Ranks of two launches that have one name are told apart when they meet (`rendezvous`).
    """
    given = environment.text("GRADWIRE_JOB")
    if given is not None:
        return given
    name = _first(launcher.job)
    if name is None and launcher is _MPICH:
        name = _hydra_job()
    if name is None:
        return DEFAULT_JOB
    step = os.environ.get("SLURM_STEP_ID", "") if launcher.name == "srun" else ""
    return f"{name}.{step}" if step else name


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _integer(*names: str) -> int | None:
    value = _first(names)
    try:
        return None if value is None else int(value)
    except ValueError:
        raise RendezvousError(f"{' or '.join(names)}={value!r} is not a number") from None


def _hydra_job() -> str | None:
    """The name of a job that MPICH's Hydra has started: where its mpiexec listens; else None.

    The environment has no name that is the same on all hosts. On each host mpiexec starts a proxy
    with `--control-port HOST:PORT --pgid NUMBER`, where it listens as long as the job lives, and
    the proxy starts the ranks. The name of the job's key-value space, for which PMI-1 has a
    question (`get_my_kvsname`), would do as well, but who asks on PMI_FD counts as an MPI process,
    and Hydra kills the job when such a one ends without MPI_Finalize.
    """
    for words in _command_lines():
        options = dict(itertools.pairwise(words))
        if "proxy" in os.path.basename(words[0]) and "--control-port" in options:
            return f"{options['--control-port']}/{options.get('--pgid', '0')}"
    return None


def _command_lines() -> Iterator[list[str]]:
    """The command lines of this process's ancestors, the nearest first."""
    pid = os.getppid()
    while pid > 0:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            # The command, in parentheses, may have spaces; the state and the parent follow.
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended, or is another user's
            return
        yield words
