"""Local Hub servers for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server import Hub, turned_to_a_hub  # isort: skip


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with turned_to_a_hub(tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A Hub for the tests of a module."""
    with turned_to_a_hub(tmp_path_factory.mktemp("hub") / "cache") as server:
        yield server
