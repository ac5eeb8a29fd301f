"""Loading the two networks of an artefact by name, with a check of their pins: weights, config and processor."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal

from torch import nn

from hf_stitch.adapters import Adapter, load, load_recorded
from hf_stitch.printing import see, warn
from hf_stitch.reference import ModelReference, as_recorded

Changeable = Literal["config", "processor"]
"""What may differ from the record of a network, with the consent of the user."""


def load_parent(
    side: str,
    reference: ModelReference,
    given: str | nn.Module | Adapter | None = None,
    options: Mapping[str, Any] | None = None,
    allow_changed: Collection[Changeable] = (),
    other: ModelReference | None = None,
) -> tuple[Adapter, list[str]]:
    """Load a network of an artefact and check that it is the recorded one: weights, config and processor."""
    if given is None and reference.public.id is None:
        raise ValueError(
            f"the {side}, {reference.public}, was a module in memory or in a local folder: pass it, as {side}=…"
            + see("no-name")
        )
    options = dict(options or {})
    if isinstance(given, str):
        named = as_recorded(ModelReference.parse(given, task=reference.task), reference)
        adapter = _named(side, dataclasses.replace(named, kwargs=reference.kwargs), options)
    elif given is None or isinstance(given, Adapter):
        adapter = _named(side, reference, options) if given is None else given
    else:
        adapter = load(given, task=reference.task, example_inputs=options.get("example_inputs"))
    found = adapter.pinned
    changes = reference.changes(found)
    if "config" in changes:  # or a forward changes it, and none has run since it was loaded
        adapter.forward(adapter.example)
        found = adapter.pinned
        changes = reference.changes(found)
    moved = adapter.reference.revision not in (None, reference.revision)
    now = f"; it is now at revision {adapter.reference.revision}" if moved else ""
    if "weights" in changes and other is not None and found.weights_hash == other.weights_hash:
        opposite = "source" if side == "target" else "target"
        raise ValueError(
            f"the network given as the {side}, {found.public}, is the recorded {opposite}; the recorded {side} is "
            f"{reference}. If source and target are swapped, pass them as attach(source=…, target=…)"
            + see("other-weights")
        )
    if "weights" in changes:
        raise ValueError(
            f"the {side} {reference} has other weights than the stitch was fitted to (hash {found.weights_hash}, "
            f"expected {reference.weights_hash}), or the same weights in another dtype{now}; pass the network with its "
            "original weights, or fit a new stitch" + see("other-weights")
        )
    texts = {part: f"{part}: {', '.join(differ)}" for part, differ in changes.items()}
    if not set(changes) <= set(allow_changed):
        raise ValueError(
            f"the {side} {reference} has the weights that the stitch was fitted to, but now computes with them in "
            f"another way ({'; '.join(texts.values())}){now}; pass it as it was, fit a new stitch, or accept other "
            f"outputs with Stitcher.attach(…, allow_changed={tuple(changes)}) or StitchedModel.parent, in the same way"
            + see("other-weights")
        )
    return adapter, [f"{side} {text}" for text in texts.values()]


@cache
def warn_if_only_weights_are_pinned(source: ModelReference, target: ModelReference) -> None:
    """Warn, once for each pair of networks, if a record of version 0.2.0 or earlier pins only their weights."""
    if any(end.weights_hash is not None and end.config is None for end in (source, target)):
        warn(
            f"the stitch from {source} to {target} was saved by version 0.2.0 or earlier: only the weights of its "
            "networks are compared with the record, not their configs and processors. To pin these too, save "
            "attach(…).stitcher"
        )


def _named(side: str, reference: ModelReference, options: Mapping[str, Any]) -> Adapter:
    try:
        return load_recorded(reference, **options)
    except OSError as error:
        kind = type(error) if type(error) in (FileNotFoundError, PermissionError, ConnectionError) else OSError
        reason = str(error).removeprefix(f"{reference} could not be loaded: ")
        raise kind(
            f"the {side} {reference} could not be loaded: {reason}\nIf it was renamed or its history was rewritten, "
            f"pass it as Stitcher.attach({side}=…); its weights are compared with those that the stitch was fitted to"
        ) from error
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # raised by the library of the network
        raise ValueError(
            f"the {side} {reference} could not be loaded from its files ({type(error).__name__}: {error})"
        ) from error
