"""Replace the tower of a multimodal network and fold an affine map into the next modules; its class stays."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

READERS = (nn.Linear, Conv1D)
"""Classes of modules that can absorb a map in front of them."""

TOLERANCE, HALF_TOLERANCE = 1e-5, 3e-2
"""Maximum difference due to rounding, over the largest output: in float32, and in half precision."""

LONGEST = 160
"""Maximum number of reported characters of an error."""


class CannotFoldError(ValueError):
    """Error for towers or maps that cannot be folded into a network of the class."""


def tolerance(*dtypes: torch.dtype) -> float:
    """Return the maximum difference due to rounding in computations with these dtypes."""
    return HALF_TOLERANCE if min(torch.finfo(dtype).bits for dtype in dtypes) < 32 else TOLERANCE


@dataclass(frozen=True)
class Tower:
    """Part of a network for one modality.

    Attributes:
        name: Name of the module.
        setting: Name of its config in the config of the network; empty if they share a config.
        content: Argument that it reads.
    """

    name: str
    setting: str
    content: str


CONTENT = {
    "vision": ("pixel_values", "flattened_patches"), "audio": ("input_features", "input_values"),
    "text": ("input_ids",),
}  # fmt: skip
"""Modality of a tower -> its possible arguments, the most common first."""


def tower_of(model: Any, part: str) -> Tower:
    """Find the tower of a network for a modality, by its config.

    Args:
        model: A network of transformers.
        part: ``vision``, ``audio`` or ``text``.

    Returns:
        The outermost module with a nested config for this modality; the encoder of an encoder-decoder with one config.

    Raises:
        CannotFoldError: If the network lacks such a tower.

    Example:
        >>> from transformers import CLIPConfig, CLIPModel
        >>> small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        >>> vision, text = {**small, "image_size": 4, "patch_size": 2}, {**small, "vocab_size": 9}
        >>> tower_of(CLIPModel(CLIPConfig(vision_config=vision, text_config=text)), "vision").name
        'vision_model'
    """
    if part not in CONTENT:
        raise ValueError(f"part must be {', '.join(CONTENT)}, got {part!r}")
    configs = {
        id(value): name for name, value in vars(model.config).items() if isinstance(value, PretrainedConfig)
    }  # fmt: skip
    towers = [(name, module, configs[id(module.config)]) for name, module in model.named_modules()
              if name and isinstance(module, PreTrainedModel) and id(module.config) in configs]  # fmt: skip
    by_setting = [tower for tower in towers if tower[2].startswith(part)]  # not high_res_vision_config and others
    by_input = [tower for tower in towers if tower[1].main_input_name in CONTENT[part]]
    for name, _, setting in by_setting or by_input:  # the first is the outermost
        parameters = inspect.signature(model.forward).parameters
        return Tower(name, setting, next((x for x in CONTENT[part] if x in parameters), CONTENT[part][0]))
    if model.config.is_encoder_decoder and model.main_input_name in CONTENT[part]:  # Whisper and its relatives
        encoder = model.get_encoder()
        name = next(name for name, module in model.named_modules() if module is encoder)
        return Tower(name, "", model.main_input_name)
    raise CannotFoldError(
        f"part={part!r} requires a tower with a nested config, but the nested configs of {type(model).__name__} are "
        f"{', '.join(configs.values()) or 'none'}"
    )


@dataclass
class Reading:
    """Features that the modules after a tower read in one forward pass.

    Attributes:
        features: The features, (samples, positions, width) or (samples, width).
        readers: Names of the modules that read them.
        output: Output of the network.
        groups: Number of concatenated tower positions in each position of the features.
    """

    features: Tensor
    readers: tuple[str, ...]
    output: Any
    groups: int = 1


class _EnoughError(Exception):
    """Stops a forward pass after the features were read."""


@torch.no_grad()
def features_of(model: nn.Module, readers: Sequence[str], inputs: Mapping[str, Any]) -> Tensor:
    """Run a network up to the first module that reads its tower, and return the features.

    Args:
        model: The network.
        readers: Names of the modules that read the tower.
        inputs: Arguments of the forward.

    Returns:
        The features, (samples, positions, width) or (samples, width).
    """
    features: list[Tensor] = []

    def stop(module: nn.Module, args: Any) -> None:
        features.append(args[0])
        raise _EnoughError

    with ExitStack() as stack, suppress(_EnoughError):
        for name in readers:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(stop).remove)
        model(**inputs)
    return features[0]


@torch.no_grad()
def read(model: nn.Module, tower: str, inputs: Mapping[str, Any]) -> Reading:
    """Run a network and find the modules that read the output of its tower.

    Args:
        model: The network.
        tower: Name of the tower.
        inputs: Arguments of the forward.

    Returns:
        The features, which are equal for all these modules.

    Raises:
        CannotFoldError: If modules other than linear ones read the output, or several modules read different parts.
    """
    tower_outputs: list[Tensor] = []
    features: dict[str, Tensor] = {}
    regrouped: dict[str, tuple[Tensor, int] | None] = {}  # module -> its input, and the width of one position

    def record_outputs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tower_outputs.extend(_tensors(output))

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            values = args[0] if args else None
            if isinstance(values, Tensor) and any(
                _shares(values, x) and values.shape[-1] == x.shape[-1] for x in tower_outputs
            ):
                features[name] = values
            elif isinstance(values, Tensor):
                regrouped[name] = next(
                    ((values, tensor.shape[-1]) for tensor in tower_outputs if _regroups(values, tensor)), None
                )

        return hook

    with ExitStack() as stack:
        tower_module = model.get_submodule(tower)
        stack.callback(tower_module.register_forward_hook(record_outputs, with_kwargs=True).remove)
        for name, module in model.named_modules():
            if isinstance(module, READERS) and not name.startswith(tower + "."):
                stack.callback(module.register_forward_pre_hook(hook_of(name)).remove)
        try:
            output = model(**inputs)
        except Exception as error:  # the network may check the number of positions
            raise CannotFoldError(f"{type(model).__name__} cannot run with this tower: {_short(error)}") from error
    readers = [(name, *found) for name, found in regrouped.items() if found]
    if not features and len(readers) == 1:
        [(name, values, width)] = readers
        return Reading(values, (name,), output, values.shape[-1] // width)
    if not features:
        raise CannotFoldError(
            f"the output of {tower} in {type(model).__name__} is not read by a linear module: a norm, pooling or "
            "attention comes first"
        )
    first = next(iter(features.values()))
    if any(candidate.shape != first.shape or not torch.equal(candidate, first) for candidate in features.values()):
        raise CannotFoldError(f"{', '.join(features)} read different parts of the output of {tower}")
    return Reading(first, tuple(features), output)


def _short(error: Exception) -> str:
    """Return the beginning of an error message, which may contain whole configs."""
    text = " ".join(str(error).split())
    return text if len(text) < LONGEST else f"{text[:LONGEST]}…"


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield all tensors in an output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for element in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(element)


def _regroups(values: Tensor, tower_output: Tensor) -> bool:
    """Return whether a tensor concatenates several positions of a second one, in any order (pixel shuffles)."""
    width = tower_output.shape[-1] if tower_output.dim() > 1 else 0
    if not width or values.numel() != tower_output.numel() or values.shape[-1] % width:
        return False
    rows = (tensor.reshape(-1, width).unique(dim=0) for tensor in (values, tower_output))
    return torch.equal(*rows)


def _shares(values: Tensor, tower_output: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return values.untyped_storage().data_ptr() == tower_output.untyped_storage().data_ptr()


EXTRA = ("projection_dim",)
"""Fields that a network reads from the config of its tower, but that configs of separate encoders lack."""

OF_ENCODER = ("encoder_", "num_mel_bins", "max_source_positions")
"""Prefixes of encoder fields in a config of encoder and decoder."""

SETTINGS = {"vision_feature_select_strategy": ("full", "default")}
"""Fields that select the features of a tower; towers without a first token require a different value."""


def variants(config: Any) -> Iterator[dict[str, Any]]:
    """Yield changes of a config for a new tower, first without any change."""
    yield {}
    for name, values in SETTINGS.items():
        yield from ({name: value} for value in values if getattr(config, name, value) != value)


# -- a new tower ----------------------------------------------------------------------------------------------------
def with_tower(model: Any, tower: Tower, encoder: Any, settings: Mapping[str, Any] | None = None) -> Any:
    """Return a network of the class of a model with a new encoder as its tower, and the rest of the weights.

    Args:
        model: The network.
        tower: Its tower.
        encoder: A transformers network, with or without a head.
        settings: Changed fields of the config, from :func:`variants`.

    Returns:
        The network, in eval mode. Weights after the tower that do not fit are random.

    Raises:
        CannotFoldError: If the class of the model builds a different tower from the config of the encoder.
    """
    backbone = getattr(encoder, "base_model", encoder)
    if not isinstance(backbone, PreTrainedModel):
        raise CannotFoldError(f"{type(encoder).__name__} is not a transformers class, so a config cannot describe it")
    config, encoder_config = copy.deepcopy(model.config), copy.deepcopy(backbone.config)
    for name in EXTRA if tower.setting else ():
        if not hasattr(encoder_config, name) and hasattr(old_config := getattr(model.config, tower.setting), name):
            setattr(encoder_config, name, getattr(old_config, name))
    parameter = next(model.parameters())
    try:
        if tower.setting:
            setattr(config, tower.setting, encoder_config)
        else:  # one config for encoder and decoder
            config.update(
                {name: value for name, value in encoder_config.to_dict().items() if name.startswith(OF_ENCODER)}
            )
        for name, value in (settings or {}).items():
            setattr(config, name, value)
        with torch.random.fork_rng():
            network = type(model)(config).to(parameter.device, parameter.dtype).eval()
    except Exception as error:  # networks can raise anything for an unexpected config
        raise CannotFoldError(
            f"{type(model).__name__} does not accept a {type(backbone.config).__name__}: {_short(error)}"
        ) from error
    new_tower = network.get_submodule(tower.name)
    weights, expected = backbone.state_dict(), new_tower.state_dict()
    prefix = max(("", "vision_model.", "encoder."), key=lambda candidate: _count(weights, expected, candidate))
    if not _count(weights, expected, prefix):
        raise CannotFoldError(
            f"{type(model).__name__} builds {type(new_tower).__name__} from {type(backbone.config).__name__}, with "
            f"weights that do not match {type(backbone).__name__}"
            + ("" if tower.setting else ": encoder and decoder share a config, so their widths must be equal")
        )
    new_tower.load_state_dict(
        {name: weights.get(prefix + name, torch.zeros_like(value)) for name, value in expected.items()}
    )
    if any(prefix + name not in weights for name in expected):  # possibly an unused pooling
        _check_same(new_tower, backbone, tower)
    new_state = network.state_dict()
    rest = {name: value for name, value in model.state_dict().items() if not name.startswith(tower.name + ".")}
    if unknown := rest.keys() - new_state.keys():
        raise CannotFoldError(
            f"{type(model).__name__} has weights that do not follow from its config ({min(unknown)}, …): merge PEFT "
            "adapters first (merge_and_unload), or exchange the tower before quantization"
        )
    rest = {name: value for name, value in rest.items() if new_state[name].shape == value.shape}
    network.load_state_dict(rest, strict=False)
    network.tie_weights()
    _copy_state(
        network,
        model,
        {name: name for name, _ in network.named_modules() if not f"{name}.".startswith(f"{tower.name}.")},
        True,
    )
    _copy_state(
        new_tower, backbone, {name: (prefix + name).rstrip(".") for name, _ in new_tower.named_modules()}, False
    )
    if getattr(model, "generation_config", None) is not None:
        network.generation_config = copy.deepcopy(model.generation_config)
    return network


def _copy_state(target: nn.Module, model: nn.Module, names: Mapping[str, str], dtypes: bool) -> None:
    """Copy buffers, which a state may lack, and optionally the dtypes of parameters from a second network.

    Args:
        target: The network to change.
        model: The network with the buffers and dtypes.
        names: Name of a module -> its name in the second network.
        dtypes: Whether to copy dtypes: in half precision, some parameters stay in float32.
    """
    others = dict(model.named_modules())
    for name, module in target.named_modules():
        reference = others.get(names.get(name, name)) if name in names else None
        if reference is None:
            continue
        for key, value in reference._buffers.items():
            own_buffer = module._buffers.get(key)
            if value is not None and own_buffer is not None and own_buffer.shape == value.shape:
                module._buffers[key] = value.detach().clone().to(own_buffer.device)
        for key, reference_parameter in reference._parameters.items():
            own_parameter = module._parameters.get(key)
            if (
                dtypes
                and reference_parameter is not None
                and own_parameter is not None
                and own_parameter.dtype != reference_parameter.dtype
            ):
                own_parameter.data = own_parameter.data.to(reference_parameter.dtype)


def _count(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of weights of a tower that a state contains under a prefix; 0 if a shape differs."""
    matches = [
        prefix + name in weights and weights[prefix + name].shape == value.shape for name, value in expected.items()
    ]
    mismatch = any(prefix + name in weights and not same for name, same in zip(expected, matches, strict=True))
    return 0 if mismatch else sum(matches)


def _check_same(new_tower: Any, backbone: Any, tower: Tower) -> None:
    """Check that a tower with missing weights computes the same hidden states as its encoder."""
    config, size = backbone.config, getattr(backbone.config, "image_size", None)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    parameter, generator, states = next(backbone.parameters()), torch.Generator().manual_seed(0), None
    if size:
        pixels = torch.randn(2, config.num_channels, height, width, generator=generator).to(parameter)
        states = [module(**{tower.content: pixels}).last_hidden_state for module in (new_tower, backbone)]
    if states is None or not torch.equal(*states):
        raise CannotFoldError(
            f"{type(backbone).__name__} lacks weights of {type(new_tower).__name__} that affect its hidden states, or "
            "they have different names: merge PEFT adapters first (merge_and_unload)"
        )


# -- a map in front of readers ----------------------------------------------------------------------------------------
def matrix_of(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return the weights of a linear module as (inputs, outputs) in float64, and its bias."""
    weight = module.weight.detach().double()
    return weight if isinstance(module, Conv1D) else weight.T, None if module.bias is None else module.bias.double()


@torch.no_grad()
def fold(
    model: Any, folded: Any, readers: Mapping[str, str], matrix: Tensor, bias: Tensor, groups: int = 1
) -> None:  # fmt: skip
    """Put an affine map in front of the readers of a tower, in place.

    Args:
        model: The network with the old tower.
        folded: The network with the new tower, from :func:`with_tower`.
        readers: Reader of the new network -> reader of the old network, ``""`` for an additional reader.
        matrix: (width of the new tower, width of the old tower) float64.
        bias: (width of the old tower,) float64.
        groups: Number of concatenated positions per input of the readers; each is mapped.

    Raises:
        CannotFoldError: If a reader without a bias would require one.
    """
    device = next(folded.parameters()).device
    matrix, bias = torch.block_diag(*[matrix.to(device)] * groups), bias.to(device).repeat(groups)
    for name, old_name in readers.items():
        module = folded.get_submodule(name)
        weight, shift = matrix, bias
        if old_name:
            old, old_bias = matrix_of(model.get_submodule(old_name))
            weight, shift = matrix @ old, bias @ old + (0 if old_bias is None else old_bias)
        if module.bias is None:
            if float(shift.abs().max()) > 0:
                raise CannotFoldError(f"{name} does not have a bias: use a matcher without a bias")
        else:
            module.bias.copy_(shift.to(module.bias.dtype))
        module.weight.copy_((weight if isinstance(module, Conv1D) else weight.T).to(module.weight.dtype))


def paired_readers(old: Reading, new: Reading, model: nn.Module) -> dict[str, str]:
    """Return the reader of the old tower that each reader of the new tower replaces.

    Raises:
        CannotFoldError: If readers cannot be paired by name.
    """
    if set(new.readers) == set(old.readers):
        return {name: name for name in new.readers}
    if len(new.readers) == 1 and new.readers[0] not in dict(model.named_modules()):
        return {new.readers[0]: ""}  # the class adds a projection between unequal widths
    raise CannotFoldError(
        f"the class connects towers of this width differently: {', '.join(old.readers)} read the old tower, "
        f"{', '.join(new.readers)} the new tower"
    )


@contextmanager
def replacing_features(model: nn.Module, readers: tuple[str, ...], features: Tensor) -> Iterator[None]:
    """Replace the features that the readers of a tower read."""

    def put(module: nn.Module, args: Any) -> Any:
        return (features.contiguous(), *args[1:])

    with ExitStack() as stack:
        for name in readers:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(put).remove)
        yield


@torch.no_grad()
def difference(model: Any, folded: Any, inputs: Mapping[str, Any], new: Mapping[str, Any], tower: Tower,
               matrix: Tensor, bias: Tensor, plain: Callable[[Any], Tensor]) -> float:  # fmt: skip
    """Return the difference between the outputs of a folded network and of the old network with mapped features.

    Args:
        model: The network with the old tower.
        folded: The folded network.
        inputs: Inputs of the old network.
        new: Inputs of the folded network.
        tower: The tower.
        matrix: The map, (width of the new tower, width of the old tower).
        bias: Its bias.
        plain: Function that returns the compared tensor of an output.

    Returns:
        The largest difference of outputs, over the largest output.
    """
    old, reading = read(model, tower.name, inputs), read(folded, tower.name, new)
    rows = reading.features.double().unflatten(-1, (reading.groups, -1))
    mapped = (rows @ matrix.to(rows.device) + bias.to(rows.device)).flatten(-2).to(old.features.dtype)
    if mapped.dtype in (torch.float16, torch.bfloat16):  # deep networks amplify rounding: compare at the readers
        pairs = [
            (
                folded.get_submodule(name)(reading.features),
                model.get_submodule(name)(mapped) if name in old.readers else mapped,
            )
            for name in reading.readers
        ]
        return max(float((output - expected).abs().max() / expected.abs().max()) for output, expected in pairs)
    with replacing_features(model, old.readers, mapped):
        expected = plain(model(**inputs))
    return float((expected - plain(reading.output)).abs().max() / expected.abs().max())
