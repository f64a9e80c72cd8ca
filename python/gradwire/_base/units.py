"""Numbers with units: read from texts of users, and written for them."""

from __future__ import annotations

import math

from gradwire._errors import InvalidArgument

_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "y": 365.25 * 86400,
}


def size(text: str) -> float:
    """Reads a number of bytes: 4096, 64K, 1G (powers of 1024); raises InvalidArgument."""
    digits = text.strip().upper().removesuffix("IB").removesuffix("B")
    scale = _SIZES.get(digits[-1:], 1)
    return (
        _positive(digits[:-1] if scale > 1 else digits, text, "a size: use 4096, 64K, 1G") * scale
    )


def rate(text: str) -> float:
    """Reads bits per second: 100mbit, 10gbit; raises InvalidArgument."""
    return _with_unit(text, _RATES, "a rate: use 100mbit, 10gbit")


def duration(text: str) -> float:
    """Reads seconds: 50us, 1.5ms, 30s, 5m, 2h, 7d, 4y; raises InvalidArgument."""
    return _with_unit(text, _TIMES, "a time: use 50us, 30s, 2h")


def link(text: str) -> tuple[float, float]:
    """Reads "10gbit,50us" as bits per second and seconds; without the second, no latency."""
    first, comma, second = text.partition(",")
    return rate(first), duration(second) if comma else 0.0


def _with_unit(text: str, units: dict[str, float], wanted: str) -> float:
    given = text.strip().lower()
    for unit in sorted(units, key=len, reverse=True):
        if given.endswith(unit):
            return _positive(given.removesuffix(unit), text, wanted) * units[unit]
    raise InvalidArgument(f"{text!r:.80} is not {wanted}")


def _positive(digits: str, text: str, wanted: str) -> float:
    try:
        found = float(digits)
    except ValueError:
        raise InvalidArgument(f"{text!r:.80} is not {wanted}") from None
    if not 0 < found < math.inf:
        raise InvalidArgument(f"{text!r:.80} is not positive and finite")
    return found


def show_bytes(count: float) -> str:
    """Writes bytes in powers of 1000, as links' rates are: 102 MB."""
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """Writes a time with three digits: 4.21 ms."""
    if not math.isfinite(seconds):
        return "never"
    for unit, scale in (("d", 86400.0), ("h", 3600.0)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.3g} {unit}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{_three(seconds / scale)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def show_rate(bits: float) -> str:
    """Writes bits per second: 2.5 Gbit/s."""
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
