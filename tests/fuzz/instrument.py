"""Makes modules tell the fuzzer what they reach.

atheris can do so while it imports them, but not those of an editable install.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, ModuleType

import atheris


def cover(*modules: ModuleType) -> None:
    """Instruments every function and method that is defined in these modules."""
    for module in modules:
        for function in _functions(module):
            atheris.instrument_func(function)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    own = [each for each in vars(module).values() if _is_defined_in(each, module)]
    for each in own:
        members = [each, *vars(each).values()] if isinstance(each, type) else [each]
        for member in members:
            function = getattr(member, "fget", member)  # a property's
            if isinstance(function, FunctionType) and _is_defined_in(function, module):
                yield function


def _is_defined_in(thing: object, module: ModuleType) -> bool:
    return getattr(thing, "__module__", None) == module.__name__
