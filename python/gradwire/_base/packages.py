"""Which packages are installed."""

from __future__ import annotations

import importlib.metadata


def installed(package: str) -> str | None:
    """The version of a package; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
