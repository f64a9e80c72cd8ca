"""The manifests of examples/kubernetes: what kubectl says of them, and that their commands train.

A pod is a process with namespaces of its own: of processes, mounts, names and the network.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import namespaces
import pytest
from namespaces import Switch
from ranks import LIMIT, eventually

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[3] / "examples" / "kubernetes"
MANIFESTS = sorted(each.name for each in FOLDER.glob("*.yaml"))
SECRETS = {("gradwire", "secret"): "MDEyMzQ1Njc4OWFiY2RlZg=="}
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


@dataclass(frozen=True)
class Pod:
    """A pod of one container, and what its controller adds."""

    name: str
    address: str  # the name by which the other pods find it
    container: dict[str, Any]
    added: Mapping[str, str]  # environment variables

    @property
    def environment(self) -> dict[str, str]:
        """The container's variables; the controller's come last, so that none refers to them."""
        values: dict[str, str] = {}
        for each in self.container["env"]:
            reference = each.get("valueFrom", {}).get("secretKeyRef")
            values[each["name"]] = (
                SECRETS[reference["name"], reference["key"]]
                if reference
                else expanded(each["value"], values)
            )
        return {**values, **self.added}

    @property
    def command(self) -> list[str]:
        """The program and its arguments."""
        return [expanded(each, self.environment) for each in self.container["command"]]


def expanded(text: str, values: Mapping[str, str]) -> str:
    """$(NAME) is a variable's value, if it has one, and $$ is $."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else values.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^()]*)\)", value, text)


def documents(manifest: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / manifest).read_text()))


def job_pods() -> list[Pod]:
    """The pods of the Indexed Job. The headless service names those that its selector fits."""
    service, job = documents("indexed-job.yaml")
    name, spec = job["metadata"]["name"], job["spec"]
    inside = spec["template"]["spec"]
    assert spec["completions"] == spec["parallelism"]
    assert service["spec"]["selector"] == {"job-name": name}  # a label that the Job's pods have
    assert (service["spec"]["clusterIP"], service["metadata"]["name"]) == (
        "None",
        inside["subdomain"],
    )
    (container,) = inside["containers"]
    return [
        Pod(
            f"{name}-{index}",
            f"{name}-{index}.{inside['subdomain']}",
            container,
            {"JOB_COMPLETION_INDEX": str(index)},
        )
        for index in range(spec["completions"])
    ]


def pytorchjob_pods() -> list[Pod]:
    """The pods of the PyTorchJob, with what Kubeflow's trainer 1 sets (its envvar.go)."""
    (job,) = documents("pytorchjob.yaml")
    name, replicas = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
    count = sum(each["replicas"] for each in replicas.values())
    added = {"MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": str(count)}
    pods: list[Pod] = []
    for kind in ("Master", "Worker"):
        (container,) = replicas[kind]["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        for index in range(replicas[kind]["replicas"]):
            pod = f"{name}-{kind.lower()}-{index}"
            pods.append(Pod(pod, pod, container, {**added, "RANK": str(len(pods))}))
    return pods


PODS: dict[str, Callable[[], list[Pod]]] = {
    "indexed-job.yaml": job_pods,
    "pytorchjob.yaml": pytorchjob_pods,
}


def test_variables_are_expanded_as_kubernetes_does() -> None:
    values = {"A": "1", "B": "$(A)"}
    assert expanded("$(A)-$(B)-$(C)-$$(A)-$A", values) == "1-$(A)-$(C)-$(A)-$A"


def known_to_kubectl(document: dict[str, Any]) -> dict[str, Any]:
    """The document, but a PyTorchJob as a Job of its pods: kubectl knows no other part of it."""
    if document["kind"] != "PyTorchJob":
        return document
    master, worker = document["spec"]["pytorchReplicaSpecs"].values()
    assert master["template"] == worker["template"]
    spec = {"template": master["template"]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": document["metadata"], "spec": spec}


def is_within(given: Any, shown: Any) -> bool:
    """Whether all that is given is shown, beside what was added."""
    if isinstance(given, dict):
        return all(is_within(value, shown.get(key)) for key, value in given.items())
    if isinstance(given, list):
        return all(map(is_within, given, shown))
    return bool(given == shown)


@needs_kubectl
@pytest.mark.parametrize("manifest", MANIFESTS)
def test_kubectl_knows_every_field(manifest: str, tmp_path: Path) -> None:
    """Without a cluster: it drops fields that its types have not, when it changes something."""
    changes = {"Service": ("selector", "job-name=train"), "Job": ("env", "A=b")}
    path = tmp_path / "one.json"
    for each in map(known_to_kubectl, documents(manifest)):
        path.write_text(json.dumps(each))
        what, change = changes[each["kind"]]
        command = ["kubectl", "set", what, "--local", "-f", str(path), "-o", "json", change]
        shown = json.loads(subprocess.check_output(command, timeout=LIMIT))
        assert is_within(each, shown), shown


@needs_kubectl
@pytest.mark.parametrize("manifest", MANIFESTS)
def test_the_command_of_the_head_makes_the_secret(manifest: str) -> None:
    (command,) = re.findall(r"(?m)^# +(kubectl create secret .*)$", (FOLDER / manifest).read_text())
    made = subprocess.check_output(
        ["sh", "-c", f"{command} --dry-run=client -o json"], timeout=LIMIT
    )
    secret = json.loads(made)
    names = {(secret["metadata"]["name"], key) for key in secret["data"]}
    assert names == set(SECRETS)
    assert all(len(base64.b64decode(each)) >= 16 for each in secret["data"].values())


# What each pod runs: calls without end where the file `endless` lies, else one.
PROGRAM = """
import os, pathlib, sys
import gradwire, numpy as np

comm = gradwire.init(timeout=60)
endless = pathlib.Path("endless").exists()
try:
    while True:
        x = np.full(1000, comm.rank + 1, np.float32)
        comm.all_reduce(x)
        print(f"rank {comm.rank} of {comm.size}: the sum is {x[0]:g}", flush=True)
        if not endless:
            break
except gradwire.TransportError as error:
    sys.exit(f"rank {comm.rank} lost {error.peer}: {error}")
comm.close()
"""


class Cluster:
    """Pods that run on a host each, in one folder."""

    def __init__(self, pods: list[Pod], folder: Path) -> None:
        self.pods, self.folder = pods, folder
        self._network = Switch(len(pods))
        self._running: list[subprocess.Popen[bytes]] = []
        (folder / "train.py").write_text(PROGRAM)
        names = [f"10.77.0.{host + 1} {pod.address}" for host, pod in enumerate(pods)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def start(self) -> list[subprocess.Popen[bytes]]:
        """Starts all pods' containers, anew where they have ended."""
        self._running = [self._start(host, pod) for host, pod in enumerate(self.pods)]
        return self._running

    def _start(self, host: int, pod: Pod) -> subprocess.Popen[bytes]:
        kinds = ("--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        inside = 'hostname "$1" && mount --bind hosts /etc/hosts && shift && exec "$@"'
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self.log(host).open("wb") as log:
            return self._network.hosts[host].run(
                lambda: subprocess.Popen(
                    ["unshare", *kinds, "sh", "-c", inside, "sh", pod.name, *pod.command],
                    cwd=self.folder,
                    env={**os.environ, **pod.environment, "PATH": path},
                    stdout=log,
                    stderr=log,
                )
            )

    def log(self, host: int) -> Path:
        return self.folder / f"{self.pods[host].name}.log"

    def close(self) -> None:
        for each in self._running:
            each.kill()
            each.wait()
        self._network.close()


@pytest.fixture
def cluster(manifest: str, bare_environment: None, tmp_path: Path) -> Iterator[Cluster]:
    if namespaces.missing() is not None:
        pytest.skip(str(namespaces.missing()))
    pytest.importorskip("torch.distributed")
    with contextlib.closing(Cluster(PODS[manifest](), tmp_path)) as made:
        yield made


@pytest.mark.nightly
@pytest.mark.parametrize("manifest", MANIFESTS)
def test_pods_meet_name_one_that_is_killed_and_meet_when_started_anew(cluster: Cluster) -> None:
    endless = cluster.folder / "endless"
    endless.touch()
    pods = cluster.start()
    logs = [cluster.log(host) for host in range(4)]
    eventually(lambda: all("the sum is 10" in each.read_text() for each in logs))
    pods[2].kill()
    endless.unlink()
    assert [each.wait(LIMIT) != 0 for each in pods] == [True] * 4
    for rank in (0, 1, 3):
        assert f"rank {rank} lost 2: " in logs[rank].read_text()

    ended = [each.wait(LIMIT) for each in cluster.start()]
    texts = [each.read_text() for each in logs]
    assert ended == [0] * 4, texts
    for rank, text in enumerate(texts):
        assert text.count(f"rank {rank} of 4: the sum is 10\n") == 1
