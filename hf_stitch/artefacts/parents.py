"""Loading the two networks of an artefact by name, with a check of their weights against the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_stitch.adapters import Adapter, load, load_recorded
from hf_stitch.reference import ModelReference

if TYPE_CHECKING:
    from torch import nn


def load_parent(
    side: str,
    reference: ModelReference,
    given: str | nn.Module | Adapter | None = None,
    options: Mapping[str, Any] | None = None,
) -> Adapter:
    """Load a network of an artefact and check its weights.

    Args:
        side: ``source`` or ``target``, for messages.
        reference: The recorded reference.
        given: The network: an adapter, a module, or another name. Default: the recorded network at its revision.
        options: Options of :func:`hf_stitch.load`, if the network is loaded by name.

    Returns:
        The adapter of the network.

    Raises:
        ValueError: If the network has other weights, has no public name and is not given, or cannot be loaded.
        OSError: If the network does not exist, or the Hub cannot be reached.
    """
    if given is None and reference.public.id is None:
        raise ValueError(f"the {side} was a module in memory or in a local folder: pass it, as {side}=…")
    if isinstance(given, str):
        named = dataclasses.replace(ModelReference.parse(given, task=reference.task), kwargs=reference.kwargs)
        adapter = _named(side, named, options or {})
    else:
        adapter = _named(side, reference, options or {}) if given is None else load(given, task=reference.task)
    found = adapter.pinned.weights_hash
    if reference.weights_hash is not None and found != reference.weights_hash:
        moved = adapter.reference.revision not in (None, reference.revision)
        raise ValueError(
            f"the {side} {reference} has other weights than the stitch was fitted to (hash {found}, expected "
            f"{reference.weights_hash}), or the same weights in another dtype"
            + (f"; it is now at revision {adapter.reference.revision}" if moved else "")
            + "; pass the network with its original weights, or fit a new stitch"
        )
    return adapter


def _named(side: str, reference: ModelReference, options: Mapping[str, Any]) -> Adapter:
    try:
        return load_recorded(reference, **options)
    except OSError as error:
        kind = type(error) if type(error) in (FileNotFoundError, PermissionError, ConnectionError) else OSError
        raise kind(
            f"the {side} {reference} could not be loaded: {error}\nIf it was renamed or its history was rewritten, "
            f"pass it as Stitcher.attach({side}=…); its weights are compared with those that the stitch was fitted to"
        ) from error
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # raised by the library of the network
        raise ValueError(
            f"the {side} {reference} could not be loaded from its files ({type(error).__name__}: {error})"
        ) from error
