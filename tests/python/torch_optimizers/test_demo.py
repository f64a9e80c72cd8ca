"""DeMo: its transform, what it sends, and what stays in the momenta."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradwire import Communicator
from gradwire.torch import DeMo
from gradwire.torch.optimizers.dct import Tiles
from local_training import small, weights
from ranks import on_ranks, run
from replicated_training import Replica, own_gradients
from scipy.fft import dctn
from torch import nn


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [((128, 64), (2, 1)), ((100, 3, 3), (2, 1)), ((65, 130), (2, 3)), ((7,), (1, 1)), ((), (1, 1))],
)
def test_tiles_are_transformed_as_scipy_does(
    shape: tuple[int, ...], tiles: tuple[int, int]
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    cut = Tiles(shape, 64)
    found = cut.transform(tensor)
    matrix = tensor.reshape(shape[0] if len(shape) > 1 else 1, -1).numpy()
    high, wide = (-(-side // count) for side, count in zip(matrix.shape, tiles, strict=True))
    padded = np.zeros((high * tiles[0], wide * tiles[1]), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    parts = padded.reshape(tiles[0], high, tiles[1], wide).swapaxes(1, 2)
    expected = dctn(parts, axes=(2, 3), norm="ortho").reshape(-1, high * wide)
    assert (cut.count, cut.elements) == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
    torch.testing.assert_close(cut.restore(found), tensor, atol=1e-5, rtol=0)


def test_momenta_keep_what_is_not_sent() -> None:
    """What all ranks have sent and what stays add up to the decayed momenta and the gradients."""

    class Recorded(DeMo):
        def _gather(self, own: list[torch.Tensor]) -> torch.Tensor:
            found = super()._gather(own)
            self.gathered.append(found)
            return found

    def body(comm: Communicator) -> Any:
        replica = Replica(comm, Recorded, lr=0.01, top_k=3, chunk=16, decay=0.9)
        optimizer, found = replica.optimizer, []
        for _ in range(4):
            optimizer.gathered = []
            replica.train(1)
            momenta = [optimizer.state[each]["momentum"].double() for each in optimizer._names]
            found.append((momenta, optimizer.gathered, weights(replica.model)))
        return found

    found = run(3, body)
    model, before = small(), [torch.zeros_like(each).double() for each in small().parameters()]
    for step, ranks in enumerate(zip(*found, strict=True)):
        gradients = own_gradients(model, step, 3)
        values, places = ranks[0][1]
        done = 0
        for i, each in enumerate(model.parameters()):
            tiles = Tiles(each.shape, 16)
            sent = torch.zeros(tiles.count, tiles.elements)
            senders = torch.zeros_like(sent)
            size = tiles.count * 3
            for its, where in zip(values, places, strict=True):
                index = where[done : done + size].view(-1, 3).long()
                component = its[done : done + size].view(-1, 3)
                sent.scatter_add_(1, index, component)
                senders.scatter_add_(1, index, component.ne(0).float())
            done += size
            kept = sum(its[0][i] for its in ranks)
            given = 0.9 * before[i] + sum(its[i].double() for its in gradients)
            delivered = tiles.restore(sent)
            torch.testing.assert_close(delivered.double() + kept, given, rtol=0, atol=1e-5)
            before[i] = kept
            each.data -= 0.01 * tiles.restore(sent / senders.clamp(min=1)).sign()
        assert all(torch.equal(its[2], ranks[0][2]) for its in ranks)
        close = (weights(model) - ranks[0][2]).abs() < 1e-6
        assert close.double().mean() > 0.99  # a component may be 0 but for its rounding
        nn.utils.vector_to_parameters(ranks[0][2].float(), model.parameters())


@on_ranks(3)
def test_a_component_weighs_the_same_however_many_ranks_send_it(comm: Communicator) -> None:
    """Two ranks send 2 of the first component, the third 3 of the second: no sum of 4 beside 3."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = DeMo([("pair", parameter)], lr=1.0, top_k=1, ranks=comm)
    parameter.grad = torch.tensor([3.0, -3.0] if comm.rank == 2 else [2.0, 2.0])
    optimizer.step()
    assert parameter.tolist() == [-1.0, 1.0]


def test_ranks_with_all_components_move_by_the_sign_of_the_mean() -> None:
    def body(comm: Communicator) -> torch.Tensor:
        replica = Replica(comm, DeMo, lr=0.01, top_k=4096, weight_decay=0.1)
        replica.train(1)
        return weights(replica.model)

    model = small()
    every = own_gradients(model, 0, 2)
    for each, gradients in zip(model.parameters(), zip(*every, strict=True), strict=True):
        each.data -= 0.01 * (sum(gradients).sign() + 0.1 * each.data)
    for found in run(2, body):
        torch.testing.assert_close(found, weights(model), rtol=0, atol=1e-6)
