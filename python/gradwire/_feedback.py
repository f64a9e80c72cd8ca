"""ErrorFeedback: what lossy codecs did not deliver, kept and added to the next call.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent", sec. 3; Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD".
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire import _core
from gradwire._arrays.operands import Operand
from gradwire._base import arguments
from gradwire._errors import InvalidArgument

Keys = Sequence[tuple[str, int]]


class ErrorFeedback:
    """This rank's residuals, one vector for each key, in units of the summed input.

    Given to a call as ``feedback=``, with the key of each array. What the codec does not deliver
    stays in the residual, which is added to the input of the key's next call: over any number of
    calls, whatever their codecs, algorithms and numbers of ranks, the sums that were delivered and
    all ranks' residuals add up to the sum of all inputs. A call that fails, or meets NaN or Inf on
    any rank, leaves the residuals of all ranks as they were.

    May be used from any thread. A key can be in one unfinished call only. Of calls on a GPU, those
    of one communicator at a time.

    `dtype` "bfloat16" keeps residuals in half the memory, for calls on the CPU. They are then
    rounded to 8 significant bits at random, up or down so that the mean is exact: an element loses
    less than 1 % of its residual a call so, and nothing in expectation. The random numbers follow
    from key, rank and number of calls, and are the same in every run. All else is as with float32,
    and what reads residuals returns float32.

    Used with arrays on a GPU, it lives in that GPU's memory. What reads or changes it on the host
    waits for the GPU then, so it must not be used while a CUDA graph is captured.
    """

    def __init__(self, dtype: Any = "float32") -> None:
        """Of residuals kept as `dtype`; raises InvalidArgument for another one than these two."""
        self.dtype = _type_name(dtype)
        self._core = _core.ErrorFeedback(self.dtype == "bfloat16")
        self._gpu: _GpuPart | None = None
        self._in_step = False

    def residual(self, key: str) -> NDArray[np.float32]:
        """A copy of the key's residual, float32 of the input's length; empty for an unused key."""
        with self._at_home():
            return self._core.residual(arguments.text(key, "key"))

    def keys(self) -> dict[str, int]:
        """The keys that have a residual, and its length."""
        with self._at_home():
            return dict(self._core.keys())

    def add(self, key: str, values: Any) -> None:
        """Adds to a key's residual, as a survivor does with that of a rank that left.

        Raises InvalidArgument for another length than the key has, and while a call is unfinished.
        """
        with self._at_home():
            self._core.add(arguments.text(key, "key"), _floats(values, "values"))

    def scale(self, factor: float) -> None:
        """Multiplies all residuals: when the loss scale or the learning rate is changed by it."""
        with self._at_home():
            self._core.scale(arguments.number(factor, "factor"))

    def clear(self) -> None:
        """Forgets all keys."""
        with self._at_home():
            self._core.clear()

    def begin_step(self) -> None:
        """Makes the calls from here to `end_step` stand or fall together."""
        self._core.begin_step()
        self._in_step = True

    def end_step(self, keep: bool = True) -> bool:
        """Keeps what the step's calls left, or nothing of it; says which.

        Nothing is kept when one of them failed or met NaN or Inf, or `keep` is false. Raises
        InvalidArgument while one of them is unfinished. Of calls on a GPU, where NaN is found only
        later, it says `keep`.
        """
        kept = self._core.end_step(arguments.flag(keep, "keep"))
        self._in_step = False
        if self._gpu is not None:
            self._gpu.end_step(kept)
        return kept

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """All there is, by key: to be saved on each rank with a checkpoint, and loaded again.

        A copy, as of one moment: calls that are not over, and those of a step under way, have no
        part in it. Of each key the residual, as float32; what codecs have adapted to it (``tau`` of
        threshold, ``filter`` of topk) or remember (``memory``, factors of lowrank); and its number
        of ``calls``, on which stochastic rounding depends.
        """
        with self._at_home():
            saved = self._core.save()
        return {key: dict(zip(_KEPT, kept, strict=True)) for key, kept in saved.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces everything by what `state_dict` returned, of residuals of either dtype.

        Raises InvalidArgument, and changes nothing, for what it did not return, for NaN or Inf,
        and while a call is unfinished.
        """
        if not isinstance(state, Mapping):
            raise InvalidArgument(f"error feedback: {state!r} is no state_dict()")
        kept = {key: _kept(key, each) for key, each in state.items()}
        with self._at_home():
            self._core.load(kept)

    def _on_gpu(self, device: int, stream: int) -> _core.CudaFeedback:
        """Its part there, for a call on the stream."""
        if self.dtype != "float32":
            raise InvalidArgument(
                f"feedback= keeps residuals in {self.dtype}, which is for arrays on the CPU, and "
                f"these are on cuda:{device}: give an ErrorFeedback() of float32"
            )
        if self._gpu is None:
            self._gpu = _GpuPart(self._core, device)
        return self._gpu.for_call(device, stream, self._in_step)

    def _require_finite(self, address: int, elements: int, keeps: object) -> None:
        """Of float32 on a GPU: the step under way is not kept where it holds NaN or Inf."""
        if self._gpu is not None:
            self._gpu.require_finite(address, elements, keeps)

    def _on_cpu(self) -> _core.ErrorFeedback:
        """The host's part, for a call there."""
        if self._gpu is not None:
            self._gpu.bring_home()
            self._gpu = None
        return self._core

    @contextlib.contextmanager
    def _at_home(self) -> Iterator[None]:
        """All of it is on the host for as long as this lasts."""
        gpu = self._gpu
        if gpu is None:
            yield
            return
        gpu.bring_home()
        try:
            yield
        finally:
            gpu.send_back()

    def __repr__(self) -> str:
        keys = self.keys()
        dtype = "" if self.dtype == "float32" else f", {self.dtype}"
        return f"ErrorFeedback({len(keys)} keys, {sum(keys.values())} elements{dtype})"


class _GpuPart:
    """What is in a GPU's memory."""

    def __init__(self, host: _core.ErrorFeedback, device: int) -> None:
        self._core, self._device = _core.CudaFeedback(host, device), device
        self._stream = 0  # of the step's last call, behind which the step ends
        self._looked_at: list[object] = []
        self._in_step = False

    def for_call(self, device: int, stream: int, in_step: bool) -> _core.CudaFeedback:
        if device != self._device:
            raise InvalidArgument(
                f"error feedback: the residuals are on cuda:{self._device} and the arrays on "
                f"cuda:{device}; give each its own ErrorFeedback"
            )
        self._stream = stream
        if in_step and not self._in_step:
            self._core.begin_step()
            self._in_step = True
            self._looked_at.clear()
        return self._core

    def end_step(self, keep: bool) -> None:
        if self._in_step:
            self._in_step = False
            self._core.end_step(keep, self._stream)

    def require_finite(self, address: int, elements: int, keeps: object) -> None:
        if self._in_step:
            self._core.require_finite(address, elements, self._stream)
            self._looked_at.append(keeps)  # until the stream has surely come by

    def bring_home(self) -> None:
        self._core.bring_home()

    def send_back(self) -> None:
        self._core.send_back()


def _type_name(dtype: Any) -> str:
    """Of a type of NumPy or torch, too."""
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        raise InvalidArgument(f"dtype={dtype!r}: residuals are kept in 'float32' or 'bfloat16'")
    return name


_KEPT = ("residual", "tau", "filter", "calls", "memory")


def _kept(key: Any, saved: Any) -> Any:
    """Of one key, for the core."""
    try:
        if not isinstance(key, str):
            raise TypeError("a key is a str")
        residual, tau, filter_, calls, memory = (saved[each] for each in _KEPT)
        calls = operator.index(calls)
        if not 0 <= calls < 2**64:
            raise ValueError(f"calls={calls}")
        return (
            _floats(residual, "residual"),
            float(tau),
            float(filter_),
            calls,
            _floats(memory, "memory"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"error feedback: the state of key {key!r} is none that state_dict() returned: {error}"
        ) from error


def _floats(values: Any, what: str) -> NDArray[np.float32]:
    """Flat; what is too large becomes Inf, which the core refuses."""
    try:
        given = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # of torch, whatever library's array it is
        raise arguments.wrong(values, what, "an array of numbers") from None
    if given.dtype.kind not in "fiub":
        raise arguments.wrong(values, what, "an array of real numbers")
    with np.errstate(over="ignore"):
        return given.astype(np.float32, copy=False).ravel()


def keys_of(inputs: Sequence[Operand], key: str | None, keys: Keys | None) -> Keys:
    """Checked against the arrays; raises InvalidArgument where they do not fit."""
    total = sum(each.elements for each in inputs)
    if key is not None and keys is not None:
        raise InvalidArgument("give key= or keys=, not both")
    if key is not None:
        return [(str(key), total)]
    if keys is None:
        raise InvalidArgument(
            "feedback= needs key=, or keys=[(name, count), ...], under which to keep what was not "
            "sent: the same one for the same array at every call"
        )
    if len({name for name, _ in keys}) < len(keys):
        raise InvalidArgument("keys= names one key twice")
    if sum(count for _, count in keys) != total:
        raise InvalidArgument(
            f"keys= have {sum(count for _, count in keys)} elements, the arrays {total}"
        )
    return keys


def cut(arrays: Sequence[Operand], keys: Keys) -> list[Operand]:
    """The arrays, cut where a key ends."""
    pieces = []
    ends = np.cumsum([count for _, count in keys]).tolist()
    done = 0
    for array in arrays:
        first, last = bisect_right(ends, done), bisect_left(ends, done + array.elements)
        within = [end - done for end in ends[first:last]]
        bounds = [0, *within, array.elements]
        if not within:
            pieces.append(array)
        else:
            pieces += [_part(array, a, b) for a, b in itertools.pairwise(bounds)]
        done += array.elements
    return pieces


def _part(array: Operand, first: int, last: int) -> Operand:
    return array._replace(
        what=f"{array.what}[{first}:{last}]",
        address=array.address + first * array.itemsize,
        elements=last - first,
        shape=(last - first,),
    )
