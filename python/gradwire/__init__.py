"""Collective communication with gradient compression for data-parallel training.

    import gradwire

    comm = gradwire.init()  # ranks as torchrun, mpirun, srun or `gradwire run` started them
    comm.all_reduce(x, op="avg")  # in place; a NumPy, torch or CuPy array, or a list of them

`gradwire.torch.register(ddp_model, "fp16")` lets DistributedDataParallel use it.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING

from gradwire import _core
from gradwire._errors import (
    Aborted,
    Error,
    InvalidArgument,
    JobOver,
    RendezvousError,
    ScheduleError,
    Timeout,
    TransportError,
)
from gradwire._launch import at_exit as _at_exit  # noqa: F401 - before what programs do at exit

if TYPE_CHECKING:
    from gradwire import codec
    from gradwire._base.stops import catch_stops
    from gradwire._calls.on_cpu import Work
    from gradwire._communicator import Communicator, Traffic
    from gradwire._feedback import ErrorFeedback
    from gradwire._init import init, join
    from gradwire._model import CostModel
    from gradwire._schedules.report import Edge, Report, Shape
    from gradwire._schedules.schedule import Schedule, ScheduleBuilder, algorithms
    from gradwire._spawn import spawn
    from gradwire._trace.session import trace
    from gradwire.lab.planner.advice import advise
    from gradwire.lab.planner.report import Advice

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "Advice",
    "Communicator",
    "CostModel",
    "Edge",
    "Error",
    "ErrorFeedback",
    "InvalidArgument",
    "JobOver",
    "RendezvousError",
    "Report",
    "Schedule",
    "ScheduleBuilder",
    "ScheduleError",
    "Shape",
    "Timeout",
    "Traffic",
    "TransportError",
    "Work",
    "advise",
    "algorithms",
    "catch_stops",
    "codec",
    "codecs",
    "init",
    "join",
    "spawn",
    "trace",
]

# The modules of the names above that are loaded when a program first uses them.
_HOMES = {
    "Advice": "gradwire.lab.planner.report",
    "Communicator": "gradwire._communicator",
    "CostModel": "gradwire._model",
    "Edge": "gradwire._schedules.report",
    "ErrorFeedback": "gradwire._feedback",
    "Report": "gradwire._schedules.report",
    "Schedule": "gradwire._schedules.schedule",
    "ScheduleBuilder": "gradwire._schedules.schedule",
    "Shape": "gradwire._schedules.report",
    "Traffic": "gradwire._communicator",
    "Work": "gradwire._calls.on_cpu",
    "advise": "gradwire.lab.planner.advice",
    "algorithms": "gradwire._schedules.schedule",
    "catch_stops": "gradwire._base.stops",
    "codec": "gradwire.codec",
    "init": "gradwire._init",
    "join": "gradwire._init",
    "spawn": "gradwire._spawn",
    "trace": "gradwire._trace.session",
}


def codecs() -> list[str]:
    """The names that ``codec=`` takes, which may have parameters: ``"fp16:scale=1024"``."""
    return _core.codec_names()


if not TYPE_CHECKING:  # type checkers read the imports above

    def __getattr__(name: str) -> object:
        """Loads the module of a name at its first use (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
        home = _importlib.import_module(_HOMES[name])
        globals()[name] = found = home if name == "codec" else getattr(home, name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
