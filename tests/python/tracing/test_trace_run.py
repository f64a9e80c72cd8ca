"""`gradwire run --trace`, and training under torch: steps, buckets, torch.profiler beside them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from gradwire._trace import merge, parts
from ranks import LIMIT
from traces import encloses, of, read

DIES = """
import os, signal, numpy as np, gradwire
comm = gradwire.init(timeout=60)
for i in range(20):
    if i == 10 and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(np.ones(1000, np.float32), algorithm="ring")
"""

TRAINS = """
import os, sys, torch, torch.distributed as dist, gradwire.torch
from torch.profiler import ProfilerActivity, profile, record_function
torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
state = gradwire.torch.register(ddp, "int8")
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
x = torch.randn(32, 64)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for step in range(4):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        other.step()
        optimizer.step()
    with record_function("marked"):
        state.communicator.all_reduce(torch.ones(7), algorithm="ring")
if state.communicator.rank == 0:
    profiler.export_chrome_trace(sys.argv[1])
print(state.communicator.traffic.bytes_sent, flush=True)
state.close()
dist.destroy_process_group()
"""


def launch(
    script: Path, text: str, *options: str, to: str = ""
) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    command = [sys.executable, "-m", "gradwire", "run", *options, str(script), to]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


def test_a_killed_rank_is_missing_and_the_others_waited_for_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    ended = launch(tmp_path / "dies.py", DIES, "-n", "3", "--trace", str(path))
    assert ended.returncode == 137
    assert f"{path}: 2 ranks" in ended.stderr
    assert "missing: rank 1" in ended.stderr
    loaded = read(path)
    assert loaded["gradwire"]["missing"] == [1]
    for rank in (0, 2):
        assert [each for each in of(loaded, "call", rank) if each["args"].get("failed")]


def test_a_program_without_gradwire_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    ended = launch(tmp_path / "none.py", "print('hello')", "-n", "1", "--trace", str(path))
    assert ended.returncode == 0
    assert "no trace" in ended.stderr
    assert not path.exists()


def test_parts_stay_where_the_file_cannot_be_written(tmp_path: Path) -> None:
    ended = launch(tmp_path / "dies.py", DIES, "-n", "3", "--trace", str(tmp_path))
    folder = Path(ended.stderr.rpartition("gradwire trace merge ")[2].removesuffix(" FILE\n"))
    try:
        assert "no trace: [Errno 21]" in ended.stderr
        assert merge.write(parts.read(folder), tmp_path / "out.json")["ranks"] == [0, 2]
    finally:
        shutil.rmtree(folder)


def test_steps_of_training_enclose_their_buckets(tmp_path: Path) -> None:
    path, profile = tmp_path / "out.json", tmp_path / "profile.json"
    script = tmp_path / "trains.py"
    ended = launch(script, TRAINS, "-n", "2", "--trace", str(path), to=str(profile))
    assert ended.returncode == 0, ended.stderr
    loaded = read(path)
    for rank in (0, 1):
        spans = of(loaded, "program", rank)
        steps = [each for each in spans if each["name"].startswith("step ")]
        assert [each["name"] for each in steps] == [f"step {i}" for i in range(4)]
        for name in ("forward", "backward", "optimizer", "wait for averages"):
            named = [each for each in spans if each["name"] == name]
            assert len(named) == 4
            assert all(map(encloses, steps, named))
        buckets = [each for each in of(loaded, "call", rank) if "bucket" in each["name"]]
        names = {name for each in buckets for name in each["args"]["parameters"]}
        assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}
        for each in buckets:
            assert any(encloses(step, each) for step in steps)
        int8 = [each["args"] for each in buckets if each["args"]["codec"] == "int8"]
        assert int8
        assert all(each["bytes_before"] > 3 * each["bytes_after"] for each in int8)
    _beside_torch(profile, loaded)


def _beside_torch(profile: Path, loaded: dict[str, object]) -> None:
    """torch.profiler's range around a call encloses our record of it, on one time axis."""
    theirs = json.loads(profile.read_text())
    assert theirs["baseTimeNanoseconds"] == loaded["baseTimeNanoseconds"]
    (marked,) = [each for each in theirs["traceEvents"] if each.get("name") == "marked"]
    (ours,) = [each for each in of(loaded, "call", 0) if each["args"]["input_bytes"] == 28]
    slack = 200.0  # microseconds: torch converts from the processor's counter
    assert marked["ts"] - slack <= ours["ts"]
    assert ours["ts"] + ours["dur"] <= marked["ts"] + marked["dur"] + slack
