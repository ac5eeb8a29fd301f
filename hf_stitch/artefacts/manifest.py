"""Integrity of the files of an artefact: the record contains a digest of each file and a checksum of itself.

Trainers write the processor again, after the model, with the padding of their last batch. Its files may therefore
differ if what decides its outputs (the settings in the record) does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_stitch.artefacts.files import ANCHORS
from hf_stitch.artefacts.record import read_record
from hf_stitch.printing import see
from hf_stitch.records import AGAIN
from hf_stitch.relative import AnchorSet
from hf_stitch.storage.files import digest

MANIFEST, CHECKSUM, PROCESSOR, TIED = "manifest", "checksum", "processor_settings", "tied_weights"
ALLOW = "pass allow_modified=True to from_pretrained if you changed it on purpose" + see("damaged-file")


def sign(record: Mapping[str, Any], folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Add the digests of files, and a checksum of the record itself, to a record."""
    signed = {**record, MANIFEST: {name: digest(folder / name) for name in sorted(names)}}
    return {**signed, CHECKSUM: checksum(signed)}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def stale(folder: Path, record_file: str) -> set[str]:
    """Return the names of the files that a new artefact in a folder replaces: those of the present one."""
    try:
        names = {record_file, *read_record(folder / record_file)[MANIFEST]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {name for name in names if Path(str(name)).name == name}


class SavedFiles:
    """The files of an artefact in a folder, which must be unchanged since they were saved, unless that is allowed."""

    def __init__(self, path: Path, record: Mapping[str, Any], allow_modified: bool) -> None:
        """Check that the record itself is unchanged."""
        self.path, self.folder, self.record, self._allowed = path, path.parent, record, allow_modified
        if allow_modified:
            return
        if missing := [key for key in (MANIFEST, CHECKSUM) if key not in record]:
            raise ValueError(f"{path} has no {missing[0]!r}: it was changed since it was saved; {AGAIN}, or {ALLOW}")
        if checksum(record) != record[CHECKSUM]:
            raise ValueError(f"{path} was changed since it was saved, or is damaged; {AGAIN}, or {ALLOW}")

    @property
    def names(self) -> set[str]:
        """Names of the files to read: those of the record, or all in the folder."""
        return {file.name for file in self.folder.iterdir()} if self._allowed else set(self.record[MANIFEST])

    def anchors(self) -> AnchorSet | None:
        """Read the anchors, if there are any."""
        return AnchorSet.from_pretrained(self.folder) if ANCHORS[0] in self.names else None

    def verify(self, written_again: Container[str] = ()) -> None:
        """Check that the files are unchanged."""
        # Names in a record are opened only if listed here.
        there = {each.name for each in self.folder.iterdir() if each.is_file()}
        expected_of = {} if self._allowed else self.record[MANIFEST]
        for name, expected in expected_of.items():
            if name not in there:
                raise FileNotFoundError(f"{self.folder} has no {name}, which was saved with it; {AGAIN}")
            if name not in written_again and digest(self.folder / name) != expected:
                raise ValueError(
                    f"{self.folder / name} was changed since {self.path.name} was saved, or is damaged; {AGAIN}, or "
                    f"{ALLOW}"
                )


def checksum(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without its checksum, as ``sha256:…``."""
    rest = {key: value for key, value in record.items() if key != CHECKSUM}
    return f"sha256:{hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}"
