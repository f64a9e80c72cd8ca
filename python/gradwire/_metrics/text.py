"""The families of metrics, and their samples as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TypeAlias

Labels: TypeAlias = tuple[tuple[str, str], ...]
Key: TypeAlias = tuple[str, Labels]

_CALLS = "by collective and codec"
_PEER = "by the peer's rank in the job, and whether it is on this host"
# name -> (type, meaning), in order
FAMILIES: dict[str, tuple[str, str]] = {
    "gradwire_info": ("gauge", "1; says what this rank is"),
    "gradwire_calls_total": ("counter", f"collectives that ended, {_CALLS}"),
    "gradwire_failed_calls_total": ("counter", f"those of them that failed, {_CALLS}"),
    "gradwire_call_seconds_total": ("counter", f"seconds that they took, {_CALLS}"),
    "gradwire_call_input_bytes_total": ("counter", f"bytes of the caller's arrays, {_CALLS}"),
    "gradwire_call_sent_bytes_total": ("counter", f"bytes sent for them, {_CALLS}"),
    "gradwire_call_ring_bytes_total": (
        "counter",
        f"bytes that a ring would have sent for them without a codec, {_CALLS}",
    ),
    "gradwire_codec_ratio": (
        "gauge",
        "bytes that a ring would have sent for the all_reduces of a codec, over those sent",
    ),
    "gradwire_encode_seconds_total": ("counter", "seconds in encoders of the core"),
    "gradwire_decode_seconds_total": ("counter", "seconds in decoders of the core"),
    "gradwire_wait_seconds_total": (
        "counter",
        "seconds in which a collective waited for a peer: for its data, or for it to read",
    ),
    "gradwire_sent_bytes_total": ("counter", f"bytes sent, headers included, {_PEER}"),
    "gradwire_received_bytes_total": ("counter", f"bytes received, headers included, {_PEER}"),
    "gradwire_sent_messages_total": ("counter", "messages that send has sent"),
    "gradwire_received_messages_total": ("counter", "messages that recv has received"),
    "gradwire_gpu_sent_bytes_total": ("counter", "bytes that this rank's GPU has sent"),
    "gradwire_tcp_retransmits_total": ("counter", "TCP segments sent again, to a peer"),
    "gradwire_tcp_round_trip_seconds": ("gauge", "TCP's smoothed round trip to a peer"),
    "gradwire_tcp_rate_bytes_per_second": (
        "gauge",
        "bytes a second at which a TCP stream to a peer last delivered",
    ),
    "gradwire_failures_total": ("counter", "communicators that an error has ended, by its culprit"),
}


def key(name: str, **labels: object) -> Key:
    """The key of a sample."""
    return name, tuple((label, str(value)) for label, value in labels.items())


def render(samples: Mapping[Key, float], more: Labels = ()) -> str:
    """Formats the samples, family by family, each with `more` labels."""
    order = {name: number for number, name in enumerate(FAMILIES)}
    ordered = sorted(samples.items(), key=lambda each: (order[each[0][0]], each[0][1]))
    lines: list[str] = []
    for name, members in groupby(ordered, key=lambda each: each[0][0]):
        kind, meaning = FAMILIES[name]
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{_text(labels + more)}}} {value!r}" for (_, labels), value in members]
    return "\n".join(lines) + "\n" if lines else ""


def total(parts: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    """Adds samples up; of round trips it takes the shortest, and of rates the highest."""
    found: dict[Key, float] = {}
    for each, value in (item for part in parts for item in part.items()):
        combine = _GAUGES.get(each[0], sum)
        found[each] = combine((found[each], value)) if each in found else value
    return found


_GAUGES = {
    "gradwire_info": max,
    "gradwire_tcp_round_trip_seconds": min,
    "gradwire_tcp_rate_bytes_per_second": max,
}


def with_ratios(samples: Mapping[Key, float]) -> dict[Key, float]:
    """Adds the codecs' ratios."""
    found = dict(samples)
    for (name, labels), ring in samples.items():
        its = dict(labels)
        if name != "gradwire_call_ring_bytes_total" or its["collective"] != "all_reduce":
            continue
        sent = samples["gradwire_call_sent_bytes_total", labels]
        if sent > 0:
            found[key("gradwire_codec_ratio", rank=its["rank"], codec=its["codec"])] = ring / sent
    return found


def _text(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
