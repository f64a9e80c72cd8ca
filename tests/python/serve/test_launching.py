"""Servers and replicas as processes: `gradwire serve`, `gradwire run --servers`, deaths."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import gradwire
import numpy as np
import pytest
from gradwire import serve
from ranks import LIMIT

TRAIN = """
import os, signal, sys, time
import numpy as np
from gradwire import serve
rank = int(os.environ["RANK"])
ones = [np.ones(100_000, np.float32)]
values = [np.zeros(100_000, np.float32)]
ps = serve.connect(values, serve.SGD(lr=1.0), timeout=60)
"""


def run(tmp_path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "train.py"
    path.write_text(TRAIN + text)
    return subprocess.run(
        [sys.executable, "-m", "gradwire", "run", *options, str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def test_servers_begin_and_end_with_the_ranks(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "for _ in range(5): ps.push(ones)\n"
        "ps.wait(15)\nps.pull(values)\nassert values[0].max() <= -15, values\n"
        "assert os.environ['WORLD_SIZE'] == '3' and ps.shards == 2\nps.close()\n",
        *("-n", "3", "--servers", "2"),
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("goes_on", [["--keep-going"], ["--min", "1"]])
def test_a_replica_that_is_killed_ends_alone_and_comes_back(
    tmp_path: Path, goes_on: list[str]
) -> None:
    ended = run(
        tmp_path,
        f"mark = {str(tmp_path / 'mark')!r}\n"
        "if rank == 1 and not os.path.exists(mark):\n"
        "    open(mark, 'w').close()\n"
        "    ps.push(ones, async_op=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "for _ in range(5): ps.push(ones)\n"
        "ps.wait(10)\n"
        "print(f'rank {rank}: {len(ps.stats()[0][\"gone\"])} gone')\n"
        "ps.close()\n",
        *("-n", "2", "--servers", "1", *goes_on, "--restarts", "1"),
    )
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 of 2" in ended.stderr
    assert "starting it anew (1 of 1)" in ended.stderr
    assert ended.stdout.count("1 gone") == 2


def test_without_restarts_the_others_go_on(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "if rank == 0: sys.exit(3)\nps.push(ones)\nps.close()\nprint('done')\n",
        *("-n", "2", "--servers", "1", "--keep-going"),
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    assert "going on with the other" in ended.stderr


def test_a_server_that_died_is_told(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "for each in os.listdir('/proc'):\n"
        "    name = f'/proc/{each}/'\n"
        "    if each.isdigit() and f'PPid:\\t{os.getppid()}\\n' in open(name + 'status').read():\n"
        "        if b'serve' in open(name + 'cmdline', 'rb').read().split(b'\\0'):\n"
        "            os.kill(int(each), signal.SIGKILL)\n"
        "while True: ps.push(ones)\n",
        *("-n", "1", "--servers", "1"),
    )
    assert ended.returncode == 1, ended.stderr
    assert "the server of shard 0 (process " in ended.stderr
    assert "with exit code -9" in ended.stderr


def test_restarts_go_with_keep_going(tmp_path: Path) -> None:
    ended = run(tmp_path, "", "-n", "1", "--restarts", "1")
    assert ended.returncode == 2
    assert "--keep-going" in ended.stderr


def test_a_stopped_replica_holds_up_nobody(bare_environment: None, tmp_path: Path) -> None:
    with serve.Server(2) as server:
        path = tmp_path / "train.py"
        path.write_text(TRAIN + "print('ready', flush=True)\nwhile True: ps.push(ones)\n")
        environment = {**os.environ, "RANK": "7", "GRADWIRE_STORE": server.store}
        with subprocess.Popen(
            [sys.executable, str(path)], env=environment, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            other.send_signal(signal.SIGSTOP)
            values = [np.zeros(100_000, np.float32)]
            with serve.connect(values, serve.SGD(lr=1.0), store=server.store) as ps:
                for _ in range(20):
                    ps.push([np.ones(100_000, np.float32)])
                    ps.pull(values)
                other.kill()
                other.wait()
                while not any("replica 7" in each for each in ps.stats()[0]["gone"]):
                    ps.pull(values)


def test_a_server_that_is_killed_is_named(
    bare_environment: None, job_secret: str, tmp_path: Path
) -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gradwire", "serve", "--store", store, "--shards", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        values = [np.zeros(1000, np.float32)]
        ps = serve.connect(values, serve.SGD(lr=1.0), store=store)
        server.kill()
        with pytest.raises(gradwire.TransportError, match=rf"shard 0 \(.*:{server.pid}\)"):
            push_often(ps, values)
        ps.close()
        server.wait()


def push_often(ps: serve.ParameterServer, values: list[np.ndarray]) -> None:
    for _ in range(1000):
        ps.push(values)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
