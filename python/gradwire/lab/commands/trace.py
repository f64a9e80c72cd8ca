"""`gradwire trace`: merges what ranks have recorded, and sums up where the time went."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gradwire._trace import merge, parts
from gradwire.lab import trace_summary
from gradwire.lab.commands.progress import LateBar


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `merge` and `summary`."""
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    summing = verbs.add_parser("summary", help="where the time went, and who was waited for")
    summing.add_argument("trace", type=Path, metavar="FILE", help="a merged trace")
    summing.add_argument("--json", action="store_true", help="print JSON")
    summing.set_defaults(command=_summary)
    merging = verbs.add_parser("merge", help="make one file of the parts in a folder")
    merging.add_argument("folder", type=Path, metavar="DIR", help="what GRADWIRE_TRACE named")
    merging.add_argument("trace", type=Path, metavar="FILE", help="the file to write")
    merging.add_argument(
        "--profile",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="files of torch.profiler to put beside the ranks' calls",
    )
    merging.set_defaults(command=_merge)


def _summary(options: argparse.Namespace) -> int:
    found = trace_summary.summarize(options.trace)
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return 0


def _merge(options: argparse.Namespace) -> int:
    found = parts.read(options.folder)
    about = merge.write(found, options.trace, profiles=options.profile, progress=LateBar())
    print(f"{options.trace}: {merge.describe(about)}")
    return 0
