"""gradwire beside other libraries between two namespaces: what is measured, and its report."""

from __future__ import annotations

import argparse
from typing import Any

import namespaces
import pytest

from bench.libraries import between_hosts, between_hosts_report
from bench.libraries.between_hosts_report import SEALED
from bench.libraries.peer_teams import GRADWIRE


def case(busy: int = 0, **seconds: list[float]) -> dict[str, Any]:
    return {"congestion_control": "bbr", "busy": busy, "bytes": 1 << 16, "seconds": seconds}


def test_the_best_other_is_no_gradwire():
    found = case(gradwire=[4e-6, 2e-6], sealed=[1e-6, 1e-6], gloo=[9e-6, 9e-6], mpich=[8e-6, 2e-6])
    assert between_hosts_report.to_best(found) == 1.5


def test_a_row_says_congestion_control_load_and_times():
    found = {"cases": [case(busy=4, gradwire=[1e-6] * 3, gloo=[1e-6, 2e-6, 3e-6])]}
    *_, row = between_hosts_report.table(found)
    assert row == "| bbr, 4 busy loops | 64 KiB | 1 (1 to 1) | 2 (1 to 3) | 2.00× |"


@pytest.mark.nightly
@pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))
def test_ranks_of_two_namespaces_reduce_over_the_link_of_that_congestion_control():
    options = argparse.Namespace(libraries=[GRADWIRE, SEALED], busy=[0, 1], sizes=[4], rounds=2)
    plain, beside = between_hosts.measure(options, "cubic")
    assert [len(each) for each in plain["seconds"].values()] == [2, 2]
    assert (plain["busy"], beside["busy"]) == (0, 1)
