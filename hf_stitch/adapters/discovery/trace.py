"""Tracing of one forward pass.

A trace contains the modules that ran, their order and outputs, and the outputs that lie on every path.

Autograd provides the dependence on the input: parameters are frozen and only the input requires a gradient, so a tensor
depends on the input exactly if it requires a gradient. An output of a module is a candidate cut exactly if every path
of the graph from the outputs of the model back to the input passes through it (it *dominates*). One forward finds all
candidates. The verification of a cut detects paths that autograd does not record (through integers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hf_stitch.adapters.cutting import tree


@dataclass(frozen=True)
class Fold:
    """A view that splits one axis of three into two, or merges two into one (tokens and grid, width and heads)."""

    axis: int  # index of the merged axis in the tensor of three axes
    length: int  # length of the merged axis
    sides: tuple[int, int] | tuple[()]  # lengths of the two axes; empty if the merged axes are not rows and columns
    shape: tuple[int, ...]  # shape of the tensor with split axes


@dataclass(frozen=True)
class Join:
    """A concatenation of tensors of two or three axes, or padding around one tensor."""

    axis: int  # axis of the concatenation
    lengths: tuple[int, ...]  # length of each part along this axis


Arrangement = Fold | Join
"""A change of the arrangement of positions by one operation."""


class Operations(TorchDispatchMode):
    """Counter of floating-point operations that records arrangements; torch's counter would need module hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.arrangements: list[Arrangement] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and add its floating-point operations if their number is known."""
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.count += formula(*args, **(kwargs or {}), out_val=out)
        if (reads := _ARRANGING.get(func.overloadpacket)) and (arranged := reads(*args, **(kwargs or {}), out=out)):
            self.arrangements.append(arranged)
        return out


def _fold_of_view(values: Tensor, size: Any, *, out: Tensor) -> Fold | None:
    """Return a fold if a view splits one of three axes, or merges axes into one (a grid, or pixels of patches)."""
    before, after = tuple(values.shape), tuple(out.shape)
    flat, folded = (before, after) if len(before) == 3 else (after, before)
    if len(flat) != 3 or len(folded) < 4 or flat[0] != folded[0]:
        return None
    merges = flat is after
    if folded[1] * folded[2] == flat[1] and (len(folded) == 4 or (merges and len(folded) == 6)):
        return Fold(1, flat[1], (folded[1], folded[2]), folded)
    if folded[1] == flat[1]:
        return Fold(2, flat[2], (folded[2], folded[3]), folded) if len(folded) == 4 else None
    return Fold(1, flat[1], (), folded) if merges else None


def _fold_of_patches(
    values: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int], *,
    out: Tensor,
) -> Fold:  # fmt: skip
    """Return the grid of patches of ``torch.nn.functional.unfold``."""
    h, w = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, d, p, s in zip(values.shape[-2:], kernel, dilation, padding, stride, strict=True)
    )
    return Fold(2, h * w, (h, w), ())


def _join_of_concatenation(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> Join | None:
    if out.dim() not in (2, 3):
        return None
    axis = dim % out.dim()
    return Join(axis, tuple(t.shape[axis] for t in tensors if t.dim() == out.dim()))


def _join_of_padding(values: Tensor, pad: Sequence[int], value: float = 0, *, out: Tensor) -> Join | None:
    """Return a join if the padding is along one axis."""
    sides = {values.dim() - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]}
    if len(sides) != 1 or out.dim() not in (2, 3):
        return None
    ((axis, (before, after)),) = sides.items()
    return Join(axis, (before, values.shape[axis], after))


_ARRANGING: dict[Any, Callable[..., Arrangement | None]] = {
    torch.ops.aten.view: _fold_of_view,
    torch.ops.aten._unsafe_view: _fold_of_view,
    torch.ops.aten.im2col: _fold_of_patches,
    torch.ops.aten.cat: _join_of_concatenation,
    torch.ops.aten.constant_pad_nd: _join_of_padding,
}


Edge = tuple[Node, int]


@dataclass(frozen=True)
class TracedTensor:
    """A tensor that a module returned or received."""

    shape: tuple[int, ...]  # shape of the tensor; empty for a nested tensor
    dtype: torch.dtype  # dtype of the tensor
    depends: bool  # whether the tensor depends on the content of the input
    dominates: bool  # whether every path from the outputs of the model to the input passes through the tensor
    is_output: bool  # whether the model returns the tensor
    given: tree.Path | None
    value: int | None  # number that identifies the tensor within a trace; None if it does not depend on the content


@dataclass
class Call:
    """The calls of one module in a forward."""

    name: str  # name of the module
    entered: int  # tick of the first entry
    exited: int = -1  # tick of the last exit
    outputs: list[Any] = field(default_factory=list)
    flops: int = 0  # number of floating-point operations of the forward up to the last exit
    arguments: list[Mapping[tree.Path, Any]] = field(default_factory=list)
    arranged: int = 0  # number of arrangements of the trace up to the last exit

    def tensors(self) -> dict[tree.Path, TracedTensor]:
        """Return the tensors of the last output."""
        return {path: leaf for path, leaf in tree.leaves(self.outputs[-1]) if isinstance(leaf, TracedTensor)}


@dataclass
class Trace:
    """The trace of a forward: shapes without activations."""

    calls: dict[str, Call]  # module name -> calls, in the order of first entry; modules that did not run are absent
    sources: list[str]  # names of the modules that embed the content of the input (token ids)
    has_source: bool  # whether any differentiable value is computed from the content
    reaches: bool  # whether any output of the model depends on the content
    flops: int  # number of floating-point operations of the whole forward
    arrangements: tuple[Arrangement, ...]  # changes of the arrangement of positions, in order


def _dominating(roots: list[Edge], leaves: set[Node]) -> set[Edge]:
    """Return the edges of the graph that lie on every path from the roots to the leaves.

    An edge dominates if (paths from the roots to it) x (paths from it to the leaves) equals the number of all paths.
    Paths are counted exactly, with Python integers.
    """
    order = _topological(node for node, _ in roots)
    down: dict[Node, int] = {}
    for node in order:
        down[node] = (node in leaves) + sum(down[n] for n, _ in node.next_functions if n is not None)
    up_node: dict[Node, int] = dict.fromkeys(order, 0)
    up_edge: dict[Edge, int] = {}
    for edge in roots:
        up_node[edge[0]] += 1
        up_edge[edge] = up_edge.get(edge, 0) + 1
    for node in reversed(order):
        for child, nr in node.next_functions:
            if child is not None:
                up_node[child] += up_node[node]
                up_edge[child, nr] = up_edge.get((child, nr), 0) + up_node[node]
    total = sum(down[node] for node, _ in roots)
    return {edge for edge, count in up_edge.items() if total and count * down[edge[0]] == total}


def _topological(roots: Iterator[Node]) -> list[Node]:
    """Return the nodes reachable from the roots, each after its successors."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in seen)
    return order


def _discard(activation: Tensor) -> Tensor:
    """Replace a saved activation by an empty tensor, because no backward pass runs."""
    return torch.empty(0)


@contextmanager
def _frozen_parameters(model: nn.Module) -> Iterator[None]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trainable:
            p.requires_grad_(False)
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)


Reads = set[tuple[str, int]]
"""Calls: pairs of a module name and the index of the call."""

Integers = dict[tuple[str, int], list[Tensor]]
"""The integer arguments of each call of a module."""


def _integers(args: Any, kwargs: Any) -> list[Tensor]:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not a.is_floating_point()]
    return [a.clone() for a in tensors if a.dtype != torch.bool]


@contextmanager
def noting(model: nn.Module) -> Iterator[Integers]:
    """Record the integers that modules receive."""
    integers: Integers = {}
    count: Counter[str] = Counter()

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        integers[name, count[name]] = _integers(args, kwargs)
        count[name] += 1

    handles = [m.register_forward_pre_hook(partial(note, n), with_kwargs=True) for n, m in model.named_modules()]
    try:
        yield integers
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def noting_outside(model: nn.Module) -> Iterator[set[str]]:
    """Record the Python lists and dicts with modules that run but are not submodules, and so are not traced."""
    inside, paths, handles = set(model.modules()), set[str](), []
    for name, holder in model.named_modules():
        for key, value in vars(holder).items():
            members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            for module in members:
                if isinstance(module, nn.Module) and module not in inside:
                    path = f"{name}.{key}".lstrip(".")
                    handles.append(module.register_forward_pre_hook(lambda *_, path=path: paths.add(path)))
    try:
        yield paths
    finally:
        for handle in handles:
            handle.remove()


def trace(
    model: nn.Module, run: Callable[[Mapping[str, Any]], Any], inputs: Mapping[str, Any], content: tuple[str, ...],
    reads: Reads, others: Integers,
) -> Trace:  # fmt: skip
    """Run a model once and trace it.

    A call reads the content if its integers differ from ``others``, which were recorded with other token ids; it is
    added to ``reads``. This detects ids after any transformation by the model (padding, transposition, hashing).
    Integers that depend only on the positions of padding (position ids) do not differ.
    """
    watch = _Watch(reads, others)
    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(watch.enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(watch.leave, name), with_kwargs=True))
        with (
            torch.inference_mode(False),
            _frozen_parameters(model),
            torch.enable_grad(),
            saved_tensors_hooks(_discard, _discard),
            watch.operations,
        ):
            arguments = {n: watch.sprout(v) if n in content and _is_values(v) else v for n, v in inputs.items()}
            output = run(arguments)
            origins = {get_gradient_edge(leaf).node for leaf in watch.sprouts}
    finally:
        for handle in handles:
            handle.remove()
    return watch.trace(output, origins)


class _Watch:
    """Record of a running forward; it holds edges of the graph until the forward ends."""

    def __init__(self, reads: Reads, others: Integers) -> None:
        self.reads, self.others = reads, others
        self.calls: dict[str, Call] = {}
        self.sources: list[str] = []
        self.sprouts: list[Tensor] = []
        self.operations = Operations()
        self.clock = 0

    def sprout(self, values: Tensor) -> Tensor:
        leaf = values.detach().clone().requires_grad_()
        self.sprouts.append(leaf)
        return leaf.clone()  # in-place operations are not allowed on leaves

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.clock += 1
        key = name, len(self.calls.setdefault(name, Call(name, self.clock)).outputs)
        if key in self.others:
            received, recorded = _integers(args, kwargs), self.others[key]
            if len(received) != len(recorded) or not all(map(torch.equal, received, recorded)):
                self.reads.add(key)

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self.clock += 1
        call, new_output = self.calls[name], output
        if name and (name, len(call.outputs)) in self.reads and _is_source(output):
            self.sources.append(name)
            new_output = tree.transform(output, lambda leaf: self.sprout(leaf) if _is_values(leaf) else leaf)
        call.exited, call.flops = self.clock, self.operations.count
        call.arranged = len(self.operations.arrangements)
        arguments = tree.tensors(tree.arguments(args, kwargs))
        paths = {id(leaf): path for path, leaf in arguments.items()}
        call.arguments.append({path: _graph_tensor(leaf, {}) for path, leaf in arguments.items()})
        # A class that overrides __call__ (Front) may return something else to its caller, which cannot be replaced.
        opaque = not str(type(module).__call__.__module__).startswith(("torch.", "transformers.", "keras."))
        call.outputs.append(None if opaque else tree.transform(new_output, lambda leaf: _graph_tensor(leaf, paths)))
        return new_output

    def trace(self, output: Any, origins: set[Node]) -> Trace:
        """Create the trace: replace edges by their properties in the whole graph."""
        returned = tree.transform(output, lambda leaf: _graph_tensor(leaf, {}))
        roots = [leaf.edge for _, leaf in tree.leaves(returned) if isinstance(leaf, _GraphTensor) and leaf.edge]
        dominating = _dominating(roots, origins)
        numbers: dict[Edge, int] = {}

        def describe(leaf: Any) -> Any:
            if not isinstance(leaf, _GraphTensor):
                return leaf
            return TracedTensor(
                leaf.shape,
                leaf.dtype,
                leaf.edge is not None,
                leaf.edge in dominating,
                leaf.edge in roots,
                leaf.given,
                None if leaf.edge is None else numbers.setdefault(leaf.edge, len(numbers)),
            )

        calls = {
            name: call for name, call in self.calls.items() if call.outputs
        }  # without outputs: an error was raised
        for call in calls.values():
            call.outputs = [tree.transform(output, describe) for output in call.outputs]
            call.arguments = [{path: describe(leaf) for path, leaf in received.items()} for received in call.arguments]
        operations = self.operations
        return Trace(
            calls, self.sources, bool(self.sprouts), bool(roots), operations.count, tuple(operations.arrangements)
        )


def _is_values(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_source(output: Any) -> bool:
    """Return whether an output contains values, all independent of the content so far."""
    values = [leaf for _, leaf in tree.leaves(output) if _is_values(leaf)]
    return bool(values) and all(leaf.grad_fn is None for leaf in values)


@dataclass(frozen=True)
class _GraphTensor:
    """A tensor while the graph exists; ``edge`` is ``None`` if it does not depend on the input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    edge: Edge | None
    given: tree.Path | None


def _graph_tensor(leaf: Any, paths: Mapping[int, tree.Path]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    edge = get_gradient_edge(leaf) if leaf.grad_fn is not None else None
    shape = () if leaf.is_nested else tuple(leaf.shape)
    return _GraphTensor(shape, leaf.dtype, (edge.node, edge.output_nr) if edge else None, paths.get(id(leaf)))
