"""The two artefacts: stitched models, and stitchers, which only refer to their networks."""

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

NetworkOrPair = NetworkLike | tuple[Any, ...] | None
"""A network for :meth:`Stitcher.attach`; for a stitched model, a tuple of its two networks."""


class StitchedModel(Artefact, StitchedNetwork):  # type: ignore[misc]  # push_to_hub is ours
    """Stitched model: source network up to a cut, stitching layer, and target network after a cut.

    The model is T ∘ stitch ∘ R, as in Csiszárik et al. 2021, section 3. It accepts the inputs of the source and returns
    the output of the target. It is a ``PreTrainedModel`` of transformers and can be trained, saved and loaded as such.
    It contains only the layers that run, without hooks. :func:`hf_stitch.stitch`, :func:`hf_stitch.swap`,
    :func:`hf_stitch.relative_model`, :meth:`Stitcher.attach` and :meth:`from_pretrained` build stitched models.

    This class returns the output of the target unchanged. Its subclasses for tasks add the loss.

    Args:
        config: The config.
        source: The front half. Default: ``source``, ``stitch`` and ``target`` are built from the config, without
            loading weights.
        stitch: The stitching layer.
        target: The back half.
        processor: The source's tokenizer or image processor.

    Attributes:
        source: The front half: inputs -> representation.
        stitch: The stitching layer: representation of the source -> representation of the target.
        target: The back half: representation -> output of the target.
        processor: The source's tokenizer or image processor, for raw samples.
        parents: The adapters of both whole networks, if the model was built from them, otherwise ``None``. They are
            neither part of the model nor saved.
        anchors: The anchor set of a relative model or of a swapped encoder, saved with the model; otherwise ``None``.
        evaluation: The scores from :func:`hf_stitch.stitch`, or from :func:`hf_stitch.swap` with data. ``None`` for a
            loaded model, for a model from ``swap`` without data, and for a model that cannot be scored (a warning
            states the reason). ``config.scores`` contains the scores after saving, unless the model was trained or cast
            since (:meth:`keep_scores`).

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
        """Build the network, without parents and scores."""
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
            allow_changed: Allowed differences of a loaded network from the record, as for :meth:`Stitcher.attach`. This
                model stays unchanged; artefacts built from the returned network record its current settings.
            **options: Options of :func:`hf_stitch.load` for a loaded network (``token``, ``cache_dir``, …).

        Raises:
            OSError: If the network or its revision does not exist, or the Hub cannot be reached.
        """
        if self.parents is not None:
            network = self.parents[SIDES.index(side)]
            return network.source if isinstance(network, PrefixAdapter) else network
        source, target = (
            ModelReference.from_dict(half["reference"]) for half in (self.config.source, self.config.target)
        )
        network, _ = load_parent(side, source if side == "source" else target, None, options, allow_changed)
        warn_if_only_weights_are_pinned(source, target)
        return network

    @checked
    def has_changed(self, side: Literal["source", "target"]) -> bool:
        """Return whether a half was trained or cast since it was cut from its network.

        False for older records without a hash of the weights.
        """
        recorded_hash = getattr(self.config, side).get("half_hash")
        return recorded_hash is not None and weights_hash(getattr(self, side)) != recorded_hash

    def keep_scores(self, evaluation: Any = None, *, audit: Mapping[str, Any] | None = None) -> None:
        """Store scores of the model in its current state, for its card and its config.

        :func:`hf_stitch.stitch` and :func:`hf_stitch.swap` store the scores that they return. A model that was trained
        or cast later is saved without scores, until new scores are stored:
        ``model.keep_scores(hf_stitch.evaluate(model, data))``.

        Args:
            evaluation: The result of :func:`hf_stitch.evaluate`. Default: the stored scores.
            audit: The verdict of an audit, with its data and seed. Default: the stored verdict.
        """
        self._drop_old_scores()
        if evaluation is not None:
            self.evaluation, self.config.scores = evaluation, evaluation.for_card()
        verdict = {} if audit is None else {"audit": audit}
        self.config.recipe = {**(self.config.recipe or {}), **verdict, SCORED: weights_hash(self)}

    def _drop_old_scores(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Drop scores and audit verdicts of other weights than the current weights."""
        recipe = dict(self.config.recipe or {})
        scored_hash = recipe.pop(SCORED, None)
        if scored_hash is None:  # versions before this key recorded the weights of the halves only
            has_scores = self.config.scores or "audit" in recipe
            changed = bool(has_scores) and (self.has_changed("source") or self.has_changed("target"))
        else:
            changed = scored_hash != weights_hash(self if weights is None else weights)
        if changed:
            self.evaluation = self.config.scores = None
            recipe.pop("audit", None)
            self.config.recipe = {**recipe, CHANGED: [*recipe.get(CHANGED, ()), "weights"]}

    # -- the small artefact -----------------------------------------------------------------------------------------
    @property
    def stitcher(self) -> Stitcher:
        """The stitching layer with references to both networks, a small artefact to share if both are public.

        Raises:
            ValueError: If a half was trained, cast or changed by hand since it was cut from its network.
        """
        self._drop_old_scores()  # they would not describe the current weights
        for side in SIDES:
            if self.has_changed(side):  # type: ignore[arg-type]
                raise ValueError(
                    f"the {side} half was trained or cast since it was cut, but a stitcher refers to the original "
                    "network: save the whole model, or train the network (for a relative model: the head) before "
                    "building the model"
                )
            if changes := changes_by_hand(self, side):
                raise ValueError(
                    f"the {side} half was changed by hand since it was cut ({', '.join(changes)}), but a stitcher "
                    "refers to the original network: change the network before stitching"
                )
        if StitchingLayer.from_dict(self.stitch.to_dict()).state_dict().keys() != self.stitch.state_dict().keys():
            raise ValueError("the stitch has a PEFT adapter, which cannot be recorded: merge it (merge_and_unload)")
        with_embedding = self.source.own is not None if isinstance(self.source, PrefixFront) else None
        stitcher = Stitcher.of(
            self.describe(), self.stitch, anchors=self.anchors, parts=_nested_stitchers(self), own=with_embedding
        )
        stitcher.evaluation = self.evaluation
        return stitcher

    # -- saving and loading -----------------------------------------------------------------------------------------
    def __str__(self) -> str:
        """Return a summary (networks, cut layers, stitch, task, scores), and the modules."""
        self._drop_old_scores()
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

        Manual additions to an existing card are kept.

        Args:
            save_directory: The folder; created if missing.
            is_main_process: Whether this process writes. Other processes return immediately.
            state_dict: Weights to write instead of the model's weights, for example gathered by a trainer.
            push_to_hub: Whether to upload the model, too, as in :meth:`push_to_hub`.
            max_shard_size: Maximum size of a weight file, in bytes or as text. Default: 5 GB; 500 MB if weights are
                offloaded, because each file is in memory during writing.
            sync: Whether to wait until all files are on disk. Either the old or the new artefact always survives a
                killed process; with ``sync=True`` also a power failure.
            **kwargs: ``repo_id`` (default: the name of the folder) and further options of :meth:`push_to_hub`.

        Raises:
            ValueError: If a half consists of user code, which cannot be rebuilt from a config, or if a network was
                changed (modules replaced, attributes set) without changing its config or using a
                :class:`hf_stitch.adapters.rewriting.Rewrite`.
            OSError: If a file cannot be written. The previous files are unchanged then.
        """
        if not is_main_process:
            return
        options: dict[str, Any] = {"state_dict": state_dict, "max_shard_size": max_shard_size}
        self._save(Path(save_directory), sync, **options)
        if push_to_hub:
            card_text = (Path(save_directory) / hub.CARD).read_text(encoding="utf-8")
            name = kwargs.pop("repo_id", Path(save_directory).name)
            self.push_to_hub(name, **{"present": card_text, **options, **kwargs})

    def _networks(self) -> Iterable[Method]:
        yield from networks_of(self.config.to_dict())

    def _check_savable(self) -> None:
        check_rebuilt(self.config.to_dict())

    def _write(  # type: ignore[override]
        self, folder: Path, *, state_dict: Mapping[str, Tensor] | None = None, max_shard_size: str | int | None = None
    ) -> Mapping[str, Any]:
        self._drop_old_scores(state_dict)
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

        Loading is strict: the files must contain exactly the weights of the model, unchanged since saving. Files that
        were not saved with the model are not read.

        Args:
            pretrained_model_name_or_path: Local folder or Hub id; ``None`` with a config and a ``state_dict``.
            *args: Not supported.
            config: Config to use instead of the saved config.
            state_dict: Weights to use instead of the saved weights; must be complete.
            dtype: Floating-point dtype of the weights. Default: the dtype of ``config``, if any, otherwise the saved
                dtypes. Computed buffers of a network are not cast.
            torch_dtype: Older name of ``dtype``.
            device_map: Device of the whole model; or ``"auto"``, ``"balanced"``, ``"sequential"``, or a mapping from
                module names to devices, ``"cpu"`` or ``"disk"``, as in accelerate. Blocks of both networks are not
                split. Weights on ``"disk"`` stay in the files of the model.
            max_memory: Device -> maximum number of bytes (``{"cpu": "2GB"}``), for ``"auto"`` and other strategies.
            attn_implementation: Attention implementation of both networks, by its name in transformers.
                Default: unchanged.
            allow_modified: Whether to load files that were changed or added by hand after saving. Files are then not
                verified.
            subfolder: Subfolder of the folder or Hub repository with the stitched model. Default: none.
            output_loading_info: Whether to return the model and the loading info of transformers. The info is empty,
                because loading is strict.
            **kwargs: Options of the download (:class:`hf_stitch.hub.DownloadOptions`: ``revision``, ``token``,
                ``cache_dir``, ``local_files_only``, ``force_download``), and options of Auto classes and pipelines
                without effect here.

        Returns:
            The model, in eval mode, of the class for its task; with ``output_loading_info``, a tuple.

        Raises:
            FileNotFoundError: If config or weights are missing, or the model or revision does not exist on the Hub.
            ValueError: If weights and config do not match (the message names the weights), a file was changed after
                saving, the folder contains a PEFT adapter or another class, an option has an invalid value, or
                transformers does not have the attention implementation of a network (the message names it; pass
                ``attn_implementation``).
            OSError: If the Hub cannot be reached or denies access.
        """
        if args:
            raise TypeError(f"StitchedModel.from_pretrained accepts one positional argument, got {len(args) + 1}")
        if dtype is None:  # Auto classes may put it into the config
            dtype = torch_dtype if config is None or torch_dtype is not None else config.dtype
        if pretrained_model_name_or_path is None:
            if config is None or state_dict is None:
                raise ValueError("without a folder or a Hub id, from_pretrained requires a config and a state_dict")
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
                raise ValueError(f"state_dict does not match this model: {error}") from error
        model.eval()
        return (model, {name: set() for name in LOADING_INFO}) if output_loading_info else model


class Stitcher(Artefact):
    """Stitching layer with references to its two networks, its recipe and its scores.

    A stitcher does not contain the weights of the networks, so its size is kilobytes instead of gigabytes.
    :meth:`attach` loads the networks and returns the stitched model. ``stitched.stitcher`` is the stitcher of a
    stitched model.

    Args:
        stitch: The stitching layer.
        source: Reference to the network of the front half, pinned by revision, weights, config and processor (in
            records of version 0.2.0 and earlier: by revision and weights).
        source_layer: The cut of the source.
        target: Reference to the network of the back half, pinned in the same way.
        target_layer: The cut of the target.
        task: Task of the stitched model, a name in ``hf_stitch.registries.tasks``. Default: no head.
        recipe: How the stitching layer was fitted: matcher, pooling, data, split, seed, versions.
        scores: Scores on held-out samples, as returned by :meth:`hf_stitch.analysis.Evaluation.to_dict`.
        anchors: The anchor set of a relative model or of a swapped encoder. Default: none.
        own: For two decoders with different tokenizers: whether the target's embedding of each token is an additional
            input of the stitching layer (:class:`hf_stitch.adapters.prefixes.PrefixAdapter`). Default: the networks
            share a tokenizer.
        parts: ``"source"`` or ``"target"`` -> the stitcher of that network, for stitched models without a public name.
            Default: none.

    All arguments are also attributes.

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
    def of(cls, description: Description, stitch: StitchingLayer, **options: Any) -> Self:
        """Create a stitcher from a description and its stitching layer, with further options of the constructor."""
        ends = description.source, description.source_layer, description.target, description.target_layer
        task, recipe, scores = description.task, description.recipe, description.scores
        return cls(stitch, *ends, task=task, recipe=recipe, scores=scores, **options)

    def __repr__(self) -> str:
        """Return e.g. ``Stitcher(timm:resnet18 layer2.1 -> timm:resnet18 layer2.1)``."""
        return visible(f"Stitcher({self.source} {self.source_layer} -> {self.target} {self.target_layer})")

    def describe(self) -> Description:
        """Return both networks, the stitching layer, its recipe and its scores as plain values."""
        ends = self.source, self.source_layer, self.target, self.target_layer
        return Description(False, *ends, self.stitch.to_dict(), self.task, self.recipe, self.scores)

    def save_pretrained(self, save_directory: str | Path, *, sync: bool = False) -> None:
        """Write ``stitcher.json``, ``stitch.safetensors``, the anchors and a model card to a folder.

        Manual additions to an existing card are kept. Paths of local networks are not written.

        Args:
            save_directory: The folder; created if missing.
            sync: Whether to wait until all files are on disk. Either the old or the new artefact always survives a
                killed process; with ``sync=True`` also a power failure.

        Raises:
            OSError: If a file cannot be written. The previous files are unchanged then.
        """
        self._save(Path(save_directory), sync)

    def _networks(self) -> Iterator[Method]:
        for part in self.parts.values():
            yield from (*part.describe().methods, *part._networks())

    def _write(self, folder: Path, **options: Any) -> Mapping[str, Any]:
        for name, stitcher in self._with_nested():
            weights = {name: tensor.contiguous() for name, tensor in stitcher.stitch.state_dict().items()}
            save_file(weights, folder / name)
        return self._record()

    def _record(self) -> dict[str, Any]:
        ends = {"source": (self.source, self.source_layer), "target": (self.target, self.target_layer)}
        return {
            "format_version": FORMAT if self.own is None else NEWEST,
            **{
                side: {"reference": reference.public.to_dict(), "layer": layer}
                | ({"stitcher": self.parts[side]._record()} if side in self.parts else {})
                for side, (reference, layer) in ends.items()
            },
            "stitch": self.stitch.to_dict(),
            "task": self.task,
            **({} if self.own is None else {"own": self.own}),
            "recipe": self.recipe,
            "scores": self.scores,
        }

    def _with_nested(self, name: str = STITCH) -> Iterator[tuple[str, Stitcher]]:
        """Yield this stitcher and nested stitchers, with the names of their weight files."""
        yield name, self
        for side, part in self.parts.items():
            yield from part._with_nested(_nested_file(name, side))

    @classmethod
    def from_pretrained(
        cls, id_or_folder: str | Path, *, allow_modified: bool = False, subfolder: str = "",
        **download: Unpack[DownloadOptions],
    ) -> Self:  # fmt: skip
        """Load a stitcher from a folder or the Hub.

        All files are checked against the digests in the record. A warning names keys from newer versions.

        Args:
            id_or_folder: Local folder or Hub id.
            allow_modified: Whether to load files that were changed by hand after saving. Files are then not verified.
            subfolder: Subfolder of the folder or Hub repository with the stitcher. Default: none.
            **download: Options of the download (:class:`hf_stitch.hub.DownloadOptions`): ``revision``, ``token``,
                ``cache_dir``, ``local_files_only``, ``force_download``.

        Raises:
            FileNotFoundError: If a file is missing, or the stitcher or revision does not exist on the Hub.
            ValueError: If a file is damaged or was changed after saving, or record and weights do not match.
            OSError: If the Hub cannot be reached or denies access.
        """
        folder = folder_of(id_or_folder, STITCHER_FILES, subfolder=subfolder, **download)
        return load_whole(folder, STITCHER, lambda: cls._load(folder, allow_modified))

    @classmethod
    def _load(cls, folder: Path, allow_modified: bool) -> Self:
        """Load the files in a folder, and verify at the end that they belong together."""
        path = record_in(folder, STITCHER)
        if not (folder / STITCH).is_file():
            raise FileNotFoundError(f"{folder} does not contain {STITCH}: the stitcher is incomplete")
        record = read_record(path)
        check_format(record, str(path))
        files = SavedFiles(path, record, allow_modified)
        try:
            values = read_stitcher(record, str(path))
            check_requirements(values.get("requires") or (), str(path))
            stitcher = cls._build(values, folder / STITCH, path)
            stitcher.anchors = files.anchors()
            files.verify()
            return stitcher
        except (ValueError, PluginError, FileNotFoundError):
            raise
        except Exception as error:
            raise damaged(path, error) from error

    @classmethod
    def _build(cls, values: Mapping[str, Any], weights: Path, path: Path) -> Self:
        """Build the stitcher of a checked record, and nested stitchers, with their weights."""
        with built_from(path), weightless():
            stitch = StitchingLayer.from_dict(values["stitch"])
            description = Description.of(values, whole=False)
        load_strictly(stitch, [weights])
        parts = {
            side: cls._build(inner, weights.with_name(_nested_file(weights.name, side)), path)
            for side in SIDES
            if (inner := values[side].get("stitcher"))
        }
        return cls.of(description, stitch.eval(), parts=parts, own=values.get("own"))

    @checked
    def attach(
        self, source: NetworkOrPair = None, target: NetworkOrPair = None, *, example_inputs: Any = None,
        dtype: torch.dtype | str | None = None, allow_changed: Collection[Changeable] = (), **options: Any,
    ) -> StitchedModel:  # fmt: skip
        """Build the stitched model from this stitching layer and both networks.

        Missing networks are downloaded at the recorded revisions. All networks are compared with the record of the
        fit: the same weights, config (activation functions, epsilons, …) and processor (image mean and size,
        vocabulary, …). A warning reports older records with a hash of the weights only.

        Args:
            source: The source network: an adapter, a module, or a name. Default: the recorded network at its revision.
                For a stitched model without a name, a tuple of its two networks.
            target: The target network, in the same forms.
            example_inputs: Batch of inputs of both networks, for modules of user code. If they require different
                inputs, or a processor, load each: ``attach(hf_stitch.load(net, example_inputs=…, processor=…), …)``.
            dtype: Floating-point dtype to cast all weights to after the check. Default: no cast.
            allow_changed: Allowed differences from the record: ``"config"``, ``"processor"`` or both; outputs then
                differ, too. The recipe of the stitched model lists the differences as ``changed_since_fit``, and the
                model is returned without scores. Default: nothing.
            **options: Options of :func:`hf_stitch.load` for networks loaded by name (``token``, ``cache_dir``,
                ``local_files_only``, ``force_download``, ``trust_remote_code``, …). Code in the repository of a network
                runs only with ``trust_remote_code=True``; a stitcher cannot enable it.

        Raises:
            ValueError: If weights, settings or layers of a network differ from the record (the message says if source
                and target are swapped), or a network without a public name is missing.
            OSError: If a network or its revision does not exist, or the Hub cannot be reached.
        """
        cast_to = dtype_of(dtype)
        networks = (source, target)
        if options and not _is_named(networks):
            raise TypeError(f"{', '.join(options)}: loading options require a network that is loaded by name")
        if example_inputs is not None:
            if all(isinstance(network, Adapter) for network in networks):
                raise TypeError("adapters already have example inputs: leave out example_inputs")
            options["example_inputs"] = example_inputs
        source, target = (
            self._attach_part(side, network, allow_changed=allow_changed, **options)
            for side, network in zip(SIDES, networks, strict=True)
        )
        adapter_a, source_changes = load_parent("source", self.source, source, options, allow_changed, self.target)
        adapter_b, target_changes = load_parent("target", self.target, target, options, allow_changed, self.source)
        warn_if_only_weights_are_pinned(self.source, self.target)
        if self.own is not None:
            adapter_a = PrefixAdapter(adapter_a, adapter_b, own=self.own)
        changed = [*self.recipe.get(CHANGED, ()), *source_changes, *target_changes]
        task = task_of_head(self.task, adapter_b.task)
        if task != self.task:
            warn(
                f"the task of the stitcher is {self.task}, but the head of its target is for {task}: the model has "
                "this task, and drops the scores of an earlier version"
            )
        stitched = model_of(
            Halves(adapter_a, adapter_b, task),
            self.source_layer,
            copy.deepcopy(self.stitch),
            self.target_layer,
            {**self.recipe, CHANGED: changed} if changed else self.recipe,
        )
        stitched.anchors = self.anchors
        if task == self.task and not (source_changes or target_changes):  # otherwise they belong to another model
            stitched.config.scores = self.scores
        if cast_to is not None:
            cast(stitched, cast_to)
        return stitched

    def _attach_part(self, side: str, network: NetworkOrPair, **options: Any) -> str | nn.Module | Adapter | None:
        """Return the network of a side; a nested stitcher is attached to its two networks."""
        nested = self.parts.get(side)
        if nested is None and isinstance(network, tuple):
            raise TypeError(f"the {side} is one network, got a tuple of {len(network)}")
        if isinstance(network, tuple):
            if len(network) != 2:
                raise TypeError(f"the {side} is stitched from two networks, {nested!r}, got {len(network)}")
            assert nested is not None
            if not _is_named(network):
                options = {key: options[key] for key in ("allow_changed", "example_inputs") if key in options}
            if all(isinstance(network_of_pair, Adapter) for network_of_pair in network):
                options.pop("example_inputs", None)
            return nested.attach(*network, **options)
        if nested is not None and network is None:
            if any(end.public.id is None for end in (nested.source, nested.target)):
                raise ValueError(
                    f"the {side} is a stitched model, {nested!r}: pass its two networks as {side}=(source, target)"
                )
            return nested.attach(**options)
        return network


def _is_named(network: NetworkOrPair) -> bool:
    """Return whether a network, or any network of a tuple, is loaded by name."""
    return any(map(_is_named, network)) if isinstance(network, tuple) else network is None or isinstance(network, str)


def _nested_file(name: str, side: str) -> str:
    return name.replace(".safetensors", f".{side}.safetensors")


def model_of(
    halves: Halves, source_layer: str, layer: StitchingLayer, target_layer: str, recipe: Mapping[str, Any] | None = None
) -> StitchedModel:
    """Return the stitched model of two halves, in the class for its task."""
    config, front, back = halves.cut(source_layer, layer, target_layer, recipe)
    model_class = class_of(config)
    assert issubclass(model_class, StitchedModel)
    stitched = model_class(config, front, layer, back, processor=halves.source.processor)
    stitched.parents = (halves.source, halves.target)
    return stitched


def _nested_stitchers(model: StitchedModel) -> dict[str, Stitcher]:
    """Return nested stitchers by side: of halves that were cut from stitched models without a public name."""
    stitchers = {}
    for side in SIDES:
        network, record = getattr(model, side).model, getattr(model.config, side)
        is_chain = getattr(getattr(network, "config", None), "model_type", None) == MODEL_TYPE
        if is_chain and record["reference"]["id"] is None and isinstance(network.stitch, StitchingLayer):  # in the half
            stitchers[side] = Stitcher.of(network.describe(), network.stitch, parts=_nested_stitchers(network))
    return stitchers
