"""The two halves of a stitched model in its record: writing them, and building them again without weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_stitch.adapters.attributes import attributes
from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.cutting.cut import Cut, CutPlan
from hf_stitch.adapters.cutting.halves import Back, Front
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.adapters.cutting.surgery import KEPT
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.adapters.rewriting import network_of
from hf_stitch.artefacts.record import MODEL_TYPE, SIDES
from hf_stitch.reference import weights_hash
from hf_stitch.tasks.heads import task_named

if TYPE_CHECKING:
    from hf_stitch.artefacts.configuration import StitchConfig


def record_of(adapter: Adapter, layer: str, half: Front | Back) -> dict[str, Any]:
    """Return the record of one half: blueprint of the network, cut, plan, interface, reference and weights hash."""
    try:
        blueprint: dict[str, Any] = {"blueprint": adapter.blueprint()}
    except ValueError as error:  # user code: the model runs, and saving it raises this error
        blueprint = {"blueprint": None, "why": str(error)}
    cut, plan = adapter.cut(layer)
    half.made = attributes(half)
    return {
        **blueprint,
        "cut": cut.to_dict(),
        "plan": plan.to_dict(),
        "interface": half.interface.to_dict(),
        "reference": adapter.pinned.public.to_dict(),
        "half_hash": weights_hash(half),
        **({"reading": half.record()} if isinstance(half, PrefixFront) else {}),
    }


def front_of(config: StitchConfig) -> Front:
    """Build the front half of a config, without loading weights."""
    half: Any = config.source
    reading = half.get("reading")
    if not reading:
        return Front(*_parts(half))
    takes = Interface.from_dict((config.target or {})["interface"])
    own = nn.Embedding(*reading["own"]) if reading["own"] else None
    return PrefixFront(*_parts(half), takes, reading["start"], own)


def back_of(config: StitchConfig) -> Back:
    """Build the back half of a config, without loading weights, with as many outputs as the config has labels."""
    half = copy.deepcopy(config.target or {})
    made = (half.get("blueprint") or {}).get("config", {})
    if len(made.get("id2label", ())) not in (0, config.num_labels) and task_named(config.task).describes_outputs:
        made |= {name: config.to_dict()[name] for name in ("id2label", "label2id")}
    return Back(*_parts(half))


def _parts(half: Mapping[str, Any]) -> tuple[nn.Module, Cut, CutPlan, Interface]:
    plan, interface = CutPlan.from_dict(half["plan"]), Interface.from_dict(half["interface"])
    return network_of(half["blueprint"]), Cut.from_dict(half["cut"]), plan, interface


def chained(half: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the config of the stitched model of which a half was cut."""
    blueprint = half["blueprint"] or {}
    found: Mapping[str, Any] | None = blueprint["config"] if blueprint.get("library") == MODEL_TYPE else None
    return found


def every_half(record: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the halves of a config, and those of the chains inside it."""
    for side in SIDES:
        yield record[side]
        if (inner := chained(record[side])) is not None:
            yield from every_half(inner)


def layer_name(module: str, record: Mapping[str, Any]) -> str:
    """Return the name of a module of a stitched model as a layer: with the name that it has in its own network."""
    side, _, rest = module.partition(".model.")
    if side not in SIDES or not rest:
        return module
    inner, last = chained(record[side]), record[side]["cut"]["layer"]
    if side == "source" and f"{rest}.".startswith(f"{last}.{KEPT}."):
        rest = last + rest.removeprefix(f"{last}.{KEPT}")
    return f"{side}.{rest if inner is None else layer_name(rest, inner)}"
