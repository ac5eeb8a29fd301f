"""The two artefacts: a stitched model, and the stitcher that only names its networks. Each makes the other."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_stitch import hub
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.loading import NetworkLike
from hf_stitch.adapters.prefixes import PrefixAdapter, PrefixFront
from hf_stitch.adapters.untrusted import weightless
from hf_stitch.artefacts.artefact import Artefact
from hf_stitch.artefacts.card import summary
from hf_stitch.artefacts.configuration import Halves, StitchConfig
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.files import CONFIG, STITCH, STITCHER, STITCHER_FILES, SavedFiles, folder_of, record_in
from hf_stitch.artefacts.network import StitchedNetwork, class_of
from hf_stitch.artefacts.parents import Changeable, load_parent, warn_if_only_weights_are_pinned
from hf_stitch.artefacts.record import (
    CHANGED,
    FORMAT,
    MODEL_TYPE,
    NEWEST,
    SCORED,
    SIDES,
    built_from,
    check_format,
    damaged,
    read_record,
    read_stitcher,
)
from hf_stitch.artefacts.saving import (
    cast,
    changes_by_hand,
    check_rebuilt,
    dtype_of,
    load_pretrained,
    networks_of,
    write,
)
from hf_stitch.artefacts.weights import load_strictly
from hf_stitch.hub import DownloadOptions
from hf_stitch.options import checked
from hf_stitch.printing import visible, warn
from hf_stitch.provenance import Method, check_requirements
from hf_stitch.reference import ModelReference, weights_hash
from hf_stitch.registry import PluginError
from hf_stitch.relative import AnchorSet
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.files import load_whole
from hf_stitch.tasks.heads import task_of_head

LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")

Given = NetworkLike | tuple[Any, ...] | None
"""A network for :meth:`Stitcher.attach`; a tuple of two if it is stitched itself."""


class StitchedModel(Artefact, StitchedNetwork):  # type: ignore[misc]  # push_to_hub is ours
    """A source network up to a cut, a stitching layer, and a target network after a cut.

    The model is T ∘ stitch ∘ R, as in Csiszárik et al. 2021, section 3. It takes the inputs of the source and returns
    the output of the target. It is a ``PreTrainedModel`` of transformers and can be trained, saved and loaded as such.
    It contains only the layers that run, and no hooks. :func:`hf_stitch.stitch`, :func:`hf_stitch.swap`,
    :func:`hf_stitch.relative_model`, :meth:`Stitcher.attach` and :meth:`from_pretrained` build stitched models.

    This class has no head: it returns the output of the target unchanged. Its subclasses for a task add the loss.

    Args:
        config: The config.
        source: The front half. Built from the config, without loading weights, if not given; likewise ``stitch`` and
            ``target``.
        stitch: The stitching layer.
        target: The back half.
        processor: The source's tokenizer or image processor.

    Attributes:
        source: The front half: inputs -> representation.
        stitch: The stitching layer: representation of the source -> representation of the target.
        target: The back half: representation -> output of the target.
        processor: The source's tokenizer or image processor, for raw samples.
        parents: The adapters of both whole networks, if the model was built from them; they are neither part of the
            model nor saved. ``None`` otherwise.
        anchors: The anchor set of a relative model or of a swapped encoder, saved with the model; ``None`` for others.
        evaluation: The scores from :func:`hf_stitch.stitch`, or from :func:`hf_stitch.swap` if it was given data;
            ``None`` for a model that was loaded, that ``swap`` was not given data for, or that cannot be scored, of
            which a warning states the reason. ``config.scores`` contains them after saving, unless the model was
            trained or cast since (:meth:`keep_scores`).

    Example:
        >>> import torch, hf_stitch
        >>> a, b = (hf_stitch.load(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)),
        ...                        example_inputs=torch.randn(2, 4)) for _ in range(2))
        >>> stitched = hf_stitch.stitch(a, b, torch.randn(200, 4), source_layer="1", target_layer="1", task=None)
        >>> stitched(input=torch.randn(3, 4)).shape
        torch.Size([3, 2])
    """

    record_file = CONFIG
    commit_message = "Upload stitched model"

    def __init__(self, config: StitchConfig, *parts: Any, **named: Any) -> None:
        """Build the network, which knows neither its parents nor its scores yet."""
        super().__init__(config, *parts, **named)
        self.model_tags = ["hf_stitch", "custom_code"]  # of a card that the Trainer writes
        self.parents: tuple[Adapter, Adapter] | None = None
        self.evaluation: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the parents."""
        return {**self.__dict__, "parents": None}

    @checked
    def parent(
        self, side: Literal["source", "target"], *, allow_changed: Collection[Changeable] = (), **options: Any
    ) -> Adapter:
        """Return one of the two whole networks, from memory or loaded by the name in the config.

        Args:
            side: ``"source"`` or ``"target"``.
            allow_changed: What of a loaded network may differ from the record, as for :meth:`Stitcher.attach`. This
                model remains as it is; whatever is made with the network records its present settings.
            **options: Options of :func:`hf_stitch.load` for a network that is loaded (``token``, ``cache_dir``, …).

        Raises:
            OSError: If the network or its revision does not exist, or the Hub cannot be reached.
        """
        if self.parents is not None:
            found = self.parents[SIDES.index(side)]
            return found.source if isinstance(found, PrefixAdapter) else found
        source, target = (
            ModelReference.from_dict(end["reference"]) for end in (self.config.source, self.config.target)
        )
        found, _ = load_parent(side, source if side == "source" else target, None, options, allow_changed)
        warn_if_only_weights_are_pinned(source, target)
        return found

    @checked
    def has_changed(self, side: Literal["source", "target"]) -> bool:
        """Return whether a half was trained or cast since it was cut from its network.

        False if an older record contains no hash of the weights at the time.
        """
        recorded = getattr(self.config, side).get("half_hash")
        return recorded is not None and weights_hash(getattr(self, side)) != recorded

    def keep_scores(self, evaluation: Any = None, *, audit: Mapping[str, Any] | None = None) -> None:
        """Keep scores of the model as it is now, for its card and its config.

        :func:`hf_stitch.stitch` and :func:`hf_stitch.swap` keep the scores that they return. If the model is trained or
        cast later, it is saved without them, until new ones are kept: ``model.keep_scores(hf_stitch.evaluate(model,
        data))``.

        Args:
            evaluation: The result of :func:`hf_stitch.evaluate`. Default: the scores that are kept already.
            audit: The verdict of an audit, with its data and seed. Default: the verdict that is kept already.
        """
        self._leave_out_old_scores()
        if evaluation is not None:
            self.evaluation, self.config.scores = evaluation, evaluation.for_card()
        verdict = {} if audit is None else {"audit": audit}
        self.config.recipe = {**(self.config.recipe or {}), **verdict, SCORED: weights_hash(self)}

    def _leave_out_old_scores(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Leave out scores and the verdict of an audit that belong to other weights than the present ones."""
        recipe = dict(self.config.recipe or {})
        scored = recipe.pop(SCORED, None)
        if scored is None:  # versions before this key knew the weights of the halves only
            known = self.config.scores or "audit" in recipe
            changed = bool(known) and (self.has_changed("source") or self.has_changed("target"))
        else:
            changed = scored != weights_hash(self if weights is None else weights)
        if changed:
            self.evaluation = self.config.scores = None
            recipe.pop("audit", None)
            self.config.recipe = {**recipe, CHANGED: [*recipe.get(CHANGED, ()), "weights"]}

    # -- the small artefact -----------------------------------------------------------------------------------------
    @property
    def stitcher(self) -> Stitcher:
        """The stitching layer with references to both networks, the small artefact to share if these are public.

        Raises:
            ValueError: If a half was trained, cast or changed by hand since it was cut, so that its network no longer
                contains it.
        """
        self._leave_out_old_scores()
        for side in SIDES:
            if self.has_changed(side):  # type: ignore[arg-type]
                raise ValueError(
                    f"the {side} half was trained or cast since it was cut, but a stitcher refers to the original "
                    "network: save the whole model, or train the network first (for a relative model: the head alone) "
                    "and build the model with it"
                )
            if changes := changes_by_hand(self, side):
                raise ValueError(
                    f"the {side} half was changed by hand since it was cut ({', '.join(changes)}), but a stitcher "
                    "refers to the original network: change the network before it is stitched"
                )
        if StitchingLayer.from_dict(self.stitch.to_dict()).state_dict().keys() != self.stitch.state_dict().keys():
            raise ValueError(
                "the stitch has an adapter of PEFT, which its record cannot give: merge it (merge_and_unload)"
            )
        own = self.source.own is not None if isinstance(self.source, PrefixFront) else None
        found = Stitcher.of(self.describe(), self.stitch, anchors=self.anchors, parts=_inner(self), own=own)
        found.evaluation = self.evaluation
        return found

    # -- saving and loading -----------------------------------------------------------------------------------------
    def __str__(self) -> str:
        """Return a summary (networks, cut layers, stitch, task, scores), and the modules."""
        self._leave_out_old_scores()
        return f"{summary(self.describe())}\n\n{self!r}"

    def describe(self) -> Description:
        """Return both networks, the stitching layer, its recipe and its scores as plain values."""
        return Description.of({**self.config.to_dict(), "stitch": self.stitch.to_dict()}, whole=True)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: str | int | None = None,
        sync: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write config, weights (safetensors), the source's processor and a model card to a folder.

        Text that a person added to an existing card is kept.

        Args:
            save_directory: The folder, created if needed.
            is_main_process: Whether this process writes. Other processes return at once.
            state_dict: Weights to write instead of the model's own, for example those gathered by a trainer.
            push_to_hub: Whether to upload the model too, as :meth:`push_to_hub` does.
            max_shard_size: Maximum size of a file of weights, in bytes or as text. Default: 5 GB; 500 MB if weights are
                offloaded, because each file is in memory while it is written.
            sync: Whether to wait until the disk contains all files. The old artefact or the new one always survives a
                killed process; with ``sync=True`` also a power failure.
            **kwargs: ``repo_id`` (default: the name of the folder) and further options of :meth:`push_to_hub`.

        Raises:
            ValueError: If a half consists of user code, which cannot be rebuilt from a config, or a network was changed
                (modules exchanged, attributes set) by other means than its config before it was built, or a
                :class:`hf_stitch.adapters.rewriting.Rewrite`.
            OSError: If a file cannot be written. The previous files are unchanged then.
        """
        if not is_main_process:
            return
        options: dict[str, Any] = {"state_dict": state_dict, "max_shard_size": max_shard_size}
        self._save(Path(save_directory), sync, **options)
        if push_to_hub:
            written = (Path(save_directory) / hub.CARD).read_text(encoding="utf-8")
            name = kwargs.pop("repo_id", Path(save_directory).name)
            self.push_to_hub(name, **{"present": written, **options, **kwargs})

    def _networks(self) -> Iterable[Method]:
        yield from networks_of(self.config.to_dict())

    def _check_savable(self) -> None:
        check_rebuilt(self.config.to_dict())

    def _write(  # type: ignore[override]
        self, folder: Path, *, state_dict: Mapping[str, Tensor] | None = None, max_shard_size: str | int | None = None
    ) -> Mapping[str, Any]:
        self._leave_out_old_scores(state_dict)
        return write(self, folder, state_dict, max_shard_size)

    def _sample_code(self) -> str | None:
        interface = self.source.takes
        if interface.modality == "text" or self.processor is not None:
            return None
        return f"torch.randn{interface.shapes[interface.content[0]]}"

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path | None,
        *args: Any,
        config: StitchConfig | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        attn_implementation: str | None = None,
        allow_modified: bool = False,
        subfolder: str = "",
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a stitched model from a folder or the Hub.

        Loading is strict: the files must contain exactly the weights of the model, unchanged since they were saved.
        Files that were not saved with the model are not read.

        Args:
            pretrained_model_name_or_path: Local folder or Hub id; ``None`` if config and ``state_dict`` are given.
            *args: Not supported.
            config: Config to use instead of the saved one.
            state_dict: Weights to use instead of the saved ones, all of them.
            dtype: Floating-point dtype to which weights are cast. Default: that of a given ``config`` if it has one,
                otherwise the saved dtypes. Buffers that a network computes itself are not cast.
            torch_dtype: Older name of ``dtype``.
            device_map: Device of the whole model; or ``"auto"``, ``"balanced"``, ``"sequential"``, or a mapping from
                names of modules to devices, ``"cpu"`` or ``"disk"``, as in accelerate. Blocks of both networks are not
                split. Weights on the ``"disk"`` stay in the files of the model.
            max_memory: Device -> most bytes (``{"cpu": "2GB"}``), for ``"auto"`` and the like.
            attn_implementation: Attention implementation of both networks, by its name in transformers.
                Default: not changed.
            allow_modified: Whether to load files that were changed by hand since they were saved, and files that were
                added: nothing is verified then.
            subfolder: Folder inside the folder or the Hub's model that contains the stitched model. Default: none.
            output_loading_info: Whether to return the model and what transformers tells of loading, which is strict
                here: no weight is missing, unexpected or mismatched.
            **kwargs: Options of the download (:class:`hf_stitch.hub.DownloadOptions`: ``revision``, ``token``,
                ``cache_dir``, ``local_files_only``, ``force_download``), and options of Auto classes and pipelines
                that have no effect here.

        Returns:
            The model, in eval mode, of the class for its task; with ``output_loading_info``, a tuple.

        Raises:
            FileNotFoundError: If config or weights are missing, or the Hub has no such model or revision.
            ValueError: If weights and config do not match (the message names the weights), a file was changed after
                saving, the folder contains an adapter of PEFT, another class was saved, an option has an invalid value,
                or transformers lacks the attention of a network (the message names it; pass ``attn_implementation``).
            OSError: If the Hub cannot be reached or denies access.
        """
        if args:
            raise TypeError(f"from_pretrained of a stitched model takes one positional argument, got {len(args)} more")
        if dtype is None:  # Auto classes may put it into the config
            dtype = torch_dtype if config is None or torch_dtype is not None else config.dtype
        if pretrained_model_name_or_path is None:
            if config is None or state_dict is None:
                raise ValueError("without a folder or a Hub id, from_pretrained takes a config and a state_dict")
            model: Any = class_of(config)(config)
        else:
            model = load_pretrained(  # of class cls
                cls, str(pretrained_model_name_or_path), kwargs, config=config, dtype=dtype_of(dtype),
                device_map=device_map, max_memory=max_memory, attention=attn_implementation,
                allow_modified=allow_modified, subfolder=subfolder,
            )  # fmt: skip
        if state_dict is not None:
            try:
                model.load_state_dict(state_dict)
            except RuntimeError as error:
                raise ValueError(f"state_dict is not that of this model: {error}") from error
        model.eval()
        return (model, {name: set() for name in LOADING_INFO}) if output_loading_info else model


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

        Raises:
            ValueError: If a network has other weights, settings or layers than those for which the stitching layer was
                fitted (the message says if source and target are swapped), or has no public name and is not given.
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
        stitched = model_of(
            Halves(front, back, task),
            self.source_layer,
            copy.deepcopy(self.stitch),
            self.target_layer,
            {**self.recipe, CHANGED: changed} if changed else self.recipe,
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
    return name.replace(".safetensors", f".{side}.safetensors")


def model_of(
    halves: Halves, source_layer: str, layer: StitchingLayer, target_layer: str, recipe: Mapping[str, Any] | None = None
) -> StitchedModel:
    """Return the stitched model of halves of two networks, of the class for its task."""
    config, front, back = halves.cut(source_layer, layer, target_layer, recipe)
    kind = class_of(config)
    assert issubclass(kind, StitchedModel)
    stitched = kind(config, front, layer, back, processor=halves.source.processor)
    stitched.parents = (halves.source, halves.target)
    return stitched


def _inner(model: StitchedModel) -> dict[str, Stitcher]:
    """Return the stitchers of the stitched models without a public name of which the halves were cut."""
    found = {}
    for side in SIDES:
        network, record = getattr(model, side).model, getattr(model.config, side)
        stitched = getattr(getattr(network, "config", None), "model_type", None) == MODEL_TYPE
        if stitched and record["reference"]["id"] is None and isinstance(network.stitch, StitchingLayer):  # not cut off
            found[side] = Stitcher.of(network.describe(), network.stitch, parts=_inner(network))
    return found
