"""Fixtures of the attacks: no connections, no programs, and small artefacts to change."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_stitch

from budget import Contact  # isort: skip
from tiny_networks import LAYERS, network  # isort: skip


@pytest.fixture
def contact(monkeypatch: pytest.MonkeyPatch) -> Iterator[Contact]:
    """Fail a test that opens a connection or starts a process."""
    found = Contact()
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, found.prevent(name))
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, found.prevent(name))
    for name in ("system", "posix_spawn", "fork"):
        monkeypatch.setattr(os, name, found.prevent(name))
    monkeypatch.setattr(subprocess, "_fork_exec", found.prevent("fork_exec"))
    yield found
    assert not found.made


@pytest.fixture(scope="session")
def saved_vit(images: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stitched model of two ViTs of transformers."""
    folder = tmp_path_factory.mktemp("vit")
    hf_stitch.stitch(
        network("vit"),
        network("vit", 1),
        images,
        source_layer=LAYERS["vit"],
        target_layer=LAYERS["vit"],
        progress=False,
    ).save_pretrained(folder)
    return folder
