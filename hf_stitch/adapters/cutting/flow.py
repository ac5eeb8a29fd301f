"""Taint tracking of tensors: it finds dependent outputs of a forward and reads of values by Python code.

An operation with a marked argument marks its output and every tensor that shares memory with it. Only the shape of a
marked tensor can be read without a mark. Taint tracking detects paths that autograd does not see: through integers,
comparisons, or weights that are zero.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_stitch.adapters.cutting import tree

aten = torch.ops.aten
SHAPE_ONLY = {
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full),
}
"""Operations that read only the shape of their argument."""
COMPARISONS = {aten.eq, aten.ne, aten.isin}
MOVES = {
    *(aten.clone, aten._to_copy, aten.copy_, aten.cat, aten.stack, aten.flip, aten.roll, aten.constant_pad_nd),
    *(aten.where, aten.masked_fill, aten.masked_fill_, aten.repeat),
}
"""Operations that rearrange token ids without computing new ones."""
PICKS = {aten.index, aten.index_select, aten.gather}
"""Operations that rearrange ids passed as the source, and compute new ones from ids passed as the index."""
IDS = (torch.int32, torch.int64)
"""dtypes that can hold any token id."""
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
OUTSIDE = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__),
    *(Tensor.map_, Tensor.map2_, Tensor.apply_, Tensor.tensor_split, torch.tensor_split),
}


class ValuesReadError(RuntimeError):
    """Raised if code reads values before the cut, which are not available."""

    def __init__(self, operation: Any) -> None:
        super().__init__(f"the computation depends on values before the cut (it reads them by {operation})")


class Flow:
    """Follow marked tensors through all operations inside ``with flow:``."""

    def __init__(
        self, special_ids: tuple[int, ...] = (), largest_id: int | None = None, *, tiles: bool = False
    ) -> None:
        """Start without marked tensors; with ``tiles``, code may test which images are all zeros."""
        self._tiles = tiles
        self._special = torch.tensor(special_ids, dtype=torch.long)
        self._largest = largest_id
        self._marked: dict[int, tuple[StorageWeakRef, bool]] = {}  # a weak reference reserves the address, not the data
        self._modes = ExitStack()

    def __enter__(self) -> Flow:
        self._modes.enter_context(_Outside(self))
        self._modes.enter_context(_Dispatch(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()

    def mark(self, values: Any) -> Any:
        """Mark the tensors of a tree."""
        for leaf in tree.tensors(values).values():
            self._set_mark(leaf, ids=not leaf.is_floating_point())
        return values

    def reaches(self, values: Any) -> bool:
        """Return whether any tensor of a tree was computed from marked tensors."""
        return any(map(self._is_marked, tree.tensors(values).values()))

    def _is_marked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and any(storage._cdata in self._marked for storage in _storages(value))

    def _set_mark(self, value: Tensor, *, ids: bool) -> None:
        for storage in _storages(value):
            mark = self._marked.get(storage._cdata)
            reference, was_ids = mark or (StorageWeakRef(storage), True)
            self._marked[storage._cdata] = reference, ids and was_ids and value.dtype in IDS

    def _are_ids(self, value: Tensor) -> bool:
        return all(self._marked[storage._cdata][1] for storage in _storages(value) if storage._cdata in self._marked)

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and mark its output if an argument is marked."""
        packet = operation.overloadpacket
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marked_operands = [value for value in operands if self._is_marked(value)]
        if not marked_operands or packet in SHAPE_ONLY:
            return operation(*args, **kwargs)
        ids = all(map(self._are_ids, marked_operands))
        if ids and (
            (packet in COMPARISONS and self._compares_with_special(args, operands))
            or (packet is aten.argmax and self._finds_special(*args, **kwargs))
        ):
            return operation(*args, **kwargs)
        is_zero_test = packet in (aten.eq, aten.ne) and args[0].dim() > 3 and isinstance(args[1], float) and not args[1]
        if self._tiles and is_zero_test:
            return operation(*args, **kwargs)  # a test for padding images; trials detect a test of pixels
        if READS & set(operation.tags) and not (packet is aten.index and not _indexes_by_mask(marked_operands, args)):
            raise ValuesReadError(operation)
        output = operation(*args, **kwargs)
        if operation.is_view:
            return output
        are_moved_ids = ids and (packet in MOVES or (packet in PICKS and self._is_marked(args[0])))
        for leaf in tree_leaves((output, _written_arguments(operation, args, kwargs))):
            if isinstance(leaf, Tensor):
                self._set_mark(leaf, ids=are_moved_ids)
        return output

    def _compares_with_special(self, args: Any, operands: list[Tensor]) -> bool:
        unmarked = [value for value in operands if not self._is_marked(value)]
        numbers = [value for value in args if isinstance(value, (int, float))]
        compared = [*(value.flatten().cpu().long() for value in unmarked), torch.tensor(numbers, dtype=torch.long)]
        return len(unmarked) + len(numbers) == 1 and bool(torch.isin(torch.cat(compared), self._special).all())

    def _finds_special(self, ids: Tensor, dim: int | None = None, keepdim: bool = False) -> bool:
        """Return whether the largest id (the end of a text for CLIP) is special and the largest possible id."""
        largest = ids.max() if dim is None else ids.amax(dim)
        return self._largest in self._special.tolist() and bool(largest.eq(self._largest or 0).all())


def _storages(value: Tensor) -> list[torch.UntypedStorage]:
    if value.layout == torch.strided:
        return [value.untyped_storage()]
    parts = (value._indices(), value._values()) if value.layout == torch.sparse_coo else (value.values(),)
    return [part.untyped_storage() for part in parts]


def _written_arguments(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    return [
        kwargs.get(argument.name) if index >= len(args) else args[index]
        for index, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _indexes_by_mask(marked: list[Tensor], args: Any) -> bool:
    """Return whether an indexing uses a marked mask; the shape of its output then depends on marked values."""
    masks = (torch.bool, torch.uint8)
    return any(index is value and index.dtype in masks for index in args[1] for value in marked)


class _Dispatch(TorchDispatchMode):
    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._flow.run(func, args, kwargs or {})


class _Outside(TorchFunctionMode):
    """Detect conversions to Python or NumPy that do not dispatch an ATen operator."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OUTSIDE and any(map(self._flow._is_marked, args)):
            raise ValuesReadError(func.__name__)
        return func(*args, **(kwargs or {}))
