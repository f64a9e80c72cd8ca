"""The libraries that peers.py measures: how each is installed, how its ranks start and obey."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench.common.report import ROOT
from bench.libraries import placement

ENVIRONMENTS = ROOT / "build" / "peers"
GRADWIRE, GLOO, MPICH, MPICH_OFI, OPEN_MPI = "gradwire", "gloo", "mpich", "mpich-ofi", "openmpi"
TITLES = {
    GRADWIRE: "gradwire",
    GLOO: "torch's gloo",
    MPICH: "MPICH",
    MPICH_OFI: "MPICH, OFI",
    OPEN_MPI: "Open MPI",
}
LIBRARIES = {
    "shm": (GRADWIRE, GLOO, MPICH, OPEN_MPI),
    "tcp": (GRADWIRE, GLOO, MPICH, MPICH_OFI, OPEN_MPI),
}
_PACKAGES = {MPICH: "mpich", MPICH_OFI: "mpich", OPEN_MPI: "openmpi"}
_START_SECONDS, _TURN_SECONDS, _END_SECONDS = 180, 600, 20
_STDERR_CHARACTERS = 4000


class Start(NamedTuple):
    """How the ranks of a library are started."""

    processes: list[list[str]]  # commands; a launcher's, or one for each rank
    environment: dict[str, str]  # beyond this process's
    descriptors: Sequence[int] = ()  # that they inherit

    def shown(self) -> str:
        """What its user would write."""
        words = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*words, *(word.replace(f"{ROOT}/", "") for word in self.processes[0])])


def install(libraries: Sequence[str]) -> None:
    """Makes the virtual environments that are not there yet. gloo comes with this one's torch."""
    for package in sorted({_PACKAGES[name] for name in libraries if name in _PACKAGES}):
        place = ENVIRONMENTS / package
        done = place / "installed"
        if done.exists():
            continue
        print(f"installing {package} and mpi4py into {place} …", file=sys.stderr, flush=True)
        subprocess.run(["sh", str(ROOT / ".ci" / "venv"), sys.executable, str(place)], check=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, package, "mpi4py", "numpy"], check=True)
        done.touch()


def start_of(library: str, transport: str, ranks: int, cores: int) -> Start:
    """Unpinned, on more ranks than cores too: then with what each needs to yield."""
    if library in (GRADWIRE, GLOO):
        launch = [sys.executable, "-m", "gradwire", "run", "-n", str(ranks)]
        settings = {"GLOO_SOCKET_IFNAME": "lo"} if library == GLOO else {}
        return Start([[*launch, *_rank(f"{library}:{transport}")]], settings)
    place = ENVIRONMENTS / _PACKAGES[library] / "bin"
    flags, settings = _mpi_settings(library, transport, crowded=ranks > cores)
    launch = [str(place / "mpiexec"), *flags, "-n", str(ranks), str(place / "python")]
    return Start([[*launch, *_rank("mpi:")]], settings)


def _mpi_settings(library: str, transport: str, crowded: bool) -> tuple[list[str], dict[str, str]]:
    if library == OPEN_MPI:
        flags = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        if transport == "tcp":  # its collectives in shared memory are of no use then
            flags += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
            flags += ["--mca", "btl_tcp_if_include", "lo", "--mca", "coll", "^sm"]
        if crowded:
            flags += ["--mca", "mpi_yield_when_idle", "1"]
        root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        return flags, dict.fromkeys(root, "1") if os.geteuid() == 0 else {}
    settings = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"} if crowded else {}
    if transport == "tcp":
        settings["MPIR_CVAR_NOLOCAL"] = "1"
        settings |= (
            {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
            if library == MPICH_OFI
            else {"UCX_TLS": "tcp,self"}
        )
    return ["-bind-to", "none"], settings


def _rank(library: str) -> list[str]:
    return ["-m", "bench.libraries.peer_rank", library]


def wall_of(transport: str, ranks: int, cores: int, stack: contextlib.ExitStack) -> Start:
    """The processes whose speed is the wall; what they inherit, the stack closes."""
    if transport == "shm":
        places, descriptors = list(map(str, range(min(ranks, cores)))), []
        kind = "copy"
    else:
        pairs = [_connected(stack) for _ in range(ranks // 2)]
        descriptors = [end.fileno() for pair in pairs for end in pair]
        places = [f"{rank},{fd}" for rank, fd in enumerate(descriptors)]
        kind = "exchange"
    commands = [[sys.executable, *_rank(f"{kind}:{place}")] for place in places]
    return Start(commands, {}, descriptors)


def floor_of(ranks: int, stack: contextlib.ExitStack) -> Start:
    """The ranks of the floor program over memory that is theirs alone."""
    memory = os.memfd_create("floor")
    stack.callback(os.close, memory)
    os.ftruncate(memory, placement.library().floor_bytes(ranks))
    commands = [[sys.executable, *_rank(f"floor:{memory},{rank},{ranks}")] for rank in range(ranks)]
    return Start(commands, {}, [memory])


def _connected(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = stack.enter_context(socket.create_connection(server.getsockname()))
        far = stack.enter_context(server.accept()[0])
    return near, far


class Team:
    """The ranks of a library, which sleep until they are asked. Ends them when it is closed."""

    def __init__(self, name: str, start: Start, ranks: int) -> None:
        self.name, self.version = name, ""
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._stderr = Path(folder, "stderr")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: dict[int, tuple[socket.socket, IO[str]]] = {}
        try:
            self._start(start, ranks, f"{folder}/socket")
        except BaseException:
            self.close()
            raise

    def ask(self, **command: Any) -> list[Any]:
        """What the ranks answer, in their order; RuntimeError if one does not."""
        try:
            self._tell(command)
            return [json.loads(self._ranks[rank][1].readline()) for rank in sorted(self._ranks)]
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{self.name}: {error}; its ranks said: {self._said()}") from None

    def close(self) -> None:
        """Asks the ranks to end, and makes them."""
        with contextlib.suppress(OSError):
            self._tell({"do": "end"})
        for sock, _ in self._ranks.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for process in self._processes:
            _end(process)
        self._stack.close()

    def _tell(self, command: Mapping[str, Any]) -> None:
        line = json.dumps(command).encode() + b"\n"
        for sock, _ in self._ranks.values():
            sock.sendall(line)

    def _start(self, start: Start, ranks: int, path: str) -> None:
        with socket.socket(socket.AF_UNIX) as server, self._stderr.open("ab") as stderr:
            server.bind(path)
            server.listen(ranks)
            for command in start.processes:
                process = subprocess.Popen(
                    [*command, path],
                    env=_environment(start.environment),
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=start.descriptors,
                    start_new_session=True,
                )
                self._processes.append(process)
            self._accept(server, ranks)

    def _accept(self, server: socket.socket, ranks: int) -> None:
        """A rank that connects is ready."""
        server.settimeout(0.2)
        deadline = time.monotonic() + _START_SECONDS
        while len(self._ranks) < ranks:
            try:
                sock, _ = server.accept()
            except TimeoutError:
                ended = any(each.poll() is not None for each in self._processes)
                if ended or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} did not start: {self._said()}") from None
                continue
            self._meet(sock)

    def _meet(self, sock: socket.socket) -> None:
        sock.settimeout(_TURN_SECONDS)
        self._stack.callback(sock.close)
        lines = self._stack.enter_context(sock.makefile("r", encoding="utf-8"))
        hello = json.loads(lines.readline())
        self._ranks[hello["rank"]], self.version = (sock, lines), hello["version"]

    def _said(self) -> str:
        said = self._stderr.read_text(errors="replace")[-_STDERR_CHARACTERS:]
        return said.strip() or "nothing"


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **settings}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its whole session, once it had time to end by itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            process.wait(_END_SECONDS)
            return
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, number)
    process.wait(_END_SECONDS)
