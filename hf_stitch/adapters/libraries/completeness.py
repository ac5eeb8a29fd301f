"""Weights that a checkpoint lacks: libraries draw them at random and log it; here they are refused unless asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_stitch.adapters.libraries.rebuilding import replaced
from hf_stitch.errors import see
from hf_stitch.printing import warn
from hf_stitch.reference import MOST_NAMED, ModelReference


@contextmanager
def load_reports() -> Iterator[list[Any]]:
    """Collect what transformers and torch report of all weights that this thread loads; that of a network is last."""
    import transformers

    reports: list[Any] = []

    def adjust(adjusted: Any, model: nn.Module, report: Any) -> None:
        adjusted(model, report)  # leaves out what the class computes itself
        reports.append(report)

    def load(loaded: Any, *args: Any, **options: Any) -> Any:
        reports.append(loaded(*args, **options))
        return reports[-1]

    adjusting = replaced(transformers.PreTrainedModel, "_adjust_missing_and_unexpected_keys", adjust)
    with adjusting, replaced(nn.Module, "load_state_dict", load):
        yield reports


def check_complete(reference: ModelReference, model: nn.Module, report: Any, new: Collection[str]) -> tuple[str, ...]:
    """Return new weights, which were asked for, with a warning; refuse a network that lacks others, by their names."""
    kind, shapes = type(model).__name__, getattr(report, "mismatched_keys", ())
    lacking = {*report.missing_keys} | {f"{name} (shape {(*has,)}, not {(*takes,)})" for name, has, takes in shapes}
    if refused := {name for name in lacking if name.split(" ")[0] not in new}:
        raise ValueError(
            f"{reference} lacks weights of {kind}, which would be random: {_first(refused)}. Copy or download it "
            "again, leave out options that change shapes, or name another task= or class. To use the network as it "
            "is, load it with its library and pass it" + see("missing-weights")
        )
    if new:
        warn(f"{kind} has new weights, which {reference} lacks and nothing has trained: {_first(new)}")
    if report.unexpected_keys:
        warn(f"{kind} does not use weights of {reference}: {_first(report.unexpected_keys)}")
    return tuple(sorted(new))


def _first(names: Collection[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(sorted(names)[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
