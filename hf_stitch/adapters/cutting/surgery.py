"""Taking a network apart without touching its code: modules that stand in for others, and their exchange.

To run only what follows a cut, the modules before it are replaced by a :class:`Stub` each, which returns an empty
tensor of the right shape, and the cut itself by an :class:`Entry`, which returns the given representation. To run only
what precedes it, the cut is replaced by an :class:`Exit`, which keeps the representation, and the modules after it by
stubs: the forward runs on to its end on nothing, so that it can be traced and exported. The exchange is
temporary in an adapter (:func:`swapped`) and final in the halves of a stitched model: the same modules serve both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.flow import Flow

Outline = dict[str, Any]
"""A tree of outputs as JSON values: tensors by the rule of their shape, those that a module only passes on by their way
among its arguments, everything else as it is."""


class Slot:
    """What the stand-ins of one network share while it runs.

    Attributes:
        values: The representation that enters, or came out, at the cut.
        batch: Number of samples.
        tokens: Length of the text, 0 for images.
        passed: Whether the forward has passed the cut.
        flow: Follows what stubs return, while a cut is verified.
        noise: Whether stubs return noise, while a cut is verified.
    """

    def __init__(self) -> None:
        """An empty slot."""
        self.values: Tensor | None = None
        self.batch = 0
        self.tokens = 0
        self.passed = False
        self.flow: Flow | None = None
        self.noise = False


def outline(examples: list[tuple[int, int, Any]], cut_dtype: torch.dtype) -> Outline | None:
    """The rule of an output's shape, from outputs at different batch sizes and lengths.

    Every dimension is ``c + b*batch + t*tokens + bt*batch*tokens``; text needs four examples (two batch sizes x two
    lengths, neighbours), everything else two.

    Args:
        examples: ``(batch, tokens, output with tensors as Seen)``, batch sizes and lengths ascending.
        cut_dtype: dtype at the cut; tensors of that dtype follow the representation's when the model is cast later.

    Returns:
        The outline, or ``None`` where no such rule gives the shapes seen.
    """
    outputs = [output for _, _, output in examples]
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        if any(type(output) is not type(first) or len(output) != len(first) for output in outputs):
            return None
        parts = [outline([(b, t, output[i]) for b, t, output in examples], cut_dtype) for i in range(len(first))]
        return None if None in parts else {type(first).__name__: parts}
    if isinstance(first, Mapping):
        items = {k: outline([(b, t, output.get(k)) for b, t, output in examples], cut_dtype) for k in first}
        return None if None in items.values() else {"dict": items}
    if not hasattr(first, "shape"):
        return {"value": first} if all(output == first for output in outputs) else None
    if not first.depends and first.given:
        return {"argument": list(first.given)} if all(output.given == first.given for output in outputs) else None
    if any(len(output.shape) != len(first.shape) for output in outputs):
        return None
    dims = [_rule([(b, t, output.shape[axis]) for b, t, output in examples]) for axis in range(len(first.shape))]
    dtype = "cut" if first.dtype == cut_dtype else str(first.dtype).removeprefix("torch.")
    return None if None in dims else {"tensor": {"dims": dims, "dtype": dtype}}


def _rule(examples: list[tuple[int, int, int]]) -> list[int] | None:
    """Coefficients ``[c, b, t, bt]`` of a dimension."""
    (b0, t0, v00), (b1, _, v10) = examples[:2]
    per_batch, rest = divmod(v10 - v00, b1 - b0)
    if rest:
        return None
    if len(examples) == 2:
        return [v00 - per_batch * b0, per_batch, 0, 0]
    (_, t1, v01), (_, _, v11) = examples[2:]
    both, rest = divmod(v11 - v01 - v10 + v00, (b1 - b0) * (t1 - t0))
    if rest:
        return None
    per_batch -= both * t0
    per_token, rest = divmod(v01 - v00 - both * b0 * (t1 - t0), t1 - t0)
    return None if rest else [v00 - per_batch * b0 - per_token * t0 - both * b0 * t0, per_batch, per_token, both]


def _build(rule: Outline, slot: Slot, given: Mapping[int | str, Any], materialise: bool) -> Any:
    ((kind, content),) = rule.items()
    if kind == "argument":
        return tree.get(given, tuple(content))
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _build(item, slot, given, materialise) for key, item in content.items()}
    if kind in ("tuple", "list"):
        items = [_build(item, slot, given, materialise) for item in content]
        return tuple(items) if kind == "tuple" else items
    values = _present(slot)
    dtype = values.dtype if content["dtype"] == "cut" else getattr(torch, content["dtype"])
    shape = [c + b * slot.batch + t * slot.tokens + bt * slot.batch * slot.tokens for c, b, t, bt in content["dims"]]
    if slot.noise:
        empty = noise(shape, dtype, values.device)
    elif materialise:
        empty = torch.zeros(shape, dtype=dtype, device=values.device)
    else:
        empty = torch.zeros((), dtype=dtype, device=values.device).expand(shape)
    return slot.flow.mark(empty) if slot.flow else empty


def noise(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Large numbers of either sign; zeros of an integer dtype."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return (1e4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(device, dtype)


def _present(slot: Slot) -> Tensor:
    """The representation at the cut, while a half runs."""
    if slot.values is None:
        raise RuntimeError(
            "part of a half runs although no representation is at its cut: in a backward pass, a gradient checkpoint "
            "around the cut computes it again. Switch gradient checkpointing off"
        )
    return slot.values


class StubReadError(AttributeError):
    """Code around a stub reads something of the module that it stands in for (a weight's dtype, say)."""

    def __init__(self, stub: str, attribute: str) -> None:
        """Name the module and what was read."""
        super().__init__(f"the code around module {stub!r} reads its attribute {attribute!r}")
        self.stub = stub


class _Absent(nn.Module):
    """Stands where a module was that does not run; says so when it is looked into."""

    _name: str

    def __getattr__(self, attribute: str) -> Any:
        """Say which module was read."""
        try:
            return super().__getattr__(attribute)
        except AttributeError:
            if attribute.startswith("__"):
                raise
            raise StubReadError(self._name, attribute) from None

    def __iter__(self) -> Any:
        """Say which module was read."""
        raise StubReadError(self._name, "__iter__")

    def __getitem__(self, index: Any) -> Any:
        """Say which module was read."""
        raise StubReadError(self._name, "__getitem__")

    def __len__(self) -> int:
        """Say which module was read."""
        raise StubReadError(self._name, "__len__")

    def __bool__(self) -> bool:
        """It is there, as the module was."""
        return True


def is_bookkeeping(hook: Any) -> bool:
    """Whether a hook belongs to a library that records or moves what passes, and changes nothing of it."""
    return getattr(hook, "__module__", "").startswith(("transformers.", "accelerate."))


class _StandIn(nn.Module):
    """A module with the plain attributes of another, such as ``attention_type``, which the code around it may read.

    Where transformers collects hidden states by hooks, those of the other are its own too, so that none is missed.
    """

    def __init__(self, original: nn.Module, *, runs: bool = False) -> None:
        super().__init__()
        for key, value in vars(original).items():
            if not key.startswith("_") and key != "training" and isinstance(value, (bool, int, float, str, tuple)):
                setattr(self, key, value)
        for hook in () if runs else original._forward_hooks.values():
            if is_bookkeeping(hook):
                self.register_forward_hook(hook)


class Stub(_StandIn, _Absent):
    """Stands in for a module of the other half: returns empty tensors of the shapes that it would return."""

    def __init__(
        self, name: str, original: nn.Module, rule: Outline, slot: Slot, materialise: bool, after: bool = False
    ) -> None:
        """Stand in for ``original``, with outputs by ``rule``, sized by ``slot``, before the cut or ``after`` it."""
        super().__init__(original)
        self._name, self._rule, self._slot, self._materialise, self._after = name, rule, slot, materialise, after

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ignore the values of the input.

        Raises:
            RuntimeError: On the wrong side of the cut, where its values would count.
        """
        if not self._after:
            _present(self._slot)
        if self._slot.passed != self._after:
            raise RuntimeError(
                f"module {self._name!r} runs {'before' if self._after else 'after'} the cut for these inputs, which it "
                "did not when the cut was verified: cut elsewhere, or load the model with example_inputs like these"
            )
        return _build(self._rule, self._slot, tree.arguments(args, kwargs), self._materialise)


class _AtCut(_StandIn):
    """Stands in for the cut; what the code around reads of it is read of the module itself, where that is kept."""

    def __init__(self, name: str, original: nn.Module, path: tree.Path, slot: Slot, *, kept: bool) -> None:
        super().__init__(original, runs=kept)
        self.inner = original if kept else None
        self._name, self._path, self._slot = name, path, slot

    def __getattr__(self, attribute: str) -> Any:
        try:
            return super().__getattr__(attribute)
        except AttributeError:
            if attribute.startswith("_"):
                raise
            if self.inner is None:
                raise StubReadError(self._name, attribute) from None
            return getattr(self.inner, attribute)


class Entry(_AtCut):
    """Stands in for the cut: returns the given representation, in the structure that the cut returns.

    Where the cut also returns what does not depend on the input (a position bias), the part of it that computes this
    runs.
    """

    def __init__(self, name: str, original: nn.Module, rule: Outline | None, path: tree.Path, slot: Slot) -> None:
        """Stand in for ``original``; with ``rule`` ``None`` it is kept and run for its other outputs."""
        super().__init__(name, original, path, slot, kept=rule is None)
        self._rule = rule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ignore the input, but for what must be computed from positions."""
        values = _present(self._slot)
        if self.inner is not None:
            output = self.inner(*args, **kwargs)
        else:
            output = _build(self._rule or {}, self._slot, tree.arguments(args, kwargs), False)
        self._slot.passed = True
        return tree.put(output, self._path, values.clone())  # an in-place operation may follow


class CutReached(BaseException):
    """Ends a forward that has said all that was asked for; no ``except Exception`` of its code stops it."""


class Exit(_AtCut):
    """Stands in for the cut in the front half: computes it and keeps the representation."""

    def __init__(self, name: str, original: nn.Module, path: tree.Path, slot: Slot) -> None:
        """Keep the tensor at ``path`` of the output of ``original`` in ``slot``."""
        super().__init__(name, original, path, slot, kept=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; what follows gets a copy, which it may overwrite."""
        assert self.inner is not None
        output = self.inner(*args, **kwargs)
        self._slot.values, self._slot.passed = tree.get(output, self._path), True
        return tree.put(output, self._path, self._slot.values.detach().clone())


class Gone(_Absent):
    """Stands where a module was that no forward runs."""

    def __init__(self, name: str) -> None:
        """Stand where the module ``name`` was."""
        super().__init__()
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise RuntimeError(f"module {self._name!r} ran in no forward when the network was cut, and is gone")


@contextmanager
def swapped(model: nn.Module, replacements: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put other modules in the place of some, wherever the model holds them; as it was afterwards, also on error."""
    places = exchange(model, replacements)
    try:
        yield
    finally:
        for parent, key, child in places:
            parent._modules[key] = child


def exchange(model: nn.Module, replacements: Mapping[str, nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Put other modules in the place of some for good; returns the places and what was there."""
    targets = {id(model.get_submodule(name)): module for name, module in replacements.items()}
    places = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent._modules.items()
        if child is not None and id(child) in targets
    ]
    for parent, key, child in places:
        parent._modules[key] = targets[id(child)]
    return places
