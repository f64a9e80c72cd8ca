"""The clock of tests that measure time on machines that do other work too."""

from __future__ import annotations

from stopwatch import Stopwatch


def test_time_is_never_negative() -> None:
    watch = Stopwatch(2)
    watch.join(0)
    watch.start()
    assert 0 <= watch.seconds <= watch.elapsed
    watch._queued[0] -= 100  # several threads that were queued at the same time
    assert watch.seconds == 0
