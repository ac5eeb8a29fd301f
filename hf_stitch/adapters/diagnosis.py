"""What is found when a network is to be cut, what is refused and why, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .base import Adapter, Explanation

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found.

    Attributes:
        model: The name that was asked for, or the network's class.
        kind: The network's class; empty if it could not be loaded.
        parameters: How many it has.
        takes: Its arguments that are the content, and what kind of content: ``("image", "pixel_values")``.
        given: Arguments that belong to the context and that every input must hold.
        override: The class of the override that it has; empty without.
        layers: Every candidate, verified or refused.
        error: Why nothing could be found out; empty otherwise.
        advice: What to do, in sentences.
    """

    model: str
    kind: str = ""
    parameters: int = 0
    takes: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    override: str = ""
    layers: tuple[Explanation, ...] = ()
    error: str = ""
    advice: tuple[str, ...] = ()

    @property
    def cuts(self) -> tuple[str, ...]:
        """The names of the verified ones."""
        return tuple(e.layer for e in self.layers if e.status == "verified")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def __rich__(self) -> Group:
        """What the network is, a table of its candidates, and the advice."""
        table = Table("layer", "status", "representation", "plan", "cost before / why not")
        for e in self.layers:
            told = e.reason if e.status == "refused" else f"{e.cost:.0%}"
            table.add_row(e.layer, e.status, str(e.form or "–"), e.plan or "–", told)
        what = f"{self.model}: {self.kind}, {self.parameters:,} parameters, takes {' '.join(self.takes)}"
        what += f" and, as context, {', '.join(self.given)}" if self.given else ""
        what += f"; override {self.override}" if self.override else ""
        head = Text(what) if self.kind else Text(f"{self.model} could not be loaded")
        rest = [Text(line) for line in (self.error, *self.advice) if line]
        return Group(head, *([table] if self.layers else []), *rest)


def diagnose(model: str | nn.Module | Adapter, **options: Any) -> Diagnosis:
    """Look at a network as ``hf-stitch doctor`` does: nothing that is wrong with it raises.

    Args:
        model: As for :func:`hf_stitch.load`.
        **options: As for :func:`hf_stitch.load`.

    Example:
        >>> import torch
        >>> print(diagnose(torch.nn.Linear(2, 2)).advice[0])
        Pass example_inputs, a batch of its inputs, to hf_stitch.load; or register an override with an example.
    """
    from . import load

    name = model if isinstance(model, str) else type(getattr(model, "model", model)).__name__
    try:
        adapter = load(model, **options)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        return Diagnosis(name, error=_told(error), advice=tuple(_advice_on(error)))
    found = Diagnosis(
        name,
        type(adapter.model).__name__,
        sum(p.numel() for p in adapter.model.parameters()),
        (adapter.interface.modality, *adapter.interface.content),
        adapter.interface.given,
        type(adapter.override).__name__ if type(adapter.override).__module__ != f"{__package__}.override" else "",
    )
    try:
        layers = tuple(adapter.explain(layer) for layer in adapter.candidates)
    except Exception as error:  # the network's own code, at inputs that were made up for it
        return Diagnosis(**{**vars(found), "error": _told(error), "advice": tuple(_advice_on(error))})
    return Diagnosis(**{**vars(found), "layers": layers, "advice": tuple(_advice(found.kind, layers))})


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _advice_on(error: Exception) -> Iterator[str]:
    """What to do about an error of loading, or of the first forward."""
    text = str(error)
    if isinstance(error, ImportError):
        yield "It needs a package that is not installed: install it, and ask again."
    elif "example_inputs" in text:
        yield (
            "Pass example_inputs, a batch of its inputs, to hf_stitch.load; or register an override with an example."
        )
    elif "different outputs for the same input" in text:
        yield "Switch what is random off: by an argument of its forward (options of an override) or in its config."
    elif "no module turns" in text:
        yield "Pass its embeddings as the input, floating-point example_inputs, if its forward takes them."
    elif isinstance(error, OSError):
        yield "Check its name, its revision and the connection."
    else:
        yield (
            "The network's own code fails on the inputs that were made up for it: pass example_inputs that it runs "
            "with, or register an override with an example."
        )


def _advice(kind: str, layers: tuple[Explanation, ...]) -> Iterator[str]:
    """What to do about candidates that are refused, or that there are none."""
    verified = [e for e in layers if e.status == "verified"]
    if not layers:
        yield (
            f"Everything flows through no single module of {kind}: two ways or more run side by side from its input to "
            "its output."
        )
    if len(verified) < 2:
        yield (
            f"There are fewer than two cuts. If you know a module of {kind} that everything flows through, ask for it "
            f"by name (explain, encode); to have it listed, register an override of {kind} with its blocks."
        )
    if any(e.status == "refused" for e in layers):
        yield (
            "What bypasses a refused layer cannot be overridden: a cut lies where the ways meet again, at the end of "
            "the block or stage that both are in."
        )
    if any(e.plan == "full" for e in verified):
        yield "Cuts of plan full are exact, but what precedes them runs too: the code between the modules needs it."
