"""The C++ core's layers: whatever a source includes lies in a layer that its own one uses."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_SOURCES = _ROOT / "csrc"
_LAYER = re.compile(r"gradwire_layer\((\S+) USES ([^)]*)\)")
_INCLUDE = re.compile(r'^#include "(gradwire/[^"]+)"', re.M)


def test_includes_point_one_way() -> None:
    below = _layers_below()
    wrong = [
        f"{path.relative_to(_SOURCES)} includes {header}"
        for path in _SOURCES.rglob("*")
        if path.suffix in {".h", ".cc", ".cu", ".cuh"}
        for header in _INCLUDE.findall(path.read_text(encoding="utf-8"))
        if _layer_of(_SOURCES / header, below) not in below[_layer_of(path, below)]
    ]
    assert not wrong


def test_a_header_has_a_name_of_its_own() -> None:
    names = [path.name for path in _SOURCES.rglob("*.*h")]
    assert len(names) > 100
    assert not {name for name in names if names.count(name) > 1}


def _layers_below() -> dict[str, set[str]]:
    """Each layer with all that it uses, as CMakeLists.txt has it; lower ones come first."""
    layers: dict[str, set[str]] = {}
    text = (_ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    for layer, uses in _LAYER.findall(text):
        libraries = {f"gradwire_{known.replace('/', '_')}": known for known in layers}
        used = [libraries[name] for name in uses.split() if name in libraries]
        layers[layer] = {layer}.union(*(layers[name] for name in used))
    layers["."] = {".", *layers["exec"]}  # gradwire.h, the public face
    layers["bind"] = {"bind", *layers}
    return layers


def _layer_of(path: Path, layers: dict[str, set[str]]) -> str:
    """The layer of the nearest folder that is one."""
    folder = path.parent.relative_to(_SOURCES / "gradwire")
    return next(str(at) for at in (folder, *folder.parents) if str(at) in layers)
