"""C++ holders: works whose C++ half torch still holds when Python has dropped them.

A work written in Python has two halves. Code that gets one from Python, such as DDP's reducer in
`join()`, holds the C++ half alone; once the Python half is gone, that would wait for ever. So a
work that is dropped stays here for as long as anything in C++ can ask it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from gradwire.torch.backend import versions

_kept: deque[Any] = deque()


def owners(work: Any) -> int:
    """The number of owners of the C++ half of a work; its Python half is one of them.

    The half is a c10::intrusive_ptr_target, which begins with the address of its virtual methods
    and the count of its owners. Pybind11 keeps its address behind the header of the Python object.
    """
    half = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    if half is None:  # it was never made
        return 0
    return ctypes.c_uint32.from_address(half + ctypes.sizeof(ctypes.c_void_p)).value


def _are_known() -> bool:
    """Whether this version of torch counts the owners where they are looked for."""
    work = dist.Work()
    before = owners(work)
    boxed = work.boxed()  # an owner more
    return (before, owners(work), boxed is None) == (1, 2, False)


# Later versions never part the halves.
_known = versions.parse(torch.__version__) < versions.FIRST_WITH_BACKENDS and _are_known()


def keep(work: Any) -> None:
    """Keeps a work that Python drops, if something in C++ owns its other half."""
    if _known and owners(work) > 1:
        _kept.append(work)


def release() -> None:
    """Drops works that nothing in C++ owns any more."""
    for _ in range(len(_kept)):
        try:
            work = _kept.popleft()
        except IndexError:  # another thread does the same
            return
        if owners(work) > 1:
            _kept.append(work)
