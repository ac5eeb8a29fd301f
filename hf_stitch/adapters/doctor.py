"""Diagnosis of a network: its cuts, the refused layers with reasons, and advice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from hf_stitch.adapters import Adapter, CutInfo, ExampleError, Override, load
from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.discovery.survey import INSTEAD, Survey
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas

FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of PyTorch that have a fused path; those around them take it through them."""

FAILED = {
    "loading": "The network could not be loaded:",
    "inputs": "The network was loaded, but its inputs are missing or do not fit:",
    "forward": "The forward pass fails on these inputs:",
    "survey": "The forward pass runs on these inputs, but fails with other sizes or cannot be traced:",
}
"""The stage that failed -> a description for the report."""

LEGEND = (
    "representation: axes (b batch, n positions, d features, c channels, h × w grid), features, grid, + prefix tokens. "
    "cost before: share of the operations that decoding saves. plan: stubs skips the modules before the cut, full runs "
    "them."
)
"""Explanation of the columns of the table."""


@dataclass(frozen=True)
class Diagnosis(Result):
    """The result of :func:`diagnose`.

    Attributes:
        model: Name of the network; empty for a live network.
        kind: Class of the network; empty if it could not be loaded.
        parameters: Number of parameters.
        takes: Modality of the content and the arguments that carry it: ``("image", "pixel_values")``.
        given: Arguments of the context, which every input must also contain.
        tried: Inputs of the diagnosis, with their shapes.
        tried_by: Source of these inputs: ``made up`` (random), ``example_inputs`` or an override.
        override: Class of the override; empty without an override.
        padding: Sides on which padding changes no activation of a text, in words; empty for other modalities.
        layers: All candidates, verified or refused.
        failed: Stage that failed, a key of ``FAILED``; empty if all stages succeeded.
        error: Error of the stage that failed.
        notes: Warnings.
        advice: What to do, in sentences.

    Example:
        >>> found = Diagnosis("org/name", layers=(CutInfo("a", "verified"), CutInfo("b", "refused")))
        >>> found.cuts
        ('a',)
    """

    model: str
    kind: str = ""
    parameters: int = 0
    takes: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    tried_by: str = ""
    override: str = ""
    padding: str = ""
    layers: tuple[CutInfo, ...] = ()
    failed: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Read a record; those of 0.2 also have a script, ``snippet``."""
        return super().from_dict({name: value for name, value in record.items() if name != "snippet"})

    @property
    def cuts(self) -> tuple[str, ...]:
        """Names of the verified candidates."""
        return tuple(e.layer for e in self.layers if e.status == "verified")

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each candidate, with the columns ``layer``, ``status``, ``cost``, ``plan``, ``reason``."""
        import pandas

        return pandas.DataFrame(map(asdict, self.layers), columns=["layer", "status", "cost", "plan", "reason"])

    def __rich__(self) -> Group:
        lines = [
            self.model,
            f"{self.kind}, {self.parameters:,} parameters" if self.kind else "",
            f"takes {', '.join(self.takes[1:])} ({self.takes[0]})" if self.takes else "",
            f"context {', '.join(self.given)}" if self.given else "",
            f"tried with {', '.join(self.tried)} ({self.tried_by})" if self.tried else "",
            f"override {self.override}" if self.override else "",
            f"padding {self.padding}" if self.padding else "",
            *(f"note: {note}" for note in self.notes),
            f"{FAILED[self.failed]} {self.error}" if self.failed else "",
        ]
        parts: list[Table | Text] = [Text(line) for line in lines if line]
        if self.layers:
            table = Table("layer", "status", "representation", "cost before", "plan")
            refused: dict[str, list[str]] = {}
            for e in self.layers:
                cost = "–" if e.cost is None else f"{e.cost:.0%}"
                table.add_row(e.layer, e.status, str(e.spec or "–"), cost, e.plan or "–")
                if e.reason:
                    why = e.reason.partition(f" {INSTEAD}")[0].partition(repr(e.layer))[2]
                    refused.setdefault(why, []).append(e.layer)
            parts += [table, Text(LEGEND, "dim"), Text(f"{len(self.cuts)} of {len(self.layers)} candidates are cuts.")]
            parts += [Text(f"refused: {', '.join(names)}{why}") for why, names in refused.items()]
        parts += [Text(f"→ {line}") for line in self.advice]
        return Group(*parts)


def diagnose(model: str | nn.Module | Adapter, *, device: torch.device | None = None, **options: Any) -> Diagnosis:
    """Report where a network can be cut and, if it cannot, what to do.

    Errors of the network are part of the report and are not raised.

    Args:
        model: As for :func:`hf_stitch.load`.
        device: Device to which the network is moved. Default: it stays where it is.
        **options: As for :func:`hf_stitch.load`.

    Example:
        >>> diagnose(nn.Linear(2, 2)).failed
        'inputs'
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> diagnose(net, example_inputs=torch.ones(2, 2)).cuts
        ('0', '1')
    """
    asked = {"model": model} | {name: value for name, value in options.items() if value is not None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = _examine(asked, device)
    return replace(found, notes=tuple(dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning)))


def _examine(asked: dict[str, Any], device: torch.device | None) -> Diagnosis:
    """Load a network, run it and verify its candidates, until a stage fails."""
    found = Diagnosis(asked["model"] if isinstance(asked["model"], str) else "")
    stage, network, adapter = "loading", None, None
    try:
        adapter = load(**asked)
        if device is not None:
            adapter.model.to(device)
        stage, network, override = "forward", adapter.model, type(adapter.override)
        tried_by = "made up" if adapter.override.example(network) is None else f"the override {override.__name__}"
        if "example_inputs" in asked:
            tried_by, asked["example_inputs"] = "example_inputs", adapter.example
        shapes = {name: getattr(value, "shape", [value]) for name, value in adapter.example.items()}
        found = replace(
            found,
            takes=(adapter.interface.modality, *adapter.interface.content),
            given=adapter.interface.given,
            tried=tuple(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items()),
            tried_by=tried_by,
            override="" if override is Override else override.__name__,
        )
        with torch.no_grad():
            _compare_with_fused(adapter)
        stage = "survey"
        layers = tuple(map(adapter.verify_cut, adapter.candidates))
        found = replace(found, layers=layers, padding=adapter._padded().padding)
    except Exception as error:  # libraries and the code of the network can raise anything
        if isinstance(error, ExampleError):
            stage, network = "inputs", error.model
        found = replace(found, failed=stage, error=" ".join(f"{type(error).__name__}: {error}".split()))
    if network is not None:
        found = replace(found, kind=type(network).__name__, parameters=sum(p.numel() for p in network.parameters()))
    return replace(found, advice=tuple(_advise(found, network, adapter, asked)))


def _compare_with_fused(adapter: Adapter) -> None:
    """Run a network, and warn if PyTorch's fused path returns other outputs, by how much."""
    outputs = tree.tensors(adapter._run(adapter.example))
    if not any(isinstance(module, FUSED) for module in adapter.model.modules()):
        return
    again, gaps = tree.tensors(adapter._run(adapter.example)), [0.0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused = tree.tensors(adapter._run(adapter.example, fused=True))
        for path, x in outputs.items():
            apart = (x.double() - fused[path]).abs()
            if torch.equal(x, again[path]) and (finite := apart.isfinite()).any():
                gaps.append(float(apart[finite].max() / x[finite].abs().max()))
        effect = f"whose outputs differ by up to {max(gaps):.1g} of the largest" if max(gaps) else ""
    except Exception as error:  # the code of the network can raise anything
        effect = f"on which the network does not run ({type(error).__name__}: {error})"
    if effect:
        warnings.warn(
            f"in eval mode without gradients, modules of PyTorch take a fused path, {effect}; hf-stitch runs the plain "
            "path",
            stacklevel=2,
        )


# -- advice ------------------------------------------------------------------------------------
def _advise(found: Diagnosis, network: Any, adapter: Adapter | None, asked: dict[str, Any]) -> Iterator[str]:
    if found.failed == "inputs" and not asked.keys() & {"example_inputs", "content"}:  # else the error explains it
        yield OWN_INPUTS
    elif found.failed == "forward" and found.tried_by != "made up":
        yield f"Correct these inputs: they come from {found.tried_by}."
    elif found.failed in ("forward", "survey"):
        yield from _of_body(network) or [OWN_INPUTS] * (found.failed == "forward")
    if adapter is None or found.failed:
        return
    interface, reasons = adapter.interface, "\n".join(e.reason for e in found.layers)
    if "bypasses it" in reasons:
        yield "A bypass of a layer cannot be overridden: cut after the block or stage in which the paths meet."
    if interface.content == ("input_ids",) and "decoder_input_ids" in interface.given:
        yield "These cuts are in the encoder. For the decoder, use --content decoder_input_ids (in Python: content=…)."
    if len(found.cuts) >= 2:
        return
    if interface.modality == "text" and "another way than through it" in reasons:
        yield "The part after the layers reads the token ids themselves: list the ids in special_ids of an override."
    elif next(network.children(), None) is None:
        yield "The network has no modules inside that could be cut: diagnose the network that contains it."
    elif not found.layers:
        yield "No module carries the whole input: two or more paths lead to the output side by side."
        yield from _of_one_output(adapter) or _of_body(network)
    else:
        yield from _of_others(adapter) or ([] if found.cuts else _of_body(network))


OWN_INPUTS = (
    "Load the network with inputs of the right sizes: hf_stitch.load(…, example_inputs={name: tensor}), or return them "
    "from an override (docs/adapters.md)."
)


def _of_body(network: nn.Module) -> list[str]:
    prefix = getattr(network, "base_model_prefix", "")
    with suppress(Exception):  # no advice if the body fails as well
        if layers := load(getattr(network, prefix)).layers:
            return [
                f"The body without the head has {len(layers)} cuts, {layers[0]} to {layers[-1]}: load it with "
                f"hf_stitch.load(adapter.model.{prefix})."
            ]
    return []


def _of_one_output(adapter: Adapter) -> list[str]:
    for path in tree.tensors(adapter.forward(adapter.example)):
        run = partial(lambda path, inputs: tree.get(adapter.forward(inputs), path), path)
        with suppress(ValueError):  # this output does not depend on the input
            if blocks := Survey(adapter.model, run, adapter.interface, adapter.example).blocks:
                place = "".join(f"[{key!r}]" for key in path)
                return [
                    f"For output{place} alone, the candidates are {', '.join(blocks)}: load a module whose forward "
                    "returns this output."
                ]
    return []


def _of_others(adapter: Adapter) -> list[str]:
    survey, kind = adapter._survey(), type(adapter.override)
    calls = survey.trace.calls
    names = [n for n in calls if n not in survey.blocks and survey.dominates(n)]
    names = [n for n in names if not any(s.given or s.is_output for s in calls[n].seen().values())]
    others = [
        n for n in names[:12] if adapter.verify_cut(n).status == "verified"
    ]  # each runs the network several times
    of = "an override" if kind is Override else f"the override {kind.__name__}"
    told = f"These modules are cuts too, but not blocks: {', '.join(others)}. Add them to the blocks of {of}."
    return [told] if others else []
