"""Print the requirements of pyproject.toml's extras ("build": of the build system), one a line."""

import re
import sys
from pathlib import Path

text = (Path(__file__).parent.parent / "pyproject.toml").read_text()


def requirements(name: str) -> list[str]:
    """The quoted strings of the list `name = [...]` (tomllib is not in Python 3.10)."""
    key = "requires" if name == "build" else name
    match = re.search(rf"^{key} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    if match is None:
        sys.exit(f"pyproject.toml has no list {key}")
    return re.findall(r'"([^"]+)"', match[1])


found = [each for name in sys.argv[1:] for each in requirements(name)]
if "build" not in sys.argv[1:]:
    found.append("numpy")
print("\n".join(dict.fromkeys(found)))
