"""GRADWIRE_METRICS: what ranks count, as Prometheus reads it, at a port and in files."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradwire
import namespaces
import numpy as np
import pytest
from gradwire import Communicator
from gradwire._host import tcp_sockets
from gradwire._metrics import exporter, places, text
from gradwire._metrics.source import link_to
from hosts import Network
from prometheus_client.parser import text_string_to_metric_families
from ranks import LIMIT, eventually, outcomes, run

MISSING = namespaces.missing()
ROOT = Path(__file__).parents[3]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counts at a free port, until the test is over."""
    monkeypatch.setenv("GRADWIRE_METRICS", "0")
    yield
    exporter.end()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Counts in files there."""
    monkeypatch.setenv("GRADWIRE_METRICS", f"{tmp_path}/")
    yield tmp_path
    exporter.end()


def parsed(shown: str) -> Samples:
    """The samples as prometheus_client reads them; each family has a type and a meaning."""
    found: Samples = {}
    for family in text_string_to_metric_families(shown):
        assert family.documentation
        assert family.type in ("counter", "gauge")
        for each in family.samples:
            key = (each.name, tuple(sorted(each.labels.items())))
            assert key not in found, "a sample twice"
            found[key] = each.value
    return found


def value(samples: Samples, name: str, **labels: object) -> float:
    """The sum of the samples of that name that have these labels."""
    wanted = {(label, str(each)) for label, each in labels.items()}
    found = [each for key, each in samples.items() if key[0] == name and wanted <= {*key[1]}]
    assert found, (name, labels, samples)
    return sum(found)


def fetched(path: str = "/metrics") -> str:
    place = str(exporter._exporter.place)  # type: ignore[union-attr]
    with urllib.request.urlopen(place.replace("/metrics", path), timeout=LIMIT) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def calls(comm: Communicator) -> tuple[int, int]:
    x = np.ones(1000, np.float32)
    for _ in range(3):
        comm.all_reduce(x)
    comm.all_reduce(x, codec="int8", feedback=False)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.recv(x, 0)
    comm.barrier()
    return comm.traffic.bytes_sent, comm.traffic.frames_sent


def test_prometheus_reads_what_ranks_count(port: None) -> None:
    traffic = run(2, calls, transport="tcp")
    found = parsed(fetched())
    for rank in range(2):
        plain = {"rank": rank, "collective": "all_reduce", "codec": "none"}
        assert value(found, "gradwire_calls_total", **plain) in (3, 4)  # with the barrier's
        assert value(found, "gradwire_call_input_bytes_total", **plain) == 12_000
        assert value(found, "gradwire_failed_calls_total", rank=rank) == 0
        assert value(found, "gradwire_call_seconds_total", **plain) > 0
        assert value(found, "gradwire_sent_bytes_total", rank=rank) == traffic[rank][0]
        sent = value(found, "gradwire_sent_bytes_total", rank=rank, link="within host")
        assert sent == value(found, "gradwire_received_bytes_total", rank=1 - rank)
        assert value(found, "gradwire_encode_seconds_total", rank=rank) > 0
        assert value(found, "gradwire_decode_seconds_total", rank=rank) > 0
        assert value(found, "gradwire_info", rank=rank) == 1
    codec = {name: each for name, each in found.items() if name[0] == "gradwire_codec_ratio"}
    ratios = {dict(labels)["codec"]: each for (_, labels), each in codec.items()}
    (int8,) = (each for name, each in ratios.items() if name.startswith("int8"))
    assert 3 < int8 <= 4
    assert 0.9 < ratios["none"] <= 1.01
    assert value(found, "gradwire_sent_messages_total", rank=0, peer=1) == 1
    assert value(found, "gradwire_received_messages_total", rank=1, peer=0) == 1


def test_a_call_counts_for_the_codec_that_was_asked_for(port: None) -> None:
    """Between sites, of which there is one, it encodes nothing."""

    def body(comm: Communicator) -> None:
        comm.all_reduce(np.ones(1000, np.float32), codec="int8:between=sites", feedback=False)

    run(2, body, transport="tcp")
    labels = {"rank": 0, "collective": "all_reduce", "codec": "int8:between=sites"}
    assert value(parsed(fetched()), "gradwire_call_input_bytes_total", **labels) == 4_000


def test_the_kernel_says_round_trips_of_open_sockets_alone(port: None) -> None:
    def body(comm: Communicator) -> Samples:
        comm.all_reduce(np.ones(1000, np.float32))
        found = parsed(exporter.text())
        comm.barrier()
        return found

    shown = run(2, body, transport="tcp")[0]
    assert 0 < value(shown, "gradwire_tcp_round_trip_seconds", rank=0, peer=1) < 10
    assert value(shown, "gradwire_tcp_rate_bytes_per_second", rank=0, peer=1) >= 0
    names = {name for name, _ in parsed(exporter.text())}
    assert "gradwire_tcp_round_trip_seconds" not in names
    assert "gradwire_tcp_retransmits_total" in names


def test_a_socket_is_not_taken_for_a_later_one_of_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        (known,) = tcp_sockets.watched(one, 1)
        assert known.info() is not None
        number = one.fileno()
        one.close()
        assert known.info() is None
        with socket.create_connection(server.getsockname()) as other:
            os.dup2(other.fileno(), number)  # mostly the same already
            assert known.info() is None
            if other.fileno() != number:
                os.close(number)


def test_waiting_is_charged_to_who_came_late(port: None) -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(np.ones(8, np.float32))
        if comm.rank == 1:
            time.sleep(0.05)
        comm.all_reduce(np.ones(8, np.float32))

    run(2, body)
    found = parsed(exporter.text())
    waits = "gradwire_wait_seconds_total"
    assert value(found, waits, rank=0, peer=1, reason="data") > 0.03
    assert value(found, waits, rank=1, peer=0) < value(found, waits, rank=0, peer=1)


def test_a_failure_is_counted_with_its_culprit(port: None) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("enough")
        comm.all_reduce(np.ones(8, np.float32))

    ended = outcomes(2, body)
    assert all(isinstance(each.error, gradwire.Aborted) for each in ended)
    found = parsed(exporter.text())
    for rank in range(2):
        assert value(found, "gradwire_failures_total", rank=rank, error="Aborted", peer=1) == 1


def test_sums_outlive_communicators_and_traces_go_on_beside_them(
    port: None, tmp_path: Path
) -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(np.ones(8, np.float32))
        half = comm.split(0)
        assert half is not None
        with gradwire.trace(tmp_path / "out.json", communicator=comm) as _, half:
            half.all_reduce(np.ones(8, np.float32))

    run(1, body)
    found = parsed(exporter.text())
    assert value(found, "gradwire_calls_total", collective="all_reduce") >= 2
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert any("all_reduce" in str(each.get("name")) for each in events)


def test_only_metrics_are_there(port: None) -> None:
    run(1, lambda comm: None)
    assert str(exporter._exporter.place).startswith("http://127.0.0.1:")  # type: ignore[union-attr]
    assert fetched("/") == fetched()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetched("/secrets")


def test_each_rank_of_a_host_has_the_next_port_and_a_taken_one_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[Any] = []

    def take(host: str, port: int, shown: Any) -> Any:
        opened.append((host, port))
        raise OSError("taken")

    monkeypatch.setattr(places, "Port", take)
    for given, local_rank in (("9400", "3"), ("[::1]:9400", "0"), ("10.0.0.1:7", "")):
        monkeypatch.setenv("GRADWIRE_METRICS", given)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert run(1, lambda comm: comm.all_reduce(np.ones(2)).sum()) == [2]
        exporter.end()
    assert opened == [("127.0.0.1", 9403), ("::1", 9400), ("10.0.0.1", 7)]
    assert caplog.text.count("shows no metrics: taken") == 3


@pytest.fixture
def opened() -> Iterator[places.Port]:
    """A port that shows a text."""
    place = places.Port("127.0.0.1", 0, lambda: "shown")
    yield place
    place.end(False)


def slow_client(place: places.Port) -> socket.socket:
    """A client whose request does not end."""
    client = socket.create_connection(place.server_address[:2], timeout=LIMIT)  # type: ignore[arg-type]
    client.sendall(b"GET /met")
    eventually(lambda: place._client is not None)
    return client


def test_a_slow_client_is_left(opened: places.Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_CLIENT_SECONDS", 0.05)
    with slow_client(opened) as client:
        assert client.recv(1) == b""
    monkeypatch.undo()
    with urllib.request.urlopen(str(opened), timeout=LIMIT) as answer:
        assert answer.read() == b"shown"


def test_a_slow_client_does_not_keep_a_rank_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_CLIENT_SECONDS", 2 * LIMIT)
    place = places.Port("127.0.0.1", 0, str)
    with slow_client(place) as client:
        place.end(False)
        assert not place._thread.is_alive()
        assert client.recv(1) == b""


def test_without_descriptors_a_port_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[Any] = []

    def full(self: Any) -> Any:
        turns.append(self)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socketserver.TCPServer, "get_request", full)
    monkeypatch.setattr(places, "_PAUSE", 2 * LIMIT)
    place = places.Port("127.0.0.1", 0, str)
    with socket.create_connection(place.server_address[:2], timeout=LIMIT):  # type: ignore[arg-type]
        eventually(lambda: len(turns) > 0)
        place.end(False)
    assert not place._thread.is_alive()
    assert turns == [place]


def test_a_link_in_a_files_place_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / f".a.prom.{os.getpid()}").symlink_to(other)
    file = places.File(tmp_path, "a.prom", lambda: "shown")
    assert other.read_text() == "kept"
    assert Path(str(file)).read_text() == "shown"
    assert not Path(str(file)).is_symlink()
    file.end(False)


def test_whatever_ends_a_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(places, "SECONDS", 0.01)
    texts = iter(["shown"])  # then StopIteration
    file = places.File(tmp_path, "a.prom", lambda: next(texts))
    file._thread.join(LIMIT)
    assert f"{file} is not written any more" in caplog.text
    file.end(False)


def test_a_file_is_replaced_as_a_whole_and_removed_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SECONDS", 0.01)

    def body(comm: Communicator) -> Path:
        comm.all_reduce(np.ones(8, np.float32))
        (shown,) = folder.glob("gradwire-threads-*-rank0.prom")
        eventually(lambda: "gradwire_calls_total{" in shown.read_text())
        return shown

    (shown,) = run(1, body)
    assert value(parsed(shown.read_text()), "gradwire_calls_total", rank=0) >= 1
    assert [*folder.glob("*.prom")] == [shown]
    exporter.end()
    assert [*folder.iterdir()] == []


def test_a_file_that_tells_of_a_failure_is_kept(folder: Path) -> None:
    def body(comm: Communicator) -> None:
        comm.abort("enough")

    outcomes(1, body)
    exporter.end()
    (kept,) = folder.iterdir()
    assert value(parsed(kept.read_text()), "gradwire_failures_total", rank=0) == 1


def test_jobs_of_one_name_share_neither_files_nor_series(folder: Path) -> None:
    def body(comm: Communicator) -> None:
        comm.abort("enough")

    for _ in range(2):
        outcomes(1, body)
        exporter.end()
    one, other = (parsed(each.read_text()) for each in folder.iterdir())
    assert {name for name, _ in one} == {name for name, _ in other}
    assert one.keys().isdisjoint(other)


def test_processes_of_a_program_show_their_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import gradwire, numpy as np, os, pathlib, sys\n"
        "with gradwire.init() as comm:\n"
        "    comm.all_reduce(np.ones(8, np.float32))\n"
        "    comm.barrier()\n"
        "    names = {each.name for each in pathlib.Path(sys.argv[1]).glob('*.prom')}\n"
        "    assert len(names) == comm.size, names\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    comm.barrier()\n"
    )
    shown = tmp_path / "shown"
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", str(program), f"{shown}/"]
    environment = {**os.environ, "GRADWIRE_METRICS": f"{shown}/"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [*shown.iterdir()] == []


def test_traffic_is_told_apart_by_what_lies_between() -> None:
    mesh: Any = SimpleNamespace(rank=0, hosts=("a", "a", "b", "c"), sites=())
    assert [link_to(peer, mesh) for peer in (1, 2)] == ["within host", "between hosts"]
    mesh.sites = ((0, 1, 2), (3,))
    found = [link_to(peer, mesh) for peer in (1, 2, 3)]
    assert found == ["within host", "between hosts", "between sites"]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_between_hosts_it_says_so_and_what_tcp_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_METRICS", "0")

    def body(comm: Communicator, pipe: Any) -> Samples:
        comm.all_reduce(np.ones(1000, np.float32))
        found = parsed(fetched())
        comm.barrier()
        return found

    network = Network(2)
    try:
        shown = network.values([0, 0, 1], body)
    finally:
        network.close()
    assert value(shown[0], "gradwire_sent_bytes_total", peer=2, link="between hosts") > 0
    assert value(shown[0], "gradwire_sent_bytes_total", peer=1, link="within host") > 0
    assert 0 < value(shown[0], "gradwire_tcp_round_trip_seconds", rank=0, peer=2) < 10
    assert value(shown[2], "gradwire_tcp_retransmits_total", rank=2, peer=0) >= 0


def test_a_communicator_may_be_collected_while_metrics_are_read(port: None) -> None:
    released: list[Any] = []

    class Source(exporter.Source):
        def samples(self, **how: Any) -> Any:
            while released:  # as the garbage collector would, at any allocation
                exporter.release(released.pop())
            return super().samples(**how)

    def body(comm: Communicator) -> float:
        comm.all_reduce(np.ones(8, np.float32))
        comm._counted.__class__ = Source
        if comm.rank == 1:
            released.append(comm._counted)
        comm.barrier()
        return sum(value(parsed(exporter.text()), "gradwire_calls_total", rank=r) for r in (0, 1))

    found = run(2, body)
    assert min(found) >= 3  # nothing of the collected one is lost
    assert released == []


def test_a_communicator_whose_last_reference_is_here_ends_without_the_lock(port: None) -> None:
    locked: list[bool] = []

    class Source(exporter.Source):
        def samples(self, **how: Any) -> Any:
            assert exporter._exporter is not None
            locked.append(exporter._exporter._lock.locked())
            return super().samples(**how)

    def body(comm: Communicator) -> None:
        comm._counted.__class__ = Source
        assert "gradwire_info{" in exporter.text()
        assert locked == [False]

    run(1, body)


def test_labels_are_escaped() -> None:
    hostile = 'a"b\\c\nd'
    shown = text.render({text.key("gradwire_info", rank=0, job=hostile): 1})
    assert value(parsed(shown), "gradwire_info", job=hostile) == 1


def test_nothing_is_counted_without_the_variable() -> None:
    def body(comm: Communicator) -> Any:
        comm.all_reduce(np.ones(8, np.float32))
        return comm._counted

    assert run(2, body) == [None, None]
    assert exporter.text() == ""


# ---- docs/monitoring.md ------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")


def test_the_page_lists_every_family() -> None:
    listed = re.findall(r"^\| `(gradwire_\w+)` \|", PAGE, re.MULTILINE)
    assert listed == [*text.FAMILIES]


def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads((ROOT / "docs" / "static" / "grafana.json").read_text())
    panels = [each for each in dashboard["panels"] if each["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for each in asked for name in re.findall(r"gradwire_\w+", each)}
    assert names <= text.FAMILIES.keys()
    wanted = {name for name in text.FAMILIES if "message" not in name}
    assert len(wanted - names) <= 6, wanted - names
    assert len({panel["id"] for panel in panels}) == len(panels)
