"""A parameter server as programs use it: NumPy arrays, several clients, names in errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import serve

Connect = Callable[..., serve.ParameterServer]

RNG = np.random.default_rng


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters of a model, of more elements than a frame."""
    shapes = {"fc.weight": (300, 200), "fc.bias": (200,), "scale": ()}
    draw = RNG(seed)
    return {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def zeros() -> dict[str, np.ndarray]:
    return {name: np.zeros_like(each) for name, each in arrays().items()}


def test_a_push_is_applied_and_pulled(connect: Connect, transport: str) -> None:
    start, gradient, found = arrays(0), arrays(1), zeros()
    ps = connect(start, serve.SGD(lr=0.5), transports=[transport])
    ps.push(gradient)
    ps.pull(found)
    for name in start:
        np.testing.assert_array_equal(found[name], start[name] - np.float32(0.5) * gradient[name])
    assert ps.versions == [1, 1]
    assert ps.shards == 2
    assert ps.first


def test_the_first_client_brings_the_values(connect: Connect) -> None:
    first = connect(arrays(0), serve.SGD(lr=1.0))
    second = connect(arrays(1), serve.SGD(lr=1.0))
    found = zeros()
    second.pull(found)
    assert first.first
    assert not second.first
    for name, each in arrays(0).items():
        np.testing.assert_array_equal(found[name], each)


def test_lists_of_arrays(connect: Connect) -> None:
    ps = connect([np.ones(5, np.float32)], serve.SGD(lr=1.0))
    found = [np.zeros(5, np.float32)]
    ps.push([np.full(5, 0.25, np.float32)], lr=2.0)
    ps.pull(found)
    assert found[0].tolist() == [0.5] * 5


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4", "onebit"])
def test_what_codecs_lose_is_pushed_later(connect: Connect, codec: str) -> None:
    start, gradient, found = arrays(0), arrays(1), zeros()
    ps, feedback = connect(start, serve.SGD(lr=1.0)), gradwire.ErrorFeedback()
    for _ in range(3):
        ps.push(gradient, codec=codec, feedback=feedback)
    ps.pull(found)
    for name in start:
        applied = start[name].astype(np.float64) - found[name]
        residual = feedback.residual(name).reshape(start[name].shape)
        np.testing.assert_allclose(applied + residual, 3.0 * gradient[name], atol=2e-5)


def test_parameters_have_codecs_of_their_own(connect: Connect) -> None:
    start, gradient, found = arrays(0), arrays(1), zeros()
    ps, feedback = connect(start, serve.SGD(lr=1.0)), gradwire.ErrorFeedback()
    rules = [("*.bias", "none"), ("scale", "fp16")]
    ps.push(gradient, codec="onebit", rules=rules, feedback=feedback)
    ps.pull(found)
    fp16 = gradient["scale"].astype(np.float16).astype(np.float32)
    exact = {"fc.bias": gradient["fc.bias"], "scale": fp16}
    for name, wanted in exact.items():
        np.testing.assert_array_equal(found[name], start[name] - wanted)
    assert not feedback.residual("fc.bias").any()
    residual = feedback.residual("fc.weight").reshape(300, 200)
    assert residual.any()
    applied = start["fc.weight"] - found["fc.weight"]
    np.testing.assert_allclose(applied + residual, gradient["fc.weight"], atol=2e-5)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([("*.gain", "none")], "'\\*.gain', which matches no parameter; .* fc.weight, fc.bias"),
        ({"*.bias": "none"}, "is a mapping: give a list of pairs"),
        (["*.bias"], "rules= holds"),
        ([("*.bias", ["none"])], "codec=.* of type list: give a str"),
        ([("*.bias", "twobit")], "unknown codec 'twobit'"),
        ([("*.bias", "topk")], "'topk' was not named when the servers were joined"),
    ],
)
def test_odd_rules_are_refused(connect: Connect, rules: Any, text: str) -> None:
    ps = connect(arrays(0), serve.SGD(lr=1.0))
    with pytest.raises(gradwire.InvalidArgument, match=text):
        ps.push(arrays(1), rules=rules, feedback=False)


@pytest.mark.parametrize("codec", ["int8", "int4", "onebit"])
def test_pulled_differences_reach_the_values(connect: Connect, codec: str) -> None:
    start, found = arrays(0), zeros()
    ps = connect(start, serve.SGD(lr=1.0))
    ps.push(arrays(1))
    for _ in range(40):
        ps.pull(found, codec=codec)
    for name, each in start.items():
        np.testing.assert_allclose(found[name], each - arrays(1)[name], atol=0.05)


def test_lossless_pulls_have_all_bits(connect: Connect) -> None:
    """Values travel, and no differences, which would be rounded."""
    plain, found = zeros(), zeros()
    ps = connect(arrays(0), serve.SGD(lr=1.0), codecs=["none", "lossless"])
    for step in range(4):
        ps.push(arrays(step + 1), codec="lossless", feedback=False, lr=0.1**step)
        ps.pull(plain)
        ps.pull(found, codec="lossless")
        for name, each in plain.items():
            assert found[name].tobytes() == each.tobytes()


def test_clients_push_at_once_and_nothing_is_lost(connect: Connect) -> None:
    start, found = zeros(), zeros()
    clients = [connect(start, serve.SGD(lr=1.0)) for _ in range(4)]
    ones = {name: np.ones_like(each) for name, each in start.items()}

    def push(ps: serve.ParameterServer) -> None:
        for _ in range(10):
            ps.push(ones)

    threads = [threading.Thread(target=push, args=(each,)) for each in clients]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    clients[0].pull(found)
    assert all((each == -40).all() for each in found.values())
    stats = clients[0].stats()
    assert [each["pushes"] for each in stats] == [40, 40]


def test_asynchronous_calls(connect: Connect) -> None:
    start, found = arrays(0), zeros()
    ps = connect(start, serve.SGD(lr=1.0))
    pushed = ps.push(arrays(1), async_op=True)
    assert pushed is not None
    assert pushed.wait() == [1, 1]
    assert pushed.done()
    assert pushed.refusals == 0
    pulled = ps.pull(found, async_op=True)
    assert pulled is not None
    pulled.wait()
    np.testing.assert_array_equal(found["scale"], start["scale"] - arrays(1)["scale"])


def test_a_replica_that_connects_again_replaces_its_former_self(connect: Connect) -> None:
    connect(arrays(), serve.SGD(lr=1.0), replica="b")
    again = connect(arrays(), serve.SGD(lr=1.0), replica="b")
    assert len(again.stats()[0]["clients"]) == 1


def test_another_model_is_refused_alone(connect: Connect) -> None:
    ps = connect(arrays(), serve.SGD(lr=1.0))
    other = {**arrays(), "fc.bias": np.zeros(7, np.float32)}
    with pytest.raises(gradwire.InvalidArgument, match=r"fc\.bias"):
        connect(other, serve.SGD(lr=1.0))
    with pytest.raises(gradwire.InvalidArgument, match="adagrad"):
        connect(arrays(), serve.Adagrad(lr=1.0))
    ps.push(arrays(1))


def test_the_end_of_the_servers_is_told(connect: Connect, server: serve.Server) -> None:
    ps = connect(arrays(), serve.SGD(lr=1.0))
    server.stop()
    with pytest.raises(gradwire.TransportError, match=r"shard [01] \("):
        ps.push(arrays())


def test_values_that_are_not_finite_are_refused(connect: Connect) -> None:
    ps, bad = connect(arrays(), serve.SGD(lr=1.0)), arrays(1)
    bad["scale"][...] = np.nan
    with pytest.raises(gradwire.Error, match=r"finite|NaN"):
        ps.push(bad)
    ps.push(arrays(1))


WRONG: list[tuple[Any, str]] = [
    ({"fc.weight": np.zeros((300, 200), np.float32)}, "fc.bias"),
    ([np.zeros(3, np.float32)], "dict"),
    ({**arrays(), "scale": np.zeros(2, np.float32)}, "shape"),
    ({**arrays(), "scale": np.zeros((), np.float64)}, "float64"),
]


@pytest.mark.parametrize(("given", "text"), WRONG)
def test_other_arrays_are_refused(connect: Connect, given: Any, text: str) -> None:
    ps = connect(arrays(), serve.SGD(lr=1.0))
    with pytest.raises(gradwire.InvalidArgument, match=text):
        ps.push(given)


def test_a_lossy_push_wants_feedback_or_a_word(connect: Connect) -> None:
    ps = connect(arrays(), serve.SGD(lr=1.0))
    with pytest.raises(gradwire.InvalidArgument, match="feedback"):
        ps.push(arrays(), codec="onebit")
    ps.push(arrays(), codec="onebit", feedback=False)


def test_without_servers_the_shard_is_named(stack: ExitStack) -> None:
    server = stack.enter_context(serve.Server(2, only=[0]))
    with pytest.raises(gradwire.RendezvousError, match="shard 1 has not begun"):
        serve.connect(arrays(), serve.SGD(lr=1.0), store=server.store, timeout=0.5)


def test_another_secret_is_refused(stack: ExitStack) -> None:
    server = stack.enter_context(serve.Server(1, secret=b"a" * 32))
    with pytest.raises(gradwire.RendezvousError):
        serve.connect(arrays(), serve.SGD(lr=1.0), store=server.store, secret=b"b" * 32, timeout=2)


@contextmanager
def served(
    folder: Path, like: dict[str, np.ndarray], rule: serve.Rule
) -> Iterator[serve.ParameterServer]:
    """A client of two shards that keep snapshots."""
    with (
        serve.Server(2, snapshot=folder) as server,
        serve.connect(like, rule, store=server.store) as ps,
    ):
        yield ps


def test_snapshots_are_where_a_new_server_begins(tmp_path: Path) -> None:
    found = zeros()
    with served(tmp_path, arrays(), serve.Adagrad(lr=0.1)) as ps:
        ps.push(arrays(1))
        ps.checkpoint()
        before = zeros()
        ps.push(arrays(2))
        ps.pull(before)
    with served(tmp_path, zeros(), serve.Adagrad(lr=0.1)) as ps:
        ps.pull(found)
        assert not ps.first
        assert ps.versions == [2, 2]
    for name, each in before.items():
        np.testing.assert_array_equal(found[name], each)


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    with served(tmp_path, arrays(), serve.SGD(lr=1.0)) as ps:
        ps.checkpoint()
    path = tmp_path / "shard-0-of-2.gradwire"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(gradwire.InvalidArgument, match="damaged"):
        serve.Server(2, snapshot=tmp_path)


def test_without_a_folder_a_checkpoint_says_so(connect: Connect) -> None:
    ps = connect(arrays(), serve.SGD(lr=1.0))
    with pytest.raises(gradwire.InvalidArgument, match="snapshot"):
        ps.checkpoint()
