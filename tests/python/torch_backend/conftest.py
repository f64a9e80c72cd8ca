"""Ranks that all tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch_pool import Pool


@pytest.fixture(scope="session", params=[2, 4], ids=lambda size: f"{size} ranks")
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    """Ranks with a group of the backend gradwire."""
    made = Pool(request.param, tmp_path_factory.mktemp("stores"))
    yield made
    made.close()
