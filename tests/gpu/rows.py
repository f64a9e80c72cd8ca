"""What a stage prints: a line of JSON for each group of checks, and each time."""

from __future__ import annotations

import json
import traceback
from types import TracebackType
from typing import Any


def tell(**fields: Any) -> None:
    """Prints a line."""
    print(json.dumps(fields), flush=True)


class Row:
    """Checks of one group; what its block raises is a failure of it. Told when the block ends."""

    def __init__(self, group: str, case: str = "") -> None:
        self._group, self._case = group, case
        self._failure = self._note = ""
        self._checks, self._instead = 0, ""

    def expect(self, holds: object, what: str) -> None:
        """The first `what` that does not hold is the row's failure."""
        self._checks += 1
        if not holds and not self._failure:
            self._failure = what

    def expect_none(self, problems: list[str], checks: int) -> None:
        """As many checks, of which these failed."""
        self._checks += checks
        if problems and not self._failure:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            self._failure = problems[0] + more

    def note(self, what: str) -> None:
        """What the row says where nothing failed."""
        self._note = what

    def skip(self, why: str) -> None:
        """Nothing was checked, nor can be here."""
        self._instead, self._note = "skipped", why

    def incomplete(self, why: str) -> None:
        """The time was not enough for all checks."""
        self._instead, self._note = "incomplete", why

    def __enter__(self) -> Row:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None and not self._failure:
            self._failure = _told(error)
        fields: dict[str, Any] = {"group": self._group, "case": self._case}
        fields |= {"passed": not self._failure, "checks": self._checks}
        if self._instead and not self._failure:
            fields[self._instead] = True
        tell(**fields, detail=self._failure or self._note)
        return isinstance(error, Exception) or error is None


def _told(error: BaseException) -> str:
    """Its words, and where it came from; that of another rank has its trace as its cause."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f", {frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in last)
    cause = [line.strip() for line in str(error.__cause__ or "").splitlines()]
    beside = [line for line in cause if line.startswith('File "')][-1:]
    return "; ".join([f"{type(error).__name__}: {error}{where}", *beside])
