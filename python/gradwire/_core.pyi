"""The C++ core. Private: use the classes of `gradwire`, which check and explain."""

import enum
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

class Error(RuntimeError):
    """Base of everything that gradwire raises."""

class InvalidArgument(Error, ValueError): ...
class ScheduleError(Error, ValueError): ...
class RendezvousError(Error): ...

class Aborted(Error):
    peer: int
    job_peer: int

class TransportError(Error):
    peer: int
    job_peer: int

class Timeout(TimeoutError, Error):
    peer: int
    job_peer: int

# An array in memory: (address, elements). The caller keeps the memory alive.
_Array = tuple[int, int]

# The fields of a DLPack capsule, which still owns the array; `itemsize` is in bytes.
class _DLPack(TypedDict):
    address: int
    device_type: int
    device_id: int
    code: int
    itemsize: int
    shape: tuple[int, ...]
    contiguous: bool
    writable: bool

def read_dlpack(capsule: object, /) -> _DLPack: ...

class Codec:
    """A codec; immutable. Made once per name and kept, so that plans are found again."""

    def __init__(self, spec: str, /) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def biased(self) -> bool: ...
    @property
    def seconds_per_byte(self) -> tuple[float, float]: ...  # encode, decode, before `tune`
    @property
    def exact(self) -> bool: ...  # loses nothing
    @property
    def compound(self) -> bool: ...
    def max_bytes(self, count: int, /) -> int: ...
    def usual_bytes(self, count: int, /) -> int: ...  # where few values are 0
    # Addresses, of float32 and of a payload of exactly max_bytes(count); codecs of a fixed size.
    def encode(self, x: int, count: int, out: int, /) -> None: ...
    def decode(self, payload: int, count: int, y: int, /) -> None: ...
    # Addresses of float32; a run is a matrix of one row. Payloads of any codec.
    def most_payload(self, rows: int, columns: int, /) -> int: ...
    def encode_array(
        self,
        x: int,
        rows: int,
        columns: int,
        feedback: ErrorFeedback | None,
        key: str,
        call: int,
        /,
    ) -> NDArray[np.uint8]: ...
    def decode_array(self, payload: NDArray[np.uint8], rows: int, columns: int, y: int) -> None: ...

def codec_names() -> list[str]: ...

# Addresses, which may be the same: y[i] = x[i] * factor, rounded once. Of floats and complex.
def scale(dtype: str, x: int, y: int, count: int, factor: float, /) -> None: ...

class Request:
    """A collective and its arrays, by the names of the public API; may run many times."""

    def __init__(
        self,
        collective: str,
        dtype: str,
        op: str,
        root: int,
        inputs: Sequence[_Array],
        outputs: Sequence[_Array],
        algorithm: str = "auto",
        schedule: Schedule | None = None,
        codec: Codec | None = None,
    ) -> None: ...
    def feed_back(self, feedback: ErrorFeedback, keys: Sequence[tuple[str, int]], /) -> None: ...
    def shape(self, shapes: Sequence[tuple[int, int]], /) -> None: ...  # rows and columns of inputs
    def exchange(self, payloads: ExchangePayloads, /) -> None: ...
    def label(self, text: str, /) -> None: ...  # what the ranks are told of the codec
    def move(self, name: str, /) -> None: ...  # what its elements are called; they move as uint8
    def name(
        self, text: str, /
    ) -> None: ...  # by which traces name it: lines, the first is the title
    # Of the arrays, which all ranks must give alike: in the first call like it, or always.
    def check_shape(self, text: str, always: bool, /) -> None: ...

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")

class fast_path_method(Generic[_S, _P, _R]):
    """A method of `Communicator` with an array, or none, and keywords: tries the cache first."""

    def __init__(self, function: Callable[Concatenate[_S, _P], _R]) -> None: ...
    @overload
    def __get__(self, instance: None, owner: type[_S]) -> Self: ...
    @overload
    def __get__(self, instance: _S, owner: type[_S]) -> Callable[_P, _R]: ...
    def __call__(self, instance: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    @property
    def names(self) -> tuple[str, ...]: ...  # of the keywords

class CallCache:
    """Makes calls like earlier ones: a blocking all_reduce of one NumPy array in place, a barrier.

    It is not used while there is something in `unfinished`. The capsule is what a
    `fast_path_method` finds as its instance's `_call_cache`.
    """

    def __init__(self, communicator: Communicator, unfinished: Sized, /) -> None: ...
    def add(
        self,
        method: fast_path_method[Any, Any, Any],
        array: NDArray[Any] | None,
        options: tuple[object, ...],  # as many as the method has names
        request: Request,
        timeout: float,
        /,
    ) -> None: ...
    @property
    def capsule(self) -> object: ...

_SavedKey = tuple[NDArray[np.float32], float, float, int, NDArray[np.float32]]

class ErrorFeedback:
    """One residual a key. Calls in a step are kept together, or not at all."""

    def __init__(self, narrow: bool, /) -> None: ...  # in bfloat16
    def residual(self, key: str, /) -> NDArray[np.float32]: ...
    # In place: zero where the residual is.
    def mask(self, key: str, values: NDArray[np.float32]) -> None: ...
    def keys(self) -> list[tuple[str, int]]: ...
    def add(self, key: str, values: NDArray[np.float32], /) -> None: ...
    def set(self, key: str, values: NDArray[np.float32], /) -> None: ...
    def multiply(self, key: str, factors: NDArray[np.float32], /) -> None: ...
    def scale(self, factor: float, /) -> None: ...
    def clear(self) -> None: ...
    def begin_step(self) -> None: ...
    def end_step(self, keep: bool, /) -> bool: ...
    # By key: the residual, tau, filter, calls, and what the codec remembers. All at one moment.
    def save(self) -> dict[str, _SavedKey]: ...
    def load(self, state: Mapping[str, _SavedKey], /) -> None: ...

class ExchangePayloads:
    """This rank's payload, and when the Work is over every rank's: a buffer, one after the other.

    It has the keys of the call open. They are settled by its maker, or where the Work fails; or
    cancelled, where the call is refused before it begins.
    """

    def __init__(
        self, feedback: ErrorFeedback | None, keys: Sequence[tuple[str, int]], /
    ) -> None: ...
    def residual(self, key: int, /) -> NDArray[np.float32]: ...
    def write_next(self, key: int, values: NDArray[np.float32], rank: int, /) -> None: ...
    # Before it is sent: the payload, whether what it stands for is finite, the most of any rank's.
    def seal(self, own: bytes, finite: bool, limit: int) -> None: ...
    def settle(self, keep: bool, /) -> None: ...
    def cancel(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def ends(self) -> list[int]: ...  # of each rank's, in the buffer
    @property
    def all_finite(self) -> bool: ...

class Recorder:
    """What a communicator's calls did, in a ring of events; `skew` is added to its clock."""

    def __init__(self, events: int, skew: int = 0) -> None: ...
    # The events as they lie in memory, how many came before them, the texts of their labels, and
    # how many texts had no room.
    def read(self) -> tuple[bytes, int, dict[int, str], int]: ...

class Totals:
    """What the calls, messages and failures of a communicator of so many ranks add up to."""

    def __init__(self, ranks: int, /) -> None: ...
    # Of each collective and codec: calls, failed ones, seconds, bytes of inputs, bytes sent.
    def calls(self) -> list[tuple[str, str, int, int, float, int, int]]: ...
    # Of each peer: bytes sent, received, messages sent, received; seconds in which nothing could be
    # done before it sent, and before it read.
    def peers(self) -> list[tuple[int, int, int, int, float, float]]: ...
    # The name of the error that ended the communicator, and the culprit's rank in the job.
    def failure(self) -> tuple[str, int] | None: ...

class Work:
    def done(self) -> bool: ...
    def source(self) -> int: ...

class Cipher(enum.Enum):
    AES_128_GCM = ...
    AES_256_GCM = ...
    CHACHA20_POLY1305 = ...

class Seal:
    @property
    def cipher(self) -> Cipher: ...
    def records(self, plain: bytes, /) -> bytes: ...
    def opened(self, arrived: bytes, /) -> bytes: ...
    @property
    def missing(self) -> int: ...

class Noise:
    def __init__(
        self, initiator: bool, prologue: bytes, psk: bytes, ephemeral: bytes | None = None
    ) -> None: ...
    def write(self, payload: bytes, /) -> bytes: ...
    def read(self, message: bytes, /) -> bytes: ...
    @property
    def hash(self) -> bytes: ...
    def seal(self, cipher: Cipher, /) -> Seal: ...

NOISE_OVERHEAD: int

def end_libcrypto_thread() -> None: ...
def has_aes() -> bool: ...
def hmac_sha256(key: bytes, data: bytes, /) -> bytes: ...
def libcrypto_version() -> str: ...
def use_libcrypto(file: str, /) -> None: ...

class Ways:
    """The pairs of interfaces by which a rank reaches one peer, and the news of them."""

    def __init__(self, count: int, /) -> None: ...
    def next(self) -> tuple[int, bool, str] | None: ...  # a way; whether it works; why not
    def ended(self) -> list[int]: ...  # ways of which a socket has ended
    def generation(self, way: int, /) -> int: ...  # how often it was made anew
    # Hands over all sockets of a way, each with its keys and its part: 0 for control, or 1 + lane.
    def renew(
        self, way: int, generation: int, sockets: Sequence[tuple[int, Seal | None, int]], /
    ) -> None: ...
    @property
    def in_use(self) -> bool: ...  # by links, to a peer that is not gone

class TransportContext:
    """What the links of one transport share in this process, such as open RDMA devices."""

    def describe(self) -> list[str]: ...  # a line for each device
    # Names of networks; `only`: there is no other transport to fall back to.
    def networks(self, only: bool, /) -> list[str]: ...

# Of each transport, best first: the fields of _host.transport_kinds.Kind.
def transport_kinds() -> list[tuple[str, str, bool, bool, list[tuple[str, str, str]]]]: ...

# The context, if the transport has one, and why there can be no link here, or "". Raises
# InvalidArgument for a wrong setting.
def open_transport(
    name: str, settings: Mapping[str, str], /
) -> tuple[TransportContext | None, str]: ...

# The asynchronous parameter server. Versions are SERVE_NO_VERSION before there
# are values. A client's id has its incarnation in the low 16 bits.
SERVE_NO_VERSION: int
SERVE_REPLACED: str  # in the error of a client in whose place another one is

# The text of a table, with names and shapes of parameters. Codec "none" is always in it.
def serve_table(
    parameters: Sequence[tuple[str, Sequence[int]]],
    rule: str,
    codecs: Sequence[str],
    shards: int,
    atomic_push: bool,
    divide: bool,
    max_staleness: int | None,
    dtype: str = ...,  # or float64, with the rule staged
) -> str: ...

class ServeChannel:
    """The client's end of a connection to one shard, over a connected, authenticated socket."""

    def __init__(
        self,
        transport: str,
        context: TransportContext | None,
        fd: int,
        seal: Seal | None,
        peer: str,
        timeout: float,
        /,
    ) -> None: ...

class _ServeSnapshot(TypedDict):
    table: str
    shard: int
    version: int
    steps: list[int]
    slots: dict[str, NDArray[np.float32]]  # two for each element of float64

class ServeServer:
    """One shard and its thread, which runs until stop()."""

    def __init__(self, shard: int, shards: int, log: bool = ...) -> None: ...
    @staticmethod
    def restored(
        table: str,
        shard: int,
        version: int,
        steps: Sequence[int],
        slots: Sequence[tuple[str, NDArray[np.float32]]],
        log: bool = ...,
    ) -> ServeServer: ...
    # Blocks until the client's end agrees; the descriptor is taken over, whatever happens.
    def admit(
        self,
        transport: str,
        context: TransportContext | None,
        fd: int,
        seal: Seal | None,
        name: str,
        client: int,
        timeout: float,
        /,
    ) -> None: ...
    def snapshot(self, timeout: float, /) -> _ServeSnapshot: ...
    def snapshot_wanted(self, seconds: float, /) -> int | None: ...  # a ticket, when a client asks
    def snapshot_written(self, ticket: int, error: str, /) -> None: ...  # "": it is written
    def statistics(self, timeout: float, /) -> str: ...  # JSON
    # Clients that are there now, that were admitted ever, and whether there are values.
    def census(self, timeout: float, /) -> tuple[int, int, bool]: ...
    def stop(self) -> None: ...

class ServeCall:
    """An operation on all shards; what it returned counts once it is done."""

    def done(self) -> bool: ...
    def texts(self) -> list[str]: ...
    # Of commands, by shard and by command: numbers, and names.
    def results(self) -> list[list[tuple[list[list[float]], list[str]]]]: ...
    def versions(self) -> list[int]: ...
    def refusals(self) -> int: ...
    def copied(self) -> bool: ...  # a merged push, whose arrays are free already

class ServeClient:
    """A client of all shards and its thread. Arrays, one a parameter, are of float32 words."""

    def __init__(self, table: str, client: int, shards: Sequence[ServeChannel], /) -> None: ...
    def join(self, timeout: float, coordinator: bool = ...) -> ServeCall: ...
    def set(self, values: Sequence[_Array], timeout: float, memory: object, /) -> ServeCall: ...
    def push(
        self,
        gradients: Sequence[_Array],
        codecs: Sequence[str],  # one for each, or one for all
        feedback: ErrorFeedback | None,
        rate: float,  # 0: the rule's; -0: zero
        strict: bool,
        timeout: float,
        memory: object,
        versions: Sequence[int] = ...,  # none: those pulled last
        staged: tuple[int, int, int] | None = ...,  # batch, replica, sequence
    ) -> ServeCall: ...
    def pull(
        self, values: Sequence[_Array], codec: str, timeout: float, memory: object, /
    ) -> ServeCall: ...
    def ask(
        self, what: str, version: int, timeout: float, /
    ) -> ServeCall: ...  # wait, stats, snapshot
    # ("dots", pairs), ("absmax", name), ("abssum", name), ("combine", target, terms),
    # ("copy", target, source), ("drop", name), ("names",), ("fold", target, batch, pushes),
    # ("discard", batch or None)
    def command(self, commands: Sequence[tuple[Any, ...]], timeout: float, /) -> ServeCall: ...
    def wait(self, call: ServeCall, seconds: float, /) -> bool: ...  # whether it is over
    def versions(self) -> list[int]: ...  # that were pulled last
    def merged(self) -> int: ...
    def stale(self) -> int: ...
    def close(self, timeout: float, /) -> None: ...

class CostModel:
    """By which algorithm="auto" decides; see csrc/gradwire/schedule/cost.h."""

    # Built-in values for the transports of pairs on one host and of others.
    def __init__(self, within: str, between: str, cores: int, /) -> None: ...
    def set(self, name: str, value: float, /) -> None: ...
    @property
    def parameters(self) -> dict[str, float]: ...
    @property
    def digest(self) -> int: ...
    # Seconds; `bytes` are those of all chunks together, `hosts` the ranks of each. `levels` are
    # groups of hosts from the inside out: ranks, seconds per byte, latency, number of uplinks. Rank
    # 0 and its host's link are `slow` times slower.
    def predict(
        self,
        schedule: Schedule,
        bytes: float,
        hosts: Sequence[Sequence[int]] = ...,
        codec: Codec | None = None,
        most_message: float = ...,
        levels: Sequence[tuple[int, float, float, int]] = ...,
        slow: float = 1.0,
    ) -> float: ...
    # Of an all_reduce of `bytes` whose inputs all ranks get.
    def predict_gathered(
        self, all_gather: Schedule, bytes: float, hosts: Sequence[Sequence[int]] = ...
    ) -> float: ...
    # Algorithm, bytes of a segment, seconds.
    def choose(
        self,
        collective: str,
        ranks: int,
        bytes: float,
        hosts: Sequence[Sequence[int]] = ...,
        codec: Codec | None = None,
        root: int = 0,
        most_message: float = ...,
    ) -> tuple[str, int, float]: ...

# Seconds that an emulated NIC ("1gbit,100us") takes for a byte among many, and that each bit is
# under way. Raises InvalidArgument.
def link_costs(spec: str, /) -> tuple[float, float]: ...
def rate_now(spec: str, /) -> float: ...

class ProgressThread:  # the thread that drives the communicators that share it
    def __init__(self) -> None: ...

class Family:
    """The communicators of a process that end together: a failure of one ends all."""

class StopRequest:
    """Whether this process asks its job to stop; one that several communicators may have."""

    def make(self) -> None: ...
    def make_at(self, seconds: float, /) -> None: ...  # since 1970
    def made(self) -> bool: ...

class Communicator:
    """Calls in a process forked from its owner raise Aborted."""

    def __init__(
        self,
        rank: int,
        size: int,
        communicator: int,
        hosts: Sequence[Sequence[int]],
        max_message: int = ...,
        segment_bytes: int = ...,
        stall_seconds: float = ...,
        job: str = "",  # this and the rest are for RankStatus
        tag: int = 0,
        about: str = "",
        contexts: Mapping[str, TransportContext] = ...,  # by transport
        job_ranks: Sequence[int] = (),  # the number in the job of each rank; empty: the same ones
        stop_request: StopRequest | None = None,
        progress: ProgressThread | None = None,  # None: its own
    ) -> None: ...

    # File descriptors are taken over. In ascending order of peers; releases the GIL.
    def adopt_control(
        self, fd: int, seal: Seal | None, peer: int, /, ways: Ways | None = None, way: int = 0
    ) -> None: ...
    def adopt_link(
        self,
        lane: str,
        transport: str,
        streams: Sequence[tuple[int, Seal | None]],  # descriptors, and their keys
        peer: int,
        timeout: float,
        /,
        ways: Ways | None = None,
        roles: Sequence[tuple[int, bool]] = (),  # of each: its way; whether it acknowledges
    ) -> None: ...
    # Once, when all links are made.
    def join(self, family: Family, /) -> None: ...
    def set_model(self, model: CostModel, /) -> None: ...  # on all ranks, between two calls
    # Likewise: the ranks of each site, seconds one way between two, and per byte of its link.
    def set_sites(
        self, ranks: Sequence[Sequence[int]], latency: float, seconds_of_byte: float, /
    ) -> None: ...
    # Collectives wait so long, where their timeouts are shorter, for a rank that answers.
    def set_patience(self, seconds: float, /) -> None: ...

    # Blocks; Ctrl-C ends it and aborts the communicator.
    def run(self, request: Request, timeout: float, /) -> None: ...
    # `memory` is whatever keeps the arrays alive; held until the work is over.
    def submit(self, request: Request, timeout: float, memory: object, /) -> Work: ...
    def send(  # packed_as: the dtype of elements that travel packed, by codec lossless; "": none
        self, address: int, bytes: int, to: int, timeout: float, memory: object, packed_as: str, /
    ) -> Work: ...
    def receive(  # source -1: any
        self, address: int, bytes: int, source: int, timeout: float, memory: object, /
    ) -> Work: ...
    # `background`: the program does not wait for this thread.
    def wait(self, work: Work, timeout: float, background: bool = False) -> None: ...
    # Between the two this rank is one that waits for a message of the sender; -1: of any.
    def begin_wait(self, sender: int, /) -> None: ...
    def end_wait(self, sender: int, /) -> None: ...
    def request_stop(self) -> None: ...
    def request_resize(self) -> None: ...
    # Whether a rank had asked to stop before it began one of the calls so far; waits for these.
    def should_stop(self) -> bool: ...
    def should_resize(self) -> bool: ...
    # Unless `alone`, the rest of the family fails too, here and on the other ranks.
    def abort(self, reason: str, alone: bool = True) -> None: ...
    def check_failure(self, seconds: float, /) -> None: ...
    # `settle`: how long to wait for ranks that are not known to have made the same calls; as long
    # as `timeout` if None. `alone`: the program goes on with other communicators.
    def close(self, timeout: float, settle: float | None = None, alone: bool = True) -> None: ...
    # Reports to both, from the next call on.
    def observe(self, recorder: Recorder | None, totals: Totals | None = None) -> None: ...
    def settled(self) -> bool: ...  # nothing to wait for after a drop
    # Goes on hearing what the others made of the last call, and logs where it was another.
    def drop(self) -> None: ...
    # Closes a failed communicator and gives its living control sockets away: (peer, descriptor,
    # what was read of its next frame).
    def release_controls(self) -> list[tuple[int, int, Seal | None, bytes]]: ...
    def release_after_fork(self) -> None: ...  # after a fork: closes what the child inherited
    @property
    def owned_here(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    # Bytes and frames this rank has sent, headers included; seconds in encoders and decoders.
    @property
    def traffic(self) -> tuple[int, int, float, float]: ...

class Edge:
    src: int
    dst: int
    first: int
    last: int
    reduces: bool

class Report:
    correct: bool
    complete: bool
    deadlock_free: bool
    agreement: bool
    in_tree: bool
    rounds: int
    max_sent: float
    problems: list[str]
    ok: bool

class Schedule:
    @staticmethod
    def generate(
        collective: str, algorithm: str, ranks: int, root: int, groups: Sequence[Sequence[int]]
    ) -> Schedule: ...
    @staticmethod
    def parse(text: str, /) -> Schedule: ...
    # (round, src, dst, first chunk, last chunk + 1, reduces)
    @staticmethod
    def from_edges(
        collective: str,
        name: str,
        ranks: int,
        chunks: int,
        root: int,
        edges: Sequence[tuple[int, int, int, int, int, bool]],
        /,
    ) -> Schedule: ...
    @property
    def collective(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def root(self) -> int: ...
    @property
    def rounds(self) -> list[list[Edge]]: ...
    def to_text(self) -> str: ...
    def verify(self) -> Report: ...
    def closed_form(self, groups: Sequence[Sequence[int]] = ...) -> tuple[int, float] | None: ...

CONTROL_MAGIC: bytes  # the first bytes of a control frame
CONTROL_FRAME_BYTES: int
RELEASED_MAGIC: bytes  # the first bytes of a message on a control socket that was released

def algorithms(collective: str, /) -> list[str]: ...

# Waits until no thread is in a call that blocks, at most so long.
def await_calls(seconds: float, /) -> None: ...
def end_with(status: int, /) -> None: ...  # this process, which ends, where it would with 0
def forget_calls() -> None: ...

# A rank of this user's on this host, as its status page and /proc show it. Texts are printable.
class RankStatus(TypedDict):
    pid: int
    state: str  # of the process, as in /proc/PID/stat: R, S, D, T (stopped), t (traced)
    job: str
    tag: int  # tells jobs of one name apart
    communicator: int
    rank: int
    size: int
    local_size: int  # ranks on its host
    about: str
    activity: str  # outside, call, send, receive, failed
    seconds: float  # for which it has done so, or not moved
    calls: int  # begun so far
    operation: str  # "all_reduce(…), call 12, round 1, segment 0"
    spec: str  # the call, or why it failed
    peer: int  # waited for; -1: none, or any
    sentence: str

class CudaDevice(TypedDict):
    name: str
    capability: tuple[int, int]
    memory: int  # bytes

class CudaInfo(TypedDict):
    library: str  # gradwire's CUDA part, as it was looked for
    runtime: str  # "13.0"; "0.0": not known
    driver: str
    devices: list[CudaDevice]
    why_not: str  # empty where there are devices

class NcclInfo(TypedDict):
    version: str
    library: str
    origin: str  # how it was found

def cuda_info(library: str = ...) -> CudaInfo: ...

# Loads NCCL; `search`: files of pip's wheels. Raises InvalidArgument that says why it can't.
def nccl_info(search: Sequence[str], /) -> NcclInfo: ...
def ranks_on_this_host() -> list[RankStatus]: ...
def reductions(dtype: str, /) -> list[str]: ...  # the ops that it has
def instruction_sets() -> list[str]: ...  # best first
def active_instruction_set() -> str: ...

class CudaLoopback:
    """What ranks that are threads of one process share, to exchange messages on GPUs."""

    def __init__(self, size: int, /) -> None: ...

class CudaMessages:
    """How one rank's GPU exchanges messages; taken by `Gpu`, once."""

    @staticmethod
    def loopback(
        shared: CudaLoopback, rank: int, device: int, timeout: float, /
    ) -> CudaMessages: ...
    @staticmethod
    def host(carrier: Communicator, device: int, timeout: float, /) -> CudaMessages: ...
    @staticmethod
    def nccl_id(search: Sequence[str], /) -> bytes: ...
    @staticmethod
    def nccl(
        id: bytes,
        rank: int,
        size: int,
        device: int,
        timeout: float,
        search: Sequence[str],
        blocking: bool,
        /,
    ) -> CudaMessages: ...
    @staticmethod
    def routed(
        ways: Sequence[CudaMessages], routes: Sequence[tuple[int, int]], /
    ) -> CudaMessages: ...

class CudaEvent:
    def __init__(self, device: int, /) -> None: ...
    def record(self, stream: int, /) -> None: ...
    def wait(self, stream: int, /) -> None: ...
    def done(self) -> bool: ...

class CudaStream:
    """Nobody else's while it lives; its handle stays valid for as long as the process."""

    def __init__(self, device: int, /) -> None: ...
    @property
    def handle(self) -> int: ...

class CudaMemory:
    """Zeros in a GPU's memory."""

    def __init__(self, device: int, bytes: int, /) -> None: ...
    @property
    def address(self) -> int: ...

class CudaFeedback:
    """An ErrorFeedback's part in a GPU's memory."""

    def __init__(self, host: ErrorFeedback, device: int, /) -> None: ...
    def begin_step(self) -> None: ...
    def end_step(self, keep: bool, stream: int, /) -> None: ...
    def require_finite(self, address: int, count: int, stream: int, /) -> None: ...
    def copy_flags(self, to: int, stream: int, /) -> None: ...
    def mask(self, arrays: Sequence[tuple[str, int, int]], stream: int, /) -> None: ...
    def scale(self, factor: float, loss_scale: int, after: int, /) -> bool: ...
    def set_loss_scale(self, last: float, /) -> None: ...
    def bring_home(self) -> None: ...
    def send_back(self) -> None: ...
    @property
    def device(self) -> int: ...

class Gpu:
    """One rank's GPU in a communicator."""

    def __init__(
        self, users: Communicator, shadow: Communicator, device: int, messages: CudaMessages, /
    ) -> None: ...
    def run(
        self, request: Request, feedback: CudaFeedback | None, stream: int, timeout: float, /
    ) -> None: ...
    # Waits until this rank's calls are over; raises Timeout, or the failure.
    def finish(self, timeout: float, /) -> None: ...
    def set_model(self, model: CostModel, /) -> None: ...
    def should_stop(self) -> bool: ...
    def should_resize(self) -> bool: ...
    def close(self) -> None: ...
    def abort(self, reason: str, /) -> None: ...
    def require_alive(self) -> None: ...
    # Raises the failure of all calls so far, whose streams the caller has waited for.
    def require_success(self) -> None: ...
    @property
    def sent(self) -> int: ...
    @property
    def messages(self) -> str: ...

def gpu_model() -> CostModel: ...  # built in, for GPUs
def cuda_is_captured(device: int, stream: int, /) -> bool: ...
def cuda_device_of(address: int, /) -> int: ...
def cuda_device_identity(device: int, /) -> tuple[str, str]: ...
