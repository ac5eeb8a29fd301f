"""File names of artefacts, and checks that files are unchanged since saving.

The record contains a digest of each file and its own checksum. Files may be untrusted: names of files to open are never
read from a file. Trainers save the processor again after the model, with the padding of their last batch. Its files may
therefore differ, as long as its settings in the record are unchanged.
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
CONTENTS = {
    STITCHER: "a stitcher; load it with hf_stitch.Stitcher.from_pretrained",
    CONFIG: "a whole model; if this is a stitched model, load it with hf_stitch.StitchedModel.from_pretrained",
}
"""Record file -> description of a folder that contains it."""

WEIGHTS, SHARDS, INDEX = "model.safetensors", "model*.safetensors", "model.safetensors.index.json"
SOURCE_TOKENIZER = "source_tokenizer.json"
"""Tokenizer of the source, for two decoders with different tokenizers. The processor then belongs to the target."""
MODULE = "modeling_hf_stitch.py"
"""Module for programs that cannot import hf_stitch, referenced by ``auto_map`` in the config. It is never run here."""
ANCHORS = ("anchors.json", "anchors.safetensors")
"""Files of the anchors, for artefacts with anchors."""

MODEL_FILES = [CONFIG, SHARDS, INDEX, MODULE, *ANCHORS, "*.json", "*.txt", "*.model", "*.spm", "*.jinja"]
"""Name patterns of the files of a stitched model; the last patterns are for processors and generation configs."""

PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "tokenizer*.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "vocab*", "merges.txt", "*.model", "*.spm",
)  # fmt: skip
"""Name patterns of processor files."""

COMPONENTS = (*PROCESSORS, "generation_config.json", SOURCE_TOKENIZER)
"""Name patterns of processor and generation config files."""

STITCHES = "stitch*.safetensors"
"""Name pattern of the weights of a stitcher and of nested stitchers."""

STITCHER_FILES = [STITCHER, STITCHES, CONFIG, *ANCHORS]
"""Name patterns of the files of a stitcher; the config distinguishes folders with a whole model."""

MANIFEST, CHECKSUM, PROCESSOR, TIED = "manifest", "checksum", "processor_settings", "tied_weights"
ALLOW = "pass allow_modified=True to from_pretrained if you changed it on purpose" + see("damaged-file")


def record_name(folder: Path) -> str:
    """Return the name of the record file in a folder, which shows whether it is a stitcher or a whole model."""
    for name in (STITCHER, CONFIG):
        if (folder / name).is_file():
            return name
    subfolders = [str(path) for path in sorted(folder.glob("*/")) if any((path / name).is_file() for name in CONTENTS)]
    raise FileNotFoundError(
        f"{folder} contains neither {STITCHER} nor {CONFIG}: it is not a stitcher or stitched model"
        + (f"; name one of its subfolders: {', '.join(subfolders)}" if subfolders else "")
    )


def folder_of(
    place: str | Path, files: list[str], *, subfolder: str = "", **download: Unpack[hub.DownloadOptions]
) -> Path:
    """Return the folder of an artefact, downloaded if it is not local."""
    folder = Path(place)
    if not folder.is_dir():
        return hub.download(str(place), files=files, subfolder=subfolder, **download)
    if not (folder / subfolder).is_dir():
        raise FileNotFoundError(f"{folder} does not have a subfolder {subfolder!r}")
    return folder / subfolder


def record_in(folder: Path, name: str) -> Path:
    """Return the path of the record with this name in a folder; raise an error if it is missing."""
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder} does not contain {name}: it contains {CONTENTS[record_name(folder)]}")
    return folder / name


def save_components(components: Iterable[Any], folder: Path) -> None:
    """Save objects other than the weights (processor, generation config), without subfolders."""
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        for component in components:
            component.save_pretrained(fresh)
        for path in Path(fresh).iterdir():
            if path.is_file():
                path.rename(folder / path.name)


@contextmanager
def named_files(folder: Path, names: Container[str]) -> Iterator[Path]:
    """Provide a folder with only the files in a record, for libraries that read every file.

    A warning names the remaining files.
    """
    paths = sorted(path for pattern in COMPONENTS for path in folder.glob(pattern) if path.is_file())
    unlisted = [path.name for path in paths if path.name not in names]
    if not unlisted:
        yield folder
        return
    warn(
        f"{folder} also contains {visible(', '.join(unlisted))}, which was not saved with the artefact and is ignored; "
        "delete it, or pass allow_modified=True to read it"
    )
    with tempfile.TemporaryDirectory() as listed_only:
        for path in paths:
            if path.name in names:
                shutil.copyfile(path, Path(listed_only) / path.name)
        yield Path(listed_only)


def sign(record: Mapping[str, Any], folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Add the digests of files, and a checksum of the record, to a record."""
    with_manifest = {**record, MANIFEST: {name: digest(folder / name) for name in sorted(names)}}
    return {**with_manifest, CHECKSUM: checksum(with_manifest)}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def stale(folder: Path, record_file: str) -> set[str]:
    """Return the names of the files of the present artefact in a folder, which a new artefact replaces."""
    try:
        names = {record_file, *read_record(folder / record_file)[MANIFEST]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {name for name in names if Path(str(name)).name == name}


class SavedFiles:
    """Files of an artefact in a folder, with checks that they are unchanged since saving."""

    def __init__(self, path: Path, record: Mapping[str, Any], allow_modified: bool) -> None:
        """Raise an error if the record has changed, unless changes are allowed."""
        self.path, self.folder, self.record, self._allow_modified = path, path.parent, record, allow_modified
        if allow_modified:
            return
        if missing := [key for key in (MANIFEST, CHECKSUM) if key not in record]:
            raise ValueError(f"{path} lacks {missing[0]!r}: it was changed since it was saved; {AGAIN}, or {ALLOW}")
        if checksum(record) != record[CHECKSUM]:
            raise ValueError(f"{path} was changed since it was saved, or is damaged; {AGAIN}, or {ALLOW}")

    @property
    def names(self) -> set[str]:
        """Names of the files to read: the files in the record, or all files in the folder."""
        return {file.name for file in self.folder.iterdir()} if self._allow_modified else set(self.record[MANIFEST])

    def anchors(self) -> AnchorSet | None:
        """Read the anchors, if there are any."""
        return AnchorSet.from_pretrained(self.folder) if ANCHORS[0] in self.names else None

    def verify(self, written_again: Container[str] = ()) -> None:
        """Raise an error if a recorded file is missing, or has changed and is not in ``written_again``."""
        # Only names in this listing are opened.
        present_names = {path.name for path in self.folder.iterdir() if path.is_file()}
        digests = {} if self._allow_modified else self.record[MANIFEST]
        for name, expected in digests.items():
            if name not in present_names:
                raise FileNotFoundError(f"{name}, saved with the artefact, is missing in {self.folder}; {AGAIN}")
            if name not in written_again and digest(self.folder / name) != expected:
                raise ValueError(
                    f"{self.folder / name} was changed since {self.path.name} was saved, or is damaged; {AGAIN}, or "
                    f"{ALLOW}"
                )


def checksum(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without its checksum, as ``sha256:…``."""
    content = {key: value for key, value in record.items() if key != CHECKSUM}
    return f"sha256:{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}"
