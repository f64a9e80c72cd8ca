"""L-BFGS by commands to shards, beside torch's and scipy's, which hold the vectors themselves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gradwire import InvalidArgument
from gradwire.serve._lbfgs import Iteration, Minimizer
from gradwire.serve._sandblaster.more_thuente import more_thuente
from gradwire.serve._sandblaster.searches import Search, fixed, strong_wolfe
from gradwire.serve._vectors import Command, Dots, Names
from vector_shards import Evaluator, Function, Shards, Vector

FEATURES, HIDDEN, CLASSES, SAMPLES = 12, 16, 4, 200
DECAY = 1e-3
SIZE = FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES


def network(dtype: Any = np.float64) -> tuple[Function, Vector]:
    """A classification by a small network: mean loss and gradient; its first parameters."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((SAMPLES, FEATURES)).astype(dtype)
    labels = (x @ draw.standard_normal((FEATURES, CLASSES))).argmax(1)
    picked = np.eye(CLASSES, dtype=dtype)[labels]

    def function(w: Vector) -> tuple[float, Vector]:
        sizes = np.cumsum([FEATURES * HIDDEN, HIDDEN, HIDDEN * CLASSES])
        first, bias, second, other = np.split(w.astype(dtype), sizes)
        first, second = first.reshape(FEATURES, HIDDEN), second.reshape(HIDDEN, CLASSES)
        hidden = np.tanh(x @ first + bias)
        scores = hidden @ second + other
        scores -= scores.max(1, keepdims=True)
        weights = np.exp(scores)
        loss = -(scores[picked > 0] - np.log(weights.sum(1))).mean()
        back = (weights / weights.sum(1, keepdims=True) - picked) / SAMPLES
        through = (back @ second.T) * (1 - hidden**2)
        parts = (x.T @ through, through.sum(0), hidden.T @ back, back.sum(0))
        gradient = np.concatenate([each.ravel() for each in parts]) + DECAY * w
        return float(loss + DECAY / 2 * (w @ w)), gradient

    return function, (0.3 * draw.standard_normal(SIZE)).astype(dtype)


def rosenbrock(w: Vector) -> tuple[float, Vector]:
    """A valley with bends, so that searches have something to find."""
    one, two = w[:-1], w[1:]
    loss = float((100 * (two - one**2) ** 2 + (1 - one) ** 2).sum())
    gradient = np.zeros_like(w)
    gradient[:-1] += -400 * one * (two - one**2) - 2 * (1 - one)
    gradient[1:] += 200 * (two - one**2)
    return loss, gradient


def valley() -> tuple[Function, Vector]:
    return rosenbrock, np.tile([-1.2, 1.0], 10)


class Run:
    """A minimization, its iterates and its counts."""

    def __init__(
        self, problem: tuple[Function, Vector], iterations: int, shards: int = 3, **options: Any
    ) -> None:
        function, start = problem
        self.shards = Shards(start, shards)
        self.evaluator = Evaluator(self.shards, function)
        self.minimizer = Minimizer(self._ask, self.evaluator, **options)
        self.iterates: list[Vector] = []
        self.iterations: list[Iteration] = []
        self.go_on(iterations)

    def _ask(self, commands: Sequence[Command]) -> list[Any]:
        return self.shards.ask(commands)

    def go_on(self, iterations: int) -> None:
        for _ in range(iterations):
            self.iterations.append(self.minimizer.step())
            self.iterates.append(self.shards.read())


class Torch:
    """torch.optim.LBFGS on the same problem."""

    def __init__(
        self, problem: tuple[Function, Vector], iterations: int, search: str | None
    ) -> None:
        torch = pytest.importorskip("torch")
        function, start = problem
        w = torch.nn.Parameter(torch.from_numpy(start.copy()))
        optimizer = torch.optim.LBFGS(
            [w],
            lr=1,
            max_iter=iterations,
            max_eval=10**6,
            history_size=10,
            line_search_fn=search,
            tolerance_grad=0,
            tolerance_change=1e-300,
        )
        self.evaluations = 0

        def closure() -> float:
            self.evaluations += 1
            loss, gradient = function(w.detach().numpy())
            w.grad = torch.from_numpy(gradient)
            return loss

        optimizer.step(closure)
        self.end = w.detach().numpy()


@pytest.mark.parametrize("problem", [network, valley])
@pytest.mark.parametrize(("search", "name"), [(strong_wolfe, "strong_wolfe"), (fixed, None)])
def test_it_is_torchs(
    problem: Callable[[], tuple[Function, Vector]], search: Search, name: str | None
) -> None:
    if problem is valley and search is fixed:
        pytest.skip("steps of one diverge there")
    run = Run(problem(), 20, search=search)
    for iterations, limit in ((1, 1e-14), (10, 1e-12), (20, 1e-9)):
        other = Torch(problem(), iterations, name)
        assert np.abs(run.iterates[iterations - 1] - other.end).max() <= limit
        evaluations = sum(each.evaluations for each in run.iterations[:iterations])
        # Without a search torch does not evaluate where its last iteration has ended.
        assert evaluations == other.evaluations + (search is fixed)


@pytest.mark.parametrize("problem", [network, valley])
def test_it_is_scipys(problem: Callable[[], tuple[Function, Vector]]) -> None:
    minimize = pytest.importorskip("scipy.optimize").minimize
    run = Run(problem(), 40, search=more_thuente, by_norm=True)
    function, start = problem()
    for iterations, limit in ((1, 1e-14), (10, 1e-12), (20, 1e-9), (40, 1e-6)):
        options = {"maxiter": iterations, "maxcor": 10, "ftol": 0, "gtol": 0}
        other = minimize(function, start, jac=True, method="L-BFGS-B", options=options)
        assert np.abs(run.iterates[iterations - 1] - other.x).max() <= limit
        assert sum(each.evaluations for each in run.iterations[:iterations]) == other.nfev


def test_float32_has_the_same_bits_for_any_number_of_shards() -> None:
    wanted = Run(network(np.float32), 20, shards=1).iterates
    for shards in (2, 3, 7, 16):
        found = Run(network(np.float32), 20, shards=shards).iterates
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_an_iteration_waits_once_beside_each_evaluation() -> None:
    run = Run(network(), 20)
    # One message ends an evaluation, one before moves the parameters; the first needs no move.
    assert run.shards.messages == 2 * run.evaluator.evaluations - 1
    assert run.evaluator.evaluations == sum(each.evaluations for each in run.iterations)


def test_memory_is_that_of_the_history() -> None:
    run = Run(valley(), 40, history=3)
    vectors = set(run.shards.shards[0].vectors)
    assert vectors <= {"w", "x0", "x1", "d", *(f"{k}{i}" for k in "sy" for i in range(4))} | {
        f"g{i}" for i in range(5)
    }


def test_pairs_without_curvature_are_skipped() -> None:
    def line(w: Vector) -> tuple[float, Vector]:
        return float(-w.sum()), -np.ones_like(w)

    run = Run((line, np.zeros(5)), 3, search=fixed)
    assert run.minimizer.history.pairs == []
    assert np.allclose(run.iterates[-1], 0.2 + 1 + 1)


def test_a_failing_search_goes_back_and_forgets() -> None:
    function, start = network()
    lies: list[float] = []

    def lying(w: Vector) -> tuple[float, Vector]:
        loss, gradient = function(w)
        return loss + (lies[0] if lies else 0), gradient

    run = Run((lying, start), 5)
    lies.append(1e3)
    run.go_on(1)
    assert (run.iterations[-1].step, run.iterations[-1].converged) == (0, False)
    assert np.array_equal(run.iterates[-1], run.iterates[-2])
    assert run.minimizer.history.pairs == []
    run.go_on(1)
    assert run.iterations[-1].converged
    lies[0] = 0
    run.go_on(1)
    assert run.iterations[-1].loss < run.iterations[4].loss


def test_a_gradient_of_zero_is_the_end() -> None:
    run = Run((lambda w: (float(w @ w), 2 * w), np.zeros(5)), 2)
    assert [each.converged for each in run.iterations] == [True, True]
    assert run.evaluator.evaluations == 1


def test_another_batch_keeps_the_history() -> None:
    run = Run(network(), 6)
    pairs = run.minimizer.history.pairs
    run.minimizer.new_batch()
    run.go_on(1)
    assert run.minimizer.history.pairs[: len(pairs)] == pairs
    assert run.iterations[-1].evaluations == 2


@pytest.mark.parametrize("killed_after", [None, 1, 2, 3])
def test_a_new_coordinator_goes_on(killed_after: int | None) -> None:
    """Also where the old one had begun another iteration, of which its state says nothing."""
    wanted = Run(network(), 20).iterates
    run = Run(network(), 8)
    state = json.loads(json.dumps(run.minimizer.state()))
    if killed_after is not None:
        begun = run.shards.messages
        _end_at(run.shards, begun + killed_after)
        with contextlib.suppress(InterruptedError):
            run.go_on(2)
        run.iterates = run.iterates[:8]
        _end_at(run.shards, None)
    run.minimizer = Minimizer(run.shards.ask, run.evaluator)
    run.minimizer.load(state, run.shards.ask([Names()])[0])
    run.go_on(12)
    assert all(np.array_equal(a, b) for a, b in zip(run.iterates, wanted, strict=True))


def _end_at(shards: Shards, message: int | None) -> None:
    """Has the message of this number reach one shard only, and ends the coordinator there."""
    ask = Shards.ask

    def dying(commands: Sequence[Command]) -> list[Any]:
        if shards.messages + 1 == message:
            whole, shards.shards = shards.shards, shards.shards[:1]
            with contextlib.suppress(KeyError):
                ask(shards, commands)
            shards.shards = whole
            raise InterruptedError
        return ask(shards, commands)

    vars(shards)["ask"] = dying


def test_a_state_of_other_shards_is_refused() -> None:
    run = Run(network(), 3)
    state = run.minimizer.state()
    with pytest.raises(InvalidArgument, match="started anew"):
        run.minimizer.load(state, ["w"])
    for wrong in ({}, {"pairs": [["s99", "y99"]], "gram": [0, 0, 0, 0]}, {**state, "at": {"x": 1}}):
        with pytest.raises(InvalidArgument):
            run.minimizer.load(wrong, run.shards.ask([Names()])[0])


def _interrupt(run: Run, evaluation: int) -> None:
    """Ends the step after an evaluation, counted from now."""
    evaluate, left = run.minimizer._evaluate, [evaluation]

    def failing(target: str, then: Sequence[Command]) -> tuple[float, list[Any]]:
        found = evaluate(target, then)
        left[0] -= 1
        if left[0] == 0:
            raise InterruptedError
        return found

    run.minimizer._evaluate = failing
    with pytest.raises(InterruptedError):
        run.minimizer.step()
    run.minimizer._evaluate = evaluate


@pytest.mark.parametrize("iterations", [5, 6])
@pytest.mark.parametrize("new_coordinator", [False, True])
def test_a_new_batch_begins_where_the_last_one_ended(
    iterations: int, new_coordinator: bool
) -> None:
    """Also when its first iteration is done again, after an error in the line search."""
    run = Run(valley(), iterations)
    state = json.loads(json.dumps(run.minimizer.state()))
    run.minimizer.new_batch()
    _interrupt(run, 2)
    assert not np.array_equal(run.shards.read(), run.iterates[-1])
    if new_coordinator:
        run.minimizer = Minimizer(run.shards.ask, run.evaluator)
        run.minimizer.load(state, run.shards.ask([Names()])[0])
    run.minimizer.new_batch()
    _interrupt(run, 1)
    assert np.array_equal(run.shards.read(), run.iterates[-1])


def test_vectors_of_a_state_outlive_a_history_that_is_forgotten() -> None:
    run = Run(valley(), 9, history=3)
    state = run.minimizer.state()
    kept = {name: run.shards.read(name) for pair in state["pairs"] for name in pair}
    assert len(kept) == 6
    run.minimizer._forget()  # as where rounding makes the direction one of ascent
    _interrupt(run, 2)
    assert all(np.array_equal(run.shards.read(name), value) for name, value in kept.items())


def test_a_state_is_refused_where_another_run_used_the_shards() -> None:
    run = Run(valley(), 5)
    state = run.minimizer.state()
    Minimizer(run.shards.ask, run.evaluator, history=2).step()
    with pytest.raises(InvalidArgument, match="another history"):
        Minimizer(run.shards.ask, run.evaluator).load(state, run.shards.ask([Names()])[0])


def test_a_shorter_history_goes_on() -> None:
    run = Run(valley(), 10, history=4)
    state = run.minimizer.state()
    # As after four iterations.
    state["pairs"] = [[f"s{i}", f"y{i}"] for i in range(4)]
    names = [name for pair in state["pairs"] for name in pair]
    dots = run.shards.ask([Dots([(one, two) for one in names for two in names])])[0]
    state["gram"] = np.reshape(dots, (8, 8)).tolist()
    minimizer = Minimizer(run.shards.ask, run.evaluator, history=3)
    minimizer.load(state, run.shards.ask([Names()])[0])
    assert minimizer.history.pairs == [(f"s{i}", f"y{i}") for i in range(1, 4)]
    minimizer.step()
    state["pairs"][3] = ["s4", "y4"]
    with pytest.raises(InvalidArgument, match="history=3"):
        minimizer.load(state, run.shards.ask([Names()])[0])


@pytest.mark.parametrize("wrong", [{"x": []}, {"x": 5}, {"loss": "1"}, {"gradient": None}])
def test_a_state_of_other_types_is_refused(wrong: dict[str, Any]) -> None:
    run = Run(network(), 3)
    state = run.minimizer.state()
    state["at"] |= wrong
    with pytest.raises(InvalidArgument, match="no state"):
        run.minimizer.load(state, run.shards.ask([Names()])[0])


@pytest.mark.parametrize("search", [strong_wolfe, more_thuente])
def test_searches_of_odd_functions_end(search: Search) -> None:
    """A line without end, and losses whose squares are more than a float64 holds."""

    def line(w: Vector) -> tuple[float, Vector]:
        return float(-w.sum()), -np.ones_like(w)

    run = Run((line, np.zeros(1)), 2, search=search)
    assert run.iterations[-1].loss < 0
    for high in (1e200, np.inf):
        run = Run((_wall(high), np.zeros(1)), 1, search=search)
        assert run.iterations[-1].step == 0
        assert np.isfinite(run.iterates[-1])
        assert run.iterations[-1].evaluations > 2


def _wall(high: float) -> Function:
    """A function that is as high everywhere but at its start."""
    return lambda w: (high if w.any() else 1.0, -np.ones_like(w))
