"""The small artefact: a stitch and the names of the two networks that it joins."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from huggingface_hub import CommitInfo
from safetensors.torch import save_file

from hf_stitch import hub
from hf_stitch.adapters import Adapter
from hf_stitch.artefacts.card import card, united, write_card
from hf_stitch.artefacts.casting import cast, dtype_of
from hf_stitch.artefacts.files import (
    ANCHORS,
    CONFIG,
    STITCH,
    STITCHER,
    check_unchanged,
    load_anchors,
    load_strictly,
    save_anchors,
    write_record,
)
from hf_stitch.artefacts.parents import load_parent
from hf_stitch.artefacts.record import CHECKSUM, HASH, check_counts, damaged, known, known_forms, read_record
from hf_stitch.artefacts.skeleton import weightless
from hf_stitch.reference import Endpoint
from hf_stitch.registry import PluginError
from hf_stitch.relative import AnchorSet
from hf_stitch.stitches import StitchingLayer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hf_stitch.artefacts.modeling import StitchedModel

FORMAT = 1
KEYS = ("format", "source", "target", "stitch", "task", "recipe", "scores", "anchors", CHECKSUM, HASH)


class Stitcher:
    """A stitching layer, where it belongs, how it was found, how well it does: kilobytes beside parents of gigabytes.

    Attributes:
        stitch: The stitching layer.
        source: The network that gives the front half, pinned by revision and by the hash of its weights.
        source_layer: Its cut.
        target: The network that gives the back half, pinned likewise.
        target_layer: Its cut.
        task: Which head the stitched model has.
        recipe: How the stitch was found: matcher, rows, data, split, seed, versions.
        scores: What was measured on held-out samples.
        anchors: The anchors of a relative model or of an encoder that was swapped in, where there are any.

    Example:
        >>> import tempfile, torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> stitched = hf_stitch.stitch(a, "1", b, "1", data=torch.randn(200, 4), task=None)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stitched.stitcher.save_pretrained(folder)
        ...     again = hf_stitch.Stitcher.from_pretrained(folder).attach(a, b)
        >>> x = torch.randn(3, 4)
        >>> torch.equal(again(input=x), stitched(input=x))
        True
    """

    def __init__(
        self,
        stitch: StitchingLayer,
        source: Endpoint,
        source_layer: str,
        target: Endpoint,
        target_layer: str,
        *,
        task: str | None = None,
        recipe: Mapping[str, Any] | None = None,
        scores: Mapping[str, Any] | None = None,
        anchors: AnchorSet | None = None,
    ) -> None:
        """Put the parts together."""
        self.stitch = stitch
        self.source, self.source_layer = source, source_layer
        self.target, self.target_layer = target, target_layer
        self.task = task
        self.recipe, self.scores = dict(recipe or {}), dict(scores or {})
        self.anchors = anchors

    def __repr__(self) -> str:
        """For example ``Stitcher(timm:resnet18 layer2.1 -> timm:resnet18 layer2.1)``."""
        return f"Stitcher({self.source} {self.source_layer} -> {self.target} {self.target_layer})"

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write ``stitcher.json``, ``stitch.safetensors``, the anchors and a model card to a folder, created if needed.

        Of a card that is there already, what a person wrote stays. Paths of local parents are not written.
        """
        folder = Path(save_directory)
        self._write(folder)
        write_card(self, folder, whole=False)

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.contiguous() for name, tensor in self.stitch.state_dict().items()}
        save_file(weights, folder / STITCH)
        record = {
            "format": FORMAT,
            "source": {"endpoint": self.source.public.to_dict(), "layer": self.source_layer},
            "target": {"endpoint": self.target.public.to_dict(), "layer": self.target_layer},
            "stitch": self.stitch.to_dict(),
            "task": self.task,
            "recipe": self.recipe,
            "scores": self.scores,
            "anchors": save_anchors(self.anchors, folder),
        }
        write_record(record, folder / STITCHER, weights)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload stitcher",
        create_pr: bool = False,
        tags: Sequence[str] = (),
        present: str | None = None,
    ) -> CommitInfo:
        """Upload the stitcher with its card to the Hub, in one commit.

        Args:
            repo_id: ``owner/name``; created if it does not exist.
            private: Whether it is private if it is created; default: the owner's own rule.
            token: Hub token; default: the one that this machine is logged in with.
            revision: Branch; created if it does not exist.
            commit_message: Its message.
            create_pr: Open a pull request instead of committing.
            tags: More tags for the card.
            present: A card of it that is here: what a person wrote there is kept, and wins over what the Hub's says.

        Returns:
            The commit: ``oid`` is what to pin, ``commit_url`` where to see it.

        Raises:
            OSError: With what happened and what to do, if the Hub does not take it; nothing is left half done.
        """
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder))
            return hub.upload(
                Path(folder),
                repo_id,
                replaces=list(ANCHORS),
                card=lambda id, there: card(self, whole=False, name=id, present=united(there, present), tags=tags),
                private=private,
                token=token,
                revision=revision,
                commit_message=commit_message,
                create_pr=create_pr,
            )

    @classmethod
    def from_pretrained(
        cls,
        id_or_folder: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> Self:
        """Read a stitcher from a folder or the Hub, strictly; a warning names what a newer version has added.

        Args:
            id_or_folder: Local folder or Hub id.
            revision: Branch, tag or commit on the Hub.
            token: Hub token.
            cache_dir: Where downloads are kept.
            local_files_only: Use what is cached only.
            force_download: Download again.

        Raises:
            FileNotFoundError: If a file is missing, or the Hub has no such stitcher or revision.
            ValueError: If a file is damaged or was changed since it was saved, or both disagree.
            OSError: If the Hub cannot be reached or refuses.
        """
        folder = Path(id_or_folder)
        if not folder.is_dir():
            folder = hub.download(
                str(id_or_folder),
                files=[STITCHER, STITCH, CONFIG, *ANCHORS],
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                force_download=force_download,
            )
        if not (folder / STITCHER).is_file() and (folder / CONFIG).is_file():
            raise FileNotFoundError(
                f"{folder} has no {STITCHER}: it holds a whole model; if that is a stitched one, "
                "hf_stitch.StitchedModel.from_pretrained loads it"
            )
        for name in (STITCHER, STITCH):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} has no {name}: it is no saved stitcher, or an incomplete one")
        record = read_record(folder / STITCHER)
        check_counts(record, str(folder / STITCHER))
        try:
            if record["format"] != FORMAT:
                raise ValueError(
                    f"{folder / STITCHER} has format {record['format']!r}, and this version reads {FORMAT}; a newer "
                    "one may read it"
                )
            record = known(record, KEYS, str(folder / STITCHER))
            with weightless():
                stitch = StitchingLayer.from_dict(known_forms(record["stitch"], f"the stitch of {folder / STITCHER}"))
            ends = {
                side: (Endpoint.from_dict(record[side]["endpoint"]), record[side]["layer"])
                for side in ("source", "target")
            }
            found = {key: record[key] for key in ("task", "recipe", "scores")}
            load_strictly(stitch, [folder / STITCH])
            check_unchanged(folder / STITCHER, stitch)
            anchors = load_anchors(record.get("anchors"), folder)
            return cls(stitch.eval(), *ends["source"], *ends["target"], **found, anchors=anchors)
        except (ValueError, PluginError, FileNotFoundError):
            raise
        except Exception as error:
            raise damaged(folder / STITCHER, error) from error

    def attach(
        self,
        source: str | nn.Module | Adapter | None = None,
        target: str | nn.Module | Adapter | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> StitchedModel:
        """The runnable model: both parents cut, with this stitch between.

        Parents that are not given are downloaded at the revisions that the stitcher names. Either way their weights
        must be those that the stitch was fitted to.

        Args:
            source: The source network, live or by name; default: the one that the stitcher names, at its revision.
            target: The target network likewise.
            dtype: Cast all weights, once the parents' were compared; default: each as it was.
            **options: Passed on to :func:`hf_stitch.load` for parents given by name (``token``, ``cache_dir``,
                ``local_files_only``, ``force_download``, ``trust_remote_code``, …). Code of a parent's repository runs
                only with ``trust_remote_code=True`` here: a stitcher cannot ask for it.

        Returns:
            The stitched model.

        Raises:
            ValueError: If a parent has other weights or layers than those that the stitch was fitted to, or must be
                given and is not.
            OSError: If a parent or its revision is not there, or the Hub cannot be reached.
        """
        from hf_stitch.artefacts.joining import join

        wanted = dtype_of(dtype)
        parents = [
            load_parent(side, endpoint, given, options)
            for side, given, endpoint in (("source", source, self.source), ("target", target, self.target))
        ]
        stitched = join(
            parents[0],
            self.source_layer,
            copy.deepcopy(self.stitch),
            parents[1],
            self.target_layer,
            task=self.task,
            recipe=self.recipe,
        )
        stitched.config.scores, stitched.anchors = self.scores, self.anchors
        if wanted is not None:
            cast(stitched, wanted)
        return stitched
