"""What is found when a network is to be cut, what is refused and why, and what would help."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hf_stitch.adapters.base import Adapter
from hf_stitch.adapters.discovery.survey import INSTEAD
from hf_stitch.adapters.doctor import advice as advise
from hf_stitch.adapters.examples import ExampleError
from hf_stitch.adapters.info import Explanation
from hf_stitch.adapters.loading import load
from hf_stitch.adapters.overrides.base import Override
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from torch import nn

FAILED = {
    "loading": "It could not be loaded.",
    "inputs": "It was loaded, but there is nothing to look at it with.",
    "forward": "Its forward fails on these inputs.",
    "survey": "Its forward runs, but it cannot be told what depends on what.",
    "": "",
}
"""Where it came to an end -> what that means."""

LEGEND = (
    "representation: order of the axes (b batch, n positions, d features, c channels, h × w grid), features, grid, "
    "+ prefix tokens. cost before: share of a forward's operations up to there, which decoding from there saves. "
    "plan: stubs, what precedes is left out; full, it runs too."
)


@dataclass(frozen=True)
class Diagnosis(Result):
    """What :func:`diagnose` found.

    Attributes:
        model: The name that was asked for, or the network's class.
        kind: The network's class; empty if it could not be loaded.
        parameters: How many it has.
        takes: Its arguments that are the content, and what kind of content: ``("image", "pixel_values")``.
        given: Arguments that belong to the context and that every input must hold.
        tried: The inputs that it was looked at with, and their shapes.
        tried_by: Where these come from: ``made up``, ``example_inputs`` or the class of an override.
        override: The class of the override that it has; empty without.
        layers: Every candidate, verified or refused.
        failed: Where it came to an end: ``loading``, ``inputs`` (there are none), ``forward`` or ``survey`` (it runs,
            but cannot be looked into); empty if candidates were found, or none.
        error: Of what kind, and what was said; empty otherwise.
        notes: What was warned of.
        advice: What to do, in sentences.
        snippet: The same in Python, ready to run once values that are marked as yours are filled in; or empty.
    """

    model: str
    kind: str = ""
    parameters: int = 0
    takes: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    tried_by: str = ""
    override: str = ""
    layers: tuple[Explanation, ...] = ()
    failed: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    snippet: str = ""

    @property
    def cuts(self) -> tuple[str, ...]:
        """The names of the verified ones."""
        return tuple(e.layer for e in self.layers if e.status == "verified")

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each candidate: ``layer``, ``status``, ``cost``, ``plan``, ``reason``."""
        import pandas

        return pandas.DataFrame([asdict(each) for each in self.layers]).drop(columns="form", errors="ignore")

    def __rich__(self) -> Group:
        """What the network is, a table of its candidates, why some are refused, and the advice."""
        lines = [self._head(), *(f"note: {note}" for note in self.notes), FAILED[self.failed], self.error]
        parts: list[Any] = [Text(line) for line in lines if line]
        if not self.failed:
            parts += self._found()
        parts += [Text(f"→ {line}") for line in self.advice]
        if self.snippet:
            parts.append(Text(f"\n{self.snippet}", no_wrap=True, overflow="ignore"))
        return Group(*parts)

    def _head(self) -> str:
        what = self.model
        what += f": {self.kind}, {self.parameters:,} parameters" if self.kind else ""
        if self.takes:
            what += f"\ntakes {', '.join(self.takes[1:])} ({self.takes[0]})"
        what += f" and, as context, {', '.join(self.given)}" if self.given else ""
        if self.tried:
            what += f"\nlooked at with {', '.join(self.tried)} ({self.tried_by})"
        return what + (f"\noverride {self.override}" if self.override else "")

    def _found(self) -> list[Any]:
        table = Table("layer", "status", "representation", "cost before", "plan")
        for e in self.layers:
            cost = "–" if e.cost is None else f"{e.cost:.0%}"
            table.add_row(e.layer, e.status, str(e.form or "–"), cost, e.plan or "–")
        told = f"{len(self.cuts)} of {len(self.layers)} candidates are cuts"
        told += ": what follows them, run alone, gives the network's own output bit for bit." if self.cuts else "."
        why = [Text(f"refused: {', '.join(names)}: {cause}") for cause, names in self._refusals().items()]
        return [
            *([table] if self.layers else []),
            *([Text(LEGEND, "dim")] if self.cuts else []),
            *([Text(told)] if self.layers else []),
            *why,
        ]

    def _refusals(self) -> dict[str, list[str]]:
        """Why layers are refused, each cause once."""
        causes: dict[str, list[str]] = {}
        for e in self.layers:
            if e.status == "refused":
                cause = e.reason.partition(f" {INSTEAD}")[0]
                for prefix in (f"{self.kind} cannot be cut at {e.layer!r}", f"layer {e.layer!r} of {self.kind}"):
                    cause = cause.removeprefix(prefix).lstrip(": ")
                causes.setdefault(cause, []).append(e.layer)
        return causes


def diagnose(model: str | nn.Module | Adapter, **options: Any) -> Diagnosis:
    """Look at a network as ``hf-stitch doctor`` does: nothing that is wrong with it raises.

    Args:
        model: As for :func:`hf_stitch.load`.
        **options: As for :func:`hf_stitch.load`.

    Example:
        >>> found = diagnose(torch.nn.Linear(2, 2))
        >>> found.failed
        'inputs'
        >>> print(found.snippet)
        import torch
        import hf_stitch
        <BLANKLINE>
        a = hf_stitch.load(
            model,
            example_inputs={
                "input": torch.randn(2, 16),  # samples first: the sizes are yours to say
            },
        )
        print(a.layers)
    """
    name = model if isinstance(model, str) else type(getattr(model, "model", model)).__name__
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = _examined(Diagnosis(name), model, options)
    notes = (str(w.message) for w in caught if w.category is UserWarning)
    return replace(found, notes=tuple(dict.fromkeys(notes)))


def _examined(found: Diagnosis, model: str | nn.Module | Adapter, options: dict[str, Any]) -> Diagnosis:

    asked = advise.Asked(model, options)
    try:
        adapter = load(model, **options)
    except ExampleError as error:
        found = replace(found, kind=type(error.model).__name__, parameters=_size(error.model))
        return _ended(found, "inputs", error, advise.on_inputs(asked, error.model))
    except Exception as error:  # whatever a library says of files that are no network
        return _ended(found, "loading", error, advise.on_loading(error))
    found = _introduced(found, adapter, options)
    try:
        with torch.no_grad():
            adapter.forward(adapter.example)
    except Exception as error:  # the network's own code
        return _ended(found, "forward", error, advise.on_forward(asked, adapter, found.tried_by))
    try:
        layers = tuple(adapter.explain(layer) for layer in adapter.candidates)
    except Exception as error:  # the network's own code, with inputs of other sizes
        return _ended(found, "survey", error, advise.on_survey(asked, adapter, error))
    told = advise.on_layers(asked, adapter, layers)
    return replace(found, layers=layers, advice=told.sentences, snippet=told.snippet)


def _ended(found: Diagnosis, where: str, error: Exception, told: advise.Advice) -> Diagnosis:
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return replace(found, failed=where, error=" ".join(said.split()), advice=told.sentences, snippet=told.snippet)


def _introduced(found: Diagnosis, adapter: Adapter, options: dict[str, Any]) -> Diagnosis:
    kind = type(adapter.override)
    override = "" if kind is Override else kind.__name__
    invents = bool(override) and adapter.override.example(adapter.model) is not None
    given = options.get("example_inputs") is not None
    return replace(
        found,
        kind=type(adapter.model).__name__,
        parameters=_size(adapter.model),
        takes=(adapter.interface.modality, *adapter.interface.content),
        given=adapter.interface.given,
        tried=tuple(f"{name} {_shape(value)}" for name, value in adapter.example.items()),
        tried_by="example_inputs" if given else f"by the override {override}" if invents else "made up",
        override=override,
    )


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _shape(value: Any) -> str:
    return "×".join(map(str, value.shape)) if isinstance(value, torch.Tensor) else repr(value)
