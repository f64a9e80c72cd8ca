"""`gradwire run --trace`: has the ranks record, and makes one file of it at their end."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gradwire._errors import InvalidArgument
from gradwire._trace import merge


@contextlib.contextmanager
def traced(file: str | None, environment: dict[str, str]) -> Iterator[None]:
    """Sets the ranks' environment for the block, and writes the file when they have ended."""
    if file is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="gradwire-trace-") as folder:
        environment["GRADWIRE_TRACE"] = folder
        try:
            yield
        finally:
            _say(file, _merged(Path(folder), Path(file)))


def _merged(folder: Path, file: Path) -> str:
    try:
        return merge.describe(merge.merge(folder, file))
    except (InvalidArgument, OSError) as error:
        return f"no trace: {error}"


def _say(file: str, what: str) -> None:
    print(f"gradwire run: {file}: {what}", file=sys.stderr, flush=True)
