"""ErrorFeedback: keeps what lossy codecs did not deliver, and adds it to the next call.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent", sec. 3; Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD".
"""

from __future__ import annotations

import contextlib
import itertools
import math
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
    """Residuals of this rank: one vector for each key, in the scale of the summed input.

    Passed to a call as ``feedback=``, with the key of each array. What the codec does not deliver
    stays in the residual, which is added to the input of the key's next call. Over any number of
    calls, with any codecs, algorithms and numbers of ranks, the delivered sums and all ranks'
    residuals add up to the sum of all inputs. A call that fails, or meets NaN or Inf on any rank,
    leaves the residuals of all ranks as they were.

    May be used from any thread. A key can be in only one unfinished call. On GPUs, only one
    communicator may use it at a time.

    `dtype` "bfloat16" keeps residuals in half the memory, for calls on the CPU. They are then
    rounded to 8 significant bits, up or down at random so that the mean is exact: an element loses
    less than 1 % of its residual in a call, and nothing in expectation. The random numbers follow
    from key, rank and number of calls, and are the same in every run. Everything else is as with
    float32, and methods that read residuals return float32.

    With arrays on a GPU, residuals live in that GPU's memory. Methods that read or change them on
    the host then wait for the GPU, so do not call them while a CUDA graph is captured.
    """

    def __init__(self, dtype: Any = "float32") -> None:
        """Takes the residuals' dtype, float32 or bfloat16; raises InvalidArgument for others."""
        self.dtype = _type_name(dtype)
        self._core = _core.ErrorFeedback(self.dtype == "bfloat16")
        self._gpu: _GpuPart | None = None
        self._in_step = False

    def residual(self, key: str) -> NDArray[np.float32]:
        """A copy of the key's residual, float32 of the input's length; empty for an unused key."""
        with self._on_host():
            return self._core.residual(arguments.text(key, "key"))

    def keys(self) -> dict[str, int]:
        """The keys that have a residual, and its length."""
        with self._on_host():
            return dict(self._core.keys())

    def add(self, key: str, values: Any) -> None:
        """Adds values to a key's residual, as a survivor does with that of a rank that left.

        Raises InvalidArgument for another length than the residual's, and while a call with the
        key is unfinished.
        """
        with self._on_host():
            self._core.add(arguments.text(key, "key"), _floats(values, "values"))

    def set(self, key: str, values: Any) -> None:
        """Replaces a key's residual; raises InvalidArgument as `add` does."""
        with self._on_host():
            self._core.set(arguments.text(key, "key"), _floats(values, "values"))

    def multiply(self, key: str, factors: Any) -> None:
        """Multiplies each element of a key's residual by its own factor; raises as `add` does."""
        with self._on_host():
            self._core.multiply(arguments.text(key, "key"), _floats(factors, "factors"))

    def scale(self, factor: float) -> None:
        """Multiplies all residuals, when loss scale or learning rate change by `factor`.

        On a GPU nothing waits for that, and a product that is too large becomes the largest float;
        on the CPU that raises InvalidArgument.
        """
        factor = arguments.number(factor, "factor")
        if self._gpu is not None and math.isfinite(factor) and self._gpu.scale(factor):
            self._core.scale(factor)  # of the keys that are not there
            return
        with self._on_host():
            self._core.scale(factor)

    def clear(self) -> None:
        """Removes all keys."""
        with self._on_host():
            self._core.clear()

    def begin_step(self) -> None:
        """Begins a step: `end_step` keeps the residuals of all its calls, or of none."""
        self._core.begin_step()
        self._in_step = True

    def end_step(self, keep: bool = True) -> bool:
        """Ends a step; returns whether it kept the residuals that the step's calls left.

        It keeps none if one of the calls failed or met NaN or Inf, or if `keep` is false. Raises
        InvalidArgument while one of them is unfinished. On GPUs, where NaN is found only later, it
        returns `keep`.
        """
        kept = self._core.end_step(arguments.flag(keep, "keep"))
        self._in_step = False
        if self._gpu is not None:
            self._gpu.end_step(kept)
        return kept

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """A copy of everything, by key, for each rank to save with a checkpoint.

        Unfinished calls, and calls of an unfinished step, have no part in it. A key's dict has its
        float32 ``residual``; what codecs have adapted (``tau`` of threshold, ``filter`` of topk) or
        remember (``memory``, factors of lowrank); and its number of ``calls``, on which stochastic
        rounding depends.
        """
        with self._on_host():
            saved = self._core.save()
        return {key: dict(zip(_SAVED_FIELDS, kept, strict=True)) for key, kept in saved.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces everything by a result of `state_dict`, from residuals of either dtype.

        Raises InvalidArgument, and changes nothing, for any other value, for NaN or Inf, and while
        a call is unfinished.
        """
        if not isinstance(state, Mapping):
            raise InvalidArgument(f"error feedback: {state!r} is no state_dict()")
        kept = {key: _saved_state(key, each) for key, each in state.items()}
        with self._on_host():
            self._core.load(kept)

    def _on_gpu(self, device: int, stream: int) -> _core.CudaFeedback:
        """The residuals on the GPU, for a call on the stream."""
        if self.dtype != "float32":
            raise InvalidArgument(
                f"feedback= keeps residuals in {self.dtype}, which is for arrays on the CPU, and "
                f"these are on cuda:{device}: give an ErrorFeedback() of float32"
            )
        if self._gpu is None:
            self._gpu = _GpuPart(self._core, device)
        return self._gpu.for_call(device, stream, self._in_step)

    def _require_finite(
        self, address: int, elements: int, keeps: object, stream: int | None = None
    ) -> None:
        """Makes the step under way keep nothing if float32 values on the GPU are NaN or Inf.

        A `stream` that is given has waited for all calls of the step, which ends on it.
        """
        if self._gpu is not None:
            self._gpu.require_finite(address, elements, keeps, stream)

    def _copy_flags(self, address: int, stream: int) -> None:
        """Copies an int32 to GPU memory on the stream: 0 if the step under way can be kept.

        Leaves it as it is where the step has no calls on a GPU.
        """
        if self._gpu is not None:
            self._gpu.copy_flags(address, stream)

    def _mask(self, arrays: Sequence[tuple[str, int, int]], stream: int) -> None:
        """Clears elements of arrays on the GPU whose residuals are 0; all of an unused key's.

        Takes key, address and number of float32 elements of each; the stream does it.
        """
        if self._gpu is not None:
            self._gpu.mask(arrays, stream)

    def _follow(self, device: int, loss_scale: int, after: int, last: float) -> None:
        """Makes residuals follow a loss scale in a GPU's memory, the address of a float32.

        It is read behind the work on the stream `after`; the host does not wait. `last` is what
        they stand for now, where the host knows that; else 0.
        """
        if self._gpu is None:
            self._gpu = _GpuPart(self._core, device)
        self._gpu.follow(device, loss_scale, after, last)

    def _on_cpu(self) -> _core.ErrorFeedback:
        """The residuals on the host, for a call on the CPU."""
        if self._gpu is not None:
            self._gpu.bring_home()
            self._gpu = None
        return self._core

    @contextlib.contextmanager
    def _on_host(self) -> Iterator[None]:
        """Brings all residuals to the host for the duration of the block."""
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
    """The residuals in a GPU's memory."""

    def __init__(self, host: _core.ErrorFeedback, device: int) -> None:
        self._core, self._device = _core.CudaFeedback(host, device), device
        self._stream = 0  # of the step's last call, after which the step ends
        self._checked: list[object] = []
        self._in_step = False

    def _require_device(self, device: int) -> None:
        if device != self._device:
            raise InvalidArgument(
                f"error feedback: the residuals are on cuda:{self._device} and the arrays on "
                f"cuda:{device}; give each its own ErrorFeedback"
            )

    def for_call(self, device: int, stream: int, in_step: bool) -> _core.CudaFeedback:
        self._require_device(device)
        self._stream = stream
        if in_step and not self._in_step:
            self._core.begin_step()
            self._in_step = True
            self._checked.clear()
        return self._core

    def end_step(self, keep: bool) -> None:
        if self._in_step:
            self._in_step = False
            self._core.end_step(keep, self._stream)

    def require_finite(
        self, address: int, elements: int, keeps: object, stream: int | None
    ) -> None:
        if self._in_step:
            self._stream = self._stream if stream is None else stream
            self._core.require_finite(address, elements, self._stream)
            self._checked.append(keeps)  # kept alive until the stream has read them

    def copy_flags(self, address: int, stream: int) -> None:
        if self._in_step:
            self._core.copy_flags(address, stream)

    def mask(self, arrays: Sequence[tuple[str, int, int]], stream: int) -> None:
        self._core.mask(arrays, stream)

    def scale(self, factor: float) -> bool:
        return self._core.scale(factor, 0, 0)

    def follow(self, device: int, loss_scale: int, after: int, last: float) -> None:
        self._require_device(device)
        if last:
            self._core.set_loss_scale(last)
        if not self._core.scale(1.0, loss_scale, after):
            raise InvalidArgument(
                "error feedback: residuals of calls in CUDA graphs cannot follow a GradScaler"
            )

    def bring_home(self) -> None:
        self._core.bring_home()

    def send_back(self) -> None:
        self._core.send_back()


def _type_name(dtype: Any) -> str:
    """The name of a dtype, given as a str or as a type of NumPy or torch."""
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        raise InvalidArgument(f"dtype={dtype!r}: residuals are kept in 'float32' or 'bfloat16'")
    return name


_SAVED_FIELDS = ("residual", "tau", "filter", "calls", "memory")


def _saved_state(key: Any, saved: Any) -> Any:
    """One key's saved state, as the core takes it."""
    try:
        if not isinstance(key, str):
            raise TypeError("a key is a str")
        residual, tau, filter_, calls, memory = (saved[each] for each in _SAVED_FIELDS)
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
    """A flat float32 array; values that are too large become Inf, which the core refuses."""
    try:
        given = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # from torch, for arrays of any library
        raise arguments.wrong(values, what, "an array of numbers") from None
    if given.dtype.kind not in "fiub":
        raise arguments.wrong(values, what, "an array of real numbers")
    with np.errstate(over="ignore"):
        return given.astype(np.float32, copy=False).ravel()


def keys_of(inputs: Sequence[Operand], key: str | None, keys: Keys | None) -> Keys:
    """Checks the keys against the arrays and returns them; raises InvalidArgument."""
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
    """Cuts the arrays where keys end."""
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
