"""Commands to the vectors of shards, and staged pushes, over servers and sockets."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import serve
from gradwire.serve import ParameterServer
from gradwire.serve._vectors import (
    Absmax,
    Abssum,
    Combine,
    Command,
    Copy,
    Discard,
    Dots,
    Drop,
    Fold,
    Names,
)

DTYPES = [np.float32, np.float64]
Array = np.ndarray[Any, Any]


def parameters(dtype: type, seed: int = 0) -> list[Array]:
    """Parameters of several frames, of magnitudes whose sum depends on its order."""
    draw = np.random.default_rng(seed)
    sizes = (40_000, 33, 1)
    return [(draw.standard_normal(n) * 2.0 ** draw.integers(0, 20, n)).astype(dtype) for n in sizes]


def flat(arrays: list[Array]) -> Array:
    return np.concatenate(arrays).astype(np.float64)


class Service:
    """Servers, a replica and a coordinator."""

    def __init__(self, stack: ExitStack, dtype: type, shards: int = 2) -> None:
        self.dtype = dtype
        self.server = stack.enter_context(serve.Server(shards))
        self.stack = stack
        self.replica = self.connect(parameters(dtype), "replica")
        self.coordinator = self.connect(parameters(dtype, 99), "coordinator")

    def connect(self, like: list[Array], role: Any) -> ParameterServer:
        ps = serve.connect(
            like, serve.Coordinated(), role=role, store=self.server.store, timeout=30
        )
        return self.stack.enter_context(ps)

    def pulled(self) -> Array:
        found = parameters(self.dtype, 98)
        self.replica.pull(found)
        return flat(found)


@pytest.fixture(params=DTYPES, ids=["float32", "float64"])
def service(request: pytest.FixtureRequest, stack: ExitStack) -> Service:
    """A service of two shards."""
    return Service(stack, request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_the_same_bits_for_any_number_of_shards(stack: ExitStack, dtype: type) -> None:
    asked = [Dots([("w", "w"), ("w", "g")]), Abssum("g"), Absmax("g")]
    w, g = flat(parameters(dtype)), flat(parameters(dtype, 1))
    results = []
    for shards in (1, 2, 3):
        service = Service(stack, dtype, shards)
        service.replica.push(parameters(dtype, 1), staged=(0, 0, 0))
        service.coordinator._command([Fold("g", 0, [(0, 0)])])
        results.append(service.coordinator._command(asked))
    assert results[0] == results[1] == results[2]
    (ww, wg), norm, largest = results[0]
    assert largest == np.abs(g).max()
    assert ww == pytest.approx(math.fsum(w * w), rel=1e-14)
    assert wg == pytest.approx(math.fsum(w * g), abs=1e-14 * math.fsum(np.abs(w * g)))
    assert norm == pytest.approx(math.fsum(np.abs(g)), rel=1e-14)


def test_a_step_goes_from_staged_gradients_to_the_parameters(service: Service) -> None:
    ps, dtype = service.coordinator, service.dtype
    start = service.pulled()
    assert (start == flat(parameters(dtype))).all()
    for sequence in range(2):
        service.replica.push(parameters(dtype, 1 + sequence), staged=(7, 3, sequence))
    service.replica.push(parameters(dtype, 5), staged=(7, 3, 0))  # once is enough
    found = ps._command(
        [
            Copy("before", "w"),
            Fold("g", 7, [(3, 1), (3, 0)]),
            Combine("w", [(1.0, "w"), (-0.125, "g")]),
            Names(),
            Drop("before"),
            Discard(None),
        ]
    )
    assert found == [None, None, None, ["before", "g", "w"], None, None]
    gradient = (flat(parameters(dtype, 2)) + flat(parameters(dtype, 1))).astype(dtype)
    assert (service.pulled() == (start - 0.125 * gradient.astype(np.float64)).astype(dtype)).all()
    assert service.replica.versions == [1, 1]
    assert service.replica._command([Names()]) == [["g", "w"]]


def test_a_fold_says_how_many_pushes_it_takes(service: Service) -> None:
    pushes = [(0, each) for each in range(8001)]
    with pytest.raises(
        gradwire.InvalidArgument, match=r"8001 pushes: one takes 8000 at most.*push_every"
    ):
        service.coordinator._command([Fold("g", 0, pushes)])
    with pytest.raises(
        gradwire.InvalidArgument, match="there is no push 0"
    ):  # so many reach the shards
        service.coordinator._command([Fold("g", 0, pushes[:8000])])


def test_asks_are_sent_ahead(service: Service) -> None:
    pending = [
        service.coordinator._command([Copy("d", "w")], async_op=True),
        service.coordinator._command(
            [Combine("d", [(2.0, "d")]), Dots([("d", "w")])], async_op=True
        ),
    ]
    assert pending[0].wait() == [None]
    assert pending[1].wait()[1] == pytest.approx([2 * math.fsum(service.pulled() ** 2)])
    assert pending[1].done()


def test_values_that_are_not_finite_show_in_sums(service: Service) -> None:
    gradient = parameters(service.dtype)
    gradient[1][7] = math.nan
    service.replica.push(gradient, staged=(1, 0, 0))
    gradient[1][7] = math.inf
    service.replica.push(gradient, staged=(2, 0, 0))
    service.coordinator._command([Fold("a", 1, [(0, 0)]), Fold("b", 2, [(0, 0)])])
    (dot,), largest = service.coordinator._command([Dots([("a", "w")]), Absmax("a")])
    assert math.isnan(dot)
    assert math.isnan(largest)
    assert service.coordinator._command([Abssum("b"), Absmax("b")]) == [math.inf, math.inf]


def test_a_coordinator_sees_no_values(service: Service) -> None:
    values = parameters(service.dtype)
    with pytest.raises(gradwire.InvalidArgument, match="coordinator has no access"):
        service.coordinator.pull(values)
    with pytest.raises(gradwire.InvalidArgument, match="coordinator has no access"):
        service.coordinator.push(values, staged=(1, 0, 0))
    assert service.coordinator._command([Names()]) == [["w"]]


WRONG: list[tuple[Command, str]] = [
    (Dots([("w", "gone")]), "no vector 'gone'"),
    (Fold("w", 1, [(0, 0), (5, 6)]), "push 6 of replica 5 to batch 1"),
    (Combine("w", [(math.inf, "w"), (1.0, "gone")]), "no vector 'gone'"),
    (Copy("", "w"), "printable ASCII"),
    (Dots([("w",)]), "pairs"),  # type: ignore[list-item]
    (Discard(-1), "less than 0"),
    ("names", "commands"),  # type: ignore[list-item]
]


def test_what_cannot_be_done_changes_nothing(service: Service) -> None:
    before = service.pulled()
    service.replica.push(parameters(service.dtype), staged=(1, 0, 0))
    for command, text in WRONG:
        with pytest.raises(gradwire.InvalidArgument, match=text):
            service.coordinator._command([Combine("w", [(2.0, "w")]), command])
    with pytest.raises(gradwire.InvalidArgument, match=r"shard [01] .* only a coordinator"):
        service.replica._command([Drop("w")])
    with pytest.raises(gradwire.InvalidArgument, match="needs a name"):
        service.replica.push(parameters(service.dtype))
    assert (service.pulled() == before).all()


def test_a_new_coordinator_resumes_from_snapshots(stack: ExitStack, tmp_path: Path) -> None:
    with serve.Server(2, snapshot=tmp_path) as server:
        options: Any = {"store": server.store, "timeout": 30}
        with serve.connect(parameters(np.float64), serve.Coordinated(), **options):
            first, second = (
                stack.enter_context(
                    serve.connect(
                        parameters(np.float64), serve.Coordinated(), role="coordinator", **options
                    )
                )
                for _ in range(2)
            )
            second._command([Combine("s", [(3.0, "w")])])
            with pytest.raises(gradwire.TransportError, match="another coordinator"):
                first._command([Names()])
    with serve.Server(2, snapshot=tmp_path) as server:
        ps = stack.enter_context(
            serve.connect(
                parameters(np.float64),
                serve.Coordinated(),
                role="coordinator",
                store=server.store,
                timeout=30,
            )
        )
        names, (dot,) = ps._command([Names(), Dots([("s", "w")])])
    assert names == ["s", "w"]
    assert dot == pytest.approx(3 * math.fsum(flat(parameters(np.float64)) ** 2), rel=1e-14)


def test_float64_needs_the_rule_staged(server: serve.Server) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="float64 need the rule staged"):
        serve.connect(parameters(np.float64), serve.SGD(lr=1.0), store=server.store, timeout=30)
