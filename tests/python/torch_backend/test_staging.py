"""Tensors that a collective reads and writes, and its arguments, without ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from gradwire import InvalidArgument
from gradwire.torch.backend import collectives
from gradwire.torch.backend.collectives import Collectives, bare_options
from gradwire.torch.backend.operations import Finished
from gradwire.torch.backend.staging import Staging, as_bytes, flat, is_plain

PLAIN = torch.arange(6.0).view(2, 3)
ODD = {
    "strides": torch.arange(6.0).view(3, 2).t(),
    "conjugated": torch.tensor([[1 + 2j, 3 - 1j]]).conj(),
    "negative": torch.tensor([[1 + 2j, 3 - 1j]]).conj().imag,
}


def test_plain_tensors_are_used_in_place() -> None:
    staging = Staging()
    for stage in (staging.read, staging.update, staging.write):
        assert stage(PLAIN) is PLAIN
        assert stage(PLAIN, torch.float32) is PLAIN
    assert not staging.late
    work = mock.Mock()
    assert staging.finished(work) is work
    assert staging.stream(work) is None


@pytest.mark.parametrize("kind", ODD)
def test_others_have_stand_ins_that_are_copied_back(kind: str) -> None:
    tensor = ODD[kind].clone(memory_format=torch.preserve_format)
    tensor = {"conjugated": torch.conj, "negative": torch._neg_view}.get(kind, lambda x: x)(tensor)
    before = tensor.clone()
    assert not is_plain(tensor, None)
    staging = Staging()
    read = staging.read(tensor)
    assert is_plain(read, None)
    assert torch.equal(read, tensor)
    assert not staging.late  # what is read stays
    update = staging.update(tensor)
    assert torch.equal(update, tensor)
    assert update.data_ptr() != tensor.data_ptr()
    update.mul_(2)
    assert staging.late
    finished = staging.finished(mock.Mock())
    assert isinstance(finished, Finished)
    assert torch.equal(tensor, before)
    finished.wait()
    assert torch.equal(tensor, before * 2)
    assert not staging.late
    written = staging.write(tensor)
    assert written.shape == tensor.shape
    assert is_plain(written, tensor.dtype)
    written.fill_(5)
    staging.finish()
    assert (tensor == 5).all()


def test_another_type_is_a_copy() -> None:
    staging, half = Staging(), PLAIN.half()
    assert not is_plain(half, torch.float32)
    read = staging.read(half, torch.float32)
    assert (read.dtype, read.tolist()) == (torch.float32, PLAIN.tolist())
    assert staging.read(ODD["strides"], torch.float64).is_contiguous()
    same = staging.read(ODD["strides"], torch.float32)
    assert same.data_ptr() != ODD["strides"].data_ptr()
    out = staging.write(half, torch.float32)
    assert out.dtype is torch.float32
    out.fill_(7)
    staging.finish()
    assert (half == 7).all()


def test_gradients_do_not_see_the_copies() -> None:
    weight = torch.zeros(3, 2, requires_grad=True)
    staging = Staging()
    made = staging.update(weight.t())
    assert not made.requires_grad
    leaf = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    staging.write(leaf, torch.float32).fill_(1)
    staging.finish()
    assert (leaf == 1).all()


def test_payloads_are_encoded_and_decoded_at_the_end() -> None:
    payloads = mock.Mock(size=lambda count: 2 * count)
    staging = Staging()
    with torch.device("meta"):
        sent = staging.read_bytes(PLAIN, payloads)
        received = staging.write_bytes(PLAIN, payloads)
    for each in (sent, received):
        assert (each.dtype, each.shape, each.device.type) == (torch.uint8, (12,), "cpu")
    payloads.encode.assert_called_once_with(PLAIN, sent)
    assert not payloads.decode.called
    assert staging.late
    staging.finish()
    payloads.decode.assert_called_once_with(received, PLAIN)
    staging.finish()
    assert payloads.decode.call_count == 1
    assert staging.read_bytes(PLAIN, None).shape == staging.write_bytes(PLAIN, None).shape == (24,)


@pytest.mark.parametrize(
    ("op", "dtype", "here", "sent", "result"),
    [
        ("avg", torch.int32, True, "sum", [2, -2]),
        ("avg", torch.int32, False, "sum", [7, -7]),
        ("avg", torch.float32, True, "avg", [7, -7]),
        ("sum", torch.int32, True, "sum", [7, -7]),
    ],
)
def test_averages_of_integers_are_cut_off(
    op: str, dtype: torch.dtype, here: bool, sent: str, result: list[int]
) -> None:
    staging, tensor = Staging(), torch.tensor([7, -7], dtype=dtype)
    assert staging.averages({"op": op, "x": 1}, 3, [tensor], here=here) == {"op": sent, "x": 1}
    staging.finish()
    assert tensor.tolist() == result
    staging.finish()
    assert tensor.tolist() == result
    other = torch.tensor([7], dtype=torch.int32)
    staging.averages({"op": "avg"}, 3, [other])
    staging.finish()
    assert other.tolist() == [2]


def test_a_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"is on meta, and another one .* on the CPU"):
        Staging().read(torch.empty(2, device="meta"))
    with pytest.raises(InvalidArgument, match="is on meta"):
        Staging().copied(torch.empty(2, device="meta"), torch.empty(2))


class Wrapper(torch.Tensor):
    """A result of a functional collective, before it is there."""

    def trigger_wait(self) -> torch.Tensor:
        return PLAIN


def test_results_of_functional_collectives_are_waited_for() -> None:
    assert Staging().read(torch.zeros(1).as_subclass(Wrapper)) is PLAIN
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert Staging().read(parameter) is parameter
    assert flat(PLAIN).shape == (6,)
    assert as_bytes(PLAIN).shape == (24,)


# ---- Arguments ---------------------------------------------------------------------------------


def test_options_may_be_given_bare() -> None:
    own = mock.Mock(timeout=1)
    assert bare_options(own, {}) is own
    plain = bare_options(None, {})
    sums = torch.distributed.ReduceOp.SUM
    assert (plain.reduceOp, plain.rootRank, plain.timeout) == (sums, 0, None)
    assert bare_options(torch.distributed.ReduceOp.MAX, {}).reduceOp is not sums
    assert bare_options(2, {}).rootRank == 2
    named = bare_options(None, {"op": "its op", "root": 3, "timeout": 4})
    assert (named.reduceOp, named.rootRank, named.timeout) == ("its op", 3, 4)


def test_a_rank_has_one_tensor_in_a_call() -> None:
    x, y = torch.zeros(1), torch.zeros(1)
    assert collectives._listed(x)[0] is collectives._listed([x])[0] is x
    for given in ([], [x, y]):
        with pytest.raises(InvalidArgument, match=f"{len(given)} tensors, and a rank has one"):
            collectives._listed(given)
    assert [len(each) for each in collectives._nested([x, y])] == [2]
    assert collectives._nested(([x, y],)) == [[x, y]]
    for lists in ([], [[x], [y]]):
        with pytest.raises(InvalidArgument, match=f"{len(lists)} lists of tensors"):
            collectives._nested(lists)


@pytest.mark.parametrize(
    ("shape", "sizes", "blocks"),
    [
        ((4, 3), [], None),
        ((4, 3), [1, 3], [(1, 3), (3, 3)]),
        ((4,), [4, 0], [(4,), (0,)]),
        ((3, 4), [], "whose first dimension cannot be cut into 2"),
        ((), [], "whose first dimension cannot be cut into 2"),
        ((4, 3), [4], r"x_split_sizes=\[4\] is not a size for each of 2 ranks that sum to 4"),
        ((4, 3), [1, 2], "that sum to 4"),
        ((4, 3), [1, 2, 1], "for each of 2 ranks"),
    ],
)
def test_blocks_are_even_or_of_the_sizes(shape: Any, sizes: list[int], blocks: Any) -> None:
    tensor = torch.zeros(shape)
    if isinstance(blocks, str):
        with pytest.raises(InvalidArgument, match=blocks):
            collectives._blocks(tensor, sizes, 2, "x")
        return
    found = collectives._blocks(tensor, sizes, 2, "x")
    if blocks is None:
        assert found.shape == (12,)
    else:
        assert [tuple(each.shape) for each in found] == blocks


class Group(Collectives):
    """Rank 1 of 2, whose calls are noted and not made."""

    def __init__(self) -> None:
        comm = mock.Mock(rank=1, size=2)
        self._endpoint = mock.Mock(communicator=comm)
        self._endpoint.staging.side_effect = lambda *_, **__: Staging()
        self._endpoint.run.side_effect = lambda call, *_: call
        self._codec = mock.Mock(compresses=False)
        self._codec.payloads.return_value = None
        self._codec.reduction.return_value = {"op": "sum"}, None


X, Y = torch.zeros(2), torch.ones(2)
PAIR = [torch.zeros(2), torch.zeros(2)]


@pytest.mark.parametrize("checked", ["allreduce", "broadcast", "reduce"])
def test_sizes_are_compared_and_shapes_are_not(checked: str) -> None:
    call: Any = getattr(Group(), checked)(X)
    assert call.args == (X,)
    assert call.keywords["check"] == "size"


@pytest.mark.parametrize("root", [0, 1])
def test_only_the_root_of_a_reduction_is_written(root: int) -> None:
    group, odd = Group(), torch.zeros(2, 2).t()
    stages = [Staging(), Staging()]
    group._endpoint.staging.side_effect = stages  # type: ignore[attr-defined]
    call: Any = group.reduce(odd, None, root=root)
    assert call.keywords["root"] == root
    assert stages[0].late == (root == 1)
    call = group.broadcast(odd, None, root=root)
    assert call.keywords["root"] == root
    assert stages[1].late == (root == 0)


def test_blocks_go_to_their_places() -> None:
    group: Any = Group()
    gathered = group.allgather([PAIR], [X])
    assert gathered.args == (X,)
    assert gathered.keywords == {"out": PAIR, "check": "size"}
    single = group.all_gather_single(torch.zeros(4), X)
    assert (single.keywords["out"].shape, single.keywords["check"]) == ((4,), "size")
    gather = group.gather([PAIR], [X], root=1)
    assert gather.keywords == {"root": 1, "out": PAIR}
    assert group.gather([], [X], root=0).keywords == {"root": 0, "out": None}
    scatter = group.scatter([X], [PAIR], root=1)
    assert (scatter.args, scatter.keywords) == ((PAIR,), {"root": 1, "out": X})
    assert group.scatter([X], [], root=0).args == (None,)
    reduced = group.reduce_scatter([X], [PAIR])
    assert (reduced.args, reduced.keywords) == ((PAIR,), {"out": X, "check": "size", "op": "sum"})
    whole = group.reduce_scatter_single(X, torch.zeros(2, 2)).keywords
    assert (whole["out"].shape, whole["check"]) == ((2,), "size")
    every = group.alltoall(PAIR, [X, Y])
    assert (every.args, every.keywords) == (([X, Y],), {"out": PAIR})
    split = group.all_to_all_single(torch.zeros(3), torch.zeros(4), [1, 2], [3, 1])
    assert [len(each) for each in split.args[0]] == [3, 1]
    assert [len(each) for each in split.keywords["out"]] == [1, 2]
    group._endpoint.staging.assert_called_with("all_to_all", mock.ANY)


def test_payloads_are_gathered_in_memory_of_the_host() -> None:
    group: Any = Group()
    group._codec.compresses = True
    payloads = group._codec.payloads.return_value = mock.Mock(size=lambda count: 5 * count)
    call = group.allgather([PAIR], [X])
    assert call.args[0].shape == (10,)
    assert [each.shape for each in call.keywords["out"]] == [(10,), (10,)]
    assert group._endpoint.staging.call_args.kwargs == {"on_host": True}
    stage = Staging()
    group._endpoint.staging.side_effect = [stage]
    call = group.all_gather_single(torch.zeros(4), X)
    assert (call.args[0].shape, call.keywords["out"].shape) == ((10,), (20,))
    assert group._endpoint.staging.call_args.kwargs == {"on_host": True}
    stage.finish()
    assert [each.args[1].shape for each in payloads.decode.call_args_list] == [(2,), (2,)]


def test_an_operation_within_backward_is_waited_for_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mock.Mock()
    monkeypatch.setattr(collectives, "Variable", mock.Mock(_execution_engine=engine))
    operation: Any = mock.Mock()
    assert collectives._told_by_backward(operation) is operation
    assert not engine.queue_callback.called
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 0)
    collectives._told_by_backward(operation)
    engine.queue_callback.assert_called_once_with(operation.wait)
