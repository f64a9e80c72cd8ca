"""Whole processes: what importing pulls in, what the extension links, and the end."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import gradwire
import pytest
from gradwire import _core
from ranks import LIMIT

# Rank 0 ends while its bucket waits for rank 1, whose hook is called in vain when rank 0 has gone.
LEAVE = """
import os, sys
{imports}
import torch.distributed as dist
from gradwire.torch._ranks.group import communicator_of

class Bucket:
    def index(self): return 0
    def buffer(self): return torch.ones(1000)
    def is_last(self): return True

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
state = gradwire.torch.State(communicator_of(dist.group.WORLD))
if rank == 1:
    sys.stdin.readline()
future = gradwire.torch.ddp.hook.comm_hook(state, Bucket())
if rank == 0:
    assert not future.done()
    print("leaving with", state._steps.completions.pending, "pending")
    sys.exit(0)
try:
    future.wait()
except Exception as error:
    print(type(state.error).__name__, error)
"""


def run(arguments: Sequence[object]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def environment() -> dict[str, str]:
    package = str(Path(gradwire.__file__).parents[1])
    found = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return found


def test_gradwire_does_not_import_torch_and_says_what_needs_it() -> None:
    script = """
import gradwire, sys
assert "torch" not in sys.modules
sys.modules["torch"] = None  # as if it were not installed
try:
    import gradwire.torch
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    ended = run(["-c", script])
    assert ended.stderr == ""
    assert re.match(r"torch gradwire\.torch needs PyTorch: pip install", ended.stdout)


def needed(path: Path) -> Iterator[str]:
    """The libraries that a 64-bit little-endian ELF file links to: the DT_NEEDED of `.dynamic`."""
    image = path.read_bytes()
    assert image[:6] == b"\x7fELF\x02\x01"
    offset, entry, count = (
        *struct.unpack_from("<Q", image, 0x28),
        *struct.unpack_from("<HH", image, 0x3A),
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * entry) for i in range(count)]
    dynamic = next(each for each in sections if each[1] == 6)  # SHT_DYNAMIC
    strings = sections[dynamic[6]][4]
    for at in range(dynamic[4], dynamic[4] + dynamic[5], 16):
        tag, value = struct.unpack_from("<QQ", image, at)
        if tag == 1:  # DT_NEEDED
            start = strings + value
            yield image[start : image.index(b"\0", start)].decode()


def test_extension_links_no_torch() -> None:
    libraries = list(needed(Path(_core.__file__)))
    assert any(each.startswith("libc.so") for each in libraries)
    assert not [each for each in libraries if "torch" in each or "c10" in each]


@pytest.mark.long
@pytest.mark.parametrize(
    "imports", ["import gradwire.torch, torch", "import torch, gradwire.torch"]
)
def test_process_ends_cleanly_with_buckets_in_flight(tmp_path: Path, imports: str) -> None:
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                LEAVE.format(imports=imports),
                str(rank),
                str(tmp_path / "store"),
            ],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        left, left_errors = ranks[0].communicate(timeout=LIMIT)
        stayed, _ = ranks[1].communicate("\n", timeout=LIMIT)
    finally:
        for each in ranks:
            each.kill()
    assert (ranks[0].returncode, left_errors) == (0, "")
    assert left.endswith("leaving with 1 pending\n")  # after what the gloo of torch 2.8 says
    assert ranks[1].returncode == 0
    assert stayed.startswith(("Aborted", "TransportError"))
    assert "rank 0" in stayed
