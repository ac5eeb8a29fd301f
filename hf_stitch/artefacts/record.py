"""The records of artefacts: their fields, and reading them from JSON.

A record may be untrusted. Its dataclasses declare the fields to check before anything is built. Other contents (configs
of networks, options of maps) are checked by the classes that use them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from hf_stitch.adapters.cutting.cut import Cut, CutPlan
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.adapters.cutting.surgery import KEPT
from hf_stitch.adapters.untrusted import AttentionError
from hf_stitch.options import Constraint, Count, Natural
from hf_stitch.provenance import check_requirements
from hf_stitch.records import AGAIN, OTHERS, SPARSE, Dtype, Place, encode, nested, read
from hf_stitch.reference import ModelReference, Settings
from hf_stitch.registry import PluginError, UnknownNameError, registries
from hf_stitch.representation import Pooling, RepresentationSpec
from hf_stitch.tasks.heads import task_of_problem
from hf_stitch.tasks.per_sample import REGRESSION

FORMAT = 2
"""The record format of this version."""

NEWEST = 3
"""The record format of artefacts that earlier versions would misread: networks with different tokenizers."""

SIDES = ("source", "target")
"""The two halves of a stitched model."""

MODEL_TYPE = "hf_stitch"
"""Value of ``model_type`` in the config of a stitched model."""

USAGE = "usage"
"""First key of the config of a stitched model: a hint on loading it, for people who open the file."""

AUTO_MAP = "auto_map"
"""Config key with the module for programs that cannot import hf_stitch; not read here."""

CHANGED = "changed_since_fit"
"""Key of a recipe: the differences from the record that the user allowed, and trained weights."""

SCORED = "scored_weights"
"""Key of a recipe: the hash of the weights of the scores and of the audit verdict."""

LAYERS = re.compile(
    r"((?<!per_)(layers?|depths?|blocks?|stages?|repeats?|levels?)|blocks_per_stage|layers_per_stack|block_sizes|n_points"
    r"|hidden_groups|group_num|group_detr|codebooks|codes_total|quantizers|hash_functions|multimask_outputs|num_inputs"
    r"|feedforward_networks|upsampling_ratios|merger_times|conv_pos_embeddings|symmetric_num|num_flows"
    r"|attends_per_block|num_point_embeddings)$"
)
MOST = 1_000
"""Config keys with the number of layers or other modules, and the maximum number.

Among all integer keys of all transformers configs, these determine the number of repeated modules.
"""

LABELS, MOST_LABELS = re.compile("(num_labels|num_classes)$"), 2**17
"""Config keys with the number of classes, which determines the length of lists of names, and the maximum number."""

IN_ALL = 10
"""Limit of the sum of all numbers of a key (stages in lists, several networks), as a multiple of the maximum number.

Some lists contain layer numbers, not layer counts, so their sum may exceed the number of layers.
"""

MOST_VALUES = 2**20
"""Maximum number of values in a record; the names of the most classes in both networks and in the model are fewer."""

FREE = ("id2label", "label2id", "recipe", "scores", "files", "manifest")
"""Keys of objects with arbitrary keys."""


# -- the fields --------------------------------------------------------------------------------------------------------
class NameOfRegistry(Constraint):
    """The name of a registry."""

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, str) and value in registries

    def __str__(self) -> str:
        return f"one of {', '.join(registries)}"


@dataclass(frozen=True)
class Requirement:
    """A method of a plugin or file (:func:`hf_stitch.provenance.requirements`)."""

    registry: Annotated[str, NameOfRegistry()]
    name: str
    distribution: str | None
    version: str | None
    file: str = field(default="", metadata=SPARSE)


@dataclass(frozen=True)
class Named:
    """A method with its options; the class of the method checks them."""

    name: str
    options: dict[str, Any] = field(default_factory=dict, metadata=OTHERS)


@dataclass(frozen=True)
class MapRecord:
    """A map of vectors (:meth:`hf_stitch.stitches.Stitch.to_dict`)."""

    name: str
    fitted: Mapping[str, Any] = field(default_factory=dict)
    in_features: Count | None = field(default=None, metadata=SPARSE)
    out_features: Count | None = field(default=None, metadata=SPARSE)
    options: dict[str, Any] = field(default_factory=dict, metadata=OTHERS)


@dataclass(frozen=True)
class StitchRecord:
    """A stitching layer (:meth:`hf_stitch.stitches.StitchingLayer.to_dict`)."""

    source: RepresentationSpec
    target: RepresentationSpec
    pooling: Pooling
    body: MapRecord
    prefix: MapRecord | None = None


@dataclass(frozen=True)
class Blueprint:
    """Instructions for building a network; its library checks the arguments."""

    library: str
    rewrites: tuple[Named, ...] = field(default=(), metadata=SPARSE)
    arguments: dict[str, Any] = field(default_factory=dict, metadata=OTHERS)


@dataclass(frozen=True)
class Reading:
    """Additional fields of a front half that receives texts (:class:`hf_stitch.adapters.prefixes.PrefixFront`)."""

    start: int
    own: tuple[Count, Count] | None


@dataclass(frozen=True)
class HalfRecord:
    """One half of a stitched model; ``why`` is the reason for a missing blueprint."""

    blueprint: Blueprint | None
    cut: Cut
    plan: CutPlan
    interface: Interface
    reference: ModelReference
    why: str = field(default="", metadata=SPARSE)
    half_hash: str = field(default="", metadata=SPARSE)
    reading: Reading | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class Score:
    """A score with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Scores:
    """Scores on held-out samples (:meth:`hf_stitch.analysis.Evaluation.to_dict`)."""

    task: str
    n: Natural
    data: str
    scores: Mapping[str, Mapping[str, Score]]
    fitted_share: float | None = None
    others: dict[str, Any] = field(default_factory=dict, metadata=OTHERS)


@dataclass(frozen=True)
class Recipe:
    """Recipe of the fit of a stitching layer; most fields are only displayed."""

    matcher: Named | None = field(default=None, metadata=SPARSE)
    versions: Mapping[str, Any] = field(default_factory=dict, metadata=SPARSE)
    changed_since_fit: tuple[Any, ...] = field(default=(), metadata=SPARSE)
    others: dict[str, Any] = field(default_factory=dict, metadata=OTHERS)


@dataclass(frozen=True, kw_only=True)
class ArtefactRecord:
    """Common record of models and stitchers, with the digests of their files."""

    requires: tuple[Requirement, ...] | None = None
    manifest: Mapping[str, str] = field(default_factory=dict)
    checksum: str | None = None
    format_version: Count
    task: str | None = None
    recipe: Recipe | None = None
    scores: Scores | None = None


@dataclass(frozen=True, kw_only=True)
class ModelRecord(ArtefactRecord):
    """The config of a stitched model; without parts for a model that is not built yet."""

    source: HalfRecord | None = None
    target: HalfRecord | None = None
    stitch: StitchRecord | None = None
    tied_weights: Mapping[str, str] | None = None
    processor_settings: Settings | None = None
    hidden_size: Count | None = None
    max_position_embeddings: Count | None = None
    vocab_size: Count | None = None
    num_hidden_layers: Natural | None = None
    num_attention_heads: Count | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: Count | None = None
    architectures: tuple[str, ...] | None = None
    id2label: Mapping[str, str] | None = None
    label2id: Mapping[str, int] | None = None
    num_labels: Natural | None = None
    problem_type: str | None = None
    use_cache: bool | None = None
    bos_token_id: int | None = None
    decoder_start_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    sep_token_id: int | None = None
    others: dict[str, Any] = field(default_factory=dict, metadata=OTHERS)  # StitchConfig warns of unknown keys


@dataclass(frozen=True)
class EndRecord:
    """A network of a stitcher; for a stitched model, with its stitcher."""

    reference: ModelReference
    layer: str
    stitcher: StitcherRecord | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True, kw_only=True)
class StitcherRecord(ArtefactRecord):
    """The record of a stitcher."""

    source: EndRecord
    target: EndRecord
    stitch: StitchRecord
    own: bool | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class TensorOutline:
    """Shape and dtype of a tensor that replaces the output of a module."""

    dims: tuple[tuple[Natural, Natural, Natural, Natural], ...]
    dtype: Literal["cut"] | Dtype


def _check_outline(outline: Any, at: Place) -> None:
    """Check the outline of a module's output: an object with the kind of the output as its only key."""
    kinds = {"tensor": TensorOutline, "argument": tuple[int | str, ...], "value": Any}
    kinds |= {"tuple": tuple[Any, ...], "list": tuple[Any, ...], "dict": Mapping[str, Any]}
    if not isinstance(outline, Mapping) or len(outline) != 1 or next(iter(outline)) not in kinds:
        raise at.wrong(f"an object with one of {', '.join(kinds)}", outline)
    ((kind, content),) = outline.items()
    read(kinds[kind], content, at / kind)
    if kind in ("tuple", "list", "dict"):
        for key, inner in content.items() if kind == "dict" else enumerate(content):
            _check_outline(inner, at / kind / key)


# -- reading -----------------------------------------------------------------------------------------------------------
def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the folder is damaged: {AGAIN}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(values).__name__}; {AGAIN}")
    return values


def check_counts(record: Any, where: str) -> None:
    """Raise an error for implausible numbers of layers or classes, as in damaged files.

    Other sizes do not require a bound: networks are built without memory, and compared with the headers of the files.
    """
    sums: Counter[str] = Counter()
    for key, value in nested(record, where, MOST_VALUES, FREE):
        if key is not None and isinstance(value, (int, float)):
            sums[key] += max(value, 0)  # type: ignore[assignment]  # lists may contain fractions
            for names, most in ((LAYERS, MOST), (LABELS, MOST_LABELS)):
                if (value > most or sums[key] > most * IN_ALL) and names.search(key):
                    number = f"{value}" if value > most else f"{sums[key]} in all"
                    raise ValueError(
                        f"{where} is damaged: {key} is {number}, and no network has more than {most}; {AGAIN}"
                    )


def check_format(record: Mapping[str, Any], where: str) -> None:
    """Raise an error if this version cannot read the format of a record."""
    version = record.get("format_version", 1)
    if version not in (FORMAT, NEWEST):
        raise ValueError(
            f"{where} has format {version!r}, but this version reads {FORMAT} to {NEWEST}; "
            + ("load and save it with hf-stitch 0.2" if version == 1 else "update hf-stitch to read it")
        )


def read_config(path: Path) -> dict[str, Any]:
    """Read the config of a stitched model; raise an error for configs of other networks."""
    values = read_record(path)
    if (kind := values.get("model_type")) != MODEL_TYPE:
        owner = f"a {kind!r} model" if kind else "another network"
        raise ValueError(f"{path} is the config of {owner}, not of a stitched model")
    return values


def read_model(record: Any, where: str) -> dict[str, Any]:
    """Check the record of a stitched model and the nested records of its halves."""
    values = _read(ModelRecord, record, where)
    for side in SIDES:
        if values.get(side):
            _check_half(values[side], Place(where) / side)
    if values.get("source") and values.get("target") and values.get("stitch"):
        for side in SIDES:
            spec, expected = values["stitch"][side], values[side]["cut"]["spec"]
            if embedding := (values[side].get("reading") or {}).get("own"):
                expected = {**expected, "width": expected["width"] + embedding[-1]}
            if spec != expected:
                raise (Place(where) / "stitch" / side).wrong(f"the spec of the cut of the {side}, {expected}", spec)
    return _with_task_of_head(values)


def read_stitcher(record: Any, where: str) -> dict[str, Any]:
    """Check the record of a stitcher."""
    return _read(StitcherRecord, record, where)


def _read(kind: type[ArtefactRecord], record: Any, where: str) -> dict[str, Any]:
    check_counts(record, where)
    if isinstance(record, Mapping):
        check_format(record, where)
        if record.get("scores") == {}:
            record = {**record, "scores": None}
    try:
        values = encode(read(kind, record, where))
    except UnknownNameError as error:
        check_requirements(record.get("requires") or (), where)
        raise UnknownNameError(f"{where} requires a method that is not installed: {error}") from error
    return {key: content for key, content in values.items() if content or key in record}


def _check_half(half: dict[str, Any], at: Place) -> None:
    blueprint = half["blueprint"] or {}
    if blueprint.get("library") == MODEL_TYPE:  # a stitched model
        blueprint["config"] = read_model(blueprint.get("config"), str(at / "blueprint" / "config"))
    cut, plan, interface = half["cut"], half["plan"], half["interface"]
    for key in ("stubs", "after"):
        for name, outline in plan[key].items():
            if outline is not None or key == "stubs":
                _check_outline(outline, at / "plan" / key / name)
    axes, layout, entry = cut["axes"], cut["spec"]["layout"], plan["entry"]
    if axes and sorted(axes) != list(range(len(layout))):
        raise (at / "cut" / "axes").wrong(f"an order of the {len(layout)} axes of {layout}", axes)
    if entry is not None:
        _check_outline(entry, at / "plan" / "entry")
        if _rank(entry, cut["path"]) != (2 if cut["fold"] == 0 else len(layout)):
            raise (at / "cut" / "path").wrong(
                f"the way to a tensor of {len(layout)} axes in plan.entry, the output of {cut['layer']!r}", cut["path"]
            )
    read(Literal["image", "text", "tensor"], interface["modality"], at / "interface" / "modality")
    if not interface["content"]:
        raise (at / "interface" / "content").wrong("a list of one text or more", interface["content"])
    for name in ("shapes", "dtypes") if interface["modality"] != "text" else ():
        if not set(interface["content"]) <= interface[name].keys():
            raise (at / "interface" / name).wrong(
                f"an object with {' and '.join(interface['content'])}", interface[name]
            )
    for name, row in interface["prompt"].items():
        try:
            torch.tensor(row)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise (at / "interface" / "prompt" / name).wrong("nested lists of numbers", row) from None


def _rank(outline: dict[str, Any], path: list[Any]) -> int | None:
    """Return the number of axes of the tensor at a path in a module's output; ``None`` without a tensor."""
    for key in path:
        ((kind, content),) = outline.items()
        parts = content if kind == "dict" else dict(enumerate(content)) if kind in ("tuple", "list") else {}
        if key not in parts:
            return None
        outline = parts[key]
    return len(outline["tensor"]["dims"]) if "tensor" in outline else None


def _with_task_of_head(values: dict[str, Any]) -> dict[str, Any]:
    """Correct the task of regression and multi-label heads, which versions up to 0.2 recorded as classification.

    Their scores are dropped, because accuracies are not defined for these heads.
    """
    if values.get("task") not in registries.tasks or not registries.tasks.get(values["task"]).classifies:
        return values
    outputs = len(values.get("id2label") or ()) or values.get("num_labels")
    task = task_of_problem(values["task"], values.get("problem_type") or (REGRESSION if outputs == 1 else None))
    if task == values["task"]:
        return values
    recipe = values.get("recipe")
    if isinstance(recipe, Mapping):
        recipe = {key: field for key, field in recipe.items() if key != "audit"}
    return {**values, "task": task, "scores": None, "recipe": recipe}


# -- halves of a config that was read ---------------------------------------------------------------------------------
def nested_config(half: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the config of the stitched model that a half was cut from; ``None`` for other networks."""
    blueprint = half["blueprint"] or {}
    config: Mapping[str, Any] | None = blueprint["config"] if blueprint.get("library") == MODEL_TYPE else None
    return config


def every_half(record: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the halves of a config and of its nested configs."""
    for side in SIDES:
        yield record[side]
        if (inner := nested_config(record[side])) is not None:
            yield from every_half(inner)


def layer_name(module: str, record: Mapping[str, Any]) -> str:
    """Return the layer name of a module of a stitched model: the side and the name in the original network."""
    side, _, rest = module.partition(".model.")
    if side not in SIDES or not rest:
        return module
    inner, cut_layer = nested_config(record[side]), record[side]["cut"]["layer"]
    if side == "source" and f"{rest}.".startswith(f"{cut_layer}.{KEPT}."):
        rest = cut_layer + rest.removeprefix(f"{cut_layer}.{KEPT}")
    return f"{side}.{rest if inner is None else layer_name(rest, inner)}"


@contextmanager
def built_from(where: str | Path) -> Iterator[None]:
    """Add the name of a record to errors during building from it."""
    try:
        yield
    except UnknownNameError as error:
        raise UnknownNameError(f"{where} requires a method that is not installed: {error}") from error
    except (AttentionError, PluginError):
        raise
    except Exception as error:
        raise damaged(where, error) from error


def damaged(where: str | Path, error: BaseException) -> ValueError:
    """Create the error for a record that cannot be built."""
    return ValueError(
        f"{where} is damaged or was written by another version ({type(error).__name__}: {error}); {AGAIN}"
    )
