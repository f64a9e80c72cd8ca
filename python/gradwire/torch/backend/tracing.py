"""Exclusion of the backend's methods from torch.compile, which would trace into them and fail."""

from __future__ import annotations

import types
from typing import Any

import torch


def hide_from_dynamo(*classes: type) -> None:
    """Has torch.compile run the methods of these classes and their bases as they are.

    torch.compiler.disable would do, but imports the compiler, which takes seconds.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for each in {base for made in classes for base in made.__mro__ if _is_ours(base)}:
        for member in vars(each).values():
            if isinstance(member, types.FunctionType):
                frames.set_code_exec_strategy(member.__code__, skip)


def _is_ours(base: type) -> bool:
    return base.__module__.startswith("gradwire.")
