"""All ranks' saved states in one dict, and each rank's share of it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from gradwire._base.arguments import wrong
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire.torch.exchange.saved import VERSION, require_complete, share


class SavedState(Protocol):
    """The state of a hook, or a `DiLoCo`."""

    @property
    def communicator(self) -> Communicator: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, saved: Mapping[str, Any], /) -> None: ...


def gather_state_dict(state: SavedState, dst: int = 0) -> dict[str, Any] | None:
    """Gathers all ranks' `state_dict` in one dict on rank `dst`; returns None on the others.

    Every rank calls it, between steps. The dict holds tensors and plain values, so that
    ``torch.load(weights_only=True)`` can read a file of it. Load it with `scatter_state_dict`, or
    with ``state.load_state_dict`` on each rank that reads the file, on any number of ranks.
    """
    communicator, own = _communicator_of(state), state.state_dict()
    if communicator.rank != dst:
        _send(communicator, own, dst)
        return None
    peers = range(communicator.size)
    states = [own if peer == dst else _receive(communicator, peer) for peer in peers]
    return {"version": VERSION, "world_size": communicator.size, "ranks": states}


def _communicator_of(state: Any) -> Communicator:
    found = getattr(state, "communicator", None)
    if not isinstance(found, Communicator):
        raise wrong(state, "state", "what register() returned, or a DiLoCo")
    return found


def scatter_state_dict(state: SavedState, gathered: Mapping[str, Any] | None, src: int = 0) -> None:
    """Loads on each rank its share of a `gather_state_dict` result that rank `src` has.

    Every rank calls it, before a step; the others give None. If the number of ranks has changed,
    residuals are averaged over old ranks or copied to new ones, so that they move weights as far as
    they would have. Raises InvalidArgument on all ranks for another value, and on each rank for
    another model's state.
    """
    communicator = _communicator_of(state)
    if communicator.rank != src:
        found = _receive(communicator, src)
        if "error" in found:
            raise InvalidArgument(found["error"])
        state.load_state_dict(found)
        return
    try:
        _require_states(gathered)
    except InvalidArgument as error:
        _send_others(communicator, [{"error": str(error)}] * communicator.size)
        raise
    assert gathered is not None
    size = communicator.size
    own = share(gathered, src, size)
    for peer in range(size):  # one at a time in memory
        if peer != src:
            _send(communicator, share(gathered, peer, size), peer)
    state.load_state_dict(own)


def _require_states(gathered: Any) -> None:
    try:
        require_complete(gathered)
        for each in gathered["ranks"]:
            dict(each["velocities"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(
            f"the states are not whole ({type(error).__name__}: {error}): give what "
            "gather_state_dict() returned"
        ) from error


def _send_others(communicator: Communicator, what: Sequence[Mapping[str, Any]]) -> None:
    for peer, each in enumerate(what):
        if peer != communicator.rank:
            _send(communicator, each, peer)


def _send(communicator: Communicator, what: Mapping[str, Any], peer: int) -> None:
    file = io.BytesIO()
    torch.save(dict(what), file)
    data = np.frombuffer(file.getbuffer(), np.uint8)
    communicator.send(np.array([data.size], np.int64), peer)
    communicator.send(data, peer)


def _receive(communicator: Communicator, peer: int) -> dict[str, Any]:
    size = np.empty(1, np.int64)
    communicator.recv(size, peer)
    data = np.empty(int(size[0]), np.uint8)
    communicator.recv(data, peer)
    found: dict[str, Any] = torch.load(io.BytesIO(data.data), weights_only=True)
    return found
