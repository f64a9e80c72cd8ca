"""The GRADWIRE_* variables: each is checked before ranks meet."""

from __future__ import annotations

from pathlib import Path

import gradwire
import pytest
from gradwire import serve
from gradwire._base import environment
from gradwire._base.environment import VARIABLES
from gradwire._errors import InvalidArgument

# Of each variable, values that it cannot have; secrets are checked where they are found.
WRONG = {
    "GRADWIRE_STORE": ["host:1", "tcp://host", "tcp://host:nan", "unix://", "http://host:1"],
    "GRADWIRE_JOB": ["a\x07b"],
    "GRADWIRE_INSECURE": ["nan", "-3", "2"],
    "GRADWIRE_ENCRYPTION": ["yes", "1"],
    "GRADWIRE_TRANSPORT": [",,,"],
    "GRADWIRE_IB_HCA": [",,,", "^", "^="],
    "GRADWIRE_IB_LINK_LAYER": ["token ring"],
    "GRADWIRE_IB_GID_INDEX": ["nan", "-3", "1.5"],
    "GRADWIRE_IB_MTU": ["nan", "-3", "1500"],
    "GRADWIRE_TRAFFIC_CLASS": ["nan", "-3", "256"],
    "GRADWIRE_RATE": ["nan", "-3", "200", "1gbit,25:00-26:00=1gbit", "1gbit,2gbit", "8-18=1gbit"],
    "GRADWIRE_TCP_CONGESTION": ["none such", "x" * 99],
    "GRADWIRE_IB_SL": ["nan", "-3", "16"],
    "GRADWIRE_IB_TIMEOUT": ["nan", "-3", "0"],
    "GRADWIRE_LINK": ["nan", "-3", ",,,", "1gbit,nan"],
    "GRADWIRE_SOCKET_IFNAME": [",,,", "=", "^=,"],
    "GRADWIRE_PORT": ["nan", "-3", "0", "65536"],
    "GRADWIRE_ADVERTISE": ["a:b", "a:0", "a:65536", ":1", "a/b", "u@h", "a:"],
    "GRADWIRE_RELAY": ["a:b", "a", ":1"],
    "GRADWIRE_SERVERS": ["nan", "-3", "0"],
    "GRADWIRE_JOIN": ["nan", "-3"],
    "GRADWIRE_MAX_RANKS": ["nan", "-3", "0", "1e9"],
    "GRADWIRE_MIN_RANKS": ["nan", "-3", "0", "1e9"],
    "GRADWIRE_SLOT_ENDS": ["nan", "-3", "inf", "tomorrow"],
    "GRADWIRE_SLOT_MARGIN": ["nan", "-3", "inf"],
    "GRADWIRE_SITE": ["Zürich", "a\tb", 65 * "x"],
    "GRADWIRE_TCP_STREAMS": ["nan", "-3", "0", "17"],
    "GRADWIRE_TCP_TIMEOUT_SECONDS": ["nan", "-3", "0.5", "1e9"],
    "GRADWIRE_STALL_SECONDS": ["nan", "-3", "inf"],
    "GRADWIRE_MODEL": ["/dev/zero"],
    "GRADWIRE_CUDA_SO": ["/dev/zero"],
    "GRADWIRE_GPU_LINKS": ["nan", "host+nccl"],
    "GRADWIRE_NCCL_SO": ["/dev/zero"],
    "GRADWIRE_NCCL_BLOCKING": ["nan", "-3"],
    "GRADWIRE_TRACE": ["/dev/zero"],
    "GRADWIRE_METRICS": ["nan", "-3", "65536", "host", "host:nan", "/dev/zero"],
    "GRADWIRE_SIMD": ["nan", "AVX2"],
}
# What they can have, where the default is not one.
RIGHT = {
    "GRADWIRE_STORE": ["tcp://host:1", "tcp://[::1]:29500", "torch://host:2", "unix://a/b"],
    "GRADWIRE_TRANSPORT": ["tcp", "shm, tcp"],
    "GRADWIRE_SOCKET_IFNAME": ["eth", "^docker,lo", "=eth0", "^=eth3"],
    "GRADWIRE_LINK": ["1gbit", "100mbit,100us"],
    "GRADWIRE_RATE": ["200mbit", "200mbit,08:00-18:00=50mbit", "22:00-06:00=1gbit"],
    "GRADWIRE_TCP_CONGESTION": ["reno"],
    "GRADWIRE_TRACE": ["/there/is/no/such/folder", "/tmp"],
    "GRADWIRE_METRICS": ["9400", "0", "0.0.0.0:9400", "[::1]:9400", "./metrics"],
    "GRADWIRE_MODEL": ["default", "/there/is/no/such/file"],
    "GRADWIRE_STALL_SECONDS": ["0", "0.5", "1e6"],
    "GRADWIRE_INSECURE": ["1", "YES", "off"],
    "GRADWIRE_MAX_RANKS": ["1", "4096"],
    "GRADWIRE_TCP_STREAMS": ["1", "16", "auto"],
    "GRADWIRE_PORT": ["1", "65535"],
    "GRADWIRE_RELAY": ["node7:29400", "[2001:db8::1]:29400"],
    "GRADWIRE_ADVERTISE": ["none", "node7", "node7:29400", "192.0.2.1", "[2001:db8::1]:29400"],
}
SECRETS = {"GRADWIRE_SECRET", "GRADWIRE_SECRET_FILE"}


def test_each_variable_has_a_parser() -> None:
    assert environment._PARSERS.keys() == VARIABLES.keys()
    assert WRONG.keys() | SECRETS | {"GRADWIRE_EXIT_FILE"} == VARIABLES.keys()


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, each in WRONG.items() for v in each])
def test_no_rank_meets_another_with_a_wrong_value(
    name: str, value: str, bare_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    for meet in (
        lambda: gradwire.init(rank=0, ranks=2, store="unix://nobody", timeout=60),
        lambda: gradwire.join(store="unix://nobody", timeout=60),
        lambda: serve.Server(store="unix://nobody", timeout=60),
    ):
        with pytest.raises(InvalidArgument, match=f"^{name}="):
            meet()


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, each in RIGHT.items() for v in each])
def test_right_values_are_taken(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    environment.check(name)


@pytest.mark.parametrize("value", ["short", "", "/dev/zero"])
def test_secrets_are_checked_before_ranks_meet(
    value: str, bare_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in SECRETS:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(gradwire.RendezvousError, match=r"secret|SECRET"):
                gradwire.init(rank=0, ranks=2, store="unix://nobody", timeout=60)
