"""Weights that a checkpoint lacks: libraries initialise them randomly; hf-stitch only does so for requested heads."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hf_stitch.adapters.libraries.configs import task_of_head
from hf_stitch.printing import see, warn
from hf_stitch.reference import MOST_NAMED, ModelReference

LABELS = ("num_labels", "id2label", "label2id")
"""Loading options of transformers that request a head of another size."""

OPTIONAL_PARTS = {"add_pooling_layer": "pooler", "use_mask_token": "embeddings.mask_token"}
"""Argument of a constructor, in addition to the config -> the part of the model that it adds."""


def complete(
    load: Callable[..., Any], reference: ModelReference, classes: Collection[str], options: dict[str, Any]
) -> tuple[Any, tuple[str, ...]]:
    """Load a model, saved as one of ``classes``, without optional parts that lack weights; return new weights too."""
    from transformers import PreTrainedModel
    from transformers.integrations import PeftAdapterMixin

    reports: list[tuple[Any, Any]] = []

    def record_report(method: Any, network: Any, *arguments: Any, **keywords: Any) -> Any:
        report = method(network, *arguments, **keywords) or arguments[0]
        reports.append((network, copy.copy(report)))
        # Transformers would also log them, or raise an error that does not name the weights.
        report.missing_keys, report.unexpected_keys, report.mismatched_keys = set(), set(), set()
        report.conversion_errors = {}
        return report

    patched = replaced(PreTrainedModel, "_adjust_missing_and_unexpected_keys", record_report)
    with patched, replaced(PeftAdapterMixin, "load_adapter", record_report):
        loaded = load(reference.id, **{**options, "use_safetensors": True, "ignore_mismatched_sizes": True})
    modules = {*loaded.modules()}  # other networks are loaded on the way
    networks = [network for network, _ in reports if network in modules]
    if not networks:
        return loaded, ()
    model, own_reports = networks[0], [report for network, report in reports if network in modules]
    kind, prefix, weights = type(model).__name__, f"{model.base_model_prefix}.", model.state_dict()
    missing = {name: "" for report in own_reports for name in (*report.missing_keys, *report.conversion_errors)}
    shapes = {name: (old, now) for report in own_reports for name, old, now in report.mismatched_keys}
    missing |= {name: f" (shape {(*old,)}, not {(*now,)})" for name, (old, now) in shapes.items()}
    unused = {name for report in own_reports for name in report.unexpected_keys}

    def is_gone(part: str) -> bool:
        names = {name for name in weights if f"{name}.".startswith(f"{part}.")}
        return bool(names) and names <= missing.keys()

    for argument in inspect.signature(type(model).__init__).parameters.keys() & OPTIONAL_PARTS.keys() - options.keys():
        if is_gone(part := OPTIONAL_PARTS[argument]):
            warn(f"{reference} does not contain weights of the {part}: {kind} is built without it ({argument}=False)")
            return complete(load, reference, classes, {**options, argument: False})
    new = {*shapes} if options.get("ignore_mismatched_sizes") else set[str]()
    if label_options := options.keys() & {*LABELS}:
        changed = {name: {now for old, now in zip(*pair, strict=False) if old != now} for name, pair in shapes.items()}
        new |= {name for name, sizes in changed.items() if sizes == {model.config.num_labels}}  # also within the base
    requested = label_options or (kind not in classes and task_of_head(kind, model.config))
    if requested and not weights.keys() <= missing.keys():  # a head is not the whole network
        has_base, pooler = model.base_model is not model, f"{prefix}pooler"
        new |= {name for name in missing if not name.startswith(prefix) and (has_base or is_gone(name.split(".")[0]))}
        new |= {name for name in missing if name.startswith(f"{pooler}.") and is_gone(pooler)}
    # If the class differs from the saved class, the caller drops the head.
    unused = {name for name in unused if kind in classes or name.startswith(prefix)}
    return loaded, check_weights(reference, kind, missing, unused, new)


def check_weights(
    reference: ModelReference, kind: str, missing: Mapping[str, str], unused: Collection[str], new: Collection[str]
) -> tuple[str, ...]:
    """Raise an error if a network lacks weights that are not in ``new``; warn about new and unused weights."""
    required = {name for name in missing if not name.endswith("num_batches_tracked")}  # eval mode does not read it
    if refused := {name + missing[name] for name in required.difference(new)}:
        raise ValueError(
            f"{reference} lacks weights of {kind}, which would be random: {_join_names(refused)}. Copy or download it "
            "again, leave out options that change shapes, or use another task= or class. To use the network with "
            "random weights, load it with its library and pass it" + see("missing-weights")
        )
    if new:
        warn(f"{kind} has new weights, which {reference} lacks and which are untrained: {_join_names(new)}")
    if unused:
        warn(f"{kind} does not use weights of {reference}: {_join_names(unused)}")
    return tuple(sorted(new))


def _join_names(names: Collection[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(sorted(names)[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


_PATCHING = threading.RLock()


@contextmanager
def replaced(kind: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method in this thread by a function that receives the original method and its arguments."""
    thread = threading.get_ident()

    def dispatch(*args: Any, **options: Any) -> Any:
        is_here = threading.get_ident() == thread
        return method(original, *args, **options) if is_here else original(*args, **options)

    with _PATCHING:
        original = getattr(kind, name)
        setattr(kind, name, dispatch)
        try:
            yield
        finally:
            setattr(kind, name, original)
