"""Example inputs of networks for images or sound with text, built from their configs and forwards.

The number of placeholder tokens comes from the network: ``get_image_features`` runs once on the example, and returns a
vector for each placeholder token.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.examples import ExampleError, arguments_of
from hf_stitch.adapters.families import WRONG
from hf_stitch.adapters.libraries.configs import text_config

MEDIA = {
    "pixel_values": "image",
    "flattened_patches": "image",
    "input_features": "audio",
    "input_values": "audio",
    "pixel_values_videos": "video",
}
"""Argument of a forward -> kind of its content. The content is the first argument that a network accepts."""

TEXTS = ("input_ids", "decoder_input_ids")
"""Arguments of a forward with token ids."""

PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "media_placeholder_token_id", "im_patch_id", "image_patch_id"),
    "audio": ("audio_token_id", "audio_token_index", "speech_token_id"),
    "video": ("video_token_id", "video_token_index"),
}
"""Kind of content -> config keys of its placeholder token id."""

COUNTS = ("num_query_tokens", "image_seq_length", "num_image_tokens", "audio_seq_length", "audio_token_len")
"""Config keys with the number of vectors of an image or a sound."""

MISMATCH = re.compile(r"tokens: (\d+),? features:? (\d+)")
"""Error of a network if the number of placeholder tokens differs from the number of vectors, or of their values."""

BEFORE, AFTER = 4, 2
"""Number of words before and after the placeholders of an example; words before are repeated in longer texts."""


def media_of(model: Any) -> tuple[str, ...]:
    """Return the arguments of a forward for images, sound or video."""
    parameters = inspect.signature(model.forward).parameters
    return tuple(name for name in MEDIA if name in parameters)


def texts_of(model: Any) -> tuple[str, ...]:
    """Return the token arguments of a forward; for networks without an encoder, only ``input_ids``."""
    parameters = inspect.signature(model.forward).parameters
    names = tuple(name for name in TEXTS if name in parameters)
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
    return names[:1] if decodes is False and "input_ids" in names else names


def placeholder(model: Any, kind: str) -> int | None:
    """Return the id of the placeholder token of an image (a sound, a video); ``None`` without one."""
    config = model.config
    for part in (config, getattr(config, "vlm_config", config), text_config(config)):
        for name in PLACEHOLDERS[kind]:
            if isinstance(token_id := getattr(part, name, None), int):
                return token_id
    return None


def end_of(model: Any) -> int | None:
    """Return the end-of-text token, required by heads; the oldest configs of CLIP contain a wrong id."""
    text = text_config(model.config)
    end = getattr(text, "eos_token_id", None)
    wrong = end == WRONG and "clip" in str(getattr(model.config, "model_type", ""))
    in_vocabulary = isinstance(end, int) and end < (getattr(text, "vocab_size", None) or end + 1)
    return text.vocab_size - 1 if wrong else end if in_vocabulary else None


def start_of(model: Any) -> int | None:
    """Return the first token of a decoder; ``None`` if it is missing in both configs."""
    configs: tuple[Any, ...] = getattr(model, "generation_config", None), model.config
    return next((x for config in configs if (x := getattr(config, "decoder_start_token_id", None)) is not None), None)


def example_of(model: nn.Module, content: str) -> dict[str, Any]:
    """Return a batch of two samples for a network, with noise and random words.

    Args:
        model: The network.
        content: Argument for images, sound or video.

    Raises:
        ExampleError: If the network does not run on any of the inputs suggested by its config; the message contains the
            errors of the first and the last attempt.
    """
    failures: list[str] = []
    for media in _media(model, content):
        for texts in _texts(model, content, media, failures):
            example = {**media, **texts}
            if (failure := _failure(model, example)) is None:
                return example
            failures.append(failure)
            for count in _counts_in(failure, model):
                example = {**media, **_text(model, content, media, count, drawer(model))}
                if _failure(model, example) is None:
                    return example
    reasons = f"{failures[0]}; and {failures[-1]}" if failures[1:] else "".join(failures) or "its config lacks sizes"
    raise ExampleError(
        f"example inputs of {type(model).__name__} could not be built from its config ({reasons}): pass "
        "example_inputs, a batch of two samples from its processor",
        model,
    )


def _is_empty(model: nn.Module) -> bool:
    return any(weight.is_meta for weight in model.parameters())


def _failure(model: nn.Module, example: Mapping[str, Any]) -> str | None:
    """Return the error of a network on an example; ``None`` if it runs, or is on the meta device (for plans)."""
    if _is_empty(model):
        return None
    options = {"use_cache": False} if "use_cache" in arguments_of(model, next(iter(example))) else {}
    try:
        with torch.no_grad(), evaluating(model):
            model(**example, **options)
    except Exception as error:  # the code of the network can raise anything
        first = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {first[:200]}"
    return None


def _counts_in(failure: str, model: Any) -> Iterator[int]:
    """Yield possible numbers of vectors of an image, from an error."""
    if match := MISMATCH.search(failure):
        features = int(match[2])
        width = getattr(text_config(model.config), "hidden_size", None) or 1
        yield from dict.fromkeys(count for count in (features // width // 2, features // 2) if count)


# -- images, sound and video ----------------------------------------------------------------------------------------


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def part_of(config: Any, kind: str) -> Any:
    """Return the config of the part for images (sound, video): a nested config, or the whole config."""
    prefix = {"image": "vision", "audio": "audio", "video": "vision"}[kind]
    parts = [
        getattr(config, name)
        for name in (f"{prefix}_config", "image_config", "encoder", "encoder_config", f"{prefix}_encoder", "vlm_config")
        if hasattr(getattr(config, name, None), "to_dict")
    ]
    if not parts:
        return config
    return part_of(parts[0], kind) if parts[0] is not config else parts[0]


def _first(config: Any, *names: str, default: Any = None) -> Any:
    for name in names:
        if (field := getattr(config, name, None)) is not None:
            return field
    return default


def image_size(config: Any) -> tuple[int, int]:
    """Return the height and width of images from a config, by default 224 × 224."""
    size = _first(config, "image_size", "img_size", "input_size")
    if isinstance(size, Mapping):
        size = [size.get("height", 224), size.get("width", 224)]
    if isinstance(size, (list, tuple)):
        return int(size[-2 if len(size) > 1 else 0]), int(size[-1])
    return (int(size), int(size)) if size else (224, 224)


def grids_of(model: Any, example: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the grids of positions of an image with packed patches: before and after merging."""
    config = part_of(model.config, "image")
    sizes = (_first(part, "spatial_merge_size") for part in (model.config, config))
    merge = next((part for part in sizes if isinstance(part, int)), 1)
    patch, grids = _first(config, "patch_size"), list[tuple[int, int]]()
    for name in ("image_grid_thw", "image_grid_hws", "grid_thws"):
        if isinstance(grid := example.get(name), Tensor):
            height, width = grid[0, -2:].tolist()
            grids = [(height // merge, width // merge)]
    if not grids and isinstance(size := example.get("image_sizes"), Tensor) and isinstance(patch, int):
        height, width = (side // patch for side in size[0].tolist())
        grids = [(height, width), (height // merge, width // merge)]
    return tuple(dict.fromkeys(grids))


def _media(model: Any, content: str) -> Iterator[dict[str, Any]]:
    """Yield candidate inputs of images, sound or video, most likely first."""
    accepted = {*inspect.signature(model.forward).parameters, *_feature_arguments(model, MEDIA[content])}
    config = part_of(model.config, MEDIA[content])
    if content == "pixel_values":
        yield from _images(model, config, accepted)
    elif content == "flattened_patches":
        size = _first(config, "patch_embed_hidden_size", default=768)
        patches = _noise(2, 12, size + 2)
        patches[..., :2] = torch.arange(1.0, 13)[None, :, None]
        yield {content: patches, **({"attention_mask": torch.ones(2, 12)} if "input_ids" not in accepted else {})}
        yield {content: patches}
    elif content == "pixel_values_videos":
        height, width = image_size(config)
        frames = _first(config, "num_frames", "frames_per_clip", default=4)
        yield {content: _noise(2, frames, _first(config, "num_channels", "in_channels", default=3), height, width)}
    else:
        yield from _sounds(config, content, accepted)


def _images(model: Any, config: Any, accepted: set[str]) -> Iterator[dict[str, Any]]:
    channels = _first(config, "num_channels", "in_channels", "in_chans", default=3)
    height, width = image_size(config)
    if not hasattr(config, "image_size") and (outer := image_size(model.config)) != (224, 224):
        height, width = outer
    if grids := accepted & {"image_grid_thw", "image_grid_hws", "grid_thws"}:
        patch, merge = _first(config, "patch_size", default=14), _first(config, "spatial_merge_size", default=2)
        merge = merge if isinstance(merge, int) else merge[0]
        side, depth = 2 * merge, _first(config, "temporal_patch_size", default=1)
        grid = torch.tensor([[1, side, side]] * 2)
        size = channels * patch * patch
        for shape in ((depth * size,), (channels, patch, patch), *([] if depth > 1 else [(2 * size,)])):
            inputs = {"pixel_values": _noise(2 * side * side, *shape), min(grids): grid}
            if "image_merge_sizes" in accepted:
                inputs["image_merge_sizes"] = torch.tensor([merge] * 2)
            yield inputs
    images, sizes = _noise(2, channels, height, width), torch.tensor([[height, width]] * 2)
    tiles = _tiles(model, (height, width))
    if tiles and "image_sizes" in accepted:
        yield {"pixel_values": _noise(2, tiles, channels, height, width), "image_sizes": sizes}
    if "pixel_attention_mask" in accepted:
        mask = torch.ones(2, 1, height, width, dtype=torch.bool)
        yield {"pixel_values": images[:, None], "pixel_attention_mask": mask}
        patch = _first(config, "patch_size", default=16)
        flat = _noise(2, (height // patch) * (width // patch), channels * patch * patch)
        shapes = {"spatial_shapes": torch.tensor([[height // patch, width // patch]] * 2)}
        yield {"pixel_values": flat, "pixel_attention_mask": torch.ones(flat.shape[:2], dtype=torch.long), **shapes}
    if "image_sizes" in accepted:
        yield {"pixel_values": images, "image_sizes": sizes}
    if "aspect_ratio_ids" in accepted:  # Mllama: images, tiles of each
        most = _first(config, "max_num_tiles", default=1)
        yield {
            "pixel_values": _noise(2, 1, most, channels, height, width),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.tensor([[[1] + [0] * (most - 1)]] * 2),
        }
    if "high_res_pixel_values" in accepted:
        large = image_size(getattr(model.config, "high_res_vision_config", config))
        yield {"pixel_values": images, "high_res_pixel_values": _noise(2, channels, *large)}
    yield {"pixel_values": images}
    yield {"pixel_values": images[:, None]}
    if isinstance(patch := _first(config, "patch_size"), int):
        yield {"pixel_values": _noise(2, 4, channels * patch * patch)}


def _tiles(model: Any, size: tuple[int, int]) -> int:
    """Return the number of tiles of an image; 0 if a network does not divide images."""
    pinpoints = getattr(model.config, "image_grid_pinpoints", None)
    count = getattr(sys.modules[type(model).__module__], "image_size_to_num_patches", None)
    if not pinpoints or count is None:
        return 0
    return int(count(list(size), pinpoints, size[0]))


def _sounds(config: Any, content: str, accepted: set[str]) -> Iterator[dict[str, Any]]:
    names = ("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_dim")
    bins = _first(config, *names, "feature_projection_input_dim", default=80)
    most = _first(config, "max_source_positions", "max_position_embeddings", default=50)
    marks = {"feature_attention_mask", "input_features_mask", "padding_mask"} & accepted

    def masked(values: Tensor, frames: int) -> Iterator[dict[str, Any]]:
        for name in sorted(marks):
            yield {content: values, name: torch.ones(2, frames, dtype=torch.long)}
        yield {content: values}

    if content == "input_features":
        for frames in (2 * most, 64):
            yield from masked(_noise(2, bins, frames), frames)
            yield from masked(_noise(2, frames, bins), frames)
            yield from masked(_noise(2, 1, frames, bins), frames)
    else:
        for samples in (1600, 16000):
            yield from masked(_noise(2, samples), samples)
            yield from masked(_noise(2, 1, samples), samples)


# -- texts ----------------------------------------------------------------------------------------------------------


def _feature_arguments(model: Any, kind: str) -> tuple[str, ...]:
    method = getattr(model, f"get_{kind}_features", None)
    return tuple(inspect.signature(method).parameters) if method else ()


def count_of(model: Any, kind: str, media: Mapping[str, Any]) -> int | None:
    """Return the number of vectors per sample that replace placeholder tokens; ``None`` if unknown.

    Raises:
        Exception: Any error of the network on the images (sound, video).
    """
    get_features = getattr(model, f"get_{kind}_features", None)
    if get_features is None:
        return None
    parameters = inspect.signature(get_features).parameters
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if any(name not in media for name in required):  # it also requires the text
        for name in COUNTS:
            if isinstance(count := getattr(model.config, name, None), int):
                return count
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {name: value for name, value in media.items() if name in parameters or has_kwargs}
    with torch.no_grad(), evaluating(model):
        output = get_features(**arguments)
    features = getattr(output, "pooler_output", output)
    if features is None:
        features = getattr(output, "last_hidden_state", None)
    if isinstance(features, Tensor):
        vectors = features.numel() // features.shape[-1]
    elif isinstance(features, (list, tuple)) and all(isinstance(tensor, Tensor) for tensor in features):
        vectors = sum(tensor.numel() // tensor.shape[-1] for tensor in features)
    else:
        return None
    return vectors // 2  # the example has two samples


def ordinary_ids(model: Any) -> list[int]:
    """Return the ids of words, without placeholder tokens and special tokens of the config."""
    config = model.config
    inner = text_config(config)
    vocabulary = getattr(inner, "vocab_size", None) or getattr(config, "vocab_size", None) or 1000
    special: set[int] = {end} if (end := end_of(model)) is not None else set()
    for part in (config, inner):
        for name, value in vars(part).items():
            if name.endswith(("token_id", "token_index", "_id")):
                special.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    return [i for i in range(min(vocabulary, 1000)) if i not in special] or list(range(min(vocabulary, 1000)))


def _texts(model: Any, content: str, media: Mapping[str, Any], failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield texts for images (sound, video): with placeholder tokens, and without."""
    kind, accepted = MEDIA[content], arguments_of(model, content)
    token = placeholder(model, kind)
    counts: list[int | None] = [None]
    if token is not None and "input_ids" in texts_of(model):
        try:
            vector_count = count_of(model, kind, media)
        except Exception as error:  # the code of the network can raise anything
            failures.append(f"get_{kind}_features raises {type(error).__name__}: {str(error)[:200]}")
            if "missing" not in str(error) and not _is_empty(model):  # it does not accept these images
                return
            vector_count = None
        counts = [vector_count, 1, None] if vector_count else [1, None]
    draw = drawer(model)
    for count in counts:
        texts = _text(model, content, media, count, draw)
        if "token_type_ids" in accepted and token is not None:
            yield {**texts, "token_type_ids": torch.zeros_like(texts["input_ids"])}
        if "cross_attention_mask" in accepted:  # Mllama: tokens, images, tiles
            shape = (2, texts["input_ids"].shape[1], *media[content].shape[1:3])
            yield {**texts, "cross_attention_mask": torch.ones(shape, dtype=torch.long)}
        yield texts


def drawer(model: Any) -> Callable[[int], Tensor]:
    """Return a function that draws words for two samples."""
    words, generator = torch.tensor(ordinary_ids(model)), torch.Generator().manual_seed(0)
    return lambda count: words[torch.randint(len(words), (2, count), generator=generator)]


def _text(
    model: Any, content: str, media: Mapping[str, Any], count: int | None, draw: Callable[[int], Tensor]
) -> dict[str, Any]:
    """Return the text arguments with a number of placeholder tokens, or without."""
    kind, accepted = MEDIA[content], arguments_of(model, content)
    token = placeholder(model, kind)
    texts: dict[str, Any] = {}
    for name in texts_of(model):
        if name == "input_ids" and count is not None and token is not None:
            opened, closed = _around(model, kind)
            marks = torch.full((2, count), token)
            texts[name] = torch.cat([draw(BEFORE), opened, marks, closed, draw(AFTER)], 1)
        else:
            texts[name] = draw(BEFORE + AFTER + _further(model))
            if name == "input_ids" and (end := end_of(model)) is not None:
                texts[name][:, -1] = end
    for name in ("attention_mask", "decoder_attention_mask"):
        ids = texts.get("decoder_input_ids" if name.startswith("decoder") else "input_ids")
        if name in accepted and name not in media and ids is not None:
            texts[name] = torch.ones_like(ids)
    if (ids := texts.get("input_ids")) is None:
        return texts
    if "mm_token_type_ids" in accepted:
        texts["mm_token_type_ids"] = (ids == token).long() if token is not None else torch.zeros_like(ids)
    if "image_embeds_position_mask" in accepted:  # Kosmos-2
        texts["image_embeds_position_mask"] = _kosmos(ids, model)
    if "bbox" in accepted:
        texts["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.long)
    if "qformer_input_ids" in accepted:
        texts |= {"qformer_input_ids": draw(4), "qformer_attention_mask": torch.ones(2, 4, dtype=torch.long)}
    return texts


def _further(model: Any) -> int:
    """Return the number of positions of image vectors in the text of Kosmos-2."""
    return int(getattr(model.config, "latent_query_num", 0) or 0)


def _kosmos(ids: Tensor, model: Any) -> Tensor:
    """Return the mask of image positions of Kosmos-2, after the first words."""
    mask = torch.zeros_like(ids)
    mask[:, BEFORE : BEFORE + _further(model)] = 1
    return mask


def _around(model: Any, kind: str) -> tuple[Tensor, Tensor]:
    """Return the tokens at the start and the end of an image in a text, if they are in the config."""
    names = {"image": ("vision", "image"), "audio": ("audio",), "video": ("vision", "video")}[kind]
    config, tokens = model.config, []
    for end in ("start", "end"):
        ids = [getattr(config, f"{name}_{end}_token_id", None) for name in names]
        ids = [token_id for token_id in ids if isinstance(token_id, int)]
        tokens.append(torch.tensor([ids[:1]] * 2, dtype=torch.long).reshape(2, -1))
    return tokens[0], tokens[1]
