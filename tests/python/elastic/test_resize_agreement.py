"""Ranks agree on the next communicator wherever ranks and guests die; guests are in when told."""

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
from gradwire._bootstrap import guests, joining, shrink
from gradwire._bootstrap.door import Guest
from gradwire._bootstrap.sign import Sign
from gradwire._bootstrap.survivor_links import MOST_RANKS, Message, MessageKind, SurvivorLinks, View
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


class FakeDoor:
    """A door at which these guests stand."""

    trouble = ""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._guests = [Guest(sock, -1) for sock in sockets]

    def take(self, most: int) -> list[Guest]:
        taken, self._guests = self._guests[:most], self._guests[most:]
        return taken


def rank_of(
    rank: int, size: int, links: MortalLinks, door: FakeDoor, least: int | None, wait: float
) -> Made:
    admission = shrink.Admission(lambda: door, wait, least)  # type: ignore[arg-type, return-value]
    return shrink.shrink(  # type: ignore[type-var, return-value]
        mesh_of(rank, size),
        links,
        made_by(links),
        transports=(),
        timeout=20,
        admission=admission,
    )


SIGN = Sign("test", b"", HERE, 0, 0)
ASKING = joining.Asking("test", -1, "unix://none", b"", ())


def guest_of(links: MortalLinks) -> Made | None:
    """What the guest is in; None when it was left out, and would knock again."""
    with contextlib.closing(links), contextlib.suppress(joining._LeftOut):
        knock = joining._Guest(ASKING, SIGN, links, made_by(links), Deadline(60))
        return knock.run()  # type: ignore[type-var]
    return None


@dataclass
class Play:
    """One resize: how many messages each rank and each guest may send."""

    ranks: list[int]
    guests: list[int]  # of each door, one after the other; guest g stands at door g % ranks
    least: int | None = 1
    wait: float = 0.0

    def run(self) -> tuple[list[Any], list[Any]]:
        """The result of each rank and each guest: a Made, None or an exception."""
        size = len(self.ranks)
        links = connected(self.ranks)
        at_doors: list[list[socket.socket]] = [[] for _ in range(size)]
        guests = []
        for number, words in enumerate(self.guests):
            one, other = socket.socketpair()
            at_doors[number % size].append(one)
            guests.append(MortalLinks(MOST_RANKS, words))
            guests[-1].add(joining._SPONSOR, other)
        doors = [FakeDoor(each) for each in at_doors]
        with ThreadPoolExecutor(size + len(guests)) as pool:
            ranks = [
                pool.submit(rank_of, rank, size, links[rank], doors[rank], self.least, self.wait)
                for rank in range(size)
            ]
            others = [pool.submit(guest_of, each) for each in guests]
            ended = [each.exception() or each.result() for each in ranks]
            for door in doors:  # those whom nobody has taken
                for guest in door.take(99):
                    guest.sock.close()
            return ended, [each.exception() or each.result() for each in others]


@pytest.fixture(autouse=True)
def _without_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "connect_mesh", connect)
    monkeypatch.setattr(joining, "connect_mesh", connect)
    monkeypatch.setattr(joining, "_REPEAT_SECONDS", 0.2)


def check(play: Play, ranks: list[Any], guests: list[Any]) -> Made:
    """Checks a play in which some rank lives; the communicator that all living ranks are in."""
    context = f"{play}: {ranks} {guests}"
    assert all(isinstance(each, Made | Crash) for each in ranks), context
    assert all(isinstance(each, Made | Crash | None) for each in guests), context
    living = {each for each, words in zip(ranks, play.ranks, strict=True) if words == LIVES}
    assert len(living) == 1, context
    made = living.pop()
    assert isinstance(made, Made)
    # Whoever was told is in what the living ranks are in; a rank may have died after it was done.
    assert {each for each in guests if isinstance(each, Made)} <= {made}, context
    assert sum(isinstance(each, Made) for each in guests) <= made.size - sum(
        words == LIVES for words in play.ranks
    ), context
    return made


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_and_guests_agree_wherever_others_crash(size: int) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(50):
        mortal = dice.sample(range(size), dice.randrange(size))
        ranks = [dice.randrange(6 * size + 8) if r in mortal else LIVES for r in range(size)]
        guests = [dice.choice([dice.randrange(8), LIVES]) for _ in range(dice.randrange(4))]
        play = Play(ranks, guests)
        check(play, *play.run())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_that_live_go_on_as_a_majority_or_none_of_them_does(size: int) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(50):
        mortal = dice.sample(range(size), dice.randrange(size))
        ranks = [dice.randrange(6 * size + 8) if r in mortal else LIVES for r in range(size)]
        guests = [LIVES] * dice.randrange(3)
        play = Play(ranks, guests, least=None)
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
    ranks, guests = Play([LIVES * (r == survivor) for r in range(3)], [LIVES] * 6, None).run()
    error = ranks[survivor]
    assert isinstance(error, RendezvousError)
    assert f"rank {survivor}: 1 of 3 ranks is no majority; pass min_ranks=1" in str(error)
    assert guests == [None] * 6


def test_all_guests_are_in_when_nobody_dies() -> None:
    play = Play([LIVES] * 3, [LIVES, 0, 0, LIVES, 0, 0])  # two at the door of rank 0
    ranks, guests = play.run()
    made = check(play, ranks, guests)
    assert made.size == 5
    assert [guests[0], guests[3]] == [made, made]
    assert set(made.job_ranks) == set(range(5))
    assert made.membership.joined == 2


@pytest.mark.parametrize("words", range(5))
def test_a_guest_that_dies_is_left_out_wherever_it_does(words: int) -> None:
    """It sends ADDRESS and VIEW, makes its communicator, and sends READY and DONE."""
    play = Play([LIVES] * 2, [words, 0, LIVES])
    ranks, guests = play.run()
    made = check(play, ranks, guests)
    assert guests[2] == made
    assert isinstance(guests[0], Crash)
    assert made.size in (3, 4)
    if words < 3:
        assert made.size == 3


def test_a_sponsor_that_has_no_time_left_ends_the_resize_of_all() -> None:
    ranks, guests = Play([LIVES] * 3, [LIVES], least=5, wait=0.1).run()
    assert all(isinstance(each, RendezvousError) for each in ranks), ranks
    assert guests == [None]


def test_others_are_awaited_when_a_guest_dies_and_ranks_are_too_few() -> None:
    """The first guest dies when invited, the second one is let in in the next round."""

    class LateDoor(FakeDoor):
        def take(self, most: int) -> list[Guest]:
            return super().take(min(most, 1))

    one, ours = socket.socketpair()
    two, theirs = socket.socketpair()
    dying, living = MortalLinks(MOST_RANKS, 0), MortalLinks(MOST_RANKS, LIVES)
    dying.add(joining._SPONSOR, ours)
    living.add(joining._SPONSOR, theirs)
    links = MortalLinks(1, LIVES)
    with ThreadPoolExecutor(3) as pool:
        rank = pool.submit(rank_of, 0, 1, links, LateDoor([one, two]), 2, 60)
        first, second = pool.submit(guest_of, dying), pool.submit(guest_of, living)
        assert rank.result().size == 2
        assert isinstance(first.exception(), Crash)
        assert second.result() == rank.result()


def test_guests_that_wait_are_kept_when_a_rank_dies() -> None:
    """The sponsor has one, who is not enough, when its other rank dies; then two more knock."""
    low, high = socket.socketpair()
    dying = SurvivorLinks((), 2)
    dying.add(0, high)
    dying.send(0, MessageKind.VIEW, View(frozenset((0, 1)), None))

    class LateDoor(FakeDoor):
        turns = 0

        def take(self, most: int) -> list[Guest]:
            self.turns += 1
            assert self.turns < 100, "it waits for more guests than it needs"
            if self.turns == 2:
                dying.close()
            return super().take(1) if self.turns in (1, 4, 5) else []

    pairs = [socket.socketpair() for _ in range(3)]
    guests = [MortalLinks(MOST_RANKS, LIVES) for _ in pairs]
    for each, (_, theirs) in zip(guests, pairs, strict=True):
        each.add(joining._SPONSOR, theirs)
    links = MortalLinks(2, LIVES)
    links.add(1, low)
    door = LateDoor([ours for ours, _ in pairs])
    with ThreadPoolExecutor(4) as pool:
        rank = pool.submit(rank_of, 0, 2, links, door, 4, 600)
        found = [pool.submit(guest_of, each) for each in guests]
        assert rank.result().size == 4
        assert [each.result() for each in found] == [rank.result()] * 3


@pytest.mark.parametrize("address", [b"\xff", b"{}", b"x" * 100_000])
def test_a_guest_without_an_address_is_left_out(address: bytes) -> None:
    ours, theirs = socket.socketpair()
    guest = SurvivorLinks((), MOST_RANKS)
    guest.add(joining._SPONSOR, theirs)
    with ThreadPoolExecutor(1) as pool, contextlib.closing(guest):
        rank = pool.submit(rank_of, 0, 1, MortalLinks(1, LIVES), FakeDoor([ours]), 1, 0)
        (invited,) = guest.poll(60)
        assert isinstance(invited, Message)
        guest.send(joining._SPONSOR, MessageKind.ADDRESS, invited.view, address)
        assert rank.result().size == 1


def view(ranks: str, guests: str | None = "", number: int = 0) -> View:
    known = None if guests is None else frozenset(map(int, guests))
    return View(frozenset(map(int, ranks)), known, number)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (view("012", None), view("012", None), view("012", None)),
        (view("012", "01"), view("012", None), view("012", "01")),
        (view("012", "01"), view("012", "12"), view("012", "1")),
        (view("012", "01"), view("02", "01"), view("02", "01")),
        (view("012", "01"), view("12", None), view("12", None)),  # the sponsor's guests go
        (view("012", "01"), view("12", "3"), view("12", "3")),
        (view("012", "01"), view("012", "2", 1), view("012", "2", 1)),
        (view("012", "01"), view("3"), View(frozenset())),
    ],
)
def test_views_meet(one: View, other: View, both: View) -> None:
    assert one.meet(other) == other.meet(one) == both
    assert both.meet(one) == both.meet(other) == both.meet(both) == both


def test_views_meet_in_any_order() -> None:
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
        assert a.meet(b).meet(c) == a.meet(b.meet(c))


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"rank": 2}', b"[" * 100_000, b"\xff", guests.Addresses([]).pack()],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    for unpack in (guests.unpack_invitation, lambda data: guests.unpack_addresses(data, 1, 0)):
        try:
            unpack(data)
        except ValueError:
            continue
        pytest.fail("it was taken for one")
