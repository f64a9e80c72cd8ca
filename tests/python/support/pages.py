"""What the pages of the documentation hold."""

from __future__ import annotations

import re


def blocks_of(text: str) -> list[tuple[int, str]]:
    """The blocks of Python, each with the number of its first line."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, each.start(1)) + 1, each[1]) for each in found]
