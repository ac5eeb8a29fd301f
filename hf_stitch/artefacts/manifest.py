"""Integrity of the files of an artefact: the record contains a digest of each file and a checksum of itself.

Trainers write the processor again, after the model, with the padding of their last batch. Its files may therefore
differ if what decides its outputs (the settings in the record) does not.

Records of format 1 (version 0.1.0) contain instead a hash of the weights, one of both files of anchors, and one of each
file of the processor. :func:`verify` supports both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_stitch.artefacts.files import ANCHORS, BESIDE, INDEX, SHARDS, STITCH
from hf_stitch.artefacts.record import AGAIN, MODEL_TYPE, read_record
from hf_stitch.storage.files import digest

MANIFEST, CHECKSUM, PROCESSOR, TIED = "manifest", "checksum", "processor_settings", "tied_weights"
ALLOW = "pass allow_modified=True to from_pretrained if you changed it on purpose"


def sign(record: Mapping[str, Any], folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Add the digests of files, and a checksum of the record itself, to a record."""
    signed = {**record, MANIFEST: {name: digest(folder / name) for name in sorted(names)}}
    return {**signed, CHECKSUM: checksum(signed)}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def names(record: Mapping[str, Any], folder: Path) -> set[str]:
    """Return the names of the files that belong to a record."""
    if isinstance(record.get(MANIFEST), Mapping):
        return set(record[MANIFEST])
    others = record.get("files")
    named = set(others) if isinstance(others, Mapping) else set()
    patterns = (SHARDS, INDEX, STITCH, *(ANCHORS if record.get("anchors") else ()))
    return named | {path.name for pattern in patterns for path in folder.glob(pattern)}


def readable(record: Mapping[str, Any], folder: Path) -> set[str]:
    """Return the names of the files that may be read with a record."""
    listed = MANIFEST in record or "files" in record
    return names(record, folder) | {path.name for pattern in BESIDE for path in folder.glob(pattern) if not listed}


def stale(folder: Path, record_file: str) -> set[str]:
    """Return the names of the files that a new artefact in a folder replaces: those of the present one."""
    try:
        record = read_record(folder / record_file)
    except (OSError, ValueError):
        return set()
    ours = MANIFEST in record or record.get("model_type") == MODEL_TYPE or "stitch" in record
    return {name for name in {record_file, *names(record, folder)} if Path(name).name == name} if ours else set()


def check_record(path: Path, record: Mapping[str, Any]) -> None:
    """Check that a record is unchanged since it was saved."""
    if CHECKSUM not in record:
        raise ValueError(f"{path} has no {CHECKSUM!r}: it was changed since it was saved; {AGAIN}, or {ALLOW}")
    if checksum(record) != record[CHECKSUM]:
        raise ValueError(f"{path} was changed since it was saved, or is damaged; {AGAIN}, or {ALLOW}")


def verify(
    path: Path, record: Mapping[str, Any], weights_hash: Callable[[], str], *, written_again: Container[str] = ()
) -> None:
    """Check that the files in the folder of a record are unchanged since they were saved."""
    if MANIFEST in record:
        for name, expected in record[MANIFEST].items():
            _check(path, [name], None if name in written_again else expected)
        return
    if (expected := record.get("weights_hash")) and (found := weights_hash()) != expected:
        raise ValueError(
            f"the weights in the folder of {path} are not those that were saved with it (hash {found}, expected "
            f"{expected}): they are damaged or belong to another model; {AGAIN}"
        )
    if record.get("anchors"):
        _check(path, ANCHORS, record["anchors"])
    for name, expected in (record.get("files") or {}).items():
        _check(path, [name], expected)


def _check(path: Path, names: Iterable[str], expected: str | None) -> None:
    """Compare files in the folder of a record with a digest; without one, check that they are there."""
    # Names in a record are opened only if listed here.
    there = {each.name for each in path.parent.iterdir() if each.is_file()}
    names = list(names)
    for name in names:
        if name not in there:
            raise FileNotFoundError(f"{path.parent} has no {name}, which was saved with it; {AGAIN}")
    if expected is not None and digest(*(path.parent / name for name in names)) != expected:
        raise ValueError(
            f"{path.parent / names[0]} was changed since {path.name} was saved, or is damaged; {AGAIN}, or {ALLOW}"
        )


def checksum(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without its checksum, as ``sha256:…``."""
    rest = {key: value for key, value in record.items() if key != CHECKSUM}
    return f"sha256:{hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}"
