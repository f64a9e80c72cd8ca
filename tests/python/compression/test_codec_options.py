"""Every option of every codec: what it takes, and that all else is refused where it is given."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
from gradwire import Communicator, InvalidArgument, _core, codec
from gradwire._base.arguments import whole
from ranks import run

NEVER = [-1, -0.5, math.nan, math.inf, -math.inf, 10**30, 10**400, [], {}, object(), b"1", True]
# By class and option: what is just within its range, and what is just beyond it.
OPTIONS: dict[tuple[type, str], tuple[list[Any], list[Any]]] = {
    (codec.FP16, "scale"): ([2**-100, 0.5, 1, 2.0, 2**100], [0, 3, 2**-101, 2**101, 1e300, "1"]),
    (codec.Int8, "block"): ([32, 1024, 65536], [0, 1, 31, 33, 65568, 1024.0, "1024"]),
    (codec.Int8, "rounding"): (["nearest", "stochastic"], ["", "up", "nearest,seed=1", 1]),
    (codec.Int4, "block"): ([32, 64, 128], [0, 16, 48, 256, 32.0, "32"]),
    (codec.Int4, "rounding"): (["nearest", "stochastic"], ["", "up", "nearest,seed=1", 1]),
    (codec.Int4, "seed"): ([0, 1, 2**53], [2**53 + 1, 2**64 - 1, 0.0, "1"]),
    (codec.Int8, "seed"): ([0, 1, 2**53], [2**53 + 1, 2**64 - 1, 0.0, "1"]),
    (codec.OneBit, "block"): ([32, 1024, 8192], [0, 1, 31, 33, 2**20, 2**32 + 32, 1024.0, "1024"]),
    (codec.Threshold, "tau"): ([2**-126, 1, 3e38], [0, -0.0, 1e-39, 1e-320, 3.5e38, 1e300, "1"]),
    (codec.Threshold, "density"): ([1e-9, 0.5, 1], [0, -0.0, 9e-10, 1.001, 2, 1e300, "1"]),
    (codec.TopK, "density"): ([1e-9, 0.5, 1], [0, -0.0, 9e-10, 1.001, "0.5,values=fp16", "1"]),
    (codec.TopK, "values"): (["fp32", "fp16", "bf16", "2bit"], ["", "fp64", "fp16,density=1", 16]),
    (codec.LowRank, "rank"): ([1, 4, np.int64(8)], [0, 10**6, 2**32 + 1, 4.0, "4"]),
}
# What an option is of no use without.
NEEDED = {"seed": {"rounding": "stochastic"}}


def each(column: int) -> list[Any]:
    found = []
    for (kind, option), values in OPTIONS.items():
        for value in values[column] + (NEVER if column else []):
            if kind is codec.Threshold and option == "tau" and value == 10**30 and column:
                continue  # which a float32 holds
            found.append(
                pytest.param(kind, option, value, id=f"{kind.__name__}-{option}-{value!r:.9}")
            )
    return found


def test_the_table_has_every_option() -> None:
    kinds = codec.NativeCodec.__subclasses__()
    assert set(OPTIONS) == {
        (kind, field.name) for kind in kinds for field in dataclasses.fields(kind)
    }


@pytest.mark.parametrize(("kind", "option", "value"), each(0))
def test_what_an_option_takes(kind: type, option: str, value: Any) -> None:
    made = kind(**NEEDED.get(option, {}), **{option: value})
    assert pickle.loads(pickle.dumps(made)).spec == made.spec
    given = {**NEEDED.get(option, {}), option: value}
    text = ",".join(f"{name}={each}" for name, each in given.items())
    assert codec._core.Codec(f"{kind._name}:{text}").name == made.spec


@pytest.mark.parametrize(("kind", "option", "value"), each(1))
def test_what_an_option_does_not_take(kind: type, option: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"{option}="):
        kind(**NEEDED.get(option, {}), **{option: value})


@pytest.mark.parametrize(("kind", "option", "value"), each(1))
def test_what_an_option_does_not_take_as_text(kind: type, option: str, value: Any) -> None:
    if isinstance(value, str) and value.replace(".", "").isdigit():
        pytest.skip("a text is what a number is there")
    if isinstance(value, str) and "," in value:
        pytest.skip("a text may have several options")
    try:
        text = str(whole(value, "value", bits=2000))
    except InvalidArgument:
        text = str(value)

    def body(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match=rf"codec {kind._name}: .*{option}="):
            comm.all_reduce(np.ones(4, np.float32), codec=f"{kind._name}:{option}={text}")

    run(1, body)


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(InvalidArgument, match="density"):
        codec.Threshold(tau=1.0, density=0.5)


def test_payloads_of_a_fixed_size() -> None:
    x = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    for spec, most in (("bf16", 2**-8), ("fp16", 2**-11), ("int8:block=64", 1 / 254), ("none", 0)):
        its = _core.Codec(spec)
        payload = np.empty(its.max_bytes(x.size), np.uint8)
        y = np.empty_like(x)
        its.encode(x.ctypes.data, x.size, payload.ctypes.data)
        its.decode(payload.ctypes.data, y.size, y.ctypes.data)
        assert np.abs(y - x).max() <= most * np.abs(x).max()
    for spec in ("topk", "threshold", "lowrank"):
        with pytest.raises(InvalidArgument, match="no fixed size"):
            _core.Codec(spec).encode(x.ctypes.data, x.size, payload.ctypes.data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("threshold:tau=1,density=0.1", "density='0.1' is of no use beside tau="),
        ("threshold:density=0.1,tau=1", "density='0.1' is of no use beside tau="),
        ("onebit:block=64,", "nothing follows the last ','"),
    ],
)
def test_what_options_do_not_say_together(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        codec.get(text)
