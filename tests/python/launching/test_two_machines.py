"""What the page for two plain machines says, on two hosts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from hosts import Network
from ranks import LIMIT

PAGE = Path(__file__).parents[3] / "docs" / "two_machines.md"
MISSING = namespaces.missing()
TORCHRUN = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-port 29500"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(2)
    yield made
    made.close()


def run(network: Network, tmp_path: Path, *program: str) -> list[str]:
    """What the program prints on each machine."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef0123456789abcdef")

    def start(host: int) -> "subprocess.Popen[str]":
        options = [*TORCHRUN.split(), "--master-addr", "10.77.0.1", "--node-rank", str(host)]
        cache = {"XDG_CACHE_HOME": str(tmp_path / f"cache-{host}")}
        return subprocess.Popen(
            [sys.executable, *options, *program],
            env={**os.environ, **cache, "GRADWIRE_SECRET_FILE": str(secret)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    machines = [network.hosts[host].run(lambda host=host: start(host)) for host in range(2)]
    try:
        printed = [each.communicate(timeout=LIMIT)[0] for each in machines]
        assert [each.returncode for each in machines] == [0, 0], printed
    finally:
        for each in machines:
            each.kill()
    return printed


def test_two_machines_train_as_the_page_says(network: Network, tmp_path: Path) -> None:
    (program,) = (each.split("```")[0] for each in PAGE.read_text().split("```python\n")[1:])
    (tmp_path / "train.py").write_text(program)
    printed = run(network, tmp_path, str(tmp_path / "train.py"))
    assert all("2 machines, same weights: True" in each for each in printed), printed


def test_two_machines_tune_their_link(network: Network, tmp_path: Path) -> None:
    """The first one keeps the model of both, and finds it when it starts a job with the other."""
    printed = run(network, tmp_path, "-m", "gradwire", "tune", "--seconds", "1")
    (path,) = (tmp_path / "cache-0" / "gradwire" / "models").iterdir()
    assert f"saved in {path}" in printed[0]
    assert "between.beta" in json.loads(path.read_text())["parameters"]
    assert not (tmp_path / "cache-1").exists()
    (tmp_path / "job.py").write_text(
        "import logging, gradwire\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "gradwire.init().close()\n"
    )
    first, _ = run(network, tmp_path, str(tmp_path / "job.py"))
    assert f"is decided by {path}" in first
