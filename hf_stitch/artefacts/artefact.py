"""What both artefacts do alike: they are written into a folder, described by a card, shared on the Hub, and read."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack

from huggingface_hub import CommitInfo

from hf_stitch import hub
from hf_stitch.artefacts import manifest
from hf_stitch.artefacts.card import card, united
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.files import ANCHORS, INDEX, SHARDS
from hf_stitch.artefacts.record import read_record
from hf_stitch.provenance import Method, requirements
from hf_stitch.relative import AnchorSet
from hf_stitch.storage.folders import replacing


class Artefact:
    """Base of stitched models and stitchers: a record in JSON, weights in safetensors, and a model card.

    Attributes:
        record_file: Name of the file that holds the record.
        commit_message: Of an upload, unless another is given.
        anchors: The anchors of a relative model or of an encoder that was swapped in, where there are any.
    """

    record_file: ClassVar[str]
    commit_message: ClassVar[str]
    anchors: AnchorSet | None

    @abstractmethod
    def describe(self) -> Description:
        """What it is, as plain values."""

    @abstractmethod
    def _write(self, folder: Path, **options: Any) -> Mapping[str, Any]:
        """Write everything but record and card into an empty folder.

        Returns:
            The record, unsigned.
        """

    def _networks(self) -> Iterable[Method]:
        """The adapters and classes that are needed to build the networks that are saved with it."""
        return ()

    def _check_savable(self) -> None:
        """Refuse what cannot be saved, before anything is written.

        Raises:
            ValueError: If a half is of user code, which no config can rebuild.
        """

    def _sample_code(self) -> str | None:
        """Python for a sample, where it is neither an image nor a text."""
        return None

    def _save(self, folder: Path, **options: Any) -> None:
        """Write the artefact and its card into a folder, and remove what an earlier one had there."""
        self._check_savable()
        here = folder / hub.CARD
        present = here.read_bytes().decode("utf-8-sig") if here.is_file() else None
        written = card(self.describe(), present=present, sample=self._sample_code())
        with replacing(folder, self.record_file, self._stale(folder)) as fresh:
            self._write_signed(fresh, **options)
            (fresh / hub.CARD).write_bytes(written.encode())

    def _write_signed(self, folder: Path, **options: Any) -> None:
        record = self._write(folder, **options)
        if self.anchors is not None:
            self.anchors.save_pretrained(folder)
        record = {**record, "requires": requirements([*self.describe().methods, *self._networks()])}
        files = [path.name for path in folder.iterdir() if path.is_file()]
        manifest.write(folder / self.record_file, manifest.sign(record, folder, files))

    def _stale(self, folder: Path) -> set[str]:
        """The files of the artefact that is in a folder, as far as its record can be read."""
        try:
            record = read_record(folder / self.record_file)
        except (OSError, ValueError):
            return set()
        there = {path.name for path in (*folder.glob(SHARDS), *folder.glob(INDEX))}
        return {name for name in manifest.names(record, there, ANCHORS) if Path(name).name == name}

    def push_to_hub(
        self, repo_id: str, *, tags: Iterable[str] = (), present: str | None = None, **options: Any
    ) -> CommitInfo:
        """Upload it with its card to the Hub, in one commit.

        Args:
            repo_id: ``owner/name``; created if it does not exist.
            tags: More tags for the card.
            present: A card of it that is here: what a person wrote there is kept, and wins over what the Hub's says.
            **options: Of the upload (:class:`hf_stitch.hub.UploadOptions`: ``private``, ``token``, ``revision``,
                ``commit_message``, ``create_pr``); for stitched models also ``max_shard_size`` and ``state_dict``, as
                for ``save_pretrained``.

        Returns:
            The commit: ``oid`` is what to pin, ``commit_url`` where to see it.

        Raises:
            ValueError: If it cannot be saved: a half is of user code, which no config can rebuild.
            OSError: With what happened and what to do, if the Hub does not take it; nothing is left half done.
        """
        self._check_savable()
        upload = {name: options.pop(name) for name in hub.UploadOptions.__annotations__ if name in options}
        with tempfile.TemporaryDirectory() as folder:
            self._write_signed(Path(folder), **options)
            return hub.upload(
                Path(folder),
                repo_id,
                replaces=[SHARDS, INDEX, *ANCHORS],
                card=lambda id, there: card(
                    self.describe(), name=id, present=united(there, present), tags=tags, sample=self._sample_code()
                ),
                **{"commit_message": self.commit_message, **upload},
            )


def folder_of(place: str | Path, files: list[str], **download: Unpack[hub.DownloadOptions]) -> Path:
    """The folder of an artefact: a local one, or that of a download.

    Args:
        place: Local folder or Hub id.
        files: Patterns of the names of the files wanted.
        **download: How the Hub is reached.

    Raises:
        FileNotFoundError: If there is no such folder, model or revision.
        OSError: If the Hub cannot be reached or refuses.
    """
    folder = Path(place)
    return folder if folder.is_dir() else hub.download(str(place), files=files, **download)


def load_anchors(record: Mapping[str, Any], folder: Path) -> AnchorSet | None:
    """The anchors beside an artefact whose record names some.

    Args:
        record: As it was read.
        folder: Where it lies.

    Raises:
        FileNotFoundError: If they are missing.
        ValueError: If they are damaged.
    """
    named = ANCHORS[0] in record.get(manifest.MANIFEST, ()) or bool(record.get("anchors"))
    return AnchorSet.from_pretrained(folder) if named else None
