"""The benchmark of RDMA: what it reads of perftest, and its goals."""

from __future__ import annotations

from typing import Any

import pytest

from bench.network import rdma, rdma_turns

BANDWIDTH = """
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    128            166.15             145.17               0.000145
"""
LATENCY = """
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]
 8       1000          9.77           5804.72      11.27              372.17         1088.78
"""


def test_perftests_average_bandwidth_and_median_latency_are_read() -> None:
    assert rdma_turns.number_in(BANDWIDTH, "ib_write_bw", 1 << 20) == 145.17
    assert rdma_turns.number_in(LATENCY, "ib_write_lat", 8) == 11.27
    assert rdma_turns.number_in("36.0835\n", "rdma", 8) == 36.0835
    with pytest.raises(ValueError, match="no line of 16 bytes"):
        rdma_turns.number_in(LATENCY, "ib_write_lat", 16)


def turns(what: str, nbytes: int, **numbers: list[float]) -> list[dict[str, Any]]:
    case = {"what": what, "nbytes": nbytes}
    return [
        {**case, "program": program, "number": number}
        for program, of_rounds in numbers.items()
        for number in of_rounds
    ]


def rows(*lines: dict[str, Any]) -> list[list[str]]:
    found = {"date": "2020-01-01", "machine": "a machine", "device": "rxe0", "rounds": 3}
    found |= {"command": "-m bench.network.rdma", "cases": rdma.cases_of(lines)}
    lines = rdma.document(found, "rdma").splitlines()[6:]
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


def test_ratios_are_of_one_round_and_decide() -> None:
    bandwidth = {
        "rdma": [90.0, 40.0, 99.0],
        "ib_write_bw": [100.0, 50.0, 100.0],
        "tcp": [300.0] * 3,
    }
    latency = {"rdma": [16.0] * 3, "ib_write_lat": [10.0] * 3, "ib_send_lat": [20.0] * 3}
    found = rows(
        *turns("bandwidth", 1 << 20, **bandwidth), *turns("latency", 8, **latency, tcp=[50.0] * 3)
    )
    assert found == [
        ["MiB/s, 1 MiB", "90.0", "100.0 ib_write_bw", "300.0", "0.90", "≥ 0.85", "yes"],
        ["µs one way, 8 B", "16.0", "10.0 ib_write_lat", "50.0", "1.60", "≤ 1.50", "no"],
        ["µs one way, 8 B", "16.0", "20.0 ib_send_lat", "50.0", "0.80", "–", "–"],
    ]
