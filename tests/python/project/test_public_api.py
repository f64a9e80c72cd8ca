"""Names that `import gradwire` gives, its costs, and what it leaves behind."""

from __future__ import annotations

import copy
import inspect
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import Communicator, _core
from ranks import LIMIT, on_ranks


def python(code: str, timeout: float = LIMIT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_import_needs_no_torch() -> None:
    done = python("import sys, gradwire; print(sorted(n for n in sys.modules if 'torch' in n))")
    assert done.stdout.strip() == "[]", done.stderr


def needed_libraries(path: Path) -> list[str]:
    """DT_NEEDED of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    offset, entry, count = (
        struct.unpack_from("<Q", data, 40)[0],
        *struct.unpack_from("<HH", data, 58),
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry) for i in range(count)]
    (dynamic,) = [each for each in sections if each[1] == 6]
    strings = sections[dynamic[6]][4]
    found = []
    for at in range(dynamic[4], dynamic[4] + dynamic[5], 16):
        tag, value = struct.unpack_from("<qQ", data, at)
        if tag == 1:
            found.append(data[strings + value :].split(b"\0", 1)[0].decode())
    return found


def test_the_extension_links_the_system_only() -> None:
    names = {name.split(".so")[0] for name in needed_libraries(Path(_core.__file__))}
    assert "libc" in names
    loaders = {"ld-linux-x86-64", "ld-linux-aarch64"}
    assert names <= {"libc", "libm", "libstdc++", "libgcc_s", "libpthread", *loaders}


def test_all_that_is_public_is_documented() -> None:
    for name in gradwire.__all__:
        thing = getattr(gradwire, name)
        assert inspect.getdoc(thing), name
    for name, member in inspect.getmembers(Communicator):
        if not name.startswith("_"):
            assert inspect.getdoc(member), name


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("InvalidArgument", {ValueError}),
        ("ScheduleError", {ValueError}),
        ("RendezvousError", set()),
        ("TransportError", set()),
        ("Timeout", {TimeoutError}),
        ("Aborted", set()),
    ],
)
def test_errors_are_one_tree(name: str, bases: set[type]) -> None:
    kind = getattr(gradwire, name)
    assert kind.__module__ == "gradwire"
    assert set(kind.__bases__) == {gradwire.Error} | bases
    assert issubclass(gradwire.Error, RuntimeError)
    error = kind("what happened")
    if name in ("TransportError", "Timeout", "Aborted"):
        assert error.peer == -1
        error.peer = 3
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(again), str(again), vars(again)) == (kind, "what happened", vars(error))
        assert again.args == ("what happened",)


@pytest.mark.parametrize(
    "name", ["InvalidArgument", "RendezvousError", "TransportError", "Timeout", "Aborted"]
)
def test_errors_can_be_derived_from(name: str) -> None:
    class Own(getattr(gradwire, name)):
        def __new__(cls, text: str, more: int) -> Any:
            return super().__new__(cls, text)

        def __init__(self, text: str, more: int) -> None:
            super().__init__(text)
            self.more = more

    error = Own("what happened", 5)
    assert (error.args, str(error), error.more) == (("what happened",), "what happened", 5)
    assert isinstance(error, RuntimeError)


def test_a_timeout_is_an_oserror_like_pythons_own() -> None:
    def fields(error: TimeoutError) -> Any:
        return error.args, str(error), error.errno, error.strerror, error.filename

    for args in [(), ("late",), (110, "late"), (110, "late", "file")]:
        assert fields(gradwire.Timeout(*args)) == fields(TimeoutError(*args))
    with pytest.raises(OSError, match="late"):
        raise gradwire.Timeout("late")


def test_one_rank_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with gradwire.init() as comm:
        assert (comm.rank, comm.size, comm.transports, comm.hosts) == (0, 1, {}, ((0,),))
        assert comm.all_reduce(np.ones(3), op="avg").tolist() == [1, 1, 1]
        assert repr(comm) == "<Communicator rank 0/1>"
        assert comm.traffic == (0, 0, 0, 0)
    assert comm.closed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "together"),
        ({"ranks": 2}, "together"),
        ({"store": "tcp://127.0.0.1:1"}, "rank= and ranks="),
        ({"rank": 2, "ranks": 2, "store": "tcp://127.0.0.1:1"}, "rank=2"),
        ({"rank": 0, "ranks": 2}, "store="),
        ({"timeout": 0}, "timeout=0"),
        ({"transports": ["pigeon"]}, "pigeon"),
    ],
)
def test_init_refuses_what_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(gradwire.InvalidArgument, match=message):
        gradwire.init(**arguments)


@pytest.mark.parametrize("transports", [None, ["tcp"], ["shm"]])
def test_spawned_ranks_meet(transports: list[str] | None) -> None:
    def body(comm: Communicator) -> tuple[float, set[str]]:
        return comm.all_reduce(np.ones(3))[0], set(comm.transports.values())

    expected = set(transports or ["shm"])
    assert gradwire.spawn(body, 3, transports=transports) == [(3.0, expected)] * 3


@on_ranks(4, transport=lambda low, high: "shm" if low ^ 1 == high else "tcp")
def test_what_a_communicator_says_of_itself(comm: Communicator) -> None:
    assert repr(comm) == f"<Communicator rank {comm.rank}/4 shm+tcp>"
    assert comm.transports[comm.rank ^ 1] == "shm"
    assert comm.transports[comm.rank ^ 2] == "tcp"
    assert comm.hosts == ((0, 1, 2, 3),)
    before = comm.traffic
    comm.all_reduce(np.ones(1024, np.float32), algorithm="ring")
    after = comm.traffic
    assert after.frames_sent - before.frames_sent == 6
    assert after.bytes_sent - before.bytes_sent == 6 * (1024 + 32)


def test_names() -> None:
    assert gradwire.codecs()[:3] == ["none", "fp16", "bf16"]
    assert "ring" in gradwire.algorithms()
    assert Communicator.allreduce is Communicator.all_reduce


EXITS = {
    "work in flight": "comm.all_reduce(np.ones(10), async_op=True)",
    "a blocked daemon": """
threading.Thread(target=quietly, args=(comm.recv, np.ones(10), 1), daemon=True).start()
threading.Thread(target=quietly, args=(comm.all_reduce, np.ones(10)), daemon=True).start()
""",
    "an open communicator": "",
    "an exception": "comm.barrier(async_op=True); raise SystemExit(0)",
}


@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_ends_cleanly(how: str) -> None:
    """No crash and no hang, whatever is open, and the peers are told."""
    code = f"""
import contextlib, gradwire, threading, numpy as np
from gradwire._communicator import from_mesh
from gradwire._bootstrap.mesh import inproc_meshes
one, other = inproc_meshes(2)
peers = []
thread = threading.Thread(target=lambda: peers.append(from_mesh(other, timeout=20)))
thread.start()
comm = from_mesh(one, timeout=20)
thread.join()
def quietly(call, *args):
    with contextlib.suppress(gradwire.Error):
        call(*args)
{EXITS[how]}
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")
