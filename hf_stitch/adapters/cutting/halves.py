"""The two halves of a network as independent modules with only the weights that they use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, inference_mode, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hf_stitch.adapters.cutting.cut import Cut, CutPlan, captured_values, fill, in_context, size_of
from hf_stitch.adapters.cutting.forwards import plain, run_by_length
from hf_stitch.adapters.cutting.interface import Interface, size_of_inputs
from hf_stitch.adapters.cutting.surgery import Slot, exchange, is_bookkeeping, swapped
from hf_stitch.offloading import State, hooks_of, is_offloaded, shared
from hf_stitch.reference import Settings
from hf_stitch.representation import Representation

CHECKPOINTS = ("grad_checkpointing", "gradient_checkpointing")
"""Flags of modules that enable gradient checkpointing in timm and transformers."""

TIES = ("_tied_weights_keys", "all_tied_weights_keys")
"""Attributes of transformers that list tied weights."""


@dataclass
class Observed:
    """Additional outputs of a front half: arguments that request them, the output, and the values at the cut."""

    flags: Mapping[str, Any]
    output: Any = None
    values: Tensor | None = None


class HalfError(RuntimeError, ValueError):
    """Raised if a half cannot run on its inputs; ``__cause__`` is the error of the network.

    Either the network does not accept the input, or the record of the half is damaged.
    """

    def __init__(self, half: _Half, error: Exception) -> None:
        side = "up to" if isinstance(half, Front) else "after"
        super().__init__(
            f"the part of {type(half.model).__name__} {side} {half.cut.layer!r} cannot run on these inputs "
            f"({type(error).__name__}: {error}). If the inputs are correct and the model was loaded from files, the "
            "record in the files is damaged: save or download the model again"
        )


class _Half(nn.Module):
    """A part of a network, with all modules outside this part replaced."""

    def __init__(
        self, model: nn.Module, cut: Cut, plan: CutPlan, interface: Interface,
        stand_ins: Callable[[nn.Module, Cut, Slot], dict[str, nn.Module]],
    ) -> None:  # fmt: skip
        self._slot = Slot()  # before the modules, because a copy follows the order of attributes
        super().__init__()
        _prepare(model, cut, plan)
        exchange(model, stand_ins(model, cut, self._slot))
        _persist_buffers(model)
        self.model = model
        self.cut, self.plan, self.interface = cut, plan, interface
        self.attributes_at_cut: Settings | None = None  # compared when saving, to find changes by hand

    def _run(self, values: Tensor | None, size: tuple[int, int], inputs: Mapping[str, Any]) -> tuple[Any, Tensor]:
        """Return the output of the network and the values at the cut."""
        fill(self._slot, values, size)
        try:
            with plain():
                output = self.model(**{**self.interface.options, **inputs})
            return output, captured_values(self._slot, self.cut)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise HalfError(self, error) from error
        finally:
            self._slot.values = None


class Front(_Half):
    """The part of a network up to a cut, as an independent module without hooks and unused weights.

    Create it with :meth:`hf_stitch.Adapter.front`. It maps inputs of the network to the
    :class:`~hf_stitch.Representation` at the cut. Several threads may run it at the same time.

    Args:
        model: Copy of the network; it becomes part of this module and is changed.
        cut: Cut at the end of the part.
        plan: Verified plan with the modules to replace.
        interface: Interface of the network.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import hf_stitch
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(network, example_inputs=torch.randn(2, 4))
        >>> front = adapter.front("1")
        >>> front(input=torch.ones(3, 4)).values.shape
        torch.Size([3, 8])
        >>> sum(p.numel() for p in front.parameters())
        40
    """

    def __init__(self, model: nn.Module, cut: Cut, plan: CutPlan, interface: Interface) -> None:
        super().__init__(model, cut, plan, interface, plan.before_cut)

    @property
    def takes(self) -> Interface:
        """Interface of this half, the same as the interface of the network."""
        return self.interface

    def __call__(self, seen: Observed | None = None, /, **inputs: Any) -> Representation:
        """Compute the representation at the cut."""

        def run(part: Mapping[str, Any]) -> tuple[Representation, Any]:
            outputs = None if seen is None else Observed(seen.flags)
            return self._observed(outputs, part), None if outputs is None else outputs.output

        representation, output = run_by_length(run, self.interface.complete(inputs), self.interface)
        if seen is not None:
            seen.output, seen.values = output, self.cut.restore(representation.values)
        return cast(Representation, representation)

    def _observed(self, seen: Observed | None, inputs: Mapping[str, Any]) -> Representation:
        values = super().__call__(*(() if seen is None else (seen,)), **inputs)
        try:
            return self._represent(values, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise HalfError(self, error) from error

    def forward(self, seen: Observed | None = None, /, **inputs: Any) -> Tensor:
        """Compute the values at the cut, with the axes in the order of the network; hooks receive these values.

        Args:
            seen: Request for additional outputs: its flags are passed to the network, and it stores the output.
            **inputs: Inputs of the network; ``inputs_embeds`` in place of token ids if the network accepts them.
        """
        _check_size(inputs, self.interface, self.cut)
        size = size_of_inputs(self._with_ids(inputs), self.interface)
        output, values = self._run(None, size, {**inputs, **({} if seen is None else seen.flags)})
        if seen is not None:
            seen.output = output
        return values

    def _represent(self, values: Tensor, inputs: Mapping[str, Any]) -> Representation:
        return self.cut.represent(values, self._with_ids(inputs), self.interface)

    def _with_ids(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return inputs with token ids in place of embeddings."""
        if (embedded := inputs.get("inputs_embeds")) is None:
            return inputs
        ids = torch.full(embedded.shape[:2], self.interface.filler_id, device=embedded.device)
        return {self.interface.content[0]: ids} | {k: v for k, v in inputs.items() if k != "inputs_embeds"}


class Back(_Half):
    """The part of a network after a cut, as an independent module without hooks and unused weights.

    Create it with :meth:`hf_stitch.Adapter.back`. It maps a :class:`~hf_stitch.Representation` in the spec of the cut
    to the output of the network; a representation without a context gets a blank one. Images and sequences must have
    the size of the inputs that verified the cut. Several threads may run it at the same time.

    Args:
        model: Copy of the network; it becomes part of this module and is changed.
        cut: Cut at the beginning of the part.
        plan: Verified plan with the modules to replace.
        interface: Interface of the network.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import hf_stitch
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(network, example_inputs=torch.randn(2, 4))
        >>> x = torch.ones(3, 4)
        >>> torch.equal(adapter.back("1")(adapter.front("1")(input=x)), network(x))
        True
    """

    def __init__(self, model: nn.Module, cut: Cut, plan: CutPlan, interface: Interface) -> None:
        super().__init__(model, cut, plan, interface, plan.after_cut)

    def __call__(self, representation: Representation, **options: Any) -> Any:
        """Compute the output of the network from a representation in the spec of the cut."""
        _check_size(representation.context, self.interface, self.cut)
        complete = in_context(self.cut.accept(representation, self.interface), self.interface)
        return run_by_length(partial(self._output, options), complete, self.interface)

    def _output(self, options: Mapping[str, Any], representation: Representation) -> Any:
        context, size = self.plan.context(representation, self.interface), size_of(representation, self.interface)
        return super().__call__(self.cut.restore(representation.values), _size=size, **{**context, **options})

    def forward(self, values: Tensor, /, *, _size: tuple[int, int], **inputs: Any) -> Any:
        """Compute the output from the values at the cut; hooks of this module receive these values."""
        return self.interface.kept(self._run(values, _size, inputs)[0])


def _check_size(inputs: Mapping[str, Any], interface: Interface, cut: Cut) -> None:
    """Raise an error for images and sequences of another size: the rest may depend on sizes of the removed part."""
    for name in interface.shapes:
        if name in inputs and (shape := interface.shape(inputs, name)) != interface.shapes[name]:
            raise ValueError(
                f"the network was cut at {cut.layer!r} for {name} of the shape {interface.shapes[name]}, got "
                f"{shape}: resize or pad them, or load the network with example_inputs of that size and cut it again"
            )


def _prepare(model: nn.Module, cut: Cut, plan: CutPlan) -> None:
    """Prepare a network before its modules are replaced permanently.

    Transformers installs its hooks while every module is present, so that the replacements get them too. Gradient
    checkpointing is disabled around the cut: a backward pass would run that code again without the representation. The
    lists of tied weights are cleared: they describe the whole network, and a half may contain only one of two weights.
    """
    for module in model.modules():
        for name in TIES:
            if getattr(module, name, None):
                setattr(module, name, {})
    for module in map(model.get_submodule, cut.around):
        for flag in CHECKPOINTS:
            if vars(module).get(flag) is True:
                setattr(module, flag, False)
    if plan.records:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        maybe_install_capturing_hooks(model)  # type: ignore[arg-type]


def _persist_buffers(model: nn.Module) -> None:
    """Make every buffer persistent: on the meta device, a constructor cannot recompute non-persistent buffers."""
    for module in model.modules():
        module._non_persistent_buffers_set.clear()


MAKING_WEIGHTS = (BasePruningMethod, SpectralNorm, WeightNorm)
"""Hooks of PyTorch that compute a weight from other weights before each forward."""


WITHOUT_WEIGHTS: dict[str, Any] = {
    name: getattr(nn.Module, name)
    for name in ("__getattr__", "__setstate__", "state_dict", "_save_to_state_dict", "get_extra_state")
} | {"__deepcopy__": None, "__getstate__": object.__getstate__, "__reduce_ex__": object.__reduce_ex__}
"""Methods that a copy uses, without overrides that read weights or children (quantized layers, PEFT)."""


def hollow(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module with its plain attributes, but without parameters, buffers and children."""
    kind: Any = type(module)  # a subclass, because transformers selects the modules to record by class
    twin: nn.Module = object.__new__(type(kind)(kind.__name__, (kind,), dict(WITHOUT_WEIGHTS)))
    vars(twin).update(vars(module))
    for name in ("_hf_hook", "_old_forward", "forward"):  # set by accelerate, which moves weights
        vars(twin).pop(name, None)
    twin._modules, twin._parameters, twin._buffers = {}, {}, {}
    return twin


def copy_without(model: nn.Module, replacements: Mapping[str, nn.Module]) -> nn.Module:
    """Copy a model in eval mode, with some modules replaced before the copy, and with no hooks except weight hooks.

    The copy of a model with weights offloaded by accelerate shares these weights and the hooks that load them.
    """
    with swapped(model, replacements):
        offloaded = is_offloaded(model)
        state = State(model)
        if empty := [name for name in state if state.lacks(name)]:
            raise ValueError(
                f"{len(empty)} weights of {type(model).__name__} are not loaded, e.g. {empty[0]}: they are on the meta "
                "device without a hook of accelerate that loads them; load the model first"
            )
        tensors = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
        copies: dict[int, Any] = {
            id(value): value.detach().clone() for value in tensors if not value.is_leaf
        }  # by hooks
        try:
            with inference_mode(False):  # inference tensors cannot be trained, and kernels handle them differently
                twin = copy.deepcopy(model, copies | (shared(model) if offloaded else {}))
        except Exception as error:
            raise ValueError(_copy_error(model, error)) from error
    if not offloaded and (hooked := [module for module in twin.modules() if hooks_of(module)]):
        from accelerate.hooks import remove_hook_from_module

        for module in hooked:
            remove_hook_from_module(module)
    for name, module in twin.named_modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            allowed_hooks = {key: hook for key, hook in hooks.items() if not is_bookkeeping(hook)}
            if unknown := [hook for hook in allowed_hooks.values() if not isinstance(hook, MAKING_WEIGHTS)]:
                raise ValueError(
                    f"module {name!r} of {type(twin).__name__} has a hook ({unknown[0]!r}), but halves of a network "
                    "cannot have hooks: remove it, or move its computation into the module"
                )
            hooks.clear()
            hooks.update(allowed_hooks)
        vars(module).pop("_output_capturing_hooks_installed", None)  # transformers installs them again on demand
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return twin.eval()


def _copy_error(model: nn.Module, error: Exception) -> str:
    culprit = ""
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            try:
                copy.deepcopy(module)
            except Exception:
                culprit = f" because of its module {name!r}, {type(module).__name__}"
                break
    return (
        f"{type(model).__name__} cannot be copied{culprit} ({type(error).__name__}: {error}), but a half of a network "
        "is a copy: stitch another form, e.g. before quantization; hf_stitch.compare works without a copy"
    )
