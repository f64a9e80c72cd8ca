"""The codec lossless on gradients and Adam's states of a small transformer: bytes and speed.

    make test-cpp && python -m bench.codecs.lossless

Writes a table to bench/results/. A byte language model of 636,160 parameters is trained with AdamW
for 150 steps; measured are its gradients of the next batch, in float32, under autocast to bfloat16,
and of the model in bfloat16 and (times 1024, as a loss scale does) in float16; and what an elastic
joiner gets: parameters and both moments. The processor time of one thread counts.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from bench.codecs.codecs_compared import BUILD, HERE
from bench.common import report
from bench.common.machine import OtherLoad
from bench.common.report import ROOT, Found
from bench.training.models.text import standard_library, windows
from bench.training.models.transformers import LanguageModel

STEPS, CONTEXT, WINDOWS = 150, 64, 16
SCALE = 1024.0  # of the loss, in float16
_BLOCK = 128  # elements
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def table(found: Found) -> list[str]:
    """Its rows: bytes, and rates of plain bytes."""
    rows = []
    for each in found["rows"]:
        plain, packed = each["plain"], each["packed"]
        rates = [f"{plain / each[name] / 1e9:.2f}" for name in ("packing", "unpacking")]
        if packed == plain:  # nothing is unpacked
            rates[1] = "–"
        share = (
            f"{plain / packed:.3f}× | {plain / each['ideal']:.3f}× | {100 * packed / plain:.1f} %"
        )
        rows.append(f"{each['what']} | {share} | {' | '.join(rates)}")
    head = "of | fewer bytes | of order 0 | bytes | GB/s packing | GB/s unpacking"
    return report.table(head, rows, "lrrrrr")


def document(found: Found, title: str) -> str:
    """The report."""
    return report.document(
        f"{title}: the codec lossless on a small transformer",
        report.origin(found),
        table(found),
        "GB/s are plain bytes by the processor time of one thread. Of order 0: with exponents in"
        " the bits of their entropy in the whole array, and the other bytes as they are.",
    )


class Training:
    """The model after some steps, and batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._text, self._random = standard_library(), torch.Generator().manual_seed(1)
        self.model = LanguageModel(128, 3, CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            self.gradients(self.model)
            self.optimizer.step()

    def gradients(self, model: nn.Module, *, scale: float = 1.0, autocast: bool = False) -> None:
        """Of the next batch."""
        last = len(self._text.seen) - CONTEXT - 1
        starts = torch.randint(0, last, (WINDOWS,), generator=self._random)
        batch = windows(self._text.seen, starts, CONTEXT)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            scores = model(batch[:, :-1])
        (cross_entropy(scores.float(), batch[:, 1:].flatten()) * scale).backward()

    def arrays(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """What is measured."""
        for dtype, scale in ((torch.bfloat16, 1.0), (torch.float16, SCALE)):
            model = copy.deepcopy(self.model).to(dtype)
            self.gradients(model, scale=scale)
            yield f"gradients, {_NAMES[dtype]}", _gradients(model)
        self.gradients(self.model)
        yield "gradients, float32", _gradients(self.model)
        self.gradients(self.model, autocast=True)
        yield "gradients, float32, of autocast to bfloat16", _gradients(self.model)
        kept = self.optimizer.state
        states = {
            "parameters": list(self.model.parameters()),
            "first moments": [kept[each]["exp_avg"] for each in self.model.parameters()],
            "second moments": [kept[each]["exp_avg_sq"] for each in self.model.parameters()],
        }
        for dtype in (torch.float32, torch.bfloat16):
            for name, tensors in states.items():
                yield f"{name}, {_NAMES[dtype]}", [each.detach().to(dtype) for each in tensors]
            every = [each.detach().to(dtype) for tensors in states.values() for each in tensors]
            yield f"all that a joiner gets, {_NAMES[dtype]}", every
        noise = torch.randint(-(2**31), 2**31, (10**6,), dtype=torch.int32)
        yield "random bits as float32", [noise.view(torch.float32)]


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def ideal(flat: torch.Tensor) -> float:
    """The bytes with exponents in the bits of their entropy of order 0, and the others as they are.

    A byte that is 0 in all of 128 elements counts nothing, as in the codec's blocks.
    """
    word = flat.element_size()
    bits = flat.view(torch.int16 if word == 2 else torch.int32).long()
    counts = torch.bincount(bits >> (8 * word - 9) & 0xFF).double()
    shares = counts[counts > 0] / len(flat)
    entropy = -float((shares * shares.log2()).sum())
    blocks = pad(bits, (0, -len(bits) % _BLOCK)).view(-1, _BLOCK)
    masks = (0x807F,) if word == 2 else (0xFF, 0xFF00, 0x807F0000)
    others = sum(int((blocks & mask).any(dim=1).sum()) for mask in masks)
    return len(flat) * entropy / 8 + _BLOCK * others


def measured(build: Path) -> Iterator[dict[str, Any]]:
    """The rows."""
    with tempfile.TemporaryDirectory() as folder:
        binary, data = f"{folder}/lossless", Path(folder) / "data"
        libraries = [str(build / f"libgradwire_{name}.a") for name in ("codec", "base")]
        source = [f"-I{ROOT / 'csrc'}", str(HERE / "lossless.cc")]
        subprocess.run(["g++", "-O3", "-std=c++20", *source, "-o", binary, *libraries], check=True)
        for what, tensors in Training().arrays():
            flat = torch.cat([each.reshape(-1) for each in tensors])
            data.write_bytes(flat.view(torch.uint8).numpy().tobytes())
            line = f"{_NAMES[flat.dtype]} {data}\n"
            ran = subprocess.run(
                [binary], input=line, stdout=subprocess.PIPE, text=True, check=True
            )
            plain, packed, packing, unpacking = map(float, ran.stdout.split())
            yield {
                "what": what,
                "plain": int(plain),
                "packed": int(packed),
                "ideal": ideal(flat),
                "packing": packing,
                "unpacking": unpacking,
            }


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--build", type=Path, default=BUILD, help="a tree, with libgradwire_codec.a"
    )
    parser.add_argument("--output", type=Path, help="default: bench/results/lossless-DATE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = OtherLoad()
    found = {
        "date": datetime.date.today().isoformat(),
        "rows": list(measured(options.build)),
        "machine": load.describe(),
        "command": "-m bench.codecs.lossless",
    }
    report.write(options.output, "lossless", found, document)


if __name__ == "__main__":
    main()
