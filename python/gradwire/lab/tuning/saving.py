"""The files of cost models: those that are saved, and what `gradwire tune` writes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gradwire import _core
from gradwire._errors import InvalidArgument
from gradwire._model import (
    FORMAT,
    VARIABLE,
    CostModel,
    HostSet,
    built_in,
    contents,
    directory,
    set_parameters,
)


def saved() -> list[Path]:
    """All files of saved models; raises OSError where the cache cannot be read."""
    try:
        names = os.listdir(directory())
    except FileNotFoundError:
        return []
    return sorted(directory() / name for name in names if name.endswith(".json"))


def describe(path: Path) -> tuple[str, bool, str]:
    """A file's name, whether it is a model, and for which hosts, or why not; for messages."""
    try:
        found = contents(path)
        set_parameters(_core.CostModel("shm", "tcp", 1), found.get("parameters"))
    except (OSError, ValueError, RecursionError) as error:
        return path.name, False, f"because {error}"
    return path.name, True, f"{found.get('hosts')!s:.120}, {found.get('made')!s:.40}"


def make_place(hosts: HostSet, path: Path | None = None) -> Path:
    """Makes the folder of a model to be saved; returns the file's path.

    Raises InvalidArgument where no file can be made there.
    """
    try:
        path = path or hosts.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise InvalidArgument(
            f"cannot save a cost model in {path or 'the cache'} ({error}): give another file by "
            f"`gradwire tune --output FILE`, and later by {VARIABLE}"
        ) from error


def save(model: CostModel, hosts: HostSet, path: Path | None = None) -> Path:
    """Saves a model, atomically, where `find` looks or in `path`; returns the path.

    Raises InvalidArgument, as `make_place` does, for a place that cannot be written.
    """
    path = make_place(hosts, path)
    kept = _saved_before(path, hosts).get("gpus")
    return _write(path, hosts, model.parameters, {} if kept is None else {"gpus": kept})


def save_for_gpus(model: CostModel, links: str, hosts: HostSet, path: Path | None = None) -> Path:
    """Saves the model of these hosts' GPUs, by their way of messages, beside that of their CPUs."""
    path = make_place(hosts, path)
    kept = _saved_before(path, hosts)
    gpus = kept.get("gpus")
    gpus = {**(gpus if isinstance(gpus, dict) else {}), links: model.parameters}
    return _write(path, hosts, kept.get("parameters", built_in(hosts).parameters), {"gpus": gpus})


def _saved_before(path: Path, hosts: HostSet) -> dict[str, Any]:
    """The contents of a file of these hosts; none where it is no such file."""
    try:
        found = contents(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if found.get("hosts") == str(hosts) else {}


def _write(path: Path, hosts: HostSet, parameters: Any, more: Mapping[str, Any]) -> Path:
    text = {
        "gradwire_cost_model": FORMAT,
        "hosts": str(hosts),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "parameters": parameters,
        **more,
    }
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(text, file, indent=2)
        file.write("\n")
    try:
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise
    return path
