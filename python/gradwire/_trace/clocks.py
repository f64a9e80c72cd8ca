"""Clocks of several processes, compared by the messages that they recorded.

A message is staged on one clock and landed, later, on another. So each direction of messages bounds
the difference of two clocks from one side, by the quickest of them, and a chain of messages bounds
that of its ends; the difference is taken to be in the middle, and half the distance of the bounds
is its error (as in NTP; Mills 1991, "Internet Time Synchronization", sec. III). Clocks drift, so
this is done for each window of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire._trace import parts
from gradwire._trace.parts import TracePart, TrackRecord

_WINDOW = 10_000_000_000  # nanoseconds
_PRIME = np.uint64(0x9E3779B97F4A7C15)

_Array = npt.NDArray[Any]


@dataclass
class Clock:
    """The way from one process's times to nanoseconds since 1970 by the first process's clock.

    `offset` and `error` (nanoseconds) are the difference to the first process's clock and how far
    that may be off, at worst; an error of None says that messages do not tell, and that the hosts'
    own clocks were trusted.
    """

    times: _Array  # of this process's clock
    shifts: _Array  # at these times
    offset: int = 0
    error: int | None = 0

    def unix(self, times: _Array) -> _Array:
        """Nanoseconds since 1970 of this process's times."""
        if len(self.shifts) == 1:
            return np.asarray(times.astype(np.int64) + self.shifts[0])
        since = times.astype(np.int64) - self.times[0]
        shift = np.interp(since, self.times - self.times[0], self.shifts - self.shifts[0])
        return np.asarray(times.astype(np.int64) + self.shifts[0] + shift.astype(np.int64))


@dataclass
class Messages:
    """Messages of a process: sent or received ones, with what tells them apart."""

    keys: _Array  # equal on both ends
    times: _Array  # when staging began, or landing
    ends: _Array  # when staging or landing ended


def align(found: Sequence[TracePart]) -> list[Clock]:
    """The clock of each process; the first one's is the one that all are set to."""
    sent = [messages(each, sent=True) for each in found]
    received = [messages(each, sent=False) for each in found]
    first, size = found[0], len(found)
    bounds: dict[int, _Array] = {}  # by window: the least time from staging to landing
    for a in range(size):
        for b in range(size):
            if a == b:
                continue
            ours, theirs = _matched(sent[a], received[b])
            windows = (sent[a].times[ours] + found[a].unix_offset) // _WINDOW
            took = received[b].times[theirs] - sent[a].times[ours]
            for window in np.unique(windows):
                at = bounds.setdefault(int(window), np.full((size, size), np.inf))
                at[a, b] = took[windows == window].min()
    for at in bounds.values():
        _follow_chains(at)
    return [_clock(index, each, first, bounds) for index, each in enumerate(found)]


def _clock(index: int, part: TracePart, first: TracePart, bounds: dict[int, _Array]) -> Clock:
    trusted = part.unix_offset - first.unix_offset
    at, shifts, errors = [], [], []
    for window, matrix in sorted(bounds.items()):
        most, least = matrix[index, 0], -matrix[0, index]
        if index > 0 and np.isfinite(most) and np.isfinite(least):
            at.append(window * _WINDOW + _WINDOW // 2 - part.unix_offset)
            shifts.append(int(most + least) // 2)
            errors.append(int(abs(most - least) + 1) // 2)
    if index == 0 or not shifts:
        shift = np.array([first.unix_offset + (0 if index == 0 else trusted)], np.int64)
        error = 0 if index == 0 else None
        return Clock(np.zeros(1, np.int64), shift, trusted if index else 0, error)
    middle = len(shifts) // 2
    return Clock(
        np.array(at, np.int64),
        np.array(shifts, np.int64) + first.unix_offset,
        shifts[middle],
        max(errors),
    )


def _follow_chains(bounds: _Array) -> None:
    """Adds the bounds of chains of messages (Floyd and Warshall)."""
    for via in range(len(bounds)):
        np.minimum(bounds, bounds[:, via, None] + bounds[None, via, :], out=bounds)
        np.fill_diagonal(bounds, 0)


def _matched(sent: Messages, received: Messages) -> tuple[_Array, _Array]:
    _, ours, theirs = np.intersect1d(sent.keys, received.keys, return_indices=True)
    return ours, theirs


def messages(part: TracePart, *, sent: bool) -> Messages:
    """The frames and messages that a process has sent or received."""
    found = [_of_track(each, sent) for each in part.tracks]
    return Messages(*(np.concatenate([each[i] for each in found]) for i in range(3)))


def _of_track(track: TrackRecord, sent: bool) -> tuple[_Array, _Array, _Array]:
    events, ranks = track.events, np.array(track.place.job_ranks, np.uint64)
    kind, flags = events["kind"], events["flags"]
    is_message = kind == parts.MESSAGE
    is_sent = (kind == parts.SEND) | (is_message & ((flags & parts.SENT) != 0))
    is_received = (kind == parts.RECEIVE) | (is_message & ((flags & parts.SENT) == 0))
    mine = events[is_sent if sent else is_received]
    return (
        keys(mine, track, ranks, sent=sent),
        mine["begin"].astype(np.int64),
        (mine["begin"] + mine["duration"]).astype(np.int64),
    )


def keys(events: _Array, track: TrackRecord, ranks: _Array, *, sent: bool) -> _Array:
    """A number for each frame or message that both of its ends give it."""
    own = np.full(len(events), track.place.job_rank, np.uint64)
    peer = ranks[events["peer"]]
    source, target = (own, peer) if sent else (peer, own)
    state = np.full(len(events), track.place.communicator, np.uint64)
    messages = (events["kind"] == parts.MESSAGE).astype(np.uint64)
    for column in (messages, events["operation"], events["segment"], events["round"]):
        state = (state ^ column.astype(np.uint64)) * _PRIME
        state ^= state >> np.uint64(29)
    for column in (source, target):
        state = (state ^ column) * _PRIME
        state ^= state >> np.uint64(32)
    return state
