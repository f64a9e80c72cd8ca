"""What int8 and int4 lose of values, by `bench.codecs.hops`, and take of processors."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from bench.codecs import hops, processor_time

# Of normal values, the squares of what is lost over those of the values.
ONE_HOP = {"int8": 6.3e-5, "int4": 0.0068, "int4:block=128": 0.0088}


def drawn(seed: int) -> hops.Gradients:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) for shape in ((256, 256), (1024,))]


@pytest.mark.parametrize("codec", ONE_HOP)
def test_a_hop_loses_what_it_should(codec: str) -> None:
    bits, loss = hops.one_hop(codec, drawn(1))
    assert loss == pytest.approx(ONE_HOP[codec], rel=0.1)
    assert bits <= (8.1 if codec == "int8" else 4.5)


def test_a_direct_sum_loses_less_than_a_ring() -> None:
    """Each hop loses a share of what it sends: a ring sends sums of one, two and three ranks."""
    given = [drawn(seed) for seed in range(4)]
    direct, ring = (hops.several_hops("int4", each, given) for each in ("direct", "ring"))
    assert direct == pytest.approx((3 / 4 + 1) * ONE_HOP["int4"], rel=0.1)
    assert ring == pytest.approx((1 / 4 + 2 / 4 + 3 / 4 + 1) * ONE_HOP["int4"], rel=0.1)


def test_the_report_has_a_row_for_each_codec() -> None:
    text = hops.document([[drawn(seed) for seed in range(8)]])
    for codec in hops.CODECS:
        assert f"`{codec}`" in text


def test_processor_time_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processor_time, "_KIB", (256,))
    monkeypatch.setattr(processor_time, "_BYTES", 1)
    given = ["--rounds", "1", "--transports", "shm", "--codecs", "int4", "int8"]
    monkeypatch.setattr(sys, "argv", ["processor_time.py", *given])
    processor_time.main()
    _, _, *rows = capsys.readouterr().out.splitlines()
    wanted = [f"{how} | `{codec}`" for how in ("without", "with") for codec in ("int4", "int8")]
    for row, each in zip(rows, wanted, strict=True):
        assert row.startswith(f"| shm | 256 | {each} |")
        assert ("| 1.00 (1.00 to 1.00) |" in row) == ("int4" in each)
