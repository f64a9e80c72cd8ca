"""Collectives of Python objects, by pickle: the sizes travel first, then the bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire._base.deadline import Deadline
from gradwire._calls.communicator_like import CommunicatorLike
from gradwire._errors import InvalidArgument, describe

_PROTOCOL = 5  # every Python that gradwire runs on has it


class ObjectCollectives:
    """The communicator's methods that take any picklable Python object.

    **Unpickling runs code that the sender chooses.** The bytes come only from ranks of this job,
    which have authenticated each other; with GRADWIRE_INSECURE=1, from anybody who has joined. Do
    not use these methods if the other ranks must not run code on this one, nor to pass on objects
    from sources that you do not trust.

    Every rank makes the same call. An object that cannot be pickled raises InvalidArgument on all
    ranks, which names its rank; one that a rank cannot unpickle raises it on that rank only. The
    communicator stays usable. ``timeout`` is in seconds for the whole call, the communicator's if
    None. For arrays use the other collectives, which copy nothing.
    """

    def broadcast_object(
        self: CommunicatorLike, obj: Any = None, *, root: int = 0, timeout: float | None = None
    ) -> Any:
        """The root's `obj`, on all ranks: itself on the root, a copy by pickle on the others.

        The `obj` of the other ranks is ignored. Only for ranks that trust each other: unpickling
        runs code that the sender chooses; see `ObjectCollectives`.
        """
        name, deadline = "broadcast_object", Deadline(self._seconds(timeout))
        root = self._rank(root, "root")
        own = _pickled(name, self.rank, obj) if self.rank == root else _NOTHING
        head = np.array([len(own.data), own.failed], np.int64)
        size, failed = self.broadcast(head, root=root, timeout=deadline.left).tolist()
        data = own.data if self.rank == root else np.empty(size, np.uint8)
        self.broadcast(data, root=root, timeout=deadline.left)
        if failed:
            raise InvalidArgument(_text(data))
        return obj if self.rank == root else _unpickled(name, root, data)

    def all_gather_object(
        self: CommunicatorLike, obj: Any, *, timeout: float | None = None
    ) -> list[Any]:
        """All ranks' `obj` in a list by rank, on all ranks; also the own one is a copy by pickle.

        Only for ranks that trust each other: unpickling runs code that the sender chooses; see
        `ObjectCollectives`.
        """
        name, deadline = "all_gather_object", Deadline(self._seconds(timeout))
        own = _pickled(name, self.rank, obj)
        sizes = _gather_sizes(self, own, deadline)
        blobs = [np.empty(size, np.uint8) for size in sizes]
        self.all_gather(own.data, out=blobs, timeout=deadline.left)
        return [_unpickled(name, rank, blob) for rank, blob in enumerate(blobs)]

    def gather_object(
        self: CommunicatorLike, obj: Any, *, root: int = 0, timeout: float | None = None
    ) -> list[Any] | None:
        """All ranks' `obj` in a list by rank, on the root; returns None on the others.

        Only for ranks that trust each other: unpickling runs code that the sender chooses; see
        `ObjectCollectives`.
        """
        name, deadline = "gather_object", Deadline(self._seconds(timeout))
        root = self._rank(root, "root")
        own = _pickled(name, self.rank, obj)
        sizes = _gather_sizes(self, own, deadline)
        blobs = [np.empty(size, np.uint8) for size in sizes] if self.rank == root else None
        self.gather(own.data, root=root, out=blobs, timeout=deadline.left)
        if blobs is None:
            return None
        return [_unpickled(name, rank, blob) for rank, blob in enumerate(blobs)]

    def scatter_object(
        self: CommunicatorLike,
        objs: Sequence[Any] | None = None,
        *,
        root: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """The r-th of the root's `objs` on rank r: a list or tuple of one object for each rank.

        The root's own is a copy by pickle too. The `objs` of the others is ignored. Only for ranks
        that trust each other: unpickling runs code that the sender chooses; see
        `ObjectCollectives`.
        """
        name, deadline = "scatter_object", Deadline(self._seconds(timeout))
        root = self._rank(root, "root")
        own = _pickled_each(name, self.rank, self.size, objs) if self.rank == root else []
        head = np.zeros(1 + self.size, np.int64)
        head[: 1 + len(own)] = [any(each.failed for each in own), *(len(each.data) for each in own)]
        failed, *sizes = self.broadcast(head, root=root, timeout=deadline.left).tolist()
        if failed:
            raise InvalidArgument(_broadcast_text(self, own, root, max(sizes), deadline))
        data = np.empty(sizes[self.rank], np.uint8)
        blobs = [each.data for each in own] if own else None
        self.scatter(blobs, root=root, out=data, timeout=deadline.left)
        return _unpickled(name, root, data)


class _Pickled(NamedTuple):
    """An object's bytes, or the text of the error that pickling it raised."""

    data: NDArray[np.uint8]
    failed: bool = False


_NOTHING = _Pickled(np.empty(0, np.uint8))


def _pickled(name: str, rank: int, obj: Any) -> _Pickled:
    file = io.BytesIO()
    try:
        pickle.dump(obj, file, _PROTOCOL)
    except Exception as error:  # any: __reduce__ may raise anything
        reason = f"{type(error).__name__}: {describe(error)}"
        return _refused(f"{name}: rank {rank} cannot pickle its object: {reason}")
    return _Pickled(np.frombuffer(file.getbuffer(), np.uint8))


def _pickled_each(name: str, rank: int, size: int, objs: Any) -> list[_Pickled]:
    """Pickles one object for each rank; if one fails, all others' bytes are empty."""
    if not isinstance(objs, list | tuple) or len(objs) != size:
        length = f" of {len(objs)}" if isinstance(objs, list | tuple) else ""
        each = [
            _refused(
                f"{name}: rank {rank} gave objs={type(objs).__name__}{length}: the root gives a "
                f"list of one object for each of {size} ranks"
            )
        ]
        return each + [_NOTHING] * (size - 1)
    made = [_pickled(name, rank, obj) for obj in objs]
    failed = next((each for each in made if each.failed), None)
    return made if failed is None else [failed] + [_NOTHING] * (size - 1)


def _refused(text: str) -> _Pickled:
    return _Pickled(np.frombuffer(bytearray(text.encode(errors="replace")), np.uint8), failed=True)


def _text(data: NDArray[np.uint8]) -> str:
    return data.tobytes().decode()


def _gather_sizes(comm: CommunicatorLike, own: _Pickled, deadline: Deadline) -> list[int]:
    """All ranks' sizes; raises InvalidArgument on all ranks if one could not pickle its object."""
    head = np.array([[len(own.data), own.failed]], np.int64)
    heads = comm.all_gather(head, timeout=deadline.left).tolist()
    if not any(failed for _, failed in heads):
        return [size for size, _ in heads]
    texts = [np.empty(size if failed else 0, np.uint8) for size, failed in heads]
    data = own.data if own.failed else _NOTHING.data
    comm.all_gather(data, out=texts, timeout=deadline.left)
    raise InvalidArgument("; ".join(_text(each) for each in texts if len(each)))


def _broadcast_text(
    comm: CommunicatorLike, own: Sequence[_Pickled], root: int, size: int, deadline: Deadline
) -> str:
    data = own[0].data if own else np.empty(size, np.uint8)
    comm.broadcast(data, root=root, timeout=deadline.left)
    return _text(data)


def _unpickled(name: str, rank: int, data: NDArray[np.uint8]) -> Any:
    try:
        return pickle.loads(data.data)  # from a rank of this job; see ObjectCollectives
    except Exception as error:
        raise InvalidArgument(
            f"{name}: what rank {rank} sent cannot be unpickled here: {type(error).__name__}: "
            f"{describe(error)}"
        ) from error
