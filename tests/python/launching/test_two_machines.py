"""The program of the page for two plain machines, on two hosts."""

import os
import subprocess
import sys
from pathlib import Path

import namespaces
import pytest
from hosts import Network
from ranks import LIMIT

PAGE = Path(__file__).parents[3] / "docs" / "two_machines.md"
MISSING = namespaces.missing()


@pytest.mark.nightly
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_two_machines_train_as_the_page_says(tmp_path: Path) -> None:
    (program,) = (each.split("```")[0] for each in PAGE.read_text().split("```python\n")[1:])
    (tmp_path / "train.py").write_text(program)
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef0123456789abcdef")
    torchrun = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-port 29500"
    network = Network(2)

    def start(host: int) -> "subprocess.Popen[str]":
        options = [*torchrun.split(), "--master-addr", "10.77.0.1", "--node-rank", str(host)]
        return subprocess.Popen(
            [sys.executable, *options, str(tmp_path / "train.py")],
            env={**os.environ, "GRADWIRE_SECRET_FILE": str(secret)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    machines = [network.hosts[host].run(lambda host=host: start(host)) for host in range(2)]
    try:
        printed = [each.communicate(timeout=LIMIT)[0] for each in machines]
        assert [each.returncode for each in machines] == [0, 0], printed
        assert all("2 machines, same weights: True" in each for each in printed), printed
    finally:
        for each in machines:
            each.kill()
        network.close()
