"""Tables of the pages that come from the code."""

import os
import subprocess
import sys
from pathlib import Path

from gradwire._base import environment
from gradwire._tools import cli


def write(folder: Path) -> None:
    """Write every generated table into the folder."""
    folder.mkdir(exist_ok=True)
    for name, lines in {"variables": variables(), "commands": commands()}.items():
        (folder / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def variables() -> list[str]:
    """Return a row for each environment variable."""
    rows = [
        f"| `{name}` | {_cell(meaning)} | {_cell(unset)} |"
        for name, (meaning, unset) in environment.VARIABLES.items()
    ]
    return ["| variable | meaning | when it is not set |", "|---|---|---|", *rows]


def commands() -> list[str]:
    """Return a section with the help of each command."""
    lines = []
    for name in cli.command_names():
        lines += [f"## gradwire {name}", "", "```", _help(name), "```", ""]
    return lines


def _help(command: str) -> str:
    environment = {**os.environ, "COLUMNS": "100"}
    program = [sys.executable, "-m", "gradwire", command, "--help"]
    return subprocess.run(
        program, env=environment, check=True, capture_output=True, text=True
    ).stdout.rstrip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
