"""Put another tower and an affine map into a network of two modalities, so that it stays one of its class."""

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
"""Classes of modules into which a map in front of them folds."""

EQUAL = {False: 1e-5, True: 3e-2}
"""Greatest difference between the folded network and the mapped one, over the largest output; in half precision."""


LONGEST = 160
"""Number of letters of an error of a network that are told."""


class CannotFoldError(ValueError):
    """No network of the class has the other tower and the map."""


@dataclass(frozen=True)
class Tower:
    """A part of a network that reads one modality.

    Attributes:
        name: Name of the module.
        setting: Name of its config in the config of the network; empty if it has none of its own.
        content: Argument that it reads.
    """

    name: str
    setting: str
    content: str


CONTENT = {
    "vision": ("pixel_values", "flattened_patches"), "audio": ("input_features", "input_values"),
    "text": ("input_ids",),
}  # fmt: skip
"""Part of a network -> arguments that its tower may read."""


def tower_of(model: Any, part: str) -> Tower:
    """Find the tower of a network that reads a modality, by its config.

    Args:
        model: A network of transformers.
        part: ``vision``, ``audio`` or ``text``.

    Returns:
        The outermost module that has a config of its own and reads this modality; of an encoder and a decoder with
        one config, the encoder.

    Raises:
        CannotFoldError: If there is none.

    Example:
        >>> from transformers import CLIPConfig, CLIPModel
        >>> small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        >>> vision, text = {**small, "image_size": 4, "patch_size": 2}, {**small, "vocab_size": 9}
        >>> tower_of(CLIPModel(CLIPConfig(vision_config=vision, text_config=text)), "vision").name
        'vision_model'
    """
    if part not in CONTENT:
        raise ValueError(f"part must be {', '.join(CONTENT)}, got {part!r}")
    own = {
        id(value): name for name, value in vars(model.config).items() if isinstance(value, PretrainedConfig)
    }  # fmt: skip
    towers = [(name, module, own[id(module.config)]) for name, module in model.named_modules()
              if name and isinstance(module, PreTrainedModel) and id(module.config) in own]  # fmt: skip
    named = [each for each in towers if each[2].startswith(part)]  # before high_res_vision_config and others
    for name, _, setting in named or [each for each in towers if each[1].main_input_name in CONTENT[part]]:
        takes = inspect.signature(model.forward).parameters
        return Tower(name, setting, next((each for each in CONTENT[part] if each in takes), CONTENT[part][0]))
    if model.config.is_encoder_decoder and model.main_input_name in CONTENT[part]:  # Whisper and its relatives
        inner = model.get_encoder()
        return Tower(next(name for name, each in model.named_modules() if each is inner), "", model.main_input_name)
    raise CannotFoldError(
        f"{type(model).__name__} has no {part} tower with a config of its own; configs in its config: "
        f"{', '.join(own.values()) or 'none'}"
    )


@dataclass
class Reading:
    """What the modules behind a tower read of it in one forward.

    Attributes:
        features: What they read, (samples, positions, width) or (samples, width).
        readers: Names of the modules.
        output: Output of the network.
        groups: Number of positions of the tower that lie side by side in each of theirs.
    """

    features: Tensor
    readers: tuple[str, ...]
    output: Any
    groups: int = 1


class _EnoughError(Exception):
    """What was wanted has been read."""


@torch.no_grad()
def features_of(model: nn.Module, readers: Sequence[str], inputs: Mapping[str, Any]) -> Tensor:
    """Run a network up to the first module that reads its tower, and return what it reads.

    Args:
        model: The network.
        readers: Names of the modules.
        inputs: Arguments of the forward.

    Returns:
        The features, (samples, positions, width) or (samples, width).
    """
    found: list[Tensor] = []

    def stop(module: nn.Module, args: Any) -> None:
        found.append(args[0])
        raise _EnoughError

    with ExitStack() as stack, suppress(_EnoughError):
        for name in readers:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(stop).remove)
        model(**inputs)
    return found[0]


@torch.no_grad()
def read(model: nn.Module, tower: str, inputs: Mapping[str, Any]) -> Reading:
    """Run a network and note which modules read the output of its tower.

    Args:
        model: The network.
        tower: Name of the tower.
        inputs: Arguments of the forward.

    Returns:
        What they read. All of them read the same values.

    Raises:
        CannotFoldError: If the output is not read by linear modules alone, or by several in different ways.
    """
    given: list[Tensor] = []
    found: dict[str, Tensor] = {}
    grouped: dict[str, tuple[Tensor, int] | None] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given.extend(_tensors(output))

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            values = args[0] if args else None
            if isinstance(values, Tensor) and any(
                _shares(values, x) and values.shape[-1] == x.shape[-1] for x in given
            ):
                found[name] = values
            elif isinstance(values, Tensor):
                grouped[name] = next(((values, each.shape[-1]) for each in given if _regroups(values, each)), None)

        return hook

    with ExitStack() as stack:
        part = model.get_submodule(tower)
        stack.callback(part.register_forward_hook(note, with_kwargs=True).remove)
        for name, module in model.named_modules():
            if isinstance(module, READERS) and not name.startswith(tower + "."):
                stack.callback(module.register_forward_pre_hook(watch(name)).remove)
        try:
            output = model(**inputs)
        except Exception as error:  # the code of the network checks numbers of positions in its own way
            raise CannotFoldError(f"{type(model).__name__} does not run with this tower: {_short(error)}") from error
    if not found and (seen := [(name, *each) for name, each in grouped.items() if each]):
        [(name, values, width), *others] = seen
        if not others:
            return Reading(values, (name,), output, values.shape[-1] // width)
    if not found:
        raise CannotFoldError(
            f"no linear module of {type(model).__name__} reads the output of {tower}: a norm, a pooling or attention "
            "comes first"
        )
    first = next(iter(found.values()))
    if any(each.shape != first.shape or not torch.equal(each, first) for each in found.values()):
        raise CannotFoldError(f"{', '.join(found)} read different parts of the output of {tower}")
    return Reading(first, tuple(found), output)


def _short(error: Exception) -> str:
    """Return the beginning of an error, of which configs are a part."""
    text = " ".join(str(error).split())
    return text if len(text) < LONGEST else f"{text[:LONGEST]}…"


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield all tensors in an output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(each)


def _regroups(values: Tensor, other: Tensor) -> bool:
    """Return whether a tensor has the positions of another one, several side by side, in any order (pixel shuffles)."""
    width = other.shape[-1] if other.dim() > 1 else 0
    if not width or values.numel() != other.numel() or values.shape[-1] % width:
        return False
    rows = (each.reshape(-1, width).unique(dim=0) for each in (values, other))
    return torch.equal(*rows)


def _shares(values: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are parts of the same memory."""
    return values.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


EXTRA = ("projection_dim",)
"""Fields that a network reads in the config of its tower, which a tower of its own lacks."""

OF_ENCODER = ("encoder_", "num_mel_bins", "max_source_positions")
"""Beginnings of fields for the encoder alone, in a config of encoder and decoder."""

SETTINGS = {"vision_feature_select_strategy": ("full", "default")}
"""Fields that say what is read of a tower, of which some towers need another value: those without a first token."""


def variants(config: Any) -> Iterator[dict[str, Any]]:
    """Yield changes of a config with which another tower may fit; none first."""
    yield {}
    for name, values in SETTINGS.items():
        yield from ({name: value} for value in values if getattr(config, name, value) != value)


# -- another tower ----------------------------------------------------------------------------------------------------
def with_tower(model: Any, tower: Tower, encoder: Any, settings: Mapping[str, Any] | None = None) -> Any:
    """Return a network of the class of a model with another encoder as its tower, and all other weights that fit.

    Args:
        model: The network.
        tower: Its tower.
        encoder: A network of transformers, with a head or without.
        settings: Fields of the config with other values, as :func:`variants` yields them.

    Returns:
        The network, in eval mode. The weights of modules that read the tower are random where they do not fit.

    Raises:
        CannotFoldError: If the class of the model makes another tower of the config of the encoder.
    """
    body = getattr(encoder, "base_model", encoder)
    if not isinstance(body, PreTrainedModel):
        raise CannotFoldError(f"{type(encoder).__name__} is no class of transformers, which a config could name")
    config, inner = copy.deepcopy(model.config), copy.deepcopy(body.config)
    for name in EXTRA if tower.setting else ():
        if not hasattr(inner, name) and hasattr(old := getattr(model.config, tower.setting), name):
            setattr(inner, name, getattr(old, name))
    place = next(model.parameters())
    try:
        if tower.setting:
            setattr(config, tower.setting, inner)
        else:  # one config for encoder and decoder
            config.update({name: value for name, value in inner.to_dict().items() if name.startswith(OF_ENCODER)})
        for name, value in (settings or {}).items():
            setattr(config, name, value)
        with torch.random.fork_rng():
            made = type(model)(config).to(place.device, place.dtype).eval()
    except Exception as error:  # the code of the network raises anything for a config that it does not expect
        raise CannotFoldError(
            f"{type(model).__name__} takes no {type(body.config).__name__}: {_short(error)}"
        ) from error
    own = made.get_submodule(tower.name)
    given, wanted = body.state_dict(), own.state_dict()
    prefix = max(("", "vision_model.", "encoder."), key=lambda each: _count(given, wanted, each))
    if not _count(given, wanted, prefix):
        raise CannotFoldError(
            f"{type(model).__name__} makes {type(own).__name__} of {type(body.config).__name__}, whose weights are not "
            f"those of {type(body).__name__}"
            + ("" if tower.setting else ": encoder and decoder share a config, so that their widths must be equal")
        )
    own.load_state_dict({name: given.get(prefix + name, torch.zeros_like(value)) for name, value in wanted.items()})
    if any(prefix + name not in given for name in wanted):  # a pooling that nothing reads, perhaps
        _check_same(own, body, tower)
    now, before = made.state_dict(), model.state_dict()
    rest = {name: value for name, value in before.items() if not name.startswith(tower.name + ".")}
    if unknown := rest.keys() - now.keys():
        raise CannotFoldError(
            f"{type(model).__name__} has weights that its config does not tell of ({min(unknown)}, …): merge adapters "
            "first (merge_and_unload of peft), or exchange the tower before weights are quantised"
        )
    rest = {name: value for name, value in rest.items() if now[name].shape == value.shape}
    made.load_state_dict(rest, strict=False)
    made.tie_weights()
    _as_in(
        made,
        model,
        {name: name for name, _ in made.named_modules() if not f"{name}.".startswith(f"{tower.name}.")},
        True,
    )
    _as_in(own, body, {name: (prefix + name).rstrip(".") for name, _ in own.named_modules()}, False)
    if getattr(model, "generation_config", None) is not None:
        made.generation_config = copy.deepcopy(model.generation_config)
    return made


def _as_in(made: nn.Module, model: nn.Module, names: Mapping[str, str], dtypes: bool) -> None:
    """Give modules the buffers of others, which no state contains, and the dtypes of their parameters.

    Args:
        made: The network.
        model: The network that has them.
        names: Name of a module -> its name in the other network.
        dtypes: Whether parameters get the dtypes, too: some stay in float32 in a network in half precision.
    """
    others = dict(model.named_modules())
    for name, module in made.named_modules():
        other = others.get(names.get(name, name)) if name in names else None
        if other is None:
            continue
        for key, value in other._buffers.items():
            mine = module._buffers.get(key)
            if value is not None and mine is not None and mine.shape == value.shape:
                module._buffers[key] = value.detach().clone().to(mine.device)
        for key, parameter in other._parameters.items():
            own = module._parameters.get(key)
            if dtypes and parameter is not None and own is not None and own.dtype != parameter.dtype:
                own.data = own.data.to(parameter.dtype)


def _count(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], prefix: str) -> int:
    """Return how many weights of a tower are among given ones under a prefix; 0 if one has another shape."""
    found = [prefix + name in given and given[prefix + name].shape == value.shape for name, value in wanted.items()]
    other = any(prefix + name in given and not same for name, same in zip(wanted, found, strict=True))
    return 0 if other else sum(found)


def _check_same(own: Any, body: Any, tower: Tower) -> None:
    """Check that a tower that lacks some weights computes the same states as its encoder."""
    config, size = body.config, getattr(body.config, "image_size", None)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    value = next(body.parameters())
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, config.num_channels, height, width, generator=draw).to(value) if size else None
    states = None if pixels is None else [each(**{tower.content: pixels}).last_hidden_state for each in (own, body)]
    if states is None or not torch.equal(*states):
        raise CannotFoldError(
            f"{type(body).__name__} lacks weights of {type(own).__name__} that its states depend on, or has them under "
            "other names: merge adapters first (merge_and_unload of peft)"
        )


# -- a map in front of readers ----------------------------------------------------------------------------------------
def matrix_of(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return the weights of a linear module as (inputs, outputs) in float64, and its bias."""
    weight = module.weight.detach().double()
    return weight if isinstance(module, Conv1D) else weight.T, None if module.bias is None else module.bias.double()


@torch.no_grad()
def fold(
    model: Any, made: Any, readers: Mapping[str, str], matrix: Tensor, bias: Tensor, groups: int = 1
) -> None:  # fmt: skip
    """Put an affine map in front of the readers of a tower, in place.

    Args:
        model: The network with the old tower.
        made: The network with the new one (:func:`with_tower`).
        readers: Reader of the new network -> reader of the old one, ``""`` if the new one has one more.
        matrix: (width of the new tower, width of the old one) float64.
        bias: (width of the old one,) float64.
        groups: Number of positions that readers read side by side; each is mapped.

    Raises:
        CannotFoldError: If a reader without a bias would need one.
    """
    place = next(made.parameters()).device
    matrix, bias = torch.block_diag(*[matrix.to(place)] * groups), bias.to(place).repeat(groups)
    for name, own in readers.items():
        module = made.get_submodule(name)
        weight, shift = matrix, bias
        if own:
            old, old_bias = matrix_of(model.get_submodule(own))
            weight, shift = matrix @ old, bias @ old + (0 if old_bias is None else old_bias)
        if module.bias is None:
            if float(shift.abs().max()) > 0:
                raise CannotFoldError(f"{name} has no bias for that of the map: use a matcher without one")
        else:
            module.bias.copy_(shift.to(module.bias.dtype))
        module.weight.copy_((weight if isinstance(module, Conv1D) else weight.T).to(module.weight.dtype))


def paired_readers(old: Reading, new: Reading, model: nn.Module) -> dict[str, str]:
    """Return which reader of the old tower each reader of the new one takes the place of.

    Raises:
        CannotFoldError: If readers cannot be paired by name.
    """
    if set(new.readers) == set(old.readers):
        return {name: name for name in new.readers}
    if len(new.readers) == 1 and new.readers[0] not in dict(model.named_modules()):
        return {new.readers[0]: ""}  # the class puts a projection between unequal widths
    raise CannotFoldError(
        f"the old tower is read by {', '.join(old.readers)}, the new one by {', '.join(new.readers)}: the class "
        "connects towers of this width in another way"
    )


@contextmanager
def replacing_features(model: nn.Module, readers: tuple[str, ...], features: Tensor) -> Iterator[None]:
    """Let readers of a tower read other features."""

    def put(module: nn.Module, args: Any) -> Any:
        return (features.contiguous(), *args[1:])

    with ExitStack() as stack:
        for name in readers:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(put).remove)
        yield


@torch.no_grad()
def difference(model: Any, made: Any, inputs: Mapping[str, Any], new: Mapping[str, Any], tower: Tower,
               matrix: Tensor, bias: Tensor, plain: Callable[[Any], Tensor]) -> float:  # fmt: skip
    """Return how far the outputs of a folded network are from those of the old one that reads mapped features.

    Args:
        model: The network with the old tower.
        made: The folded one.
        inputs: Inputs of the old one.
        new: Inputs of the folded one.
        tower: The tower.
        matrix: The map, (width of the new tower, width of the old one).
        bias: Its bias.
        plain: Returns the tensor of an output that is compared.

    Returns:
        The greatest difference of outputs, over the largest one.
    """
    old, found = read(model, tower.name, inputs), read(made, tower.name, new)
    rows = found.features.double().unflatten(-1, (found.groups, -1))
    mapped = (rows @ matrix.to(rows.device) + bias.to(rows.device)).flatten(-2).to(old.features.dtype)
    if mapped.dtype in (torch.float16, torch.bfloat16):  # deep networks make much of rounding: at the readers then
        pairs = [
            (
                made.get_submodule(name)(found.features),
                model.get_submodule(name)(mapped) if name in old.readers else mapped,
            )
            for name in found.readers
        ]
        return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    with replacing_features(model, old.readers, mapped):
        wanted = plain(model(**inputs))
    return float((wanted - plain(found.output)).abs().max() / wanted.abs().max())
