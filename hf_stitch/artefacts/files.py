"""The files of an artefact: their names, and whether they are unchanged since they were saved.

The record contains a digest of each file and a checksum of itself. Files may be untrusted: names of files to open are
never taken from a file. Trainers write the processor again, after the model, with the padding of their last batch. Its
files may therefore differ if what decides its outputs (the settings in the record) does not.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from hf_stitch import hub
from hf_stitch.artefacts.record import read_record
from hf_stitch.printing import see, visible, warn
from hf_stitch.records import AGAIN
from hf_stitch.relative import AnchorSet
from hf_stitch.storage.files import digest

STITCHER = "stitcher.json"
STITCH = "stitch.safetensors"
CONFIG = "config.json"
BOTH = {
    STITCHER: "a stitcher; load it with hf_stitch.Stitcher.from_pretrained",
    CONFIG: "a whole model; if this is a stitched model, load it with hf_stitch.StitchedModel.from_pretrained",
}
"""The records, and what a folder with them contains."""

WEIGHTS, SHARDS, INDEX = "model.safetensors", "model*.safetensors", "model.safetensors.index.json"
SOURCE_TOKENIZER = "source_tokenizer.json"
"""Tokenizer of the source, for two decoders with different tokenizers. The processor is then that of the target."""
MODULE = "modeling_hf_stitch.py"
"""Module for programs that cannot import hf_stitch, which ``auto_map`` in the config names. It is never run here."""
ANCHORS = ("anchors.json", "anchors.safetensors")
"""Files of the anchors, for artefacts that have some."""

MODEL_FILES = [CONFIG, SHARDS, INDEX, MODULE, *ANCHORS, "*.json", "*.txt", "*.model", "*.spm", "*.jinja"]
"""Name patterns of the files of a stitched model; the last ones are for processors and the generation config."""

PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "tokenizer*.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "vocab*", "merges.txt", "*.model", "*.spm",
)  # fmt: skip
"""Name patterns of files that processors consist of."""

BESIDE = (*PROCESSORS, "generation_config.json", SOURCE_TOKENIZER)
"""Name patterns of files that processors and generation configs consist of."""

STITCHES = "stitch*.safetensors"
"""Name pattern of the weights of a stitcher and of those inside it."""

STITCHER_FILES = [STITCHER, STITCHES, CONFIG, *ANCHORS]
"""Name patterns of the files of a stitcher; a config identifies a folder that contains a whole model instead."""

MANIFEST, CHECKSUM, PROCESSOR, TIED = "manifest", "checksum", "processor_settings", "tied_weights"
ALLOW = "pass allow_modified=True to from_pretrained if you changed it on purpose" + see("damaged-file")


def kind_of(folder: Path) -> str:
    """Return the name of the record in a folder: that of a stitcher, or the config of a whole model."""
    for name in (STITCHER, CONFIG):
        if (folder / name).is_file():
            return name
    below = [str(each) for each in sorted(folder.glob("*/")) if any((each / name).is_file() for name in BOTH)]
    raise FileNotFoundError(
        f"{folder} has neither {STITCHER} nor {CONFIG}: it contains no stitcher and no stitched model"
        + (f"; name one of its subfolders: {', '.join(below)}" if below else "")
    )


def folder_of(
    place: str | Path, files: list[str], *, subfolder: str = "", **download: Unpack[hub.DownloadOptions]
) -> Path:
    """Return the folder of an artefact, downloaded if it is not local."""
    folder = Path(place)
    if not folder.is_dir():
        return hub.download(str(place), files=files, subfolder=subfolder, **download)
    if not (folder / subfolder).is_dir():
        raise FileNotFoundError(f"{folder} has no subfolder {subfolder!r}")
    return folder / subfolder


def record_in(folder: Path, name: str) -> Path:
    """Return the path of the record in a folder, if it is of this kind."""
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder} has no {name}: it contains {BOTH[kind_of(folder)]}")
    return folder / name


def save_beside(saves: Iterable[Any], folder: Path) -> None:
    """Save objects other than the weights (processor, generation config), without subfolders."""
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        for each in saves:
            each.save_pretrained(fresh)
        for path in Path(fresh).iterdir():
            if path.is_file():
                path.rename(folder / path.name)


@contextmanager
def named_files(folder: Path, names: Container[str]) -> Iterator[Path]:
    """Provide a folder with only those files that a record names, for libraries that read whatever they find.

    A warning names the files that are left out.
    """
    here = sorted(path for pattern in BESIDE for path in folder.glob(pattern) if path.is_file())
    unread = [path.name for path in here if path.name not in names]
    if not unread:
        yield folder
        return
    warn(
        f"{folder} also contains {visible(', '.join(unread))}, which was not saved with the artefact and is not read; "
        "delete it, or pass allow_modified=True to read it"
    )
    with tempfile.TemporaryDirectory() as view:
        for path in here:
            if path.name in names:
                shutil.copyfile(path, Path(view) / path.name)
        yield Path(view)


def sign(record: Mapping[str, Any], folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Add the digests of files, and a checksum of the record itself, to a record."""
    signed = {**record, MANIFEST: {name: digest(folder / name) for name in sorted(names)}}
    return {**signed, CHECKSUM: checksum(signed)}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
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
