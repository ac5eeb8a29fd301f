"""Loading the two networks of an artefact, with a check of weights, config and processor."""

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
"""Parts of a network that may differ from its record if the user allows it."""


def load_parent(
    side: str,
    reference: ModelReference,
    network: str | nn.Module | Adapter | None = None,
    options: Mapping[str, Any] | None = None,
    allow_changed: Collection[Changeable] = (),
    opposite: ModelReference | None = None,
) -> tuple[Adapter, list[str]]:
    """Load a network of an artefact and compare it with its record, and, for an error, with the ``opposite`` record."""
    if network is None and reference.public.id is None:
        raise ValueError(
            f"the {side}, {reference.public}, was a module in memory or in a local folder: pass it as {side}=…"
            + see("no-name")
        )
    options = dict(options or {})
    if isinstance(network, str):
        named_reference = as_recorded(ModelReference.parse(network, task=reference.task), reference)
        adapter = _load_named(side, dataclasses.replace(named_reference, kwargs=reference.kwargs), options)
    elif network is None or isinstance(network, Adapter):
        adapter = _load_named(side, reference, options) if network is None else network
    else:
        adapter = load(network, task=reference.task, example_inputs=options.get("example_inputs"))
    pinned = adapter.pinned
    changes = reference.changes(pinned)
    if "config" in changes:  # perhaps the forward changes the config, and has not run since loading
        adapter.forward(adapter.example)
        pinned = adapter.pinned
        changes = reference.changes(pinned)
    has_moved = adapter.reference.revision not in (None, reference.revision)
    moved_text = f"; it is now at revision {adapter.reference.revision}" if has_moved else ""
    if "weights" in changes and opposite is not None and pinned.weights_hash == opposite.weights_hash:
        raise ValueError(
            f"the network passed as the {side}, {pinned.public}, is the recorded "
            f"{'source' if side == 'target' else 'target'}; the recorded {side} is {reference}. If source and target "
            "are swapped, pass them as attach(source=…, target=…)" + see("other-weights")
        )
    if "weights" in changes:
        raise ValueError(
            f"the {side} {reference} has other weights than the stitch was fitted to (hash {pinned.weights_hash}, "
            f"expected {reference.weights_hash}), or the same weights in another dtype{moved_text}; pass the network "
            "with its original weights, or fit a new stitch" + see("other-weights")
        )
    texts = {part: f"{part}: {', '.join(differ)}" for part, differ in changes.items()}
    if not set(changes) <= set(allow_changed):
        raise ValueError(
            f"the {side} {reference} has the weights that the stitch was fitted to, but other settings "
            f"({'; '.join(texts.values())}){moved_text}; pass it with its original settings, fit a new stitch, or "
            f"accept different outputs with Stitcher.attach(…, allow_changed={tuple(changes)}) or "
            "StitchedModel.parent(…, allow_changed=…)" + see("other-weights")
        )
    return adapter, [f"{side} {text}" for text in texts.values()]


@cache
def warn_if_only_weights_are_pinned(source: ModelReference, target: ModelReference) -> None:
    """Warn, once per pair of networks, if a record of version 0.2.0 or earlier pins only the weights."""
    if any(reference.weights_hash is not None and reference.config is None for reference in (source, target)):
        warn(
            f"the stitch from {source} to {target} was saved by version 0.2.0 or earlier, so only the weights of its "
            "networks are checked, not their configs and processors. To record these, too, save attach(…).stitcher"
        )


def _load_named(side: str, reference: ModelReference, options: Mapping[str, Any]) -> Adapter:
    try:
        return load_recorded(reference, **options)
    except OSError as error:
        error_class = type(error) if type(error) in (FileNotFoundError, PermissionError, ConnectionError) else OSError
        reason = str(error).removeprefix(f"{reference} could not be loaded: ")
        raise error_class(
            f"the {side} {reference} could not be loaded: {reason}\nIf it was renamed or its history was rewritten, "
            f"pass it as Stitcher.attach({side}=…); its weights are checked against the record"
        ) from error
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # raised by the library of the network
        raise ValueError(
            f"the {side} {reference} could not be loaded from its files ({type(error).__name__}: {error})"
        ) from error
