"""ParameterServer: one client's connection to all shards."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, overload

import numpy as np

from gradwire import _core
from gradwire._arrays.operands import Operand, operand, same_dtype, writable, written
from gradwire._base import arguments
from gradwire._base.deadline import Deadline
from gradwire._base.rules import choose, require_matches, require_pairs
from gradwire._bootstrap.rendezvous import choose_transports
from gradwire._errors import Error, InvalidArgument, Timeout
from gradwire._feedback import ErrorFeedback
from gradwire.codec import NativeCodec
from gradwire.serve import _directory
from gradwire.serve._histories import Versions
from gradwire.serve._joining import GOODBYE_SECONDS, Joining
from gradwire.serve._names import ClientSlot, identity
from gradwire.serve._reconnect import LastingClient
from gradwire.serve._rules import Coordinated, Rule
from gradwire.serve._vectors import Command, pack, unpack

CODECS = ("none", "fp16", "bf16", "int8", "int4", "onebit")
DTYPES = ("float32", "float64")

Arrays = Mapping[str, Any] | Sequence[Any]
CodecName = str | NativeCodec


class Pending:
    """A push or pull under way. Its arrays belong to it until it is over, or `copied`."""

    def __init__(self, core: _core.ServeClient, call: _core.ServeCall) -> None:
        self._core, self._call = core, call

    def done(self) -> bool:
        """Whether it is over, successfully or with an error."""
        return self._call.done()

    def wait(self, timeout: float | None = None) -> list[int]:
        """Blocks until it is over; returns each shard's version. Raises its error, at every call.

        Raises Timeout after `timeout` seconds; it then goes on, and wait() may be called again.
        None waits for its own timeout.
        """
        limit = math.inf if timeout is None else arguments.seconds(timeout)
        if not self._core.wait(self._call, limit):
            raise Timeout(f"the call is not over after {limit:g} s, and goes on")
        return self._call.versions()

    @property
    def refusals(self) -> int:
        """The number of shards that refused a push, as too stale; their part is pushed later.

        Raises InvalidArgument while it is under way.
        """
        if not self._call.done():
            raise InvalidArgument(
                "how many shards refuse it is known when it is over: wait() first"
            )
        return self._call.refusals()

    @property
    def copied(self) -> bool:
        """Whether it is a push that was added to others: its arrays may be used again at once."""
        return self._call.copied()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'done' if self.done() else 'in flight'}>"


class PendingResults(Pending):
    """Commands to the shards' vectors under way."""

    def __init__(
        self, core: _core.ServeClient, call: _core.ServeCall, commands: Sequence[Command]
    ) -> None:
        super().__init__(core, call)
        self._commands = commands

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Blocks until they are over; returns each command's result. Raises their error.

        Raises Timeout after `timeout` seconds; they then go on, and wait() may be called again.
        None waits for their own timeout.
        """
        super().wait(timeout)
        return unpack(self._commands, self._call.results())


class ParameterServer:
    """One process's connection to a parameter server; made by `gradwire.serve.connect`.

    Every method may be called from any thread. Values are float32, or float64 with the rule
    `Coordinated()`, on the CPU: NumPy arrays, torch tensors, or others with DLPack, C-contiguous.
    They come as the dict or list that `connect` was given, with the same names, order and shapes.

    `first` says whether this client's values became the initial ones.

    When a server ends, open calls raise TransportError, which names the shard, its host and its
    process, and so do all later ones: connect anew, or give `connect` seconds to `reconnect`.
    """

    def __init__(
        self,
        core: _core.ServeClient,
        table: Table,
        shards: int,
        timeout: float,
        place: ClientSlot | None = None,
    ) -> None:
        self._core, self._table, self._shards, self._timeout = core, table, shards, timeout
        self._place = place  # until it is closed
        self._closed = False
        self._lock = threading.Lock()
        self._pushes: list[_core.ServeCall] = []  # under way; guarded by the lock
        self._chosen: dict[Any, list[str]] = {}  # codecs of parameters, by arguments of push()
        self.first = False

    def push(
        self,
        gradients: Arrays,
        *,
        codec: CodecName = "none",
        rules: Sequence[tuple[str, CodecName]] = (),
        feedback: ErrorFeedback | Literal[False] | None = None,
        lr: float | None = None,
        versions: Sequence[int] | None = None,
        staged: tuple[int, int, int] | None = None,
        strict: bool = False,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Pending | None:
        """Sends gradients, which each shard applies by the update rule as they arrive.

        `codec` is one of those that `connect` was given. `rules` are pairs of a pattern and a codec
        of these: the first pattern that matches a parameter's name (as in fnmatch: ``"*.bias"``; in
        a list its place: "0") decides, and `codec` for all others. `feedback` keeps what a lossy
        codec does not deliver, and what shards refuse as too stale, for the next push, by
        parameter; without it, or with False, both are given up. `lr`, 0 or more, replaces the
        rule's learning rate for this push. `versions` are those of the values that the gradients
        were computed from, as the `wait()` of their pull returned them; the default is the last
        pull that is over.

        With the rule `Coordinated()` each shard keeps the push whole under the name `staged`, a
        batch, a replica and a sequence number, until a coordinator folds or discards the batch. A
        push under a name that is there already, or of a batch that is over, changes
        nothing. NaN and infinity are values like others there.

        While two pushes are not acknowledged, further ones with the same codecs, feedback and `lr`
        are added up and go out as one, so that a slow network makes pushes rarer and holds nobody
        up; others wait, and so do all with `strict` and staged ones. With `async_op` returns a
        Pending; otherwise waits until all shards have applied it.

        Raises InvalidArgument, TransportError that names a shard which has ended, and Timeout.
        """
        given = self._table.operands(gradients, "gradients")
        limit = self._limit(timeout)
        codecs = self._codecs(codec, rules)
        kept = _feedback_of(codecs, feedback)
        rate = 0.0 if lr is None else _rate(lr)
        of = [] if versions is None else _versions(versions)
        name = None if staged is None else _push_name(staged)
        call = self._core.push(_memory(given), codecs, kept, rate, strict, limit, given, of, name)
        with self._lock:
            self._pushes = [*(each for each in self._pushes if not each.done()), call]
        return self._result(call, async_op)

    def pull(
        self,
        arrays: Arrays,
        *,
        codec: CodecName = "none",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Pending | None:
        """Writes the servers' values into arrays.

        With the codecs "none", "fp16" and "bf16" the values travel, rounded so. With others the
        differences to what this client has travel; a loss is made good by later pulls. Raises
        InvalidArgument, TransportError that names a shard which has ended, and Timeout. With
        `async_op` returns a Pending, and the arrays are undefined until it is over.
        """
        given = writable(self._table.operands(arrays, "arrays"))
        written(given)
        call = self._core.pull(_memory(given), _core_name(codec), self._limit(timeout), given)
        return self._result(call, async_op)

    @overload
    def _command(
        self,
        commands: Sequence[Command],
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[Any]: ...
    @overload
    def _command(
        self, commands: Sequence[Command], *, async_op: Literal[True], timeout: float | None = None
    ) -> PendingResults: ...
    def _command(
        self, commands: Sequence[Command], *, async_op: bool = False, timeout: float | None = None
    ) -> list[Any] | PendingResults:
        """Gives commands to the vectors of all shards, with one message to each; returns results.

        Needs the rule `Coordinated()`. Each shard runs them in their order, without another
        client's message between, and does all of them or none. There is a result for each command:
        a list of floats for Dots, a float for Absmax and Abssum, a list of names for Names, else
        None. Only a coordinator may give commands that change vectors. With `async_op` returns
        PendingResults; asks are answered in their order, so the next one may be sent ahead.

        Raises InvalidArgument, which says what a shard cannot do, TransportError that names a
        shard which has ended, and Timeout.
        """
        given = list(commands)
        call = self._core.command(pack(given), self._limit(timeout))
        pending = PendingResults(self._core, call, given)
        return pending if arguments.flag(async_op, "async_op") else pending.wait()

    def wait(
        self, version: int, *, async_op: bool = False, timeout: float | None = None
    ) -> Pending | None:
        """Waits until every shard has applied so many pushes: a warm start by one replica.

        With 0 waits for initial values. With the rule `Coordinated()` the version is the number of
        asks that have changed the parameters, and with `Rounds` that of rounds. With `async_op`
        returns a Pending.
        """
        least = arguments.whole(version, "version", least=0, bits=64)
        return self._result(self._core.ask("wait", least, self._limit(timeout)), async_op)

    def checkpoint(self, *, timeout: float | None = None) -> None:
        """Has every shard write a snapshot, of all pushes that were acknowledged before.

        Raises InvalidArgument where a server has no folder for snapshots, or its disk is full.
        """
        self._ask("snapshot", timeout)

    def stats(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Statistics of each shard, as a dict.

        `version` (pushes applied), `pushes`, `pulls`, `partial`, `stale` and `not_finite` (pushes
        that were cut off or refused, of which nothing was applied), `received` and `sent` (bytes);
        `staleness`, the numbers of pushes with 0, 1, 2, ... versions between the values of their
        gradients and them, `mean_staleness` and `most_staleness`; `last_batch` (with the rule
        `Coordinated()`: the largest number of a batch of pushes that it knows); `clients` (names)
        and `gone` (those that ended without close(), and why).
        """
        return [json.loads(text) for text in self._ask("stats", timeout).texts()]

    @property
    def versions(self) -> list[int]:
        """The version that this client pulled last, of each shard; -1 before the first pull."""
        found = self._core.versions()
        return [-1 if each == _core.SERVE_NO_VERSION else each for each in found]

    @property
    def merged(self) -> int:
        """The number of pushes that were added to others, since two were not acknowledged."""
        return self._core.merged()

    @property
    def stale(self) -> int:
        """The number of refusals of pushes that were too stale."""
        return self._core.stale()

    @property
    def lost(self) -> int:
        """The number of pushes that were under way when a server ended, with `reconnect`.

        Each shard applied its part of such a push once, or not at all. What shards did not get
        whole goes with the next push where this one has `feedback`.
        """
        return self._core.lost if isinstance(self._core, LastingClient) else 0

    @property
    def shards(self) -> int:
        """The number of shards."""
        return self._shards

    def close(self, timeout: float | None = None) -> None:
        """Waits until pushes under way are applied, says goodbye and ends the thread.

        Pushes that are not applied within `timeout` seconds are given up, and their `wait()` raises
        Aborted. May be called again.
        """
        if self._closed:
            return
        self._closed = True
        deadline = Deadline(self._limit(timeout))
        with self._lock:
            pushes, self._pushes = self._pushes, []
        try:
            for call in pushes:
                with contextlib.suppress(Error):  # which their own wait() raises
                    self._core.wait(call, deadline.remaining)
        finally:
            self._core.close(deadline.left)
            self._place = None

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<gradwire.serve.ParameterServer of {self.shards} shards{state}>"

    def _codecs(self, codec: CodecName, rules: Sequence[tuple[str, CodecName]]) -> list[str]:
        """The codec of each parameter in a push, in their order, or one for all."""
        require_pairs(rules)
        if not rules:
            return [_core_name(codec)]
        choices = [(pattern, _core_name(choice)) for pattern, choice in [*rules, ("*", codec)]]
        key = tuple(choices)
        if key not in self._chosen:
            names = self._table.names
            require_matches(rules, names, "connect()'s arrays")
            self._chosen[key] = [choose(name, choices) for name in names]
        return self._chosen[key]

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else arguments.seconds(timeout)

    def _ask(self, what: str, timeout: float | None, version: int = 0) -> _core.ServeCall:
        call = self._core.ask(what, version, self._limit(timeout))
        self._core.wait(call, math.inf)
        return call

    def _result(self, call: _core.ServeCall, async_op: bool) -> Pending | None:
        pending = Pending(self._core, call)
        if arguments.flag(async_op, "async_op"):
            return pending
        pending.wait()
        return None


class Table:
    """Names and shapes of the parameters, in the order of `connect`'s arrays."""

    def __init__(self, like: Arrays) -> None:
        """Raises InvalidArgument for arrays that are not all float32, or float64, on the CPU."""
        self._by_name = isinstance(like, Mapping)
        self.initial = _operands(like, "like")
        self.names = [each.what for each in self.initial]
        self.dtype = self.initial[0].dtype

    def operands(self, given: Arrays, what: str) -> list[Operand]:
        """The operands of arrays like those of `connect`, in their order."""
        if isinstance(given, Mapping) != self._by_name:
            raise InvalidArgument(
                f"{what} is a {type(given).__name__}, and connect() was given a "
                f"{'dict' if self._by_name else 'list'}: give the same"
            )
        found = _operands(given, what)
        if sorted(each.what for each in found) != sorted(self.names):
            odd = sorted({each.what for each in found} ^ set(self.names))
            raise InvalidArgument(f"{what}: {odd[0]!r} is not in both, here and at connect()")
        by_name = {each.what: each for each in found}
        ordered = [by_name[name] for name in self.names]
        same_dtype([*self.initial[:1], *ordered])
        for each, own in zip(ordered, self.initial, strict=True):
            if each.shape != own.shape:
                raise InvalidArgument(
                    f"{what}: {each.what!r} has the shape {each.shape}, and at connect() "
                    f"{own.shape}"
                )
        return ordered

    def describe(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes, for the core."""
        return [(each.what, each.shape) for each in self.initial]


def connect(
    like: Arrays,
    rule: Rule,
    *,
    codecs: Sequence[CodecName] = CODECS,
    store: str | None = None,
    name: str = "parameters",
    replica: str | None = None,
    role: Literal["replica", "coordinator"] = "replica",
    secret: bytes | str | None = None,
    transports: Sequence[str] | None = None,
    atomic: Literal["frame", "push"] = "frame",
    staleness: Literal["keep", "divide"] = "keep",
    max_staleness: int | None = None,
    timeout: float = 300.0,
    reconnect: float | None = None,
    while_dialling: Literal["wait", "raise"] = "wait",
) -> ParameterServer:
    """Connects to a parameter server; at any time, also anew.

    `like` are the parameters, a dict or a list of arrays on the CPU, of which the first client's
    become the initial values; the others pull theirs. All are float32, or float64 with the rule
    `Coordinated()` and codec "none". `rule`, such as Adagrad(lr=0.02), says how the servers apply a
    push. All clients give the same names, shapes, rule, codecs and options; one that differs gets
    InvalidArgument, alone, which names the difference.

    `store`, `name` and `secret` are those of the `Server`; the store defaults to GRADWIRE_STORE.
    `replica` names this client in messages; one that connects again under its name replaces its
    former self. The default is "replica R" under a launcher that sets RANK; replicas of other
    launches, and further clients of one process, are others though they have this name. A client
    with the role "coordinator" gives commands to the vectors of a service with the rule
    `Coordinated()`; shards refuse values of parameters to it, and `like` tells only names and
    shapes. It takes the place of a coordinator that is there, whose calls then raise
    TransportError.

    Each shard applies its part of a push at once, or refuses all of it. With `atomic="frame"` a
    pull may see frames (28,672 elements at most) of different versions; with "push" it sees one
    version of each shard, at the price of a copy of the parameters for each version under way.
    `staleness="divide"` divides the learning rate by the staleness of a push: the versions between
    the values that its gradient was computed from and it. `max_staleness` refuses pushes above
    it; what `feedback` keeps of them is pushed with the next one. `timeout` limits this and every
    later call, in seconds.

    With `reconnect`, calls that find a server ended dial all shards again for so many seconds, and
    go on where a server was started again from its snapshot; what it lost is logged. A push that
    was under way is not made again: see `ParameterServer.lost`. With `while_dialling="raise"` they
    do not wait for that: a thread dials, calls and the `wait()` of those under way raise Dialling
    meanwhile, and may be made again later.

    Raises RendezvousError, which names the shard that cannot be reached, and InvalidArgument.
    """
    table = Table(like)
    arguments.instance(rule, "rule", Rule, "a rule such as gradwire.serve.Adagrad(lr=0.02)")
    coordinator = _one_of(role, "role", ("replica", "coordinator")) == "coordinator"
    offered_codecs = () if codecs is CODECS and table.dtype != "float32" else codecs
    limit = arguments.seconds(timeout)
    lasting = None if reconnect is None else arguments.seconds(reconnect, "reconnect")
    raises = _one_of(while_dialling, "while_dialling", ("wait", "raise")) == "raise"
    if lasting is not None and isinstance(rule, Coordinated):
        raise InvalidArgument(
            "reconnect with the rule Coordinated(): a server that is started again has no staged "
            "pushes, and may have run a command or not; connect anew"
        )
    deadline = Deadline(limit)
    found = _directory.service(name, store, secret)
    offered = choose_transports(transports)
    with _directory.opened(found, deadline) as directory:
        directory.job(deadline)  # so that servers are there
        shards = directory.find(0, deadline).shards
        text = _core.serve_table(
            table.describe(),
            rule.spec,
            [_core_name(each) for each in offered_codecs],
            shards,
            _one_of(atomic, "atomic", ("frame", "push")) == "push",
            _one_of(staleness, "staleness", ("keep", "divide")) == "divide",
            None if max_staleness is None else _whole(max_staleness),
            table.dtype,
        )
        own = identity(directory, found, replica)
        joining = Joining(found, text, shards, own.name, own.label, offered, coordinator)
        joined = joining.join(directory, deadline)
        core = joined.core
        if lasting is not None:  # which has the same methods
            made = LastingClient(joined, joining.join_again, lasting)
            core = cast(_core.ServeClient, made)
        client = ParameterServer(core, table, shards, limit, own.place)
        try:
            if coordinator:
                return client
            with directory.first_alone(shards, deadline):
                values = core.set(_memory(table.initial), deadline.left, table.initial)
                core.wait(values, math.inf)
            client.first = values.refusals() == 0
            if lasting is not None:
                made.raises = raises
        except BaseException:
            client.close(GOODBYE_SECONDS)
            raise
    return client


def _operands(given: Arrays, what: str) -> list[Operand]:
    """The operands of arrays of one dtype, whose `what` is their name."""
    if isinstance(given, Mapping):
        named = {arguments.text(key, what): value for key, value in given.items()}
    else:
        named = {str(i): each for i, each in enumerate(given)}
    if not named:
        raise InvalidArgument(f"{what} has no arrays")
    found = [operand(value, f"{what}[{key!r}]") for key, value in named.items()]
    same_dtype(found)
    for each in found:
        if each.dtype not in DTYPES or each.device is not None:
            where = "the CPU" if each.device is None else f"cuda:{each.device}"
            raise InvalidArgument(
                f"{each.what} is {each.dtype} on {where}: parameter servers hold float32 or "
                "float64, and take it from the CPU"
            )
    return [each._replace(what=key) for each, key in zip(found, named, strict=True)]


def _memory(given: Sequence[Operand]) -> list[tuple[int, int]]:
    """Addresses, and numbers of float32 words."""
    return [(each.address, each.nbytes // 4) for each in given]


def _core_name(codec: CodecName) -> str:
    """The canonical name of a codec; raises InvalidArgument for anything else."""
    if isinstance(codec, NativeCodec):
        return codec.spec
    return _canonical(arguments.text(codec, "codec"))


@functools.cache
def _canonical(spec: str) -> str:
    return _core.Codec(spec).name


def _feedback_of(
    codecs: Sequence[str], given: ErrorFeedback | Literal[False] | None
) -> _core.ErrorFeedback | None:
    lossy = next((each for each in codecs if each != "none"), None)
    if given is None and lossy is not None:
        raise InvalidArgument(
            f"codec={lossy!r} loses a part of each push: give feedback=gradwire.ErrorFeedback(), "
            "which pushes it later, or feedback=False to give it up"
        )
    if not given:
        return None
    return arguments.instance(
        given, "feedback", ErrorFeedback, "a gradwire.ErrorFeedback"
    )._on_cpu()


def _whole(max_staleness: int) -> int:
    return arguments.whole(max_staleness, "max_staleness", least=0, bits=64)


def _rate(lr: float) -> float:
    """A learning rate for the core, for which 0 is the rule's own, and -0 is zero."""
    given = arguments.number(lr, "lr")
    if not 0 <= given <= float(np.finfo(np.float32).max):
        raise InvalidArgument(f"lr={lr} is negative, or no float32")
    return float(np.float32(given)) or -0.0


def _push_name(staged: tuple[int, int, int]) -> tuple[int, int, int]:
    given = arguments.items(staged, "staged", "(batch, replica, sequence)")
    if len(given) != 3:
        raise arguments.wrong(staged, "staged", "(batch, replica, sequence)")
    batch, replica, sequence = (arguments.whole(each, "staged", least=0, bits=64) for each in given)
    return batch, replica, sequence


def _versions(given: Sequence[int]) -> list[int]:
    """Versions for the core, with the histories that they are of where they have some."""
    found = [_version(each) for each in given]
    return Versions(found, given.histories) if isinstance(given, Versions) else found


def _version(version: int) -> int:
    given = arguments.whole(version, "versions", least=-1, bits=64)
    return _core.SERVE_NO_VERSION if given == -1 else given


def _one_of(value: Any, what: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise arguments.wrong(value, what, " or ".join(map(repr, choices)))
    return str(value)
