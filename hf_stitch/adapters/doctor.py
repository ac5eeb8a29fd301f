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
"""Modules of PyTorch that have a fused path. Modules that contain them use it too."""

FAILED = {
    "loading": "The network could not be loaded:",
    "inputs": "The network was loaded, but its inputs are missing or do not match the forward:",
    "forward": "The forward pass fails on these inputs:",
    "survey": "The forward pass runs on these inputs, but fails with other sizes or cannot be traced:",
}
"""Description of each failed stage for the report."""

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
        takes: Modality of the content and the names of its arguments: ``("image", "pixel_values")``.
        given: Arguments of the context, which every input must also contain.
        tried: Inputs of the diagnosis, with their shapes.
        tried_by: Source of these inputs: ``made up`` (random), ``example_inputs`` or an override.
        override: Class of the override; empty without an override.
        padding: Sides where padding does not change the activations of texts, in words; empty for other modalities.
        layers: All candidates, verified or refused.
        failed: Stage that failed, a key of ``FAILED``; empty if all stages succeeded.
        error: Error of the stage that failed.
        notes: Warnings.
        advice: Recommended actions, in sentences.

    Example:
        >>> diagnosis = Diagnosis("org/name", layers=(CutInfo("a", "verified"), CutInfo("b", "refused")))
        >>> diagnosis.cuts
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
        """Create a diagnosis from a record. Records of version 0.2 also contain a script, ``snippet``."""
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
            f"inputs {', '.join(self.takes[1:])} ({self.takes[0]})" if self.takes else "",
            f"context {', '.join(self.given)}" if self.given else "",
            f"tested with {', '.join(self.tried)} ({self.tried_by})" if self.tried else "",
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
                    reason = e.reason.partition(f" {INSTEAD}")[0].partition(repr(e.layer))[2]
                    refused.setdefault(reason, []).append(e.layer)
            parts += [table, Text(LEGEND, "dim"), Text(f"{len(self.cuts)} of {len(self.layers)} candidates are cuts.")]
            parts += [Text(f"refused: {', '.join(names)}{reason}") for reason, names in refused.items()]
        parts += [Text(f"→ {line}") for line in self.advice]
        return Group(*parts)


def diagnose(model: str | nn.Module | Adapter, *, device: torch.device | None = None, **options: Any) -> Diagnosis:
    """Report where a network can be cut, with advice if it cannot.

    Errors of the network appear in the report and are not raised.

    Args:
        model: As for :func:`hf_stitch.load`.
        device: Device for the network. Default: the network is not moved.
        **options: As for :func:`hf_stitch.load`.

    Example:
        >>> diagnose(nn.Linear(2, 2)).failed
        'inputs'
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> diagnose(net, example_inputs=torch.ones(2, 2)).cuts
        ('0', '1')
    """
    passed = {"model": model} | {name: value for name, value in options.items() if value is not None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        diagnosis = _examine(passed, device)
    return replace(diagnosis, notes=tuple(dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning)))


def _examine(passed: dict[str, Any], device: torch.device | None) -> Diagnosis:
    """Load a network, run it and verify its candidates, until a stage fails."""
    diagnosis = Diagnosis(passed["model"] if isinstance(passed["model"], str) else "")
    stage, network, adapter = "loading", None, None
    try:
        adapter = load(**passed)
        if device is not None:
            adapter.model.to(device)
        stage, network, override = "forward", adapter.model, type(adapter.override)
        tried_by = "made up" if adapter.override.example(network) is None else f"the override {override.__name__}"
        if "example_inputs" in passed:
            tried_by, passed["example_inputs"] = "example_inputs", adapter.example
        shapes = {name: getattr(value, "shape", [value]) for name, value in adapter.example.items()}
        diagnosis = replace(
            diagnosis,
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
        diagnosis = replace(diagnosis, layers=layers, padding=adapter._padded().padding)
    except Exception as error:  # libraries and the code of the network can raise anything
        if isinstance(error, ExampleError):
            stage, network = "inputs", error.model
        diagnosis = replace(diagnosis, failed=stage, error=" ".join(f"{type(error).__name__}: {error}".split()))
    if network is not None:
        diagnosis = replace(
            diagnosis, kind=type(network).__name__, parameters=sum(p.numel() for p in network.parameters())
        )
    return replace(diagnosis, advice=tuple(_advise(diagnosis, network, adapter, passed)))


def _compare_with_fused(adapter: Adapter) -> None:
    """Run a network and warn if PyTorch's fused path returns other outputs, with the size of the difference."""
    outputs = tree.tensors(adapter._run(adapter.example))
    if not any(isinstance(module, FUSED) for module in adapter.model.modules()):
        return
    repeated, gaps = tree.tensors(adapter._run(adapter.example)), [0.0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused = tree.tensors(adapter._run(adapter.example, fused=True))
        for path, x in outputs.items():
            gap = (x.double() - fused[path]).abs()
            if torch.equal(x, repeated[path]) and (finite := gap.isfinite()).any():
                gaps.append(float(gap[finite].max() / x[finite].abs().max()))
        effect = f"changes outputs by up to {max(gaps):.1g} of the largest" if max(gaps) else ""
    except Exception as error:  # the code of the network can raise anything
        effect = f"fails on this network ({type(error).__name__}: {error})"
    if effect:
        warnings.warn(
            f"PyTorch's fused path, the default in eval mode without gradients, {effect}; hf-stitch runs the unfused "
            "path",
            stacklevel=2,
        )


# -- advice ------------------------------------------------------------------------------------
def _advise(diagnosis: Diagnosis, network: Any, adapter: Adapter | None, passed: dict[str, Any]) -> Iterator[str]:
    if diagnosis.failed == "inputs" and not passed.keys() & {"example_inputs", "content"}:  # else the error explains it
        yield PASS_INPUTS
    elif diagnosis.failed == "forward" and diagnosis.tried_by != "made up":
        yield f"Correct these inputs: they come from {diagnosis.tried_by}."
    elif diagnosis.failed in ("forward", "survey"):
        yield from _advise_backbone(network) or [PASS_INPUTS] * (diagnosis.failed == "forward")
    if adapter is None or diagnosis.failed:
        return
    interface, reasons = adapter.interface, "\n".join(e.reason for e in diagnosis.layers)
    if "bypasses it" in reasons:
        yield "A bypass of a layer cannot be overridden: cut after the block or stage where the paths meet."
    if interface.content == ("input_ids",) and "decoder_input_ids" in interface.given:
        yield "These cuts are in the encoder. For the decoder, use --content decoder_input_ids (in Python: content=…)."
    if len(diagnosis.cuts) >= 2:
        return
    if interface.modality == "text" and "through other paths" in reasons:
        yield "The part after the layers reads the token ids: list these ids in special_ids of an override."
    elif next(network.children(), None) is None:
        yield "The network does not contain modules: diagnose the network that contains it."
    elif not diagnosis.layers:
        yield "No module carries the whole input: two or more parallel paths lead to the output."
        yield from _advise_one_output(adapter) or _advise_backbone(network)
    else:
        yield from _advise_more_cuts(adapter) or ([] if diagnosis.cuts else _advise_backbone(network))


PASS_INPUTS = (
    "Load the network with inputs of the right sizes: hf_stitch.load(…, example_inputs={name: tensor}), or return them "
    "from an override (docs/adapters.md)."
)


def _advise_backbone(network: nn.Module) -> list[str]:
    prefix = getattr(network, "base_model_prefix", "")
    with suppress(Exception):  # no advice if the backbone fails as well
        if layers := load(getattr(network, prefix)).layers:
            return [
                f"The backbone, without the head, has {len(layers)} cuts, {layers[0]} to {layers[-1]}: load it with "
                f"hf_stitch.load(adapter.model.{prefix})."
            ]
    return []


def _advise_one_output(adapter: Adapter) -> list[str]:
    for path in tree.tensors(adapter.forward(adapter.example)):
        run = partial(lambda path, inputs: tree.get(adapter.forward(inputs), path), path)
        with suppress(ValueError):  # this output does not depend on the input
            if blocks := Survey(adapter.model, run, adapter.interface, adapter.example).blocks:
                location = "".join(f"[{key!r}]" for key in path)
                return [
                    f"For output{location} alone, the candidates are {', '.join(blocks)}: load a module that "
                    "returns only this output."
                ]
    return []


def _advise_more_cuts(adapter: Adapter) -> list[str]:
    survey, kind = adapter._survey(), type(adapter.override)
    calls = survey.trace.calls
    names = [n for n in calls if n not in survey.blocks and survey.dominates(n)]
    names = [n for n in names if not any(s.given or s.is_output for s in calls[n].tensors().values())]
    # each verification runs the network several times
    further = [name for name in names[:12] if adapter.verify_cut(name).status == "verified"]
    override = "an override" if kind is Override else f"the override {kind.__name__}"
    advice = f"These modules are also cuts, but not blocks: {', '.join(further)}. Add them to the blocks of {override}."
    return [advice] if further else []
