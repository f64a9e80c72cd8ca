"""`gradwire run --trace`: has the ranks record, and makes one file of it at their end."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gradwire._errors import InvalidArgument
from gradwire._launch.root_cause import say
from gradwire._trace import merge, parts


@contextlib.contextmanager
def traced(file: str | None, environment: dict[str, str]) -> Iterator[None]:
    """Sets the ranks' environment for the block, and writes the file when they have ended."""
    if file is None:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="gradwire-trace-"))
    environment["GRADWIRE_TRACE"] = str(folder)
    try:
        yield
    finally:
        say(f"{file}: {_merged(folder, Path(file))}")


def _merged(folder: Path, file: Path) -> str:
    """Merges the ranks' parts and removes them; keeps them, if there are any, where that fails."""
    try:
        text = merge.describe(merge.write(parts.read(folder), file))
    except (InvalidArgument, OSError) as error:
        text = f"no trace: {error}"
        if any(folder.iterdir()):
            return f"{text}; the ranks' parts are in {folder}: gradwire trace merge {folder} FILE"
    shutil.rmtree(folder, ignore_errors=True)
    return text
