"""Ranks agree on the next communicator wherever ranks and joiners die; joiners are in when told."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import joining, resize, shrink
from gradwire._bootstrap.join_listener import Joiner, ListenerEntry
from gradwire._bootstrap.survivor_links import (
    MOST_RANKS,
    Addresses,
    Message,
    MessageKind,
    SurvivorLinks,
    View,
    unpack_addresses,
)
from gradwire._errors import RendezvousError
from mortal_links import (
    HERE,
    LIVES,
    Crash,
    Made,
    MortalLinks,
    connect,
    connected,
    made_by,
    mesh_of,
)


class FakeListener:
    """A listener that these joiners have asked."""

    trouble = ""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._joiners = [Joiner(sock, -1) for sock in sockets]

    def take(self, most: int) -> list[Joiner]:
        taken, self._joiners = self._joiners[:most], self._joiners[most:]
        return taken


def rank_of(
    rank: int, size: int, links: MortalLinks, listener: FakeListener, least: int | None, wait: float
) -> Made:
    options = resize.ResizeOptions(lambda: listener, wait, least)  # type: ignore[arg-type, return-value]
    made = resize.Resize(mesh_of(rank, size), links, made_by(links), options, 20)  # type: ignore[type-var]
    return made.run()


ENTRY = ListenerEntry("test", b"", HERE, 0, 0)
OPTIONS = joining.JoinOptions("test", -1, "unix://none", b"", ())


def joiner_of(links: MortalLinks) -> Made | None:
    """What the joiner is in; None when it was left out, and would ask again."""
    with contextlib.closing(links), contextlib.suppress(joining._LeftOut):
        request = joining._Request(OPTIONS, ENTRY, links, made_by(links), Deadline(60))
        return request.run()  # type: ignore[type-var]
    return None


@dataclass
class Play:
    """One resize: how many messages each rank and each joiner may send."""

    ranks: list[int]
    joiners: list[int]  # of each rank, one after the other; joiner g asks rank g % ranks
    least: int | None = 1
    wait: float = 0.0

    def run(self) -> tuple[list[Any], list[Any]]:
        """The result of each rank and each joiner: a Made, None or an exception."""
        size = len(self.ranks)
        links = connected(self.ranks)
        at_listeners: list[list[socket.socket]] = [[] for _ in range(size)]
        joiners = []
        for number, words in enumerate(self.joiners):
            one, other = socket.socketpair()
            at_listeners[number % size].append(one)
            joiners.append(MortalLinks(MOST_RANKS, words))
            joiners[-1].add(joining._LEADER, other)
        listeners = [FakeListener(each) for each in at_listeners]
        with ThreadPoolExecutor(size + len(joiners)) as pool:
            ranks = [
                pool.submit(
                    rank_of, rank, size, links[rank], listeners[rank], self.least, self.wait
                )
                for rank in range(size)
            ]
            others = [pool.submit(joiner_of, each) for each in joiners]
            ended = [each.exception() or each.result() for each in ranks]
            for listener in listeners:  # those whom nobody has taken
                for joiner in listener.take(99):
                    joiner.sock.close()
            return ended, [each.exception() or each.result() for each in others]


@pytest.fixture(autouse=True)
def _without_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "connect_mesh", connect)
    monkeypatch.setattr(joining, "connect_mesh", connect)
    monkeypatch.setattr(joining, "_REPEAT_SECONDS", 0.2)


def check(play: Play, ranks: list[Any], joiners: list[Any]) -> Made:
    """Checks a play in which some rank lives; the communicator that all living ranks are in."""
    context = f"{play}: {ranks} {joiners}"
    assert all(isinstance(each, Made | Crash) for each in ranks), context
    assert all(isinstance(each, Made | Crash | None) for each in joiners), context
    living = {each for each, words in zip(ranks, play.ranks, strict=True) if words == LIVES}
    assert len(living) == 1, context
    made = living.pop()
    assert isinstance(made, Made)
    # Whoever was told is in what the living ranks are in; a rank may have died after it was done.
    assert {each for each in joiners if isinstance(each, Made)} <= {made}, context
    assert sum(isinstance(each, Made) for each in joiners) <= made.size - sum(
        words == LIVES for words in play.ranks
    ), context
    return made


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_and_joiners_agree_wherever_others_crash(size: int) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(50):
        mortal = dice.sample(range(size), dice.randrange(size))
        ranks = [dice.randrange(6 * size + 8) if r in mortal else LIVES for r in range(size)]
        joiners = [dice.choice([dice.randrange(8), LIVES]) for _ in range(dice.randrange(4))]
        play = Play(ranks, joiners)
        check(play, *play.run())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_that_live_go_on_as_a_majority_or_none_of_them_does(size: int) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(50):
        mortal = dice.sample(range(size), dice.randrange(size))
        ranks = [dice.randrange(6 * size + 8) if r in mortal else LIVES for r in range(size)]
        joiners = [LIVES] * dice.randrange(3)
        play = Play(ranks, joiners, least=None)
        ended, others = play.run()
        living = [each for each, words in zip(ended, ranks, strict=True) if words == LIVES]
        if all(isinstance(each, RendezvousError) for each in living):
            assert all("majority" in str(each) for each in living), living
            assert 2 * len(living) <= size
            continue
        members = {r for r in check(play, ended, others).job_ranks if r < size}
        assert 2 * len(members) + (0 in members) > size, (play, members)


@pytest.mark.parametrize("victims", [{0, 1}, {0, 2}])
def test_those_who_join_make_no_majority(victims: set[int]) -> None:
    """Each part of a network might find some."""
    (survivor,) = {0, 1, 2} - victims
    ranks, joiners = Play([LIVES * (r == survivor) for r in range(3)], [LIVES] * 6, None).run()
    error = ranks[survivor]
    assert isinstance(error, RendezvousError)
    assert f"rank {survivor}: 1 of 3 ranks is no majority; pass min_ranks=1" in str(error)
    assert joiners == [None] * 6


def test_all_joiners_are_in_when_nobody_dies() -> None:
    play = Play([LIVES] * 3, [LIVES, 0, 0, LIVES, 0, 0])  # two ask rank 0
    ranks, joiners = play.run()
    made = check(play, ranks, joiners)
    assert made.size == 5
    assert [joiners[0], joiners[3]] == [made, made]
    assert set(made.job_ranks) == set(range(5))
    assert made.membership.joined == 2


@pytest.mark.parametrize("words", range(5))
def test_a_joiner_that_dies_is_left_out_wherever_it_does(words: int) -> None:
    """It sends ADDRESS and VIEW, makes its communicator, and sends READY and DONE."""
    play = Play([LIVES] * 2, [words, 0, LIVES])
    ranks, joiners = play.run()
    made = check(play, ranks, joiners)
    assert joiners[2] == made
    assert isinstance(joiners[0], Crash)
    assert made.size in (3, 4)
    if words < 3:
        assert made.size == 3


def test_a_leader_that_has_no_time_left_ends_the_resize_of_all() -> None:
    ranks, joiners = Play([LIVES] * 3, [LIVES], least=5, wait=0.1).run()
    assert all(isinstance(each, RendezvousError) for each in ranks), ranks
    assert joiners == [None]


def test_others_are_awaited_when_a_joiner_dies_and_ranks_are_too_few() -> None:
    """The first joiner dies when invited, the second one is let in in the next round."""

    class LateListener(FakeListener):
        def take(self, most: int) -> list[Joiner]:
            return super().take(min(most, 1))

    one, ours = socket.socketpair()
    two, theirs = socket.socketpair()
    dying, living = MortalLinks(MOST_RANKS, 0), MortalLinks(MOST_RANKS, LIVES)
    dying.add(joining._LEADER, ours)
    living.add(joining._LEADER, theirs)
    links = MortalLinks(1, LIVES)
    with ThreadPoolExecutor(3) as pool:
        rank = pool.submit(rank_of, 0, 1, links, LateListener([one, two]), 2, 60)
        first, second = pool.submit(joiner_of, dying), pool.submit(joiner_of, living)
        assert rank.result().size == 2
        assert isinstance(first.exception(), Crash)
        assert second.result() == rank.result()


def test_joiners_that_wait_are_kept_when_a_rank_dies() -> None:
    """The leader has one, who is not enough, when its other rank dies; then two more ask."""
    low, high = socket.socketpair()
    dying = SurvivorLinks((), 2)
    dying.add(0, high)
    dying.send(0, MessageKind.VIEW, View(frozenset((0, 1)), None))

    class LateListener(FakeListener):
        turns = 0

        def take(self, most: int) -> list[Joiner]:
            self.turns += 1
            assert self.turns < 100, "it waits for more joiners than it needs"
            if self.turns == 2:
                dying.close()
            return super().take(1) if self.turns in (1, 4, 5) else []

    pairs = [socket.socketpair() for _ in range(3)]
    joiners = [MortalLinks(MOST_RANKS, LIVES) for _ in pairs]
    for each, (_, theirs) in zip(joiners, pairs, strict=True):
        each.add(joining._LEADER, theirs)
    links = MortalLinks(2, LIVES)
    links.add(1, low)
    listener = LateListener([ours for ours, _ in pairs])
    with ThreadPoolExecutor(4) as pool:
        rank = pool.submit(rank_of, 0, 2, links, listener, 4, 600)
        found = [pool.submit(joiner_of, each) for each in joiners]
        assert rank.result().size == 4
        assert [each.result() for each in found] == [rank.result()] * 3


@pytest.mark.parametrize("address", [b"\xff", b"{}", b"x" * 100_000])
def test_a_joiner_without_an_address_is_left_out(address: bytes) -> None:
    ours, theirs = socket.socketpair()
    joiner = SurvivorLinks((), MOST_RANKS)
    joiner.add(joining._LEADER, theirs)
    with ThreadPoolExecutor(1) as pool, contextlib.closing(joiner):
        rank = pool.submit(rank_of, 0, 1, MortalLinks(1, LIVES), FakeListener([ours]), 1, 0)
        (invited,) = joiner.poll(60)
        assert isinstance(invited, Message)
        joiner.send(joining._LEADER, MessageKind.ADDRESS, invited.view, address)
        assert rank.result().size == 1


def view(ranks: str, joiners: str | None = "", number: int = 0) -> View:
    known = None if joiners is None else frozenset(map(int, joiners))
    return View(frozenset(map(int, ranks)), known, number)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (view("012", None), view("012", None), view("012", None)),
        (view("012", "01"), view("012", None), view("012", "01")),
        (view("012", "01"), view("012", "12"), view("012", "1")),
        (view("012", "01"), view("02", "01"), view("02", "01")),
        (view("012", "01"), view("12", None), view("12", None)),  # the leader's joiners go
        (view("012", "01"), view("12", "3"), view("12", "3")),
        (view("012", "01"), view("012", "2", 1), view("012", "2", 1)),
        (view("012", "01"), view("3"), View(frozenset())),
    ],
)
def test_views_intersect(one: View, other: View, both: View) -> None:
    assert one.intersect(other) == other.intersect(one) == both
    assert both.intersect(one) == both.intersect(other) == both.intersect(both) == both


def test_views_intersect_in_any_order() -> None:
    dice = random.Random(3)
    for _ in range(2000):
        views = [
            View(
                frozenset(dice.sample(range(4), dice.randrange(1, 5))),
                dice.choice([None, frozenset(dice.sample(range(3), dice.randrange(4)))]),
            )
            for _ in range(3)
        ]
        a, b, c = views
        assert a.intersect(b).intersect(c) == a.intersect(b.intersect(c))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"rank": 2}',
        b"[" * 100_000,
        b"\xff",
        Addresses([]).pack(),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    for unpack in (
        joining.unpack_invitation,
        lambda data: unpack_addresses(data, 1, 0),
    ):
        try:
            unpack(data)
        except ValueError:
            continue
        pytest.fail("it was taken for one")
