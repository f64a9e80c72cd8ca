"""init() and join(): how a process becomes a rank."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire._base import arguments, environment
from gradwire._base.deadline import Deadline
from gradwire._base.stops import catch_stops
from gradwire._bootstrap import launch_info, rendezvous
from gradwire._bootstrap.job_secret import find_secret
from gradwire._communicator import Communicator, from_mesh
from gradwire._errors import InvalidArgument, JobOver, RendezvousError
from gradwire._launch import at_exit


def init(
    *,
    rank: int | None = None,
    ranks: int | None = None,
    store: str | None = None,
    transports: Sequence[str] | None = None,
    timeout: float = 300,
    secret: bytes | str | None = None,
    elastic: bool = False,
    stops: bool = False,
) -> Communicator:
    """Connects this rank to all others; returns the communicator.

    Every rank must call `init` the same number of times.

    Its `rank` and the number of `ranks` come from the environment that torchrun, `gradwire run`,
    mpirun or srun sets; without any of them there is one rank. Or give both, and a `store`:
    ``tcp://HOST:PORT`` on rank 0's host, the same on all ranks (GRADWIRE_STORE).

    `transports` are the ones to offer, best first (GRADWIRE_TRANSPORT). The default is shm, rdma,
    tcp, without rdma where it cannot be used; each pair of ranks takes the first that both have.
    `timeout`, in seconds, is for connecting, and the default for every operation. `secret`
    (GRADWIRE_SECRET, GRADWIRE_SECRET_FILE) authenticates the ranks to each other: at least 16
    bytes, required for a ``tcp://`` store, on loopback too (GRADWIRE_INSECURE).

    With `elastic`, processes may ask to join (`Communicator.accept_joins`), and one that `gradwire
    run --min` has started anew (GRADWIRE_JOIN) calls `join` instead: then ``comm.joined`` is not 0,
    and it needs the others' state. Where these have come to the end, it raises JobOver; `gradwire
    run` does not count that as a failure. With `stops` it calls `catch_stops`, too.

    Raises RendezvousError, which names the missing ranks or what to set, TransportError when a rank
    dies meanwhile, and InvalidArgument.
    """
    environment.check()
    if (rank is None) != (ranks is None):
        raise InvalidArgument("rank= and ranks= are given together, or neither")
    elastic, stops = arguments.flag(elastic, "elastic"), arguments.flag(stops, "stops")
    if rank is not None and ranks is not None:
        launch = launch_info.explicit(rank, ranks, store)
    elif store is not None:
        raise InvalidArgument("store= needs rank= and ranks=; or set GRADWIRE_STORE")
    else:
        launch = launch_info.from_environment()
        if environment.flag("GRADWIRE_JOIN"):
            if elastic:
                made = join(transports=transports, timeout=timeout, secret=secret)
                return _prepared(made, elastic=False, stops=stops)
            raise RendezvousError(
                f"this process replaces rank {launch.rank}, which failed, and the other ranks go "
                "on without init(): call init(elastic=True), or gradwire.join(), and take their "
                "state, or start the program without `gradwire run --min`"
            )
    limit = arguments.seconds(timeout)
    made = rendezvous.rendezvous(
        launch,
        lambda mesh: from_mesh(mesh, timeout=limit),
        timeout=limit,
        transports=transports,
        secret=secret,
    )
    return _prepared(made, elastic, stops)


def _prepared(made: Communicator, elastic: bool, stops: bool) -> Communicator:
    """Opens what init() was asked for; closes the communicator where that fails."""
    try:
        if elastic:
            made.accept_joins()
        if stops:
            catch_stops()
    except BaseException:
        made.close()
        raise
    return made


def join(
    *,
    store: str | None = None,
    transports: Sequence[str] | None = None,
    timeout: float = 300,
    secret: bytes | str | None = None,
) -> Communicator:
    """Joins a job that runs: waits until its ranks call `Communicator.resize`, and lets them in.

    A new process calls it, and becomes the last rank, or one of the last, of the communicator that
    it returns: its `joined` last ranks have just come, and need the state of the training from the
    others. The members let it in at the next place where they call `resize`, which
    `Communicator.should_resize` tells them to.

    `store` is where the job's ranks met, ``tcp://HOST:PORT``, ``unix://NAME`` or torchrun's
    ``torch://MASTER_ADDR:MASTER_PORT``, or what they passed to `resize`; the default is that of the
    launcher's environment, as in `init`, or GRADWIRE_STORE. The job's name (GRADWIRE_JOB) and its
    `secret` are those of the members; only a ``unix://`` store needs none.
    `transports` are as in `init`. `timeout`, in seconds, is for being let in, and the default for
    every operation.

    Raises RendezvousError when nobody has let it in by then, or, two seconds later, when rank 0 has
    closed its communicator, so that the job is over, unless others go on; twelve seconds later
    where the store alone says so; and InvalidArgument.
    """
    environment.check()
    launch = launch_info.from_environment()
    limit = arguments.seconds(timeout)
    where = store if store is None else arguments.text(store, "store")
    where = where or launch.store or environment.text("GRADWIRE_STORE")
    if where is None:
        raise InvalidArgument(
            "join() needs store='tcp://HOST:PORT', where the job's ranks met, or GRADWIRE_STORE"
        )
    from gradwire._bootstrap import joining

    options = joining.JoinOptions(
        launch.job if launch.size > 1 else environment.text("GRADWIRE_JOB") or launch.job,
        launch.rank if launch.size > 1 else -1,
        where,
        find_secret(secret),
        rendezvous.choose_transports(transports),
    )
    try:
        joined = joining.join(
            options,
            lambda mesh, seconds: from_mesh(mesh, timeout=limit, connect_timeout=seconds),
            Deadline(limit),
        )
    except JobOver:
        at_exit.note_join("late")
        raise
    at_exit.note_join("joined")
    joined._accepts_joins = True
    return joined
