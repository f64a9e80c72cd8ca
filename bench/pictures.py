"""The pictures of docs/ that come from the newest files in bench/results.

python -m bench.pictures                   # draws all of them anew, beside the results too
python -m bench.pictures hybrid diloco     # these
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.asynchronous import (
    diloco_report,
    downpour_report,
    downpour_search_report,
    downpour_simulated_report,
    stragglers_report,
)
from bench.common.report import RESULTS, ROOT, Found
from bench.tables import newest
from bench.torch_backend import hybrid_report
from bench.training import elastic

DRAWN = ROOT / "docs/pictures"
PICTURES: Mapping[str, tuple[str, Callable[[Found, Path], None]]] = {
    "diloco": ("diloco-*.json", diloco_report.draw),
    "downpour": ("downpour-*.json", downpour_report.draw),
    "downpour_search": ("search-downpour-*.json", downpour_search_report.draw),
    "elastic": ("elastic-2*.json", elastic.draw),
    "hybrid": ("hybrid-*.json", hybrid_report.draw),
    "sandblaster": ("stragglers-*.json", stragglers_report.draw),
    "simulated_downpour": ("simulated-downpour-*.json", downpour_simulated_report.draw),
}


def main() -> None:
    """Draws the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], metavar="NAME")
    for name in parser.parse_args().names or PICTURES:
        pattern, draw = PICTURES[name]
        found = newest(RESULTS, pattern)
        picture = found.with_suffix(".png")
        draw(json.loads(found.read_text(encoding="utf-8")), picture)
        shutil.copyfile(picture, DRAWN / f"{name}.png")


if __name__ == "__main__":
    main()
