"""Torch's test modules, made to choose their tests for gradwire and to run them over it.

Torch's tests know backends by name, and choose by these names when their module is imported. What
gloo and MPI can do on the CPU (MPI: all_to_all; gloo: nearly all the rest), gradwire can. So in
torch's module BACKEND is the word "gradwire" that also equals "gloo" and "mpi", which chooses the
tests of both; groups that they make have the backend gradwire. No test is changed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

RANKS = 4
_STANDS_FOR = ("gloo", "mpi")


class _Chooser(str):
    """The word "gradwire", equal to the names of the backends whose tests are chosen."""

    def __eq__(self, other: object) -> bool:
        return other in _STANDS_FOR or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_STANDS_FOR[0])  # for sets of backends


def distributed_test() -> types.ModuleType:
    """torch.testing._internal.distributed.distributed_test, with the tests for gradwire."""
    os.environ["WORLD_SIZE"] = str(RANKS)
    common = importlib.import_module("torch.testing._internal.common_distributed")
    importlib.import_module("torch.testing._internal.common_utils")
    common.DistTestCases.backend_feature["plugin"].add("gradwire")
    # Tests of groups of ranks 1 and 2: it wants 8 ranks, but of MPI, which is taken at its word.
    common.skip_if_small_worldsize = lambda test: test
    chosen: Any = {**os.environ, "BACKEND": _Chooser("gradwire")}  # os.environ takes no subclass
    with mock.patch.object(os, "environ", chosen):
        module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    os.environ["BACKEND"] = "gradwire"
    return module


class Forked:
    """For a MultiProcessTestCase: ranks that are forked from a process which has imported torch.

    Torch starts each rank of each test anew, which takes seconds.
    """

    def _spawn_processes(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([type(self).__module__, "torch._dynamo", "gradwire.torch"])

        def process(target: Callable[..., None], name: str, args: Any, kwargs: Any) -> Any:
            given = dict(os.environ), target, args, kwargs
            return context.Process(target=_run, name=name, args=given)

        self._start_processes(process)  # type: ignore[attr-defined]


def _run(environment: dict[str, str], target: Callable[..., None], args: Any, kwargs: Any) -> None:
    """Runs a rank in the environment of its test, which sets variables for it."""
    os.environ.update(environment)
    target(*args, **kwargs)
