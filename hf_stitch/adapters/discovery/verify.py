"""Verification of plans by trial.

The part after the cut must reproduce the output of the model bit for bit, on other batch sizes, other lengths, and with
padding on either side. No output may be computed from the placeholders for the part before the cut, and no code may
read their values. This detects bypasses through weights that are zero, or through a comparison with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.cut import Cut, NotACutError
from hf_stitch.adapters.cutting.flow import Flow, ValuesReadError
from hf_stitch.adapters.cutting.halves import HalfError
from hf_stitch.adapters.cutting.plan import CutPlan, run_after, run_before
from hf_stitch.adapters.cutting.surgery import StubReadError
from hf_stitch.adapters.discovery.probes import Probes, copied
from hf_stitch.representation import Representation

Run = Callable[[Mapping[str, Any]], Any]


class Verifier:
    """Test plans on a model.

    Args:
        model: The model.
        run: Function that calls the model with a mapping of inputs, in eval mode.
        probes: Inputs for the tests.

    Attributes:
        read: Names of modules whose attributes other code reads, so that no plan can replace them.
    """

    def __init__(self, model: nn.Module, run: Run, probes: Probes) -> None:
        """Keep the arguments; nothing is tested yet."""
        self.model, self.run, self.probes, self.interface = model, run, probes, probes.interface
        self.read: set[str] = set()
        self._reading: dict[str, str] = {}
        self._failure: dict[str, str] = {}

    def failure(self, cut: Cut) -> str:
        """Return the error of the code of the model with plans for a cut.

        Args:
            cut: The cut.

        Returns:
            That values before the cut are read, or else the last error; empty if there was none.
        """
        return self._reading.get(cut.layer) or self._failure.get(cut.layer, "")

    def holds(self, cut: Cut, plan: CutPlan) -> bool:
        """Return whether both parts reproduce the whole model.

        The whole model runs on all probes first, then each part on all probes, so that no part can rely on state that
        a forward of the same inputs left in the model.

        Args:
            cut: The cut.
            plan: Plan with the modules to replace.

        Raises:
            NotACutError: If the layer does not run for all inputs, or returns nested tensors.
        """
        try:
            with torch.no_grad():
                probes = [*self.probes, *self._further]
                whole = [self._observed(cut, inputs) for inputs in probes]
                seen = [
                    cut.represent(values, inputs, self.interface)
                    for inputs, (values, _) in zip(probes, whole, strict=True)
                ]
                before = [run_before(self.model, self.run, cut, plan, self.interface, copied(p)) for p in probes]
                return all(same(a.values, b.values) for a, b in zip(before, seen, strict=True)) and all(
                    self._follows(cut, plan, representation, output)
                    for representation, (_, output) in zip(seen, whole, strict=True)
                )
        except (torch.OutOfMemoryError, NotACutError):
            raise
        except Exception as error:  # the code of the model fails with this plan; the next one is tried
            origin = _origin(error)
            if isinstance(origin, StubReadError):
                self.read.add(origin.stub)
            else:
                kept = self._reading if isinstance(origin, ValuesReadError) else self._failure
                kept[cut.layer] = f"{type(origin).__name__}: {origin}"
        return False

    @cached_property
    def _further(self) -> list[dict[str, Any]]:
        """The further probes that the network accepts."""

        def runs(inputs: Mapping[str, Any]) -> bool:
            try:
                self.run(copied(inputs))
            except Exception:
                return False
            return True

        return [inputs for inputs in self.probes.further() if runs(inputs)]

    def _observed(self, cut: Cut, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Return the values at the cut and the output of the model."""
        with self._capture(cut) as captured:
            output = self.run(copied(inputs))
        if not captured:
            raise NotACutError(
                f"layer {cut.layer!r} of {type(self.model).__name__} does not run for all inputs (not for "
                f"{len(inputs[self.interface.content[0]])} samples); cut at another layer"
            )
        return captured[0], output

    def _follows(self, cut: Cut, plan: CutPlan, representation: Representation, output: Any) -> bool:
        """Return whether the output of the model depends on the content only through the representation."""
        after = run_after(self.model, self.run, cut, plan, self.interface, representation)
        if not same(after, output):
            return False
        largest = max((m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding)), default=0) - 1
        with Flow(self.interface.special_ids, largest) as flow:  # may disable fused kernels
            for name in self.interface.content:
                flow.mark(representation.context[name])
            if flow.reaches(run_after(self.model, self.run, cut, plan, self.interface, representation, flow)):
                return False
        # detects dependence that Flow does not (custom kernels, threads)
        return same(run_after(self.model, self.run, cut, plan, self.interface, representation, noise=True), output)

    @contextmanager
    def _capture(self, cut: Cut, poisoned: str | None = None, entering: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Record the values at the cut; optionally let another module return NaN, and the layer a given value."""
        captured: list[Tensor] = []

        def at_cut(module: nn.Module, args: Any, output: Any) -> Any:
            values = tree.get(output, cut.path)
            if values.is_nested:
                raise NotACutError(
                    f"layer {cut.layer!r} of {type(self.model).__name__} returns texts of several lengths as a nested "
                    "tensor in inference, expected a padded tensor of tokens: build nn.TransformerEncoder with "
                    "enable_nested_tensor=False"
                )
            captured.append(values.clone())
            # A copy for each run, because a network may add to it in place.
            return output if entering is None else tree.put(output, cut.path, entering.clone())

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
        """Return the first module before a cut whose output matters while that of the layer is held fixed.

        Args:
            cut: The cut.
            before: Names of modules before the cut, in the order of the search.

        Returns:
            Name of the module; empty if there is none.
        """
        inputs = self.probes.vary(2)
        with torch.no_grad():
            values, expected = self._observed(cut, inputs)
        for name in before:
            try:
                with torch.no_grad(), self._capture(cut, poisoned=name, entering=values):
                    if not same(expected, self.run(copied(inputs))):
                        return name
            except Exception as error:  # the code of the model refuses NaN, so it reads the values
                self._failure[cut.layer] = f"{type(error).__name__}: {error}"
                return name
        return ""


def _origin(error: BaseException) -> BaseException:
    """Return the error that the halves inside a stitched model explain, or the error itself."""
    while isinstance(error, HalfError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def same(a: Any, b: Any) -> bool:
    """Return whether two outputs are equal, tensors with the same dtype and bit for bit; NaN equals NaN.

    Args:
        a: Tensor, or a tree of tuples, lists and mappings.
        b: The output to compare it with.
    """
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
    a leading underscore are not restored, because libraries record there which hooks they have installed.

    Args:
        model: The model.
    """
    modules = [(module, dict(module._modules), dict(module._buffers)) for module in model.modules()]
    attributes = [
        (module, {n: v for n, v in vars(module).items() if not n.startswith("_")}) for module in model.modules()
    ]
    lists = [(v, list(v)) for _, values in attributes for v in values.values() if type(v) is list]
    dicts = [(v, dict(v)) for _, values in attributes for v in values.values() if type(v) is dict]
    buffers = {id(buffer): buffer for _, _, held in modules for buffer in held.values() if buffer is not None}
    before = [(buffer, buffer.clone()) for buffer in buffers.values() if not buffer.is_meta]
    try:
        yield
    finally:
        for module, children, held in modules:
            module._modules.update(children)
            module._buffers.update(held)
        for module, values in attributes:
            for name in [name for name in vars(module) if not name.startswith("_") and name not in values]:
                del vars(module)[name]
            vars(module).update(values)
        for now, then in lists:
            now[:] = then
        for table, entries in dicts:
            table.clear()
            table.update(entries)
        with torch.no_grad():
            for buffer, was in before:
                if not (buffer.is_meta or torch.equal(buffer, was)):
                    buffer.copy_(was)
