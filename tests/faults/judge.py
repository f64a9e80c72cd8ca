"""Rules for a case: no hang, no wrong result, no leak, and the right error in time."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from gradwire._host.encryption import Setting, setting
from stopwatch import queued_since

from tests.faults.cases import SET_UP, Case
from tests.faults.ranks import Outcome
from tests.faults.supervisor import Finished

_TYPED = ("TransportError", "Timeout", "Aborted", "InvalidArgument", "RendezvousError")
_LOAD_SECONDS = 2.0  # by which a busy machine may make a rank late besides, as by its memory
_DEATH_SECONDS = 2.0  # for all to know of a rank's death
_DEADLY = ("kill", "crash")  # the faulty rank does not report
# What InvalidArgument says of ranks that differ: in a call, in one long ago, in a message, or in a
# frame of a rank that does not answer for half a second, as one may that waits for a processor.
_WHO_PASSED_WHAT = re.compile(
    r"\branks? \d[\d, -]* called |\d against ranks? \d|rank \d+ sent a message of another size"
    r"|rank \d+ sent a frame of its call \d+, while rank \d+ is in call \d+, \w+\("
)


@dataclass(frozen=True)
class Rule:
    """The effect of a kind of fault on the other ranks."""

    errors: tuple[str, ...]  # the types that they may raise
    named: tuple[str, ...] = ()  # who `peer` may be: "faulty", "peer"; nothing: anybody
    certain: bool = True  # every rank must raise if the faulty rank did not reach the last barrier
    within: float = _DEATH_SECONDS  # seconds after the fault
    own: tuple[str, ...] = ()  # what the faulty rank may raise; nothing: the same


_RULES = {
    "kill": Rule(("TransportError",), ("faulty",)),
    "crash": Rule(("TransportError",), ("faulty",)),
    "stop": Rule(("Timeout",), ("faulty",), own=_TYPED),
    "silence": Rule(("Timeout",), certain=False),  # who waits may wait in a circle
    "exception": Rule(("Aborted",), ("faulty",), own=("ValueError", "SystemExit")),
    "interrupt": Rule(("Aborted",), ("faulty",), own=("KeyboardInterrupt",)),
    "abort": Rule(("Aborted",), ("faulty",)),
    "leave": Rule(("TransportError",), ("faulty",)),
    "mismatch": Rule(("InvalidArgument",)),
    "cut": Rule(("TransportError",), ("faulty", "peer"), certain=False),
    "truncate": Rule(("TransportError",), ("faulty",), certain=False),
    "header": Rule(("TransportError", "InvalidArgument"), ("faulty",), certain=False),
    "garble": Rule(_TYPED, certain=False),
}


_SEALED_PAYLOAD = Rule(("TransportError",), ("faulty",), certain=False)


def _rule_of(kind: str) -> Rule | None:
    """A flipped bit of a payload is found out where links are sealed."""
    if kind == "payload" and setting() is Setting.ON:
        return _SEALED_PAYLOAD
    return _RULES.get(kind)


def problems(case: Case, finished: Finished) -> list[str]:
    """Everything that must not be; empty for a case that went well."""
    found = [
        f"rank {rank} hangs in call {finished.entered.get(rank, SET_UP)}"
        for rank in range(case.ranks)
        if rank not in finished.outcomes
    ]
    for _, outcome in sorted(finished.outcomes.items()):
        found += _Verdict(case, finished, outcome).problems()
    return found + _different_results(case, finished)


def _different_results(case: Case, finished: Finished) -> list[str]:
    """Differing results of calls that have the same bits on all ranks, with any codec."""
    seen: dict[tuple[int, tuple[int, ...]], set[int]] = defaultdict(set)
    for rank, outcome in finished.outcomes.items():
        for call, digest in outcome.digests.items():
            communicator = case.calls[call].communicator
            seen[call, tuple(case.members(communicator, rank))].add(digest)
    return [
        f"ranks {', '.join(map(str, ranks))} do not agree in call {call}: {case.calls[call]}"
        for (call, ranks), digests in sorted(seen.items())
        if len(digests) > 1
    ]


def bit(finished: Finished) -> bool:
    """Whether it did anything to anyone."""
    return any(
        each.error or each.wrong or each.died is not None for each in finished.outcomes.values()
    )


def latency(case: Case, finished: Finished) -> float | None:
    """Seconds until the last rank other than the faulty rank raised."""
    times = [
        each.at
        for rank, each in finished.outcomes.items()
        if each.error and rank != case.fault.faulty
    ]
    return max(times) - finished.fired_at if times and finished.fired_at else None


@dataclass
class _Verdict:
    """The judgement of one rank."""

    case: Case
    finished: Finished
    outcome: Outcome

    def problems(self) -> list[str]:
        found = self._wrong_results() + [f"leak: {each}" for each in self.outcome.leaks]
        found += self._ending() + self._sequel()
        return [f"{self.outcome}: {each}" for each in found]

    def _wrong_results(self) -> list[str]:
        """A flipped bit of a payload is one wrong element where nothing tells."""
        untold = self.case.fault.kind == "payload" and _rule_of("payload") is None
        allowed = 1 if untold else 0
        return [
            f"{elements} wrong elements in call {call}"
            for call, elements in self.outcome.wrong
            if elements > allowed
        ]

    def _ending(self) -> list[str]:
        if self.outcome.died is not None:
            expected = self._is_culprit and self.case.fault.kind in (*_DEADLY, "interrupt")
            return [] if expected else ["died"]
        if not self.outcome.error:
            return ["did not notice"] if self._must_raise else []
        rule = _rule_of(self.case.fault.kind)
        if rule is None or self.finished.fired_at is None:
            return ["failed without a cause"]
        if self._is_culprit and rule.own:
            return [] if self.outcome.error in rule.own else [f"is not one of {rule.own}"]
        return self._error(rule)

    def _error(self, rule: Rule) -> list[str]:
        if self._misses_the_culprit():
            return []
        found = []
        if self.outcome.error not in rule.errors and not self._is_consequence(rule):
            found.append(f"is not one of {rule.errors}")
        elif not self._names(rule):
            found.append(f"does not name the {' or '.join(rule.named)}")
        elif self.case.fault.kind == "mismatch" and not self._says_who_passed_what:
            found.append("does not say who passed what")
        late = self._own_seconds - rule.within - _LOAD_SECONDS
        late -= self.case.timeout if "Timeout" in rule.errors else 0
        if late > 0 and rule.certain:
            found.append(f"{late:.1f} s too late")
        return found

    @property
    def _own_seconds(self) -> float:
        """Seconds from the fault until it raised, less the longest a rank was queued meanwhile.

        That rank is this one, or another that had to tell it.
        """
        began = self.finished.queued
        waited = max(
            queued_since(began.get(rank, each.queued), each.queued)
            for rank, each in self.finished.outcomes.items()
        )
        return self.outcome.at - (self.finished.fired_at or 0.0) - waited

    def _sequel(self) -> list[str]:
        """Ranks that failed and can go on do so, all together."""
        outcome = self.outcome
        if not self.case.goes_on or not self._can_go_on:
            return []
        together = sum(bool(each.went_on) for each in self.finished.outcomes.values())
        if 0 < outcome.went_on == together:
            return []
        return [f"went on as one of {outcome.went_on}, not {together}: {outcome.sequel}"]

    @property
    def _can_go_on(self) -> bool:
        alone = self._is_culprit and self.case.fault.kind in ("stop", "exception")
        in_calls = self.finished.entered.get(self.outcome.rank, SET_UP) > SET_UP
        return self.outcome.error in _TYPED and not alone and in_calls

    def _misses_the_culprit(self) -> bool:
        """While another communicator is made, a RendezvousError says in words who is stopped."""
        case, outcome = self.case, self.outcome
        in_set_up = self.finished.entered.get(outcome.rank, SET_UP) == SET_UP
        if (
            case.fault.kind not in ("stop", "silence")
            or outcome.error != "RendezvousError"
            or not in_set_up
        ):
            return False
        for communicator in range(1, len(case.splits) + 1):
            members = case.members(communicator, outcome.rank)
            number = members.index(case.fault.faulty) if case.fault.faulty in members else -1
            if f"rank {number} (" in outcome.text:
                return True
        return False

    def _is_consequence(self, rule: Rule) -> bool:
        """Whether one of several communicators failed since its rank left on another's failure."""
        left = any(f"with block with {each}" in self.outcome.text for each in rule.errors)
        return bool(self.case.splits) and self.outcome.error == "Aborted" and left

    def _names(self, rule: Rule) -> bool:
        """Checks the named rank. The right communicator may not be the first to fail: a rank that
        left on another's failure aborts this one, and one that is blocked there is silent here.
        """
        ranks = {"faulty": self.case.fault.faulty, "peer": self.case.fault.peer}
        if self.outcome.error == "InvalidArgument" or (
            self.case.splits and self.outcome.error in ("Timeout", "Aborted")
        ):
            return True
        return not rule.named or self.outcome.peer in [ranks[name] for name in rule.named]

    @property
    def _says_who_passed_what(self) -> bool:
        told = self.outcome.error == "Aborted" or _WHO_PASSED_WHAT.search(self.outcome.text)
        return bool(told)

    @property
    def _is_culprit(self) -> bool:
        return self.outcome.rank == self.case.fault.faulty

    @property
    def _must_raise(self) -> bool:
        """The barrier at the end is passed by nobody who needed one that never came to it."""
        rule = _rule_of(self.case.fault.kind)
        if rule is None or not rule.certain or self.finished.fired_at is None:
            return False
        if self._is_culprit and self.case.fault.kind in ("leave", "stop"):
            return False
        reached = self.finished.entered.get(self.case.fault.faulty, SET_UP)
        return self.case.fault.kind == "mismatch" or reached < len(self.case.calls)
