"""Writing a stitched model, whole or as the stitcher of its networks."""

from __future__ import annotations

import tempfile
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_stitch.adapters.attributes import attributes, changed_by_hand, differences
from hf_stitch.adapters.cutting.surgery import KEPT
from hf_stitch.adapters.pinning import settings_of_processor
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.adapters.rewriting import REWRITES
from hf_stitch.adapters.untrusted import weightless
from hf_stitch.artefacts import manifest
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.files import CONFIG, MODULE, SOURCE_TOKENIZER, described, save_beside, save_weights, ties
from hf_stitch.artefacts.halves import back_of, chained, every_half, front_of
from hf_stitch.artefacts.record import AUTO_MAP, MODEL_TYPE, SIDES, USAGE, read_record
from hf_stitch.artefacts.stitcher import Stitcher
from hf_stitch.offloading import State, is_offloaded
from hf_stitch.printing import see
from hf_stitch.provenance import Method
from hf_stitch.records import encode
from hf_stitch.reference import Settings
from hf_stitch.stitches import StitchingLayer

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel

KEEP_STITCHER = (
    "Or save the Stitcher (stitched.stitcher.save_pretrained) and attach it to live modules: Stitcher.attach(source=…, "
    "target=…)"
)
"""Advice for a model that cannot be saved."""

QUANTISED = (
    "a stitched model with a quantised network ({}) cannot be saved: stitch the network before it is quantised. "
    + KEEP_STITCHER + see("not-saved")
)  # fmt: skip

REGISTRATION = """# Read with trust_remote_code=True, for programs that do not import hf_stitch (pip install hf-stitch).
import hf_stitch.auto
from hf_stitch import StitchConfig, StitchedModel
"""
"""The module beside a model: it only imports the installed package."""


def check_rebuilt(record: Mapping[str, Any]) -> None:
    """Raise an error if a half of a config, or of the chains inside it, consists of user code."""
    for half in every_half(record):
        if half["blueprint"] is None:
            raise ValueError(half["why"])
        if (how := (half["blueprint"].get("config") or {}).get("quantization_config")) is not None:
            by = how["quant_method"]  # an enum in live networks
            raise ValueError(QUANTISED.format(getattr(by, "value", by)))


def networks_of(record: Mapping[str, Any]) -> Iterator[Method]:
    """Yield what is needed to build the networks of a config, and those of the chains inside it."""
    for half in every_half(record):
        blueprint = half["blueprint"]
        yield "adapters", blueprint["library"]
        yield from (("rewrites", each["name"]) for each in blueprint.get(REWRITES, ()))
        if (inner := chained(half)) is not None:
            yield from Description.of(inner, whole=True).methods


def write(
    model: StitchedModel, folder: Path, state_dict: Mapping[str, Tensor] | None, max_shard_size: str | int | None
) -> dict[str, Any]:
    """Write the weights and the processor of a model, and return its record."""
    record = _record(model, folder)
    weights = state_dict or State(model)
    if packed := {type(weight).__name__ for weight in model.parameters() if is_traceable_wrapper_subclass(weight)}:
        raise ValueError(QUANTISED.format(", ".join(packed)))
    tied = ties(weights)
    _check_loads(model, record, described(weights), tied)
    save_beside([model.generation_config] if model.can_generate() else [], folder)
    save_beside([model.processor] if hasattr(model.processor, "save_pretrained") else [], folder)
    if isinstance(model.source, PrefixFront):
        if model.source.reader is None:
            raise ValueError("both tokenizers are missing, with which the model is saved: load it with its files")
        model.source.reader.source.save(str(folder / SOURCE_TOKENIZER))
    save_weights(weights, folder, max_shard_size or ("500MB" if is_offloaded(model) else "5GB"), tied)
    (folder / MODULE).write_text(REGISTRATION, encoding="utf-8")
    settings = settings_of_processor(model.processor)
    return {
        USAGE: "import hf_stitch before AutoModel, pipeline, or other libraries load this folder, or pass "
        "trust_remote_code=True to them",
        **record,
        AUTO_MAP: dict.fromkeys(("AutoModel", model.auto_class), f"{Path(MODULE).stem}.StitchedModel")
        | {"AutoConfig": f"{Path(MODULE).stem}.StitchConfig"},
        manifest.PROCESSOR: None if settings is None else encode(settings),
        **({manifest.TIED: tied} if tied else {}),
    }


def check_saves(model: StitchedModel) -> None:
    """Raise the error of saving, if a model could not be loaded again, without writing its weights."""
    model._check_savable()
    with tempfile.TemporaryDirectory() as folder:
        record = _record(model, Path(folder))
    weights = State(model)
    _check_loads(model, record, described(weights), ties(weights))


def _record(model: StitchedModel, folder: Path) -> dict[str, Any]:
    """Return the record of a model as its config writes it; the folder stays as it is."""
    config: Any = model.config
    config.architectures, config.stitch = [type(model).__name__], model.stitch.to_dict()
    config.save_pretrained(folder)
    record = read_record(folder / CONFIG)
    (folder / CONFIG).unlink()
    return record


def _check_loads(
    model: StitchedModel, record: Mapping[str, Any], weights: Mapping[str, Tensor], tied: Container[str]
) -> None:
    """Raise an error if a record and weights, before they are written, could not be loaded as this model again."""
    try:
        config = StitchConfig.from_dict(dict(record))
        with weightless():
            skeleton = config.model_class(config)
    except Exception as error:  # libraries raise any exception
        raise ValueError(
            f"this model cannot be saved, because it could not be loaded again ({type(error).__name__}: {error}). "
            + KEEP_STITCHER
            + see("not-saved")
        ) from error
    if differing := differences(model, weights, skeleton):
        merged = any(type(module).__module__.startswith("peft.") for module in model.modules())
        why = (
            "this model cannot be saved with an adapter of PEFT inside: merge it into its network first, with "
            "merge_and_unload of its PeftModel. " + KEEP_STITCHER
            if merged
            else "this model cannot be saved, because its networks were changed by hand, or built in a way that their "
            "configs do not contain, and the configs are what loads it: "
            f"{'; '.join(differing)}. Change the config before a network is built, or its modules by a recorded "
            "hf_stitch.adapters.rewriting.Rewrite. " + KEEP_STITCHER + ", with the same changes"
        )
        raise ValueError(why + see("not-saved"))


def stitcher_of(model: StitchedModel) -> Stitcher:
    """Return the stitcher of a model whose halves are still those of its networks."""
    for side in SIDES:
        if model.has_changed(side):  # type: ignore[arg-type]
            raise ValueError(
                f"the {side} half was trained or cast since it was cut, but a stitcher refers to the original "
                "network: save the whole model, or train the network first (for a relative model: the head alone) "
                "and build the model with it"
            )
        if changes := _changes_by_hand(model, side):
            raise ValueError(
                f"the {side} half was changed by hand since it was cut ({', '.join(changes)}), but a stitcher "
                "refers to the original network: change the network before it is stitched"
            )
    if StitchingLayer.from_dict(model.stitch.to_dict()).state_dict().keys() != model.stitch.state_dict().keys():
        raise ValueError("the stitch has an adapter of PEFT, which its record cannot give: merge it (merge_and_unload)")
    own = model.source.own is not None if isinstance(model.source, PrefixFront) else None
    found = Stitcher.of(model.describe(), model.stitch, anchors=model.anchors, parts=_inner(model), own=own)
    found.evaluation = model.evaluation
    return found


def _changes_by_hand(model: StitchedModel, side: str) -> list[str]:
    """Return what was changed in a half, apart from weights, since it was cut from its network."""
    config: Any = model.config
    half, record = getattr(model, side), getattr(config, side)
    found = changed_by_hand(half, lambda: front_of(config) if side == "source" else back_of(config))
    if found is None:
        return [] if half.made is None else half.made.changes(attributes(half))
    now, then = found
    known, cut = (record["reference"].get("config") or {}).get("chosen", {}), half.cut.layer
    names = {name: name.removeprefix("model.").replace(f"{cut}.{KEPT}", cut) for name in now.chosen}
    new = {name for name in names if known.get(f"modules.{names[name]}") != now.chosen[name]}
    own, old = (Settings({names[name]: each.chosen[name] for name in new & each.chosen.keys()}) for each in (now, then))
    return old.changes(own)


def _inner(model: StitchedModel) -> dict[str, Stitcher]:
    """Return the stitchers of the stitched models without a public name of which the halves were cut."""
    found = {}
    for side in SIDES:
        network, record = getattr(model, side).model, getattr(model.config, side)
        stitched = getattr(getattr(network, "config", None), "model_type", None) == MODEL_TYPE
        if stitched and record["reference"]["id"] is None and isinstance(network.stitch, StitchingLayer):  # not cut off
            found[side] = Stitcher.of(network.describe(), network.stitch, parts=_inner(network))
    return found
