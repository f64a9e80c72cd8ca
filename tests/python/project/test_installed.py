"""What other environments see of an installed gradwire."""

import importlib.metadata
import subprocess
import sys

import gradwire

LIMIT = 120  # seconds


def test_the_package_is_found_where_its_metadata_is() -> None:
    """As by PYTHONPATH, which is taken without the .pth files of editable installs."""
    site = str(importlib.metadata.distribution("gradwire").locate_file(""))
    code = f"""
import importlib.metadata, sys
sys.path.insert(0, {site!r})
(found,) = importlib.metadata.entry_points(group="torch.backends", name="gradwire")
print(found.load().__name__)  # as `import torch` does
import gradwire.codec
print(gradwire.spawn.__name__, gradwire.__file__)
"""
    # -S: without site-packages and their .pth files; -I: without PYTHONPATH and the current folder.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.stdout == f"register\nspawn {gradwire.__file__}\n", done.stderr
