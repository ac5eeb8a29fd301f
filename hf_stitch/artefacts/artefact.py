"""Common base of artefacts: saving to a folder, the model card, and uploading to the Hub."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import CommitInfo

from hf_stitch import hub
from hf_stitch.artefacts.card import PICTURES, REPORT, card, merge_cards
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.files import ANCHORS, INDEX, SHARDS, SOURCE_TOKENIZER, STITCHES, sign, stale, write_record
from hf_stitch.artefacts.record import SIDES
from hf_stitch.provenance import Method, requirements
from hf_stitch.relative import AnchorSet
from hf_stitch.storage.files import replacing


class Artefact:
    """Base class of stitched models and stitchers: a JSON record, safetensors weights, and a model card.

    Attributes:
        record_file: File name of the record.
        commit_message: Default commit message of an upload.
        anchors: Anchor set of a relative model or of a swapped encoder; otherwise ``None``.
        evaluation: Scores computed in this session; ``None`` for a loaded artefact.
    """

    record_file: ClassVar[str]
    commit_message: ClassVar[str]
    anchors: AnchorSet | None
    evaluation: Any = None

    @abstractmethod
    def describe(self) -> Description:
        """Return a description of the artefact as plain values."""

    @abstractmethod
    def _write(self, folder: Path, **options: Any) -> Mapping[str, Any]:
        """Write all files except record and card to an empty folder."""

    def _networks(self) -> Iterable[Method]:
        """Return the adapters and classes required to build the saved networks."""
        return ()

    def _check_savable(self) -> None:
        """Raise an error, before anything is written, if the artefact cannot be saved."""

    def _sample_code(self) -> str | None:
        """Return a Python expression for a sample; ``None`` for images and texts."""
        return None

    def _save(self, folder: Path, sync: bool, **options: Any) -> None:
        """Write the artefact and its card to a folder, and remove the files of an earlier artefact."""
        self._check_savable()
        card_path = folder / hub.CARD
        old_card = card_path.read_bytes().decode("utf-8-sig") if card_path.is_file() else None
        with replacing(folder, lambda folder: stale(folder, self.record_file), sync=sync) as fresh:
            self._write_signed(fresh, **options)
            card_text = card(self.describe(), present=old_card, sample=self._sample_code())
            (fresh / hub.CARD).write_bytes(card_text.encode())

    def _write_signed(self, folder: Path, licences: Mapping[str, str | None] | None = None, **options: Any) -> None:
        record = self._write(folder, **options)
        for side, licence in (licences or {}).items():
            record[side]["reference"] |= {} if licence is None else {"license": licence}
        if self.anchors is not None:
            self.anchors.save_pretrained(folder)
        record = {**record, "requires": requirements([*self.describe().methods, *self._networks()])}
        files = [path.name for path in folder.iterdir() if path.is_file()]
        write_record(folder / self.record_file, sign(record, folder, files))

    def _illustrate(self, folder: Path) -> tuple[str, ...]:
        """Write figures and report of the evaluation, without samples, and return the file names."""
        if self.evaluation is None:
            return ()
        public = replace(self.evaluation, examples=())
        public.to_html(folder / REPORT)
        if find_spec("matplotlib") is None:
            return (REPORT,)
        plots = {"stitch.png": public.plot_parts(), "scores.png": public.plot()}
        for name, figure in plots.items():
            figure.savefig(folder / name, dpi=150)
        return *plots, REPORT

    def _licences(self) -> dict[str, str | None]:
        ends = {side: getattr(self.describe(), side) for side in SIDES}
        return {
            side: end.license or (hub.license_of(name, end.revision, ask=True) if (name := end.public.id) else None)
            for side, end in ends.items()
        }

    def push_to_hub(
        self, repo_id: str, *, tags: Iterable[str] = (), present: str | None = None, **options: Any
    ) -> CommitInfo:
        """Upload the artefact and its model card to the Hub in one commit.

        If the model was evaluated in this session, its figures (with matplotlib) and the evaluation report are uploaded
        as well, and the card shows and links them. They do not contain samples.

        Args:
            repo_id: Id of the repository, ``owner/name``. A missing repository is created.
            tags: Additional tags for the card.
            present: Text of a local card. Manual additions are kept and take precedence over the card on the Hub.
            **options: Options of the upload (:class:`hf_stitch.hub.UploadOptions`: ``private``, ``token``,
                ``revision``, ``commit_message``, ``create_pr``). Stitched models also accept ``max_shard_size`` and
                ``state_dict``, as in ``save_pretrained``.

        Returns:
            The commit. ``oid`` is its hash, for pinning the revision; ``commit_url`` is its URL.

        Raises:
            OSError: If the Hub rejects the upload. The Hub is then unchanged; the message contains the reason and a
                remedy.
        """
        self._check_savable()
        upload_options = {name: options.pop(name) for name in hub.UploadOptions.__annotations__ if name in options}
        licences = self._licences()

        def described() -> Description:
            about = self.describe()
            return replace(about, **{side: replace(getattr(about, side), license=licences[side]) for side in SIDES})

        with tempfile.TemporaryDirectory() as folder:
            self._write_signed(Path(folder), licences, **options)
            pictures = self._illustrate(Path(folder))
            return hub.upload(
                Path(folder),
                repo_id,
                replaces=[SHARDS, STITCHES, INDEX, SOURCE_TOKENIZER, *ANCHORS, *PICTURES, REPORT],
                card=lambda id, there: card(
                    described(),
                    name=id,
                    present=merge_cards(there, present),
                    tags=tags,
                    sample=self._sample_code(),
                    pictures=pictures,
                ),
                **{"commit_message": self.commit_message, **upload_options},
            )
