"""What vouches for the files of an artefact: a digest of each in its record, and a checksum of the record itself.

Records of format 1 (version 0.1.0) have instead a hash of the weights, one of both files of anchors, and one for each
file of a processor; :func:`verify` reads both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_stitch.artefacts.record import AGAIN

MANIFEST, CHECKSUM = "manifest", "checksum"
FORMAT_1 = ("weights_hash", "anchors", "files")
"""Keys that were the manifest of format 1."""


def sign(record: Mapping[str, Any], folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """A record with the digests of the files that it belongs to, and a checksum of itself.

    Args:
        record: JSON values.
        folder: Where the files are.
        names: Of the files.
    """
    signed = {**record, MANIFEST: {name: digest([folder / name]) for name in sorted(names)}}
    return {**signed, CHECKSUM: checksum(signed)}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON.

    Args:
        path: The file.
        record: JSON values, signed.
    """
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def names(record: Mapping[str, Any], weights: Iterable[str], anchors: Iterable[str]) -> set[str]:
    """The files that a record names.

    Args:
        record: JSON values.
        weights: Files of weights, which format 1 does not name.
        anchors: Files of anchors, which format 1 does not name.
    """
    if isinstance(record.get(MANIFEST), Mapping):
        return set(record[MANIFEST])
    others = record.get("files")
    named = set(others) if isinstance(others, Mapping) else set()
    return named | set(weights) | (set(anchors) if record.get("anchors") else set())


def verify(path: Path, record: Mapping[str, Any], anchors: Iterable[str], weights_hash: Callable[[], str]) -> None:
    """Make sure that a record and the files beside it are those that were saved.

    Args:
        path: Of the record.
        record: What it holds.
        anchors: Names of the files of anchors.
        weights_hash: The hash of the weights that were loaded, for records of format 1.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file or the record was changed since it was saved.
    """
    if CHECKSUM in record and checksum(record) != record[CHECKSUM]:
        raise ValueError(
            f"{path} was changed since it was saved, or is damaged; {AGAIN}, or, if you changed it and mean it, remove "
            f"its {CHECKSUM!r}"
        )
    if MANIFEST in record:
        for name, expected in record[MANIFEST].items():
            _check(path, [name], expected)
        return
    if (expected := record.get("weights_hash")) and (found := weights_hash()) != expected:
        raise ValueError(
            f"the weights beside {path} are not those that it was saved with (hash {found}, expected {expected}): "
            f"they are damaged or of another model; {AGAIN}"
        )
    if record.get("anchors"):
        _check(path, anchors, record["anchors"])
    for name, expected in (record.get("files") or {}).items():
        _check(path, [name], expected)


def _check(path: Path, names: Iterable[str], expected: str) -> None:
    """Compare files beside a record with a digest of it."""
    there = {each.name for each in path.parent.iterdir()}  # no name of a record is opened that is not one of these
    names = list(names)
    for name in names:
        if name not in there:
            raise FileNotFoundError(f"{path.parent} has no {name}, which was saved with it; {AGAIN}")
    if digest([path.parent / name for name in names]) != expected:
        raise ValueError(
            f"{path.parent / names[0]} was changed since it was saved, or is damaged; {AGAIN}, or, if you changed it "
            f"and mean it, remove it from {path.name} (from its {MANIFEST!r}), and the {CHECKSUM!r} there"
        )


def digest(paths: Iterable[Path]) -> str:
    """The SHA-256 of the bytes of files, one after the other."""
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                found.update(block)
    return f"sha256:{found.hexdigest()}"


def checksum(record: Mapping[str, Any]) -> str:
    """The SHA-256 of a record but for its checksum."""
    rest = {key: value for key, value in record.items() if key != CHECKSUM}
    return f"sha256:{hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}"
