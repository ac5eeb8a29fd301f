"""The two networks that an artefact was made of: found again by name, and compared with what is recorded of them."""

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
    """A parent of an artefact, with the weights that it had.

    Args:
        side: ``source`` or ``target``, for messages.
        reference: The record of it.
        given: The network, live or by a name of today; default: the one that is recorded, at its revision.
        options: For :func:`hf_stitch.load`, for one that is loaded by name.

    Raises:
        ValueError: If it has other weights, must be given and is not, or cannot be loaded.
        OSError: If it is not there, or the Hub cannot be reached.
    """
    if given is None and reference.public.id is None:
        raise ValueError(f"the {side} was a live module or in a local folder: pass it, as {side}=…")
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
            f"{reference.weights_hash}), or has them in another dtype"
            + (f"; it is now at revision {adapter.reference.revision}" if moved else "")
            + "; attach the network of that revision as it was, or fit a new stitch"
        )
    return adapter


def _named(side: str, reference: ModelReference, options: Mapping[str, Any]) -> Adapter:
    try:
        return load_recorded(reference, **options)
    except OSError as error:
        kind = type(error) if type(error) in (FileNotFoundError, PermissionError, ConnectionError) else OSError
        raise kind(
            f"the {side} {reference} is not to be had: {error}\nIf its history was rewritten, or it is here under "
            f"another name, pass it: Stitcher.attach({side}=…); its weights are compared with those that the stitch "
            "was fitted to"
        ) from error
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # from the library that loads it
        raise ValueError(
            f"the {side} {reference} cannot be loaded: its files make no network ({type(error).__name__}: {error})"
        ) from error
