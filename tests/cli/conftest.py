"""Fixtures of the command line tests: two tiny untrained networks in folders."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from hf_stitch import Samples
    from hf_stitch.cli import networks
    from hf_stitch.data import read_data

    digits = Samples.of(read_data("sklearn:digits", split="test"))
    folder = tmp_path_factory.mktemp("networks")
    for architecture in networks.ARCHITECTURES:
        networks.save(networks.build(architecture, 0, digits), folder / architecture)
    return {architecture: folder / architecture for architecture in networks.ARCHITECTURES}
