"""The doctor's table: every section, every absence with its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from gradwire import _core
from gradwire._host import interfaces, transport_kinds
from gradwire._tools import doctor
from ranks import LIMIT


def test_json_holds_every_section():
    command = [sys.executable, "-m", "gradwire", "doctor", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    checks = json.loads(ended.stdout)["checks"]
    found = {(check["section"], check["name"]): check for check in checks}
    for name in transport_kinds.KINDS:
        usable = transport_kinds.why_not(name) is None
        assert found["transports", name]["ok"] is usable
    active = found["instruction sets", _core.active_instruction_set()]
    assert active["detail"] == "active"
    assert found["network", "lo"]["detail"] in ("127.0.0.1", "::1")
    for place in [("devices", "CUDA"), ("devices", "NCCL"), ("torch", "DDP hook")]:
        assert isinstance(found[place]["ok"], bool)
    for place in [("memory", "memory-lock limit"), ("system", "cores")]:
        assert found[place]["detail"]


def test_what_is_absent_says_why():
    absent = [check for check in doctor.checks() if check.ok is False]
    assert all(len(check.detail) > 8 for check in absent)


def test_the_table_has_a_line_for_each_check():
    checks = doctor.checks()
    table = doctor.as_table(checks)
    assert all(check.name in table for check in checks)
    assert [line for line in table.splitlines() if line == "transports"]


def test_an_absent_torch_is_explained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_installed", lambda package: None)
    (check,) = doctor._torch()
    assert check.ok is False
    assert "pip install" in check.detail


@pytest.mark.parametrize(("version", "ok"), [("2.3.1", False), ("2.13.0+cpu", True)])
def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, ok: bool):
    monkeypatch.setattr(doctor, "_installed", lambda package: version)
    (check,) = doctor._torch()
    assert check.ok is ok


def test_the_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRADWIRE_SECRET", "open sesame, open sesame")
    assert "sesame" not in doctor.as_table(doctor.checks())


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a launcher."""
    names = [name for name in os.environ if name.startswith(("GRADWIRE_", "TORCHELASTIC_"))]
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", *names):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def detail(section: str, name: str) -> str:
    (found,) = [each for each in doctor.checks() if (each.section, each.name) == (section, name)]
    return found.detail


JOINS = {
    "nothing": ({}, "a tcp:// store is refused"),
    "a secret": ({"GRADWIRE_SECRET": "0123456789abcdef"}, "whoever has the secret"),
    "a short secret": ({"GRADWIRE_SECRET": "short"}, "because the secret has 5 bytes"),
    "torchrun": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        "nobody joins by torch's store at 127.0.0.1:29500",
    ),
    "insecure": ({"GRADWIRE_INSECURE": "1"}, "everybody who reaches the store"),
    "insecure?": ({"GRADWIRE_INSECURE": "perhaps"}, "because GRADWIRE_INSECURE='perhaps'"),
}


@pytest.mark.parametrize("what", JOINS)
def test_who_may_join(nowhere: pytest.MonkeyPatch, what: str):
    variables, expected = JOINS[what]
    for name, value in variables.items():
        nowhere.setenv(name, value)
    assert expected in detail("joins", "who may join")


def test_the_interface_has_its_reason(nowhere: pytest.MonkeyPatch):
    nowhere.setattr(interfaces, "interfaces", lambda: [interfaces.Interface("ib0", "10.1.2.3")])
    nowhere.setattr(interfaces, "address_towards", lambda host, port: f"10.1.2.{port}")
    where = "ranks on several hosts"
    assert detail("network", where).startswith("use ib0 (10.1.2.3): ")
    nowhere.setenv("GRADWIRE_STORE", "tcp://leader:3")
    assert detail("network", where) == "use ib0 (10.1.2.3): it reaches the store"
    nowhere.setenv("GRADWIRE_SOCKET_IFNAME", "ib")
    assert detail("network", where) == "use ib0 (10.1.2.3): GRADWIRE_SOCKET_IFNAME=ib"
    nowhere.setenv("GRADWIRE_SOCKET_IFNAME", "eth")
    assert detail("network", where).startswith("because GRADWIRE_SOCKET_IFNAME='eth'")
