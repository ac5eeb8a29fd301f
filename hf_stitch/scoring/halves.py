"""Halves of two networks around scored stitching layers, and the whole networks for comparison."""

from __future__ import annotations

import json
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn

from hf_stitch.adapters import Adapter, load
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Batch
from hf_stitch.pairs import Pair
from hf_stitch.pairs.pair import Ran, check_finite
from hf_stitch.printing import warn
from hf_stitch.reference import ModelReference, weights_hash
from hf_stitch.relative import RelativeProjection
from hf_stitch.representation import Representation
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import Whole, logits_of
from hf_stitch.tasks.heads import check_head, task_named, task_of

SOURCE = "source"
"""Stands for the only source layer of a stitched model."""
ONLY = ""
"""Name of the halves if a pass has only one set."""
OTHER_TOKENS = "its tokens differ from the tokens of the target"  # reason not to score the whole source


class Predictor(NamedTuple):
    """Stitching layer to score."""

    name: str
    layer_a: str
    layer_b: str
    stitch: StitchingLayer
    front: str = ONLY  # name of its halves; names of predictors are unique within the halves
    constant: bool = False  # whether it ignores the source: its logits are computed once, unless masks differ


class Halves(Protocol):
    """Halves of two networks."""

    alone: Adapter | None  # the whole source, if it is scored and :meth:`encode` does not return its output
    reads_other_tokens: bool  # whether the whole source uses other tokens than the target
    needs_own: bool  # whether :meth:`finish` requires the target's own activations

    @property
    def front(self) -> Hashable:
        """Key of the output of :meth:`encode`: halves with the same front share it."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Modules that run in eval mode during scoring."""

    def encode(self, batch: Batch) -> Ran:
        """Run the source up to its layers."""

    def finish(self, mapped: Representation, layer: str, like: Representation | None) -> Any:
        """Run the target after a layer; ``like`` are its own activations there, if required or watched."""


class HalvesOfPair:
    """Halves of the networks of a pair; the source runs once, to its end if it is scored."""

    alone: Adapter | None = None
    reads_other_tokens, needs_own = False, True
    modules: Sequence[nn.Module] = ()
    front: Hashable = "pair"

    def __init__(self, pair: Pair, *, with_source: bool) -> None:
        self.pair, self._with_source = pair, with_source

    def encode(self, batch: Batch) -> Ran:
        """Run the source."""
        return self.pair.run_source(batch, complete=self._with_source)

    def finish(self, mapped: Representation, layer: str, like: Representation | None) -> Any:
        """Run the target after a layer."""
        assert like is not None
        return self.pair.finish(mapped, layer, like)


class HalvesOfModel:
    """Halves of a stitched model; its parents need not be in memory."""

    def __init__(self, model: StitchedModel, alone: Adapter | None = None) -> None:
        self.needs_own = bool(model.target.interface.beside)  # its context
        self.model, self.alone, self.modules = model, alone, [model]
        self.left_out: dict[str, str] = {}  # reason why the whole source is not scored
        self.reads_other_tokens = isinstance(model.source, PrefixFront)

    @cached_property
    def front(self) -> Hashable:
        """Key of the outputs of the front half: current weights, cut, network and inputs."""
        record: Any = self.model.config.source
        front_record = {key: record.get(key) for key in ("cut", "plan", "reference", "interface")}
        key = [front_record, weights_hash(self.model.source), repr(self.model.interface)]
        return json.dumps(key, sort_keys=True, default=repr)

    def encode(self, batch: Batch) -> Ran:
        """Run the front half."""
        inputs = task_named(self.model.task).inputs(self.model, batch.samples)
        activations = self.model.source(**self.model.source_inputs(inputs))
        check_finite({self.model.source.cut.layer: activations}, batch, " of the source")
        return Ran(inputs, {SOURCE: activations}, None)

    def finish(self, mapped: Representation, layer: str, like: Representation | None) -> Any:
        """Run the back half."""
        return self.model.head(mapped.replace(context=like.context) if self.needs_own and like else mapped)

    @classmethod
    def of(cls, model: StitchedModel, source: Any, target: Whole, *, other_tokens: bool = False) -> Self:
        """Return the halves of a model with its whole source, if the heads of source and target are comparable.

        With ``other_tokens``, the source may use other tokens than the target.
        """
        halves = cls(model)
        reason = OTHER_TOKENS if halves.reads_other_tokens and not other_tokens else ""
        if not reason and model.task is not None and source is None and model.parents is None:
            reason = "it is not in memory; pass the whole source"
        elif not reason and model.task is not None:
            whole_source = model.parent("source") if source is None else load(source)
            recorded_hash = model.config.source["reference"].get("weights_hash")
            if source is not None and recorded_hash not in (None, whole_source.pinned.weights_hash):
                warn(
                    "source= differs from the source of this model in its weights, so its score is not comparable; "
                    "pass the network that the model was made from"
                )
            reason = head_difference(whole_source, target, str(model.task))
            halves.alone = None if reason else whole_source
        halves.left_out = {"source": reason} if reason else {}
        return halves

    @property
    def layer(self) -> str:
        """Layer of the target that the model continues after."""
        layer: str = self.model.target.cut.layer
        return layer

    def predictors(
        self, stitches: Mapping[str, StitchingLayer], front: str = ONLY, constant: Container[str] = ()
    ) -> Iterator[Predictor]:
        """Yield the predictors of stitching layers at the cuts of the model, by name."""
        for name, stitch in stitches.items():
            yield Predictor(name, SOURCE, self.layer, stitch, front, name in constant)


@dataclass(frozen=True)
class _Unswapped:
    """Stitched model as the reference: the model before its encoder was exchanged."""

    model: StitchedModel

    @property
    def processor(self) -> Any:
        return self.model.processor

    def preprocess(self, samples: Sequence[Any]) -> Mapping[str, Any]:
        return self.model.preprocess(samples)

    def forward(self, inputs: Any) -> Any:
        with evaluating(self.model):
            return self.model(**inputs)


def head_difference(source: Adapter, target: Whole, task: str) -> str:
    """Return why the heads of source and target are not comparable; empty if they are."""
    if source.unscored or source.task != task:
        return f"it lacks a head for {task}"
    if not source.completes:
        return OTHER_TOKENS
    if not task_named(task).describes_outputs:
        return ""
    (count, names), (target_count, target_names) = _classes(source), _classes(target)
    if count == target_count and (names == target_names or not names or not target_names):
        return ""
    reordered = count == target_count and sorted(names) == sorted(target_names)
    return "its head has the same classes in another order" if reordered else "its head has other classes"


def _classes(network: Any) -> tuple[int, tuple[str, ...]]:
    """Return the number of classes, and their names if the network has them."""
    config: Any = getattr(network.model, "config", None)
    names = getattr(config, "id2label", None) or {}
    if isinstance(network, Adapter):  # networks of user code lack a config
        with torch.no_grad():
            count = int(logits_of(network.forward(network.example)).shape[-1])
    else:
        count = config.num_labels
    class_names = tuple(str(names.get(i, "")) for i in range(count))
    generic = all(name in ("", f"LABEL_{i}") for i, name in enumerate(class_names))
    return count, () if generic else class_names


def models_of(stitched: StitchedModel | Iterable[StitchedModel]) -> tuple[list[StitchedModel], bool]:
    """Return one or several stitched models as a list, and whether several were passed."""
    return ([stitched], False) if isinstance(stitched, StitchedModel) else (list(stitched), True)


def check_place(stitched: StitchedModel, name: str, layer: StitchingLayer) -> None:
    """Check that a stitching layer has the same source, target and pooling as the model."""
    expected, got = (f"{side.source} to {side.target} ({side.pooling})" for side in (stitched.stitch, layer))
    if expected != got:
        raise ValueError(f"stitch {name!r} must map {expected}, like the stitching layer of this model, got {got}")


def whole_target(stitched: StitchedModel, target: Any = None) -> Adapter:
    """Return the whole target network of a stitched model; warn if ``target`` is another network."""
    if target is None and isinstance(stitched.stitch.body, RelativeProjection):
        raise ValueError(
            "a relative model requires target=, because its head reads similarities to anchors; pass the model with "
            "its first encoder to hf_stitch.evaluate, and a network that reads samples to other functions"
        )
    if target is None:
        return stitched.parent("target")
    network = load(target)
    if changes := target_changes(stitched, network):
        warn(
            f"target= differs from the target of the stitched model in {', '.join(changes)} "
            f"({'; '.join(text for texts in changes.values() for text in texts)}). Relative figures are not "
            "comparable with figures of the recorded target"
        )
    return network


def scored_target(stitched: StitchedModel, target: Any = None) -> Adapter:
    """Return the whole target (:func:`whole_target`) for scoring a stitched model."""
    whole = whole_target(stitched, target)
    for model in (whole, stitched):
        check_head(model)
    task_of(whole, stitched.task)  # raises an error if the network cannot be scored
    return whole


def _has_first_encoder(stitched: StitchedModel) -> bool:
    """Return whether the model still has the encoder of :func:`hf_stitch.relative_model`."""
    recipe, source = stitched.config.recipe or {}, stitched.config.source
    if (space := recipe.get("space")) is None or "matcher" in recipe:
        return False
    first, current = (ModelReference.from_dict(side["reference"]).public for side in (space, source))
    return first == current and space["layer"] == source["cut"]["layer"]


def target_changes(stitched: StitchedModel, whole: Adapter) -> dict[str, list[str]]:
    """Compare a network with the recorded target of a stitched model."""
    record = (stitched.config.target or {}).get("reference")
    if record is None or record.get("weights_hash") is None:
        return {}
    return ModelReference.from_dict(record).changes(whole.pinned)


def reference(stitched: StitchedModel, target: Any = None) -> Whole:
    """Return the reference of predictors: the target, a stitched model passed instead, or a relative model."""
    if target is None and _has_first_encoder(stitched):
        target = stitched
    if not isinstance(target, StitchedModel):
        return scored_target(stitched, target)
    for model in (stitched, target):
        check_head(model)
    return _Unswapped(target)
