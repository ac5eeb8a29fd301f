"""Verification of plans by trial.

The part after the cut must reproduce the output of the model bit for bit, on other batch sizes, other lengths, and with
padding on either side. No output may be computed from the placeholders for the part before the cut, and no code may
read their values. This detects bypasses through weights that are zero, or through a comparison with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.cut import Cut, CutPlan, NotACutError, run_part
from hf_stitch.adapters.cutting.flow import Flow, ValuesReadError
from hf_stitch.adapters.cutting.halves import HalfError
from hf_stitch.adapters.cutting.surgery import StubReadError
from hf_stitch.adapters.discovery.probes import Probes, copied
from hf_stitch.printing import progress_bar

Run = Callable[[Mapping[str, Any]], Any]
End = tuple[Cut, CutPlan]
TRIES = ((True, True), (True, False), (False, True))
"""Modes of the runs of a part: one for each of the first probes, all remaining modes for the last probe.

A mode is a pair: whether Flow tracks the part, and whether noise replaces the content before it.
"""


@dataclass(frozen=True)
class WholeRun:
    """Run of the whole model on a probe."""

    inputs: Mapping[str, Any]  # the probe
    values: Mapping[str, Tensor]  # name of a layer -> values at its cut
    output: Any  # output of the model
    tries: tuple[tuple[bool, bool], ...] = TRIES[2:]  # how the parts run on this probe


class Verifier:
    """Verification of plans on a model."""

    def __init__(self, model: nn.Module, run: Run, probes: Probes) -> None:
        self.model, self.run, self.probes, self.interface = model, run, probes, probes.interface
        self.read: set[str] = set()
        self._reading: dict[str, str] = {}
        self._failure: dict[str, str] = {}

    def failure(self, cut: Cut) -> str:
        """Return the error that the code of the model raised with plans for a cut; empty without an error."""
        return self._reading.get(cut.layer) or self._failure.get(cut.layer, "")

    def holds(self, cut: Cut, plan: CutPlan) -> bool:
        """Return whether both parts reproduce the whole model.

        The whole model runs on all probes first, then each part on all probes, so that a part cannot rely on state from
        a forward of the same inputs.
        """
        return self._passes(cut, lambda: self._holds(cut, plan))

    def _holds(self, cut: Cut, plan: CutPlan) -> bool:
        whole_runs = self.observe([cut])
        for probe in whole_runs:
            if cut.layer not in probe.values:
                raise NotACutError(
                    f"layer {cut.layer!r} of {type(self.model).__name__} does not run for all inputs (not for "
                    f"{len(probe.inputs[self.interface.content[0]])} samples); cut at another layer"
                )
        return self.front_holds(cut, plan, whole_runs) and self.back_holds((cut, plan), whole_runs)

    def observe(self, cuts: Iterable[Cut]) -> list[WholeRun]:
        """Run the whole model on all probes; the values of a probe exclude layers that do not run for it."""
        cut_list = list(cuts)
        with torch.no_grad():
            probes = list(self.probes)
            tries = [TRIES[min(index, 2) :][:1] for index in range(len(probes) - 1)]
            tries.append(TRIES[max(1, min(len(probes) - 1, 2)) :])
            whole_runs = [self._run_whole(cut_list, *probe) for probe in zip(probes, tries, strict=True)]
            for index, inputs in enumerate(self.probes.further()):
                with suppress(Exception):  # the network may reject these
                    whole_runs.append(self._run_whole(cut_list, inputs))
                    if not index:
                        break
        return whole_runs

    def front_holds(self, cut: Cut, plan: CutPlan, whole_runs: Iterable[WholeRun]) -> bool:
        """Return whether the part before a cut, without the modules after it, returns the values at the cut."""

        def holds(probe: WholeRun) -> bool:
            values = run_part(self.model, self.run, self.interface, copied(probe.inputs), last=(cut, plan))
            return same(values, probe.values[cut.layer])

        return self._passes(cut, lambda: all(holds(probe) for probe in whole_runs))  # map would stop at a StopIteration

    def back_holds(self, first: End, whole_runs: Iterable[WholeRun], last: End | None = None) -> bool:
        """Return whether the part after a cut depends on the content only through the values at the cut.

        The part ends at a second cut, if any, and runs without the modules before the first and after the second cut.
        """
        cut = first[0]

        def holds(probe: WholeRun) -> bool:
            def runs(flow: Flow | None, noise: bool) -> Any:
                representation = cut.represent(probe.values[cut.layer], probe.inputs, self.interface)
                return run_part(self.model, self.run, self.interface, representation, first, last, flow, noise)

            return self._reproduces(probe, runs, probe.output if last is None else probe.values[last[0].layer])

        return self._passes(cut, lambda: all(holds(probe) for probe in whole_runs))  # map would stop at a StopIteration

    @cached_property
    def _largest_id(self) -> int:
        return max((m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding)), default=0) - 1

    def _passes(self, cut: Cut, holds: Callable[[], bool]) -> bool:
        """Return whether a condition holds; an error of the model's code is recorded."""
        try:
            with torch.no_grad():
                return holds()
        except (torch.OutOfMemoryError, NotACutError):
            raise
        except Exception as error:  # the code of the model fails with this plan; the next plan is tried
            origin = _original_error(error)
            if isinstance(origin, StubReadError):
                self.read.add(origin.stub)
            else:
                errors = self._reading if isinstance(origin, ValuesReadError) else self._failure
                errors[cut.layer] = f"{type(origin).__name__}: {origin}"
        return False

    def _run_whole(self, cuts: Iterable[Cut], inputs: Mapping[str, Any], tries: Any = TRIES[2:]) -> WholeRun:
        with ExitStack() as hooks:
            captured = {cut.layer: hooks.enter_context(self._capture(cut)) for cut in cuts}
            output = self.run(copied(inputs))
        return WholeRun(inputs, {layer: values[0] for layer, values in captured.items() if values}, output, tries)

    def _reproduces(self, probe: WholeRun, runs: Callable[[Flow | None, bool], Any], expected: Any) -> bool:
        """Return whether a part reproduces the output of the model, independently of everything before the part.

        Flow tracks dependence on the content before the part. Noise in its place detects dependence that Flow misses
        (custom kernels, threads). Flow may disable fused kernels: if the values differ, the part runs again without it.
        """
        for is_tracked, noise in probe.tries:
            ids = self.interface.special_ids, self._largest_id
            with Flow(*ids, tiles=self.interface.tiles) if is_tracked else nullcontext() as flow:
                output = runs(flow, noise)
                if flow is not None and flow.reaches(output):
                    return False
        return same(output, expected) or (is_tracked and same(runs(None, True), expected))

    @contextmanager
    def _capture(self, cut: Cut, poisoned: str | None = None, fixed: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Record the values at the cut; optionally let another module return NaN, and the layer fixed values."""
        captured: list[Tensor] = []

        def at_cut(module: nn.Module, args: Any, output: Any) -> Any:
            values = tree.get(output, cut.path)
            captured.append(values.clone())
            # A copy for each run, because a network may add to it in place.
            return output if fixed is None else tree.put(output, cut.path, fixed.clone())

        def poison(module: nn.Module, args: Any, output: Any) -> Any:
            return tree.transform(
                output,
                lambda t: torch.full_like(t, float("nan")) if isinstance(t, Tensor) and t.is_floating_point() else t,
            )

        handles = [self.model.get_submodule(cut.layer).register_forward_hook(at_cut)]
        if poisoned is not None:
            handles.append(self.model.get_submodule(poisoned).register_forward_hook(poison))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def bypass(self, cut: Cut, before: Iterable[str]) -> str:
        """Return the first module before a cut that changes the output while the output of the layer is fixed."""
        inputs = self.probes.vary(2)
        with torch.no_grad():
            whole_run = self._run_whole([cut], inputs)
        for name in before:
            try:
                with torch.no_grad(), self._capture(cut, poisoned=name, fixed=whole_run.values[cut.layer]):
                    if not same(whole_run.output, self.run(copied(inputs))):
                        return name
            except Exception as error:  # the code of the model rejects NaN, so it reads the values
                self._failure[cut.layer] = f"{type(error).__name__}: {error}"
                return name
        return ""


def _original_error(error: BaseException) -> BaseException:
    """Return the original error behind errors of halves inside a stitched model."""
    while isinstance(error, HalfError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def same(a: Any, b: Any) -> bool:
    """Return whether two outputs are equal: tensors bit for bit, with the same dtype; NaN equals NaN."""
    left, right = dict(tree.leaves(a)), dict(tree.leaves(b))
    return left.keys() == right.keys() and all(_equal(x, right[path]) for path, x in left.items())


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the state of modules other than parameters: submodules, buffers, attributes, lists and dicts.

    A forward on a short text may change the mode of a network permanently, or leave values in a buffer. Attributes with
    a leading underscore are not restored, because libraries store there which hooks they have installed. If a network
    changes its weights (RWKV halves them for inference), attributes stay, because they record the change.
    """
    weights = [(weight, weight._version) for weight in model.parameters() if not weight.is_inference()]
    modules = [(module, dict(module._modules), dict(module._buffers)) for module in model.modules()]
    attributes = [
        (module, {n: v for n, v in vars(module).items() if not n.startswith("_")}) for module in model.modules()
    ]
    lists = [(v, list(v)) for _, values in attributes for v in values.values() if type(v) is list]
    dicts = [(v, dict(v)) for _, values in attributes for v in values.values() if type(v) is dict]
    buffers = {id(buffer): buffer for _, _, stored in modules for buffer in stored.values() if buffer is not None}
    before = [(buffer, buffer.clone()) for buffer in buffers.values() if not buffer.is_meta]
    try:
        yield
    finally:
        for module, children, stored in modules:
            module._modules.update(children)
            module._buffers.update(stored)
        for module, values in attributes if all(weight._version == old for weight, old in weights) else ():
            for name in [name for name in vars(module) if not name.startswith("_") and name not in values]:
                del vars(module)[name]
            vars(module).update(values)
        for current, saved in lists:
            current[:] = saved
        for table, entries in dicts:
            table.clear()
            table.update(entries)
        with torch.no_grad():
            for buffer, old in before:
                if not (buffer.is_meta or torch.equal(buffer, old)):
                    buffer.copy_(old)


def sweep(verifier: Verifier, cuts: Sequence[Cut], propose: Callable[[Cut], CutPlan]) -> dict[str, CutPlan]:
    """Verify cuts together.

    Cuts form a sequence. If the output depends on the content only through the last cut, and each cut depends on the
    content only through the previous cut, then the output depends on the content only through every cut. It is
    sufficient to run the part before the first cut, the parts between consecutive cuts, and the part after the last
    cut: the cost of two forwards per probe, for any number of cuts.

    The same applies to the replaced modules. The code before a cut is tested in a part that replaces the modules after
    the cut and more; likewise for the code after a cut.
    """
    try:
        whole_runs = verifier.observe(cuts)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return {}
    everywhere = [cut for cut in cuts if all(cut.layer in probe.values for probe in whole_runs)]
    while True:  # plans do not replace modules with attributes that code reads
        read = set(verifier.read)
        plans = _verified(verifier, everywhere, propose, whole_runs)
        if verifier.read == read:
            return plans


def _verified(
    verifier: Verifier, cuts: Sequence[Cut], propose: Callable[[Cut], CutPlan], whole_runs: Sequence[WholeRun]
) -> dict[str, CutPlan]:
    """Return the plans of the verified cuts; empty if the code of the model reads attributes of a further module."""
    read = set(verifier.read)
    verified: list[tuple[Cut, CutPlan]] = []  # from the last to the first
    with progress_bar("verifying", len(cuts), "cut", leave=False) as bar:
        for cut in cuts[::-1]:
            plan = propose(cut)
            holds = verifier.back_holds((cut, plan), whole_runs, verified[-1] if verified else None)
            if verifier.read != read:
                return {}
            if holds:
                verified.append((cut, plan))
            bar.update()
    while verified and not verifier.front_holds(*verified[-1], whole_runs):
        if verifier.read != read:
            return {}
        verified.pop()
    return {cut.layer: plan for cut, plan in reversed(verified)}
