"""Copies of each verb between devices, and its waits for the device: per job, batch and layer.

This does not need a GPU. Networks are on an emulated device: its tensors are of a subclass that holds their values on
the CPU, and a dispatch mode sees every operation, copies between the devices, and operations that make a CPU wait for a
GPU. As on a GPU, an operation on tensors of two devices is an error, and so is ``numpy()``. Each verb runs with 2 and
with 4 batches and with networks of 2 and of 3 layers; the slopes are the counts per batch, and per batch and layer.

It cannot see waits inside a kernel of a GPU (an SVD waits), seconds, and layouts of memory. NumPy operations on copied
values do not count as work of the device.

``python -m benchmarks device`` prints the table, ``python -m benchmarks.device KIND VERB …`` also the lines that wait.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import accelerate
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils import backend_registration as registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import hf_stitch
from benchmarks.networks import CLASSES, SIDE, data, images, tokenizer
from benchmarks.timing import show
from benchmarks.tiny import shaken
from hf_stitch.training import TaskLoss

NAME = "emulated"
BATCH = 8
WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
         "bincount", "repeat_interleave", "_linalg_check_errors", "tolist"}  # fmt: skip
"""Operations after which the CPU waits for the device: they read a value, check for errors, or return a shape that
depends on values."""


class Counts(NamedTuple):
    """Counts of a verb."""

    waits: Counter[str]  # line of hf_stitch -> operations that wait, copies from the device among them
    sent: Counter[str]  # line -> copies to the device
    numbers: int  # numbers that were copied from the device


class _Module(registration._DummyBackendModule):  # type: ignore[name-defined, misc]
    """Functions that torch requires of the module of a device."""

    def get_rng_state(self, device: object = None) -> Tensor:
        """Return the random state of the CPU, which draws the numbers."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        """Set the random state of the CPU."""
        torch.set_rng_state(state)


@functools.cache
def device() -> torch.device:
    """Return the emulated device; the first call registers it for the whole process."""
    registration._setup_privateuseone_for_python_backend(NAME, _Module())
    library = torch.library.Library("aten", "IMPL")  # torch.tensor(…, device=…) passes below the dispatch mode
    library.impl("empty_strided", lambda *size, dtype=None, **_: Emulated(torch.empty_strided(*size, dtype=dtype)),
                 "PrivateUse1")  # fmt: skip
    library.impl("_copy_from", lambda source, to, _=False: _copied(to, source), "PrivateUse1")
    emulated = torch.device(NAME, 0)
    accelerate.PartialState(cpu=True).device = emulated  # accelerate does not support the emulated device
    _kept.append(library)
    return emulated


_kept: list[Any] = []


class Emulated(Tensor):
    """A tensor on the emulated device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Emulated:
        """Wrap values."""
        wrapper = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=device(), requires_grad=held.requires_grad,
        )  # fmt: skip
        wrapper.held = held
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its graph; a cast of a module sets it."""
        return self.detach()

    @data.setter
    def data(self, value: Emulated) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def tolist(self) -> Any:
        """Return numbers; the CPU waits for them."""
        _note("waits", "tolist", self)
        return self.held.tolist()

    def data_ptr(self) -> int:
        """Return the address of the values, which distinguishes tensors."""
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        """Return the memory of the values."""
        return self.held.untyped_storage()

    def numpy(self, **_: Any) -> Any:
        """Raise an error, as a tensor on a GPU does."""
        raise TypeError(f"can't convert {self.device} device type tensor to numpy; use Tensor.cpu()")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        clone = Emulated(self.held.detach().clone()).requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            clone._is_param = True  # type: ignore[attr-defined]
        return memo.setdefault(id(self), clone)


class _Mode(TorchDispatchMode):
    """Dispatch mode that runs all operations of a verb, also those that create tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_counts: list[Counts] = []


def _note(kind: str, event: str, tensor: Tensor | None = None) -> None:
    """Add an event to the counts of the running line of hf_stitch."""
    frame: Any = sys._getframe(1)
    while frame is not None and "/hf_stitch/" not in frame.f_code.co_filename:
        frame = frame.f_back
    line = "elsewhere" if frame is None else f"{frame.f_code.co_filename.rpartition('/hf_stitch/')[2]}:{frame.f_lineno}"
    if _counts:
        getattr(_counts[-1], kind)[f"{line} {event}"] += 1
        if kind == "waits" and tensor is not None:
            _counts[-1] = _counts[-1]._replace(numbers=_counts[-1].numbers + tensor.numel())


def _on(value: object) -> bool:
    return isinstance(value, Emulated)


def _bare(value: Any) -> Any:
    """Return the values of a tensor on the device; replace the device by the CPU."""
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value.held if isinstance(value, Emulated) else value


def _copied(to: Tensor, source: Tensor) -> Tensor:
    if _on(to) != _on(source):
        _note("sent" if _on(to) else "waits", "copy", source)
    _bare(to).copy_(_bare(source))
    return to


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, count its waits and copies on a GPU, and wrap its outputs for the device."""
    name = func._schema.name.partition("::")[2]
    if name == "copy_":
        return _copied(*args[:2])
    tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
    originals = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, Emulated)}
    requested = kwargs.get("device")
    on_device = bool(originals) if requested is None else torch.device(requested).type == NAME
    if name == "_to_copy":
        if on_device is not bool(originals) and str(requested) != "meta":
            _note("sent" if on_device else "waits", "copy", tensors[0])
    elif originals:
        indices = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)] if name.startswith("index") else []
        if not name.startswith("index") and any(tensor.dim() and not _on(tensor) for tensor in tensors):
            raise RuntimeError(f"{func}: tensors are on {NAME} and on the CPU")
        if any(not _on(tensor) for tensor in indices):
            _note("sent", "index")
        masked = any(tensor.dtype == torch.bool for tensor in indices) and not (len(args) > 2 and not args[2].dim())
        if masked or name in WAITS:
            _note("waits", name, tensors[0] if name == "_local_scalar_dense" else None)
    elif on_device and getattr(kwargs.get("generator"), "device", None) == torch.device("cpu"):
        raise RuntimeError(f"{func}: a generator of the CPU draws on {NAME}")
    outputs = func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
    if not on_device:
        return outputs

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return originals[id(value)] if id(value) in originals else Emulated(value)

    return tree_map(wrapped, outputs)


@contextmanager
def counting() -> Iterator[list[Counts]]:
    """Count the operations inside; append the counts to the list."""
    device()
    _counts[:] = [Counts(Counter(), Counter(), 0)]
    with _Mode():
        yield _counts


def put(module: nn.Module) -> None:
    """Put a network on the device, in place; ``Module.to`` would not keep weights tied."""
    moved: dict[int, Tensor] = {}
    for submodule in module.modules():
        for store in (submodule._parameters, submodule._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    emulated = Emulated(tensor.detach())
                    replacement = (
                        nn.Parameter(emulated, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else emulated
                    )
                    store[name] = moved.setdefault(id(tensor), replacement)


# -- verbs ------------------------------------------------------------------------------------------------------------
SMALL: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
VIT: dict[str, Any] = {**SMALL, "image_size": SIDE, "patch_size": SIDE // 4, "num_labels": CLASSES}
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
KINDS: dict[str, Callable[[int], nn.Module]] = {
    "vit": lambda depth: hf.ViTForImageClassification(hf.ViTConfig(**VIT, num_hidden_layers=depth)),
    "bert": lambda depth: hf.BertForSequenceClassification(
        hf.BertConfig(**TEXT, num_hidden_layers=depth, num_labels=CLASSES)
    ),
    "llama": lambda depth: hf.LlamaForCausalLM(
        hf.LlamaConfig(**TEXT, num_hidden_layers=depth, bos_token_id=1, eos_token_id=2)
    ),
}
"""Kind of networks -> function of the number of layers that builds one."""


class Setting(NamedTuple):
    """Two networks on the device with their cuts already listed, and samples for several batches."""

    kind: str
    networks: Sequence[hf_stitch.Adapter]
    batches: int
    options: Any

    def data(self, seed: int = 0) -> hf_stitch.Samples:
        """Draw samples for all batches."""
        return data(self.kind, self.batches * BATCH, seed)

    def stitched(self) -> hf_stitch.StitchedModel:
        """Stitch the networks at their first layers."""
        a, b = self.networks
        layers = {"source_layer": a.layers[0], "target_layer": b.layers[0]}
        options = {"test_data": self.data(1), "matcher": "lstsq", **layers, **self.options}
        return hf_stitch.stitch(a, b, self.data(), **options)

    def relative(self) -> hf_stitch.StitchedModel:
        """Build a model with a head that reads similarities to anchors."""
        network = self.networks[0]
        options: Any = {"layer": network.layers[-1], "num_labels": CLASSES, **self.options}
        return hf_stitch.relative_model(network, self.data(2), "cosine", **options)


def _swap(s: Setting) -> Callable[[], object]:
    model = s.relative()
    arguments: Any = {"anchors": s.data(2), "encoder_layer": s.networks[1].layers[-1], "data": s.data(3)}
    return lambda: hf_stitch.swap(model, s.networks[1], **arguments, **s.options)


def _audit(s: Setting) -> Callable[[], object]:
    model = s.stitched()
    return lambda: hf_stitch.audit(model, s.data(3), train_data=s.data(4), resamples=20, **s.options)


def _evaluate(s: Setting) -> Callable[[], object]:
    model = s.stitched()
    return lambda: hf_stitch.evaluate(model, s.data(3), resamples=20, **s.options)


def _train(s: Setting) -> Callable[[], object]:
    model = s.stitched()
    return lambda: TaskLoss(epochs=1, batch_size=BATCH).fit(model, s.data(), progress=False)


VERBS: dict[str, Callable[[Setting], Callable[[], object]]] = {
    "compare": lambda s: lambda: hf_stitch.compare(*s.networks, s.data(), **s.options),
    "compare_all": lambda s: lambda: hf_stitch.compare_all(list(s.networks), s.data(), resamples=10, **s.options),
    "extract_activations": lambda s: (
        lambda: hf_stitch.analysis.extract_activations(s.networks[0], s.data(), **s.options)
    ),
    "stitch": lambda s: s.stitched,
    "stitch_grid": lambda s: (
        lambda: hf_stitch.stitch_grid(
            *s.networks, s.data(), test_data=s.data(1), matchers=["lstsq"], resamples=20, **s.options
        )
    ),
    "evaluate": _evaluate,
    "audit": _audit,
    "relative_model": lambda s: s.relative,
    "swap": _swap,
    "TaskLoss.fit": _train,
}
"""Verb -> function of a setting that prepares a job and returns it."""
LAYERED = ("compare", "compare_all", "extract_activations", "stitch_grid")
"""Verbs that read all layers; the rest read one layer of each network."""
OF_SAMPLES = ("relative_model", "swap")
"""Verbs that score one prediction for each sample."""


@functools.cache
def networks(kind: str, depth: int) -> tuple[hf_stitch.Adapter, ...]:
    """Build two networks with random weights, list their cuts, and put them on the device."""
    adapters = []
    for seed in range(2):
        torch.manual_seed(seed)
        inputs: Any = {"example_inputs": images(2)} if kind == "vit" else {"processor": tokenizer()}
        adapter = hf_stitch.load(shaken(KINDS[kind](depth)), **inputs)
        assert len(adapter.layers) >= depth
        put(adapter.model)
        adapters.append(adapter)
    return tuple(adapters)


@functools.cache
def counted(kind: str, verb: str, batches: int, depth: int) -> Counts:
    """Run a verb on the device, and return its counts."""
    with warnings.catch_warnings(), counting() as counts:
        warnings.simplefilter("ignore")
        setting = Setting(kind, networks(kind, depth), batches, {"batch_size": BATCH, "progress": False})
        job = VERBS[verb](setting)
        counts[:] = [Counts(Counter(), Counter(), 0)]
        job()
        return counts[0]


class Slopes(NamedTuple):
    """Counts of a verb for each batch with networks of 2 layers, and the increase with a third layer."""

    waits: float
    waits_of_layer: float
    sent: float
    sent_of_layer: float
    numbers: float  # numbers copied from the device per sample, for networks with 2 layers


def slopes(kind: str, verb: str) -> Slopes:
    """Measure the slopes of a verb."""
    few, many = (counted(kind, verb, batches, 2) for batches in (2, 4))
    deep = [counted(kind, verb, batches, 3) for batches in (2, 4)] if verb in LAYERED else (few, many)
    waits, more = ((b.waits.total() - a.waits.total()) / 2 for a, b in ((few, many), deep))
    sent, more_sent = ((b.sent.total() - a.sent.total()) / 2 for a, b in ((few, many), deep))
    return Slopes(waits, more - waits, sent, more_sent - sent, (many.numbers - few.numbers) / (2 * BATCH))


def lines(kind: str, verb: str, depth: int = 2) -> dict[str, float]:
    """Return the lines that wait, with their number of waits per batch."""
    few, many = (counted(kind, verb, batches, depth).waits for batches in (2, 4))
    return {line: (count - few[line]) / 2 for line, count in many.items() if count != few[line]}


def main() -> None:
    """Print the table."""
    columns = ("networks", "verb", "waits per batch", "and layer", "copies to it per batch", "and layer",
               "numbers from it per sample", "waits per job")  # fmt: skip
    jobs = [(kind, verb) for kind in KINDS for verb in VERBS if kind != "llama" or verb not in OF_SAMPLES]
    figures = ((*job, *slopes(*job), counted(*job, 2, 2).waits.total()) for job in jobs)
    show("on an emulated device", columns, ((kind, verb, *(f"{x:g}" for x in row)) for kind, verb, *row in figures))


if __name__ == "__main__":
    _, *asked = sys.argv
    if not asked:
        main()
    for name in asked[1:]:
        print(name, slopes(asked[0], name))
        for line, count in lines(asked[0], name).items():
            print(f"  {count:g} per batch: {line}")
