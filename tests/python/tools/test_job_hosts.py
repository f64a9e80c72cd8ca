"""`gradwire doctor --job` under a launcher: all hosts of a job, and what lies between them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import namespaces
import pytest
from gradwire import Communicator
from gradwire._bootstrap import launch_info
from gradwire._tools import job_hosts
from gradwire._tools.job_hosts import Found, Host, Link
from gradwire._tools.status import communicators
from hosts import Network
from ranks import LIMIT

MISSING = namespaces.missing()
SAME = {"gradwire": "1", "torch": "2.4"}


def host(name: str, rank: int, **other: Any) -> Host:
    setting = {"interface": "eth0", "address": f"10.0.0.{rank}", "mtu": 1500, "cores": 8}
    return Host(name, [rank], **{**setting, "settings": SAME, **other})


@pytest.mark.parametrize("hosts", range(1, 10))
def test_each_pair_meets_once_and_no_host_is_in_two_of_a_round(hosts: int) -> None:
    met = [*job_hosts.rounds(hosts)]
    for pairs in met:
        places = [*itertools.chain(*pairs)]
        assert len(places) == len({*places})
    assert sorted(itertools.chain(*met)) == [*itertools.combinations(range(hosts), 2)]
    assert len(met) <= hosts


def test_what_differs_and_what_is_slow_is_said() -> None:
    other = {**SAME, "torch": "2.5"}
    hosts = [host("a", 0), host("b", 1, settings=other, mtu=9000), host("c", 2)]
    rates = {(0, 1): 1e6, (0, 2): 1.25e8, (1, 2): 1.25e8}
    links = [Link(pair, "tcp", 0.08, rate) for pair, rate in rates.items()]
    text = job_hosts.as_text(Found(hosts, links, []))
    assert "torch differs: 2.4 on a, c; 2.5 on b" in text
    assert "MTU differs: 1500 on a, c; 9000 on b" in text
    assert "gradwire differs" not in text
    rows = {tuple(line.split()[:2]): line for line in text.splitlines()}
    assert rows["a", "b"].endswith("80.000 ms  8 Mbit/s (slow)")
    assert rows["a", "c"].split()[-2:] == ["1,000", "Mbit/s"]


def test_of_many_links_the_slowest_are_shown() -> None:
    hosts = [host(f"h{number}", number) for number in range(10)]
    pairs = [*itertools.combinations(range(10), 2)]
    links = [Link(pair, "tcp", 0.001, 1e6 * (1 + at)) for at, pair in enumerate(pairs)]
    lines = job_hosts.as_text(Found(hosts, links, [])).splitlines()
    assert any(line.startswith("h0       h1 ") for line in lines)
    assert not any(line.startswith("h8       h9 ") for line in lines)
    assert "17 faster ones; median 184 Mbit/s" in lines


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_hosts_are_measured_as_a_training_finds_them() -> None:
    network = Network(2)
    try:
        network.hosts[1].ip("link set eth0 mtu 1400")

        def body(comm: Communicator, pipe: Any) -> Found | None:
            return job_hosts.survey(comm)

        found, *others = network.values([0, 0, 1], body)
    finally:
        network.close()
    assert others == [None, None]
    one, other = found.hosts
    assert (one.ranks, other.ranks) == ([0, 1], [2])
    assert (one.interface, one.address, one.mtu) == ("eth0", "10.77.0.1", 1500)
    assert (other.address, other.mtu) == ("10.77.0.2", 1400)
    assert one.name != other.name
    (link,) = found.links
    assert (link.hosts, link.transport) == ((0, 1), "tcp")
    assert 0 < link.round_trip < 10
    assert link.rate > 1e5
    assert "MTU" in job_hosts.differing(found.hosts)
    assert "Python" not in job_hosts.differing(found.hosts)
    assert json.loads(job_hosts.to_json(found))["links"][0]["transport"] == "tcp"


def test_the_command_meets_the_ranks_of_its_launcher() -> None:
    command = [*("run", "-n", "2", "-m", "gradwire", "doctor", "--job")]
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", *command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "All ranks are on one host" in done.stdout
    assert done.stdout.splitlines()[1].split()[1:3] == ["0,1", "lo"]


def test_who_is_started_by_hand_beside_ranks_disturbs_nobody(
    bare_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not launch_info.started_by_launcher()
    container = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    for name, value in container.items():
        monkeypatch.setenv(name, value)
    assert not launch_info.started_by_launcher()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert launch_info.started_by_launcher()


def test_ranks_of_several_hosts_are_one_job() -> None:
    def seen(rank: int, peer: int) -> Any:
        of_job = {"job": "j", "tag": 1, "communicator": 0, "size": 2, "local_size": 1}
        doing = {"activity": "call", "state": "S", "seconds": 3.0, "operation": "all_reduce"}
        return {**of_job, **doing, "rank": rank, "pid": 7, "peer": peer, "about": "", "calls": 1}

    (group,) = communicators([seen(0, 1), seen(1, 0)], where="these 2 hosts")
    assert group.missing() == []
    assert "2 of them found on these 2 hosts" in group.as_table()
    (sentence,) = group.conclusions()
    assert sentence.startswith("Ranks 0 and 1 wait for each other")
