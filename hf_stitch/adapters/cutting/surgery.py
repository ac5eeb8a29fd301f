"""Replacement of modules, to run parts of a network without changes to its code.

To run only the part after a cut, each module before it is replaced by a :class:`Stub`, which returns empty tensors of
the right shape, and the layer of the cut by an :class:`Entry`, which returns the representation. To run only the part
before a cut, the layer is replaced by an :class:`Exit`, which stores the representation, and the modules after it by
stubs: the forward runs to its end on empty tensors, so that it can be traced and exported. An adapter replaces modules
temporarily (:func:`swapped`) and locks the network meanwhile (:func:`alone`); the halves of a stitched model replace
modules permanently (:func:`exchange`).
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.flow import Flow

Outline = dict[str, Any]
"""The output of a module as JSON values.

A tensor is described by a rule for its shape, or by its path among the arguments if the module only passes it on. Other
values are stored unchanged.
"""


class Slot(threading.local):
    """Thread-local state of a forward, shared by the replacement modules of a network."""

    def __init__(self) -> None:
        self.values: Tensor | None = None
        self.batch = 0
        self.tokens = 0
        self.passed = False
        self.flow: Flow | None = None
        self.noise = False

    def __reduce__(self) -> tuple[type[Slot], tuple[()]]:
        return Slot, ()


def outline(examples: list[tuple[int, int, Any]], cut_dtype: torch.dtype) -> Outline | None:
    """Derive the shapes of a module's output as a function of batch size and number of tokens.

    Every dimension is ``c + b*batch + t*tokens + bt*batch*tokens``. Text requires three examples (the second with
    another batch size, the third with another length); other modalities require two.
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
    dims = [_shape_rule([(b, t, output.shape[axis]) for b, t, output in examples]) for axis in range(len(first.shape))]
    dtype = "cut" if first.dtype == cut_dtype else str(first.dtype).removeprefix("torch.")
    return None if None in dims else {"tensor": {"dims": dims, "dtype": dtype}}


def _shape_rule(examples: list[tuple[int, int, int]]) -> list[int] | None:
    """Return the coefficients ``[c, b, t, bt]`` of a dimension."""
    (b0, t0, v00), (b1, _, v10) = examples[:2]
    per_batch, rest = divmod(v10 - v00, b1 - b0)
    if rest:
        return None
    if len(examples) == 2:
        return [v00 - per_batch * b0, per_batch, 0, 0]
    _, t1, v01 = examples[2]
    per_token, rest = divmod(v01 - v00, t1 - t0)
    if rest:
        return None
    if not (per_batch and per_token):
        return [v00 - per_batch * b0 - per_token * t0, per_batch, per_token, 0]
    per_pair, rest = divmod(per_token, b0)  # a product of batch size and tokens
    return None if rest or v00 != per_batch * b0 else [0, per_batch - per_pair * t0, 0, per_pair]


def _build_output(rule: Outline, slot: Slot, arguments: Mapping[int | str, Any], materialise: bool) -> Any:
    ((kind, content),) = rule.items()
    if kind == "argument":
        return tree.get(arguments, tuple(content))
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _build_output(item, slot, arguments, materialise) for key, item in content.items()}
    if kind in ("tuple", "list"):
        items = [_build_output(item, slot, arguments, materialise) for item in content]
        return tuple(items) if kind == "tuple" else items
    values = _current_values(slot)
    dtype = values.dtype if content["dtype"] == "cut" else getattr(torch, content["dtype"])
    shape = [c + b * slot.batch + t * slot.tokens + bt * slot.batch * slot.tokens for c, b, t, bt in content["dims"]]
    if slot.noise:
        empty = noise(shape, dtype, values.device)
    elif materialise:
        empty = torch.zeros(shape, dtype=dtype, device=values.device)
    else:
        empty = torch.zeros((), dtype=dtype, device=values.device).expand(shape)
    return slot.flow.mark(empty) if slot.flow else empty


PERIOD = 997
"""Period of :func:`noise`; a prime, so that no axis repeats."""


def noise(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Create large random numbers of both signs, identical in every call and repeated after :data:`PERIOD`."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    period = (1e4 * torch.randn(PERIOD, generator=torch.Generator().manual_seed(0))).to(device, dtype)
    count = math.prod(shape)
    return period.repeat(-(-count // PERIOD))[:count].view(*shape)


def _current_values(slot: Slot) -> Tensor:
    if slot.values is None:
        raise RuntimeError(
            "a half runs without a representation at its cut: a backward pass recomputes a gradient checkpoint around "
            "the cut. Disable gradient checkpointing"
        )
    return slot.values


class StubReadError(AttributeError):
    """Raised if code reads an attribute of a replaced module, for example the dtype of a weight."""

    def __init__(self, stub: str, attribute: str) -> None:
        super().__init__(f"the code around module {stub!r} reads its attribute {attribute!r}")
        self.stub = stub


class _Absent(nn.Module):
    """Replacement of a module that does not run; raises :class:`StubReadError` if code reads its attributes."""

    _name: str

    def __getattr__(self, attribute: str) -> Any:
        try:
            return super().__getattr__(attribute)
        except AttributeError:
            if attribute.startswith("__"):
                raise
            raise StubReadError(self._name, attribute) from None

    def __iter__(self) -> Any:
        raise StubReadError(self._name, "__iter__")

    def __getitem__(self, index: Any) -> Any:
        raise StubReadError(self._name, "__getitem__")

    def __len__(self) -> int:
        raise StubReadError(self._name, "__len__")

    def __bool__(self) -> bool:
        """Return True, like the replaced module."""
        return True


def is_bookkeeping(hook: Any) -> bool:
    """Return whether a hook belongs to transformers or accelerate; these hooks only record or move tensors."""
    return getattr(hook, "__module__", "").startswith(("transformers.", "accelerate."))


class _StandIn(nn.Module):
    """A module with the plain attributes of the original, which code around it may read (``attention_type``).

    If transformers collects hidden states with hooks, the hooks of the original are registered here too.
    """

    _slot: Slot

    def __init__(self, original: nn.Module, *, runs: bool = False) -> None:
        super().__init__()
        for key, value in vars(original).items():
            if not key.startswith("_") and key != "training" and isinstance(value, (bool, int, float, str, tuple)):
                setattr(self, key, value)
        for hook in () if runs else original._forward_hooks.values():
            if is_bookkeeping(hook):
                self.register_forward_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the module; a copy without its half (PEFT: ``modules_to_save``) still uses the slot of that half."""
        memo[id(self)] = twin = type(self).__new__(type(self))  # first: hooks of accelerate refer to the module
        memo.setdefault(id(self._slot), self._slot)  # the slot of a half is copied before its modules
        twin.__dict__.update(copy.deepcopy(vars(self), memo))
        return twin


class Stub(_StandIn, _Absent):
    """Replacement of a module outside the half; it returns empty tensors of the same shapes."""

    def __init__(
        self, name: str, original: nn.Module, rule: Outline, slot: Slot, materialise: bool, after: bool = False
    ) -> None:
        super().__init__(original)
        self._name, self._rule, self._slot, self._materialise, self._after = name, rule, slot, materialise, after

    def extra_repr(self) -> str:
        """Return a note for errors of libraries that find the stub in place of a layer."""
        return f"in place of {self._name!r}, which does not run in this half"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return empty tensors, or the arguments that the replaced module would pass on."""
        if not self._after:
            _current_values(self._slot)
        if self._slot.passed != self._after:
            raise RuntimeError(
                f"module {self._name!r} runs {'before' if self._after else 'after'} the cut for these inputs, unlike "
                "during verification: cut at another layer, or load the model with example_inputs like these"
            )
        return _build_output(self._rule, self._slot, tree.arguments(args, kwargs), self._materialise)


KEPT = "inner"
"""Name of the original layer in the module that replaces it at a cut."""


class _AtCut(_StandIn):
    """Replacement of the layer of a cut; attributes are read from the original layer if it is still used."""

    def __init__(self, name: str, original: nn.Module, path: tree.Path, slot: Slot, *, runs: bool) -> None:
        super().__init__(original, runs=runs)
        self.inner = original if runs else None
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
    """Replacement of the layer of a cut; it returns the representation in the structure of the layer's output.

    If the output also contains tensors that do not depend on the input (a position bias), the original layer runs to
    compute them.
    """

    def __init__(self, name: str, original: nn.Module, rule: Outline | None, path: tree.Path, slot: Slot) -> None:
        """Store ``original`` only if ``rule`` is ``None``."""
        super().__init__(name, original, path, slot, runs=rule is None)
        self._rule = rule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer with the representation at its path."""
        values = _current_values(self._slot)
        if self.inner is not None:
            output = self.inner(*args, **kwargs)
        else:
            output = _build_output(self._rule or {}, self._slot, tree.arguments(args, kwargs), False)
        self._slot.passed = True
        return tree.put(output, self._path, values.clone())  # a clone, because an in-place operation may follow


class CutReached(BaseException):
    """Raised to stop a forward after the last requested layer; ``except Exception`` does not catch it."""


class Exit(_AtCut):
    """Replacement of the layer of a cut in the front half; it runs the layer and stores the representation."""

    def __init__(self, name: str, original: nn.Module, path: tree.Path, slot: Slot) -> None:
        super().__init__(name, original, path, slot, runs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer and store the representation."""
        assert self.inner is not None
        output = self.inner(*args, **kwargs)
        self._slot.values, self._slot.passed = tree.get(output, self._path), True
        return tree.put(output, self._path, self._slot.values.detach().clone())


class Gone(_Absent):
    """Replacement of a module that no forward runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error."""
        raise RuntimeError(
            f"module {self._name!r} was removed because it did not run when the network was cut: load the network with "
            "example_inputs that run it, and cut it again"
        )


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
"""Lock of every module that an adapter has run; not an attribute of the module, because locks cannot be copied."""

_REGISTERING = threading.Lock()


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """Lock a network, and all networks that share modules with it, for this thread. The lock is reentrant."""
    locks: dict[int, threading.RLock] = {}
    with ExitStack() as stack:
        while (current := _locks_of(model)) != locks:  # another thread has restored modules meanwhile
            stack.close()
            locks = current
            for _, lock in sorted(locks.items()):  # in a fixed order, to avoid deadlocks
                stack.enter_context(lock)
        yield


def _locks_of(model: Any) -> dict[int, threading.RLock]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    new = threading.RLock()
    with _REGISTERING:
        return {id(lock): lock for lock in [_LOCKS.setdefault(module, new) for module in modules]}


@contextmanager
def swapped(model: nn.Module, replacements: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace modules temporarily, wherever they occur in the model; they are restored afterwards, also on errors."""
    originals = exchange(model, replacements)
    try:
        yield
    finally:
        for parent, key, child in originals:
            parent._modules[key] = child


def exchange(model: nn.Module, replacements: Mapping[str, nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Replace modules permanently, wherever they occur in the model; return the parent, key and original of each."""
    targets = {id(model.get_submodule(name)): module for name, module in replacements.items()}
    originals = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent._modules.items()
        if child is not None and id(child) in targets
    ]
    for parent, key, child in originals:
        parent._modules[key] = targets[id(child)]
    return originals
