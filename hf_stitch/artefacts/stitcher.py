"""Stitchers: a stitching layer with references to the two networks that it connects."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from safetensors.torch import save_file
from torch import nn

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.loading import NetworkLike
from hf_stitch.adapters.prefixes import PrefixAdapter
from hf_stitch.adapters.untrusted import weightless
from hf_stitch.artefacts.artefact import Artefact, folder_of
from hf_stitch.artefacts.casting import cast, dtype_of
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.files import STITCH, STITCHER, STITCHER_FILES, load_strictly, record_in
from hf_stitch.artefacts.joining import join
from hf_stitch.artefacts.manifest import SavedFiles
from hf_stitch.artefacts.parents import CHANGED, Changeable, load_parent, warn_if_only_weights_are_pinned
from hf_stitch.artefacts.record import (
    FORMAT,
    NEWEST,
    SIDES,
    built_from,
    check_format,
    damaged,
    read_record,
    read_stitcher,
)
from hf_stitch.hub import DownloadOptions
from hf_stitch.options import checked
from hf_stitch.printing import visible, warn
from hf_stitch.provenance import Method, check_requirements
from hf_stitch.reference import ModelReference
from hf_stitch.registry import PluginError
from hf_stitch.relative import AnchorSet
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.files import load_whole
from hf_stitch.tasks.heads import task_of_head

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel

Given = NetworkLike | tuple[Any, ...] | None
"""A network for :meth:`Stitcher.attach`; a tuple of two if it is stitched itself."""


class Stitcher(Artefact):
    """A stitching layer with references to its two networks, its recipe and its scores.

    A stitcher contains no weights of the two networks, so it takes kilobytes instead of gigabytes. :meth:`attach` loads
    the networks and returns the stitched model. ``stitched.stitcher`` returns the stitcher of a stitched model.

    Args:
        stitch: The stitching layer.
        source: Reference to the network of the front half, pinned by revision, weights, config and processor (in
            records of version 0.2.0 and earlier: by revision and weights).
        source_layer: The layer at which the source is cut.
        target: Reference to the network of the back half, pinned in the same way.
        target_layer: The layer at which the target is cut.
        task: Task of the stitched model, a name in ``hf_stitch.registries.tasks``. Default: no head.
        recipe: How the stitching layer was fitted: matcher, pooling, data, split, seed, versions.
        scores: Scores on held-out samples, as returned by :meth:`hf_stitch.analysis.Evaluation.to_dict`.
        anchors: The anchor set of a relative model or of a swapped encoder. Default: none.
        own: For two decoders with different tokenizers: whether the stitching layer also takes the embedding of each
            token in the target (:class:`hf_stitch.adapters.prefixes.PrefixAdapter`). Default: both have one tokenizer.
        parts: ``"source"`` or ``"target"`` -> the stitcher of that network, if it is a stitched model itself and has no
            public name. Default: none.

    All of these are also attributes.

    Example:
        >>> import tempfile, torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> stitched = hf_stitch.stitch(a, b, torch.randn(200, 4), source_layer="1", target_layer="1", task=None)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stitched.stitcher.save_pretrained(folder)
        ...     again = hf_stitch.Stitcher.from_pretrained(folder).attach(a, b)
        >>> x = torch.randn(3, 4)
        >>> torch.equal(again(input=x), stitched(input=x))
        True
    """

    record_file = STITCHER
    commit_message = "Upload stitcher"

    def __init__(
        self, stitch: StitchingLayer, source: ModelReference, source_layer: str, target: ModelReference,
        target_layer: str, *, task: str | None = None, recipe: Mapping[str, Any] | None = None,
        scores: Mapping[str, Any] | None = None, anchors: AnchorSet | None = None,
        parts: Mapping[str, Stitcher] | None = None, own: bool | None = None,
    ) -> None:  # fmt: skip
        """Store the arguments."""
        self.stitch = stitch
        self.source, self.source_layer = source, source_layer
        self.target, self.target_layer = target, target_layer
        self.task = task
        self.recipe, self.scores = dict(recipe or {}), dict(scores or {})
        self.anchors = anchors
        self.parts = dict(parts or {})
        self.own = own

    @classmethod
    def of(cls, found: Description, stitch: StitchingLayer, **options: Any) -> Self:
        """Create the stitcher of a stitching layer that is described, with further options of the constructor."""
        ends = found.source, found.source_layer, found.target, found.target_layer
        return cls(stitch, *ends, task=found.task, recipe=found.recipe, scores=found.scores, **options)

    def __repr__(self) -> str:
        """Return e.g. ``Stitcher(timm:resnet18 layer2.1 -> timm:resnet18 layer2.1)``."""
        return visible(f"Stitcher({self.source} {self.source_layer} -> {self.target} {self.target_layer})")

    def describe(self) -> Description:
        """Return both networks, the stitching layer, its recipe and its scores as plain values."""
        ends = self.source, self.source_layer, self.target, self.target_layer
        return Description(False, *ends, self.stitch.to_dict(), self.task, self.recipe, self.scores)

    def save_pretrained(self, save_directory: str | Path, *, sync: bool = False) -> None:
        """Write ``stitcher.json``, ``stitch.safetensors``, the anchors and a model card to a folder.

        Text that a person added to an existing card is kept. Paths of local networks are not written.

        Args:
            save_directory: The folder, created if needed.
            sync: Whether to wait until the disk contains all files. The old artefact or the new one always survives a
                killed process; with ``sync=True`` also a power failure.

        Raises:
            OSError: If a file cannot be written. The previous files are unchanged then.
        """
        self._save(Path(save_directory), sync)

    def _networks(self) -> Iterator[Method]:
        for part in self.parts.values():
            yield from (*part.describe().methods, *part._networks())

    def _write(self, folder: Path, **options: Any) -> Mapping[str, Any]:
        for name, stitcher in self._all():
            weights = {name: tensor.contiguous() for name, tensor in stitcher.stitch.state_dict().items()}
            save_file(weights, folder / name)
        return self._record()

    def _record(self) -> dict[str, Any]:
        ends = {"source": (self.source, self.source_layer), "target": (self.target, self.target_layer)}
        return {
            "format_version": FORMAT if self.own is None else NEWEST,
            **{
                side: {"reference": end.public.to_dict(), "layer": layer}
                | ({"stitcher": self.parts[side]._record()} if side in self.parts else {})
                for side, (end, layer) in ends.items()
            },
            "stitch": self.stitch.to_dict(),
            "task": self.task,
            **({} if self.own is None else {"own": self.own}),
            "recipe": self.recipe,
            "scores": self.scores,
        }

    def _all(self, name: str = STITCH) -> Iterator[tuple[str, Stitcher]]:
        """Yield this stitcher and those inside it, with the names of the files of their weights."""
        yield name, self
        for side, part in self.parts.items():
            yield from part._all(_inside(name, side))

    @classmethod
    def from_pretrained(
        cls, id_or_folder: str | Path, *, allow_modified: bool = False, subfolder: str = "",
        **download: Unpack[DownloadOptions],
    ) -> Self:  # fmt: skip
        """Load a stitcher from a folder or the Hub.

        All files are checked against the digests in the record. A warning names keys that a newer version added.

        Args:
            id_or_folder: Local folder or Hub id.
            allow_modified: Whether to load files that were changed by hand since they were saved: nothing is verified
                then.
            subfolder: Folder inside the folder or the Hub's model that contains the stitcher. Default: none.
            **download: Options of the download (:class:`hf_stitch.hub.DownloadOptions`): ``revision``, ``token``,
                ``cache_dir``, ``local_files_only``, ``force_download``.

        Returns:
            The stitcher.

        Raises:
            FileNotFoundError: If a file is missing, or the Hub has no such stitcher or revision.
            ValueError: If a file is damaged or was changed after saving, or record and weights do not match.
            OSError: If the Hub cannot be reached or denies access.
        """
        folder = folder_of(id_or_folder, STITCHER_FILES, subfolder=subfolder, **download)
        return load_whole(folder, STITCHER, lambda: cls._load(folder, allow_modified))

    @classmethod
    def _load(cls, folder: Path, allow_modified: bool) -> Self:
        """Load the files in a folder, and verify them once all are read: then they belong together."""
        path = record_in(folder, STITCHER)
        if not (folder / STITCH).is_file():
            raise FileNotFoundError(f"{folder} has no {STITCH}: it contains an incomplete stitcher")
        record = read_record(path)
        check_format(record, str(path))
        files = SavedFiles(path, record, allow_modified)
        try:
            values = read_stitcher(record, str(path))
            check_requirements(values.get("requires") or (), str(path))
            stitcher = cls._built(values, folder / STITCH, path)
            stitcher.anchors = files.anchors()
            files.verify()
            return stitcher
        except (ValueError, PluginError, FileNotFoundError):
            raise
        except Exception as error:
            raise damaged(path, error) from error

    @classmethod
    def _built(cls, values: Mapping[str, Any], weights: Path, path: Path) -> Self:
        """Build the stitcher of a record that was checked, and those inside it, with their weights."""
        with built_from(path), weightless():
            stitch = StitchingLayer.from_dict(values["stitch"])
            found = Description.of(values, whole=False)
        load_strictly(stitch, [weights])
        parts = {
            side: cls._built(inner, weights.with_name(_inside(weights.name, side)), path)
            for side in SIDES
            if (inner := values[side].get("stitcher"))
        }
        return cls.of(found, stitch.eval(), parts=parts, own=values.get("own"))

    @checked
    def attach(
        self, source: Given = None, target: Given = None, *, example_inputs: Any = None,
        dtype: torch.dtype | str | None = None, allow_changed: Collection[Changeable] = (), **options: Any,
    ) -> StitchedModel:  # fmt: skip
        """Build the stitched model from this stitching layer and both networks.

        Networks that are not given are downloaded at the recorded revisions. In all cases they must be those for which
        the stitching layer was fitted: the same weights, config (activation functions, epsilons, …) and processor (mean
        and size of images, vocabulary, …). A warning says if an older record contains only a hash of the weights.

        Args:
            source: The source network: an adapter, a module, or a name. Default: the recorded network at its revision.
                If it is stitched itself and has no name, a tuple of its two networks.
            target: The target network, given in the same way.
            example_inputs: Batch of inputs of both networks, for modules of user code. If they need different ones, or
                a processor, load each: ``attach(hf_stitch.load(net, example_inputs=…, processor=…), …)``.
            dtype: Floating-point dtype to which all weights are cast after the check. Default: no cast.
            allow_changed: What may differ from the record, ``"config"`` or ``"processor"`` or both; outputs then differ
                too. If something does, the recipe of the stitched model lists it as ``changed_since_fit``, and the
                model has no scores. Default: nothing.
            **options: Options of :func:`hf_stitch.load` for networks that are loaded by name (``token``, ``cache_dir``,
                ``local_files_only``, ``force_download``, ``trust_remote_code``, …). Code in the repository of a network
                runs only with ``trust_remote_code=True``; a stitcher cannot enable it.

        Returns:
            The stitched model.

        Raises:
            ValueError: If a network has other weights, settings or layers than those for which the stitching layer was
                fitted (the message says if source and target are swapped), or has no public name and is not given.
            TypeError: If options are given that no network takes.
            OSError: If a network or its revision does not exist, or the Hub cannot be reached.
        """
        wanted = dtype_of(dtype)
        given = (source, target)
        if options and not _loads(given):
            raise TypeError(f"{', '.join(options)}: options of loading, but no network is loaded by name")
        if example_inputs is not None:
            if all(isinstance(each, Adapter) for each in given):
                raise TypeError("adapters have example inputs of their own: leave out example_inputs")
            options["example_inputs"] = example_inputs
        source, target = (
            self._joined(side, each, allow_changed=allow_changed, **options)
            for side, each in zip(SIDES, given, strict=True)
        )
        front, front_changes = load_parent("source", self.source, source, options, allow_changed, self.target)
        back, back_changes = load_parent("target", self.target, target, options, allow_changed, self.source)
        warn_if_only_weights_are_pinned(self.source, self.target)
        if self.own is not None:
            front = PrefixAdapter(front, back, own=self.own)
        changed = [*self.recipe.get(CHANGED, ()), *front_changes, *back_changes]
        task = task_of_head(self.task, back.task)
        if task != self.task:
            warn(
                f"the task of the stitcher is {self.task}, but the head of its target is for {task}: the model has "
                "this task, without the scores that an earlier version recorded"
            )
        stitched = join(
            front,
            self.source_layer,
            copy.deepcopy(self.stitch),
            back,
            self.target_layer,
            task=task,
            recipe={**self.recipe, CHANGED: changed} if changed else self.recipe,
        )
        stitched.anchors = self.anchors
        if task == self.task and not (front_changes or back_changes):  # others are not the scores of this model
            stitched.config.scores = self.scores
        if wanted is not None:
            cast(stitched, wanted)
        return stitched

    def _joined(self, side: str, given: Given, **options: Any) -> str | nn.Module | Adapter | None:
        """Return the network of a side, attached from its two networks if it is a stitched model itself."""
        inner = self.parts.get(side)
        if inner is None and isinstance(given, tuple):
            raise TypeError(f"the {side} is one network, got a tuple of {len(given)}")
        if isinstance(given, tuple):
            if len(given) != 2:
                raise TypeError(f"the {side} is stitched from two networks, {inner!r}, got {len(given)}")
            assert inner is not None
            if not _loads(given):
                options = {key: options[key] for key in ("allow_changed", "example_inputs") if key in options}
            if all(isinstance(each, Adapter) for each in given):
                options.pop("example_inputs", None)
            return inner.attach(*given, **options)
        if inner is not None and given is None:
            if any(end.public.id is None for end in (inner.source, inner.target)):
                raise ValueError(
                    f"the {side} is stitched itself, {inner!r}: pass its two networks as {side}=(source, target)"
                )
            return inner.attach(**options)
        return given


def _loads(given: Given) -> bool:
    """Return whether a network, or one of those of a tuple, is loaded by name."""
    return any(map(_loads, given)) if isinstance(given, tuple) else given is None or isinstance(given, str)


def _inside(name: str, side: str) -> str:
    """Return the name of the file with the weights of the stitcher of a side."""
    return name.replace(".safetensors", f".{side}.safetensors")
