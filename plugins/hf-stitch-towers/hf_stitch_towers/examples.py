"""Valid inputs of networks that read images or sound together with texts, found from their configs and forwards.

A network names its own number of placeholders: ``get_image_features`` is run once on the example, and returns a vector
for each of them.
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
"""Argument of a forward -> what it carries. Of several, the first one that the network takes is the content."""

TEXTS = ("input_ids", "decoder_input_ids")
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "media_placeholder_token_id", "im_patch_id", "image_patch_id"),
    "audio": ("audio_token_id", "audio_token_index", "speech_token_id"),
    "video": ("video_token_id", "video_token_index"),
}
"""What stands for an image, a sound or a video in a text -> the keys of configs with the id of this token."""

COUNTS = ("num_query_tokens", "image_seq_length", "num_image_tokens", "audio_seq_length", "audio_token_len")
"""Keys of configs with the number of vectors of an image or a sound."""

MISMATCH = re.compile(r"tokens: (\d+),? features:? (\d+)")
"""Error of a network whose text has another number of placeholders than there are vectors, or numbers in them."""

BEFORE, AFTER = 4, 2
"""Number of words before and after the placeholders of an example; those before are repeated in longer texts."""


def media_of(model: Any) -> tuple[str, ...]:
    """Return the arguments of a forward that carry images, sound or video."""
    known = inspect.signature(model.forward).parameters
    return tuple(name for name in MEDIA if name in known)


def texts_of(model: Any) -> tuple[str, ...]:
    """Return the arguments of a forward that are tokens of a text; of a decoder alone, without those of a decoder."""
    known = inspect.signature(model.forward).parameters
    found = tuple(name for name in TEXTS if name in known)
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
    return found[:1] if decodes is False and "input_ids" in found else found


def placeholder(model: Any, kind: str) -> int | None:
    """Return the id of the token that stands for an image (a sound, a video) in a text; ``None`` without one."""
    config = model.config
    for each in (config, getattr(config, "vlm_config", config), text_config(config)):
        for name in PLACEHOLDERS[kind]:
            if isinstance(found := getattr(each, name, None), int):
                return found
    return None


def end_of(model: Any) -> int | None:
    """Return the token that ends a text, for which heads search; the oldest configs of CLIP name a wrong one."""
    text = text_config(model.config)
    end = getattr(text, "eos_token_id", None)
    wrong = end == WRONG and "clip" in str(getattr(model.config, "model_type", ""))
    known = isinstance(end, int) and end < (getattr(text, "vocab_size", None) or end + 1)
    return text.vocab_size - 1 if wrong else end if known else None


def start_of(model: Any) -> int | None:
    """Return the token with which a decoder begins a text; ``None`` if neither config names it."""
    configs: tuple[Any, ...] = getattr(model, "generation_config", None), model.config
    return next((x for each in configs if (x := getattr(each, "decoder_start_token_id", None)) is not None), None)


def example_of(model: nn.Module, content: str) -> dict[str, Any]:
    """Return a batch of two samples on which a network runs, of noise and random words.

    Args:
        model: The network.
        content: Argument that carries images, sound or video.

    Raises:
        ExampleError: If the network runs on none of the inputs that its config suggests; the message has the error of
            the first and the last try.
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
    tried = f"{failures[0]}; and {failures[-1]}" if failures[1:] else "".join(failures) or "its config has no sizes"
    raise ExampleError(
        f"no valid input of {type(model).__name__} follows from its config ({tried}): pass example_inputs, a batch of "
        "two samples as its processor makes them",
        model,
    )


def _is_empty(model: nn.Module) -> bool:
    return any(weight.is_meta for weight in model.parameters())


def _failure(model: nn.Module, example: Mapping[str, Any]) -> str | None:
    """Return the error of a network on an example; ``None`` if it runs, or has no weights (for plans)."""
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
    """Yield the numbers of vectors of an image that an error may mean."""
    if found := MISMATCH.search(failure):
        features = int(found[2])
        width = getattr(text_config(model.config), "hidden_size", None) or 1
        yield from dict.fromkeys(each for each in (features // width // 2, features // 2) if each)


# -- images, sound and video ----------------------------------------------------------------------------------------


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def part_of(config: Any, kind: str) -> Any:
    """Return the config of the part that reads images (sound, video): a nested one, or the config itself."""
    names = {"image": "vision", "audio": "audio", "video": "vision"}[kind]
    found = [
        getattr(config, name)
        for name in (f"{names}_config", "image_config", "encoder", "encoder_config", f"{names}_encoder", "vlm_config")
        if hasattr(getattr(config, name, None), "to_dict")
    ]
    if not found:
        return config
    inner = part_of(found[0], kind) if found[0] is not config else found[0]
    return inner


def _first(config: Any, *names: str, default: Any = None) -> Any:
    for name in names:
        if (found := getattr(config, name, None)) is not None:
            return found
    return default


def image_size(config: Any) -> tuple[int, int]:
    """Return height and width of the images of a config, by default 224 × 224."""
    size = _first(config, "image_size", "img_size", "input_size")
    if isinstance(size, Mapping):
        size = [size.get("height", 224), size.get("width", 224)]
    if isinstance(size, (list, tuple)):
        return int(size[-2 if len(size) > 1 else 0]), int(size[-1])
    return (int(size), int(size)) if size else (224, 224)


def grids_of(model: Any, example: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the grids of positions of an image whose patches are packed: of those in rows, and of merged ones."""
    config = part_of(model.config, "image")
    sizes = (_first(each, "spatial_merge_size") for each in (model.config, config))
    merge = next((each for each in sizes if isinstance(each, int)), 1)
    patch, found = _first(config, "patch_size"), list[tuple[int, int]]()
    for name in ("image_grid_thw", "image_grid_hws", "grid_thws"):
        if isinstance(grid := example.get(name), Tensor):
            height, width = grid[0, -2:].tolist()
            found = [(height // merge, width // merge)]
    if not found and isinstance(size := example.get("image_sizes"), Tensor) and isinstance(patch, int):
        height, width = (side // patch for side in size[0].tolist())
        found = [(height, width), (height // merge, width // merge)]
    return tuple(dict.fromkeys(found))


def _media(model: Any, content: str) -> Iterator[dict[str, Any]]:
    """Yield images, sound or video as a network may take them, the likeliest first."""
    known = {*inspect.signature(model.forward).parameters, *_feature_arguments(model, MEDIA[content])}
    config = part_of(model.config, MEDIA[content])
    if content == "pixel_values":
        yield from _images(model, config, known)
    elif content == "flattened_patches":
        size = _first(config, "patch_embed_hidden_size", default=768)
        patches = _noise(2, 12, size + 2)
        patches[..., :2] = torch.arange(1.0, 13)[None, :, None]
        yield {content: patches, **({"attention_mask": torch.ones(2, 12)} if "input_ids" not in known else {})}
        yield {content: patches}
    elif content == "pixel_values_videos":
        height, width = image_size(config)
        frames = _first(config, "num_frames", "frames_per_clip", default=4)
        yield {content: _noise(2, frames, _first(config, "num_channels", "in_channels", default=3), height, width)}
    else:
        yield from _sounds(config, content, known)


def _images(model: Any, config: Any, known: set[str]) -> Iterator[dict[str, Any]]:
    channels = _first(config, "num_channels", "in_channels", "in_chans", default=3)
    height, width = image_size(config)
    if not hasattr(config, "image_size") and (outer := image_size(model.config)) != (224, 224):
        height, width = outer
    if grids := known & {"image_grid_thw", "image_grid_hws", "grid_thws"}:
        patch, merge = _first(config, "patch_size", default=14), _first(config, "spatial_merge_size", default=2)
        merge = merge if isinstance(merge, int) else merge[0]
        side, depth = 2 * merge, _first(config, "temporal_patch_size", default=1)
        grid = torch.tensor([[1, side, side]] * 2)
        size = channels * patch * patch
        for shape in ((depth * size,), (channels, patch, patch), *([] if depth > 1 else [(2 * size,)])):
            found = {"pixel_values": _noise(2 * side * side, *shape), min(grids): grid}
            if "image_merge_sizes" in known:
                found["image_merge_sizes"] = torch.tensor([merge] * 2)
            yield found
    images, sizes = _noise(2, channels, height, width), torch.tensor([[height, width]] * 2)
    tiles = _tiles(model, (height, width))
    if tiles and "image_sizes" in known:
        yield {"pixel_values": _noise(2, tiles, channels, height, width), "image_sizes": sizes}
    if "pixel_attention_mask" in known:
        mask = torch.ones(2, 1, height, width, dtype=torch.bool)
        yield {"pixel_values": images[:, None], "pixel_attention_mask": mask}
        patch = _first(config, "patch_size", default=16)
        flat = _noise(2, (height // patch) * (width // patch), channels * patch * patch)
        shapes = {"spatial_shapes": torch.tensor([[height // patch, width // patch]] * 2)}
        yield {"pixel_values": flat, "pixel_attention_mask": torch.ones(flat.shape[:2], dtype=torch.long), **shapes}
    if "image_sizes" in known:
        yield {"pixel_values": images, "image_sizes": sizes}
    if "aspect_ratio_ids" in known:  # Mllama: images, tiles of each
        most = _first(config, "max_num_tiles", default=1)
        yield {
            "pixel_values": _noise(2, 1, most, channels, height, width),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.tensor([[[1] + [0] * (most - 1)]] * 2),
        }
    if "high_res_pixel_values" in known:
        large = image_size(getattr(model.config, "high_res_vision_config", config))
        yield {"pixel_values": images, "high_res_pixel_values": _noise(2, channels, *large)}
    yield {"pixel_values": images}
    yield {"pixel_values": images[:, None]}
    if isinstance(patch := _first(config, "patch_size"), int):
        yield {"pixel_values": _noise(2, 4, channels * patch * patch)}


def _tiles(model: Any, size: tuple[int, int]) -> int:
    """Return the number of tiles of an image in a network that divides images; 0 for others."""
    pinpoints = getattr(model.config, "image_grid_pinpoints", None)
    count = getattr(sys.modules[type(model).__module__], "image_size_to_num_patches", None)
    if not pinpoints or count is None:
        return 0
    return int(count(list(size), pinpoints, size[0]))


def _sounds(config: Any, content: str, known: set[str]) -> Iterator[dict[str, Any]]:
    names = ("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_dim")
    bins = _first(config, *names, "feature_projection_input_dim", default=80)
    most = _first(config, "max_source_positions", "max_position_embeddings", default=50)
    marks = {"feature_attention_mask", "input_features_mask", "padding_mask"} & known

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
    found = getattr(model, f"get_{kind}_features", None)
    return tuple(inspect.signature(found).parameters) if found else ()


def count_of(model: Any, kind: str, media: Mapping[str, Any]) -> int | None:
    """Return the number of vectors for each sample that a network puts in place of placeholders; ``None`` if unknown.

    Raises:
        Exception: That of the network, if it does not run on the images (sound, video).
    """
    find = getattr(model, f"get_{kind}_features", None)
    if find is None:
        return None
    takes = inspect.signature(find).parameters
    missing = [name for name, p in takes.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if any(name not in media for name in missing):  # it reads the text too
        for name in COUNTS:
            if isinstance(count := getattr(model.config, name, None), int):
                return count
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    given = {name: value for name, value in media.items() if name in takes or anything}
    with torch.no_grad(), evaluating(model):
        found = find(**given)
    features = getattr(found, "pooler_output", found)
    if features is None:
        features = getattr(found, "last_hidden_state", None)
    if isinstance(features, Tensor):
        vectors = features.numel() // features.shape[-1]
    elif isinstance(features, (list, tuple)) and all(isinstance(each, Tensor) for each in features):
        vectors = sum(each.numel() // each.shape[-1] for each in features)
    else:
        return None
    return vectors // 2


def ordinary_ids(model: Any) -> list[int]:
    """Return ids of words: no placeholder, and no token with a meaning in the config."""
    config = model.config
    inner = text_config(config)
    vocabulary = getattr(inner, "vocab_size", None) or getattr(config, "vocab_size", None) or 1000
    special: set[int] = {end} if (end := end_of(model)) is not None else set()
    for each in (config, inner):
        for name, value in vars(each).items():
            if name.endswith(("token_id", "token_index", "_id")):
                special.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    return [i for i in range(min(vocabulary, 1000)) if i not in special] or list(range(min(vocabulary, 1000)))


def _texts(model: Any, content: str, media: Mapping[str, Any], failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield texts that go with images (sound, video): with their placeholders, and without."""
    kind, known = MEDIA[content], arguments_of(model, content)
    takes, token = texts_of(model), placeholder(model, kind)
    counts: list[int | None] = [None]
    if token is not None and "input_ids" in takes:
        try:
            found = count_of(model, kind, media)
        except Exception as error:  # the code of the network can raise anything
            failures.append(f"get_{kind}_features raises {type(error).__name__}: {str(error)[:200]}")
            if "missing" not in str(error) and not _is_empty(model):  # it does not read these images
                return
            found = None
        counts = [found, 1, None] if found else [1, None]
    draw = drawer(model)
    for count in counts:
        texts = _text(model, content, media, count, draw)
        if "token_type_ids" in known and token is not None:
            yield {**texts, "token_type_ids": torch.zeros_like(texts["input_ids"])}
        if "cross_attention_mask" in known:  # Mllama: tokens, images, tiles
            shape = (2, texts["input_ids"].shape[1], *media[content].shape[1:3])
            yield {**texts, "cross_attention_mask": torch.ones(shape, dtype=torch.long)}
        yield texts


def drawer(model: Any) -> Callable[[int], Tensor]:
    """Return a function that draws a number of words for two samples."""
    words, generator = torch.tensor(ordinary_ids(model)), torch.Generator().manual_seed(0)
    return lambda count: words[torch.randint(len(words), (2, count), generator=generator)]


def _text(
    model: Any, content: str, media: Mapping[str, Any], count: int | None, draw: Callable[[int], Tensor]
) -> dict[str, Any]:
    """Return a text with so many placeholders, or without, and what a network reads of it."""
    kind, known = MEDIA[content], arguments_of(model, content)
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
        if name in known and name not in media and ids is not None:
            texts[name] = torch.ones_like(ids)
    if (ids := texts.get("input_ids")) is None:
        return texts
    if "mm_token_type_ids" in known:
        texts["mm_token_type_ids"] = (ids == token).long() if token is not None else torch.zeros_like(ids)
    if "image_embeds_position_mask" in known:  # Kosmos-2
        texts["image_embeds_position_mask"] = _kosmos(ids, model)
    if "bbox" in known:
        texts["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.long)
    if "qformer_input_ids" in known:
        texts |= {"qformer_input_ids": draw(4), "qformer_attention_mask": torch.ones(2, 4, dtype=torch.long)}
    return texts


def _further(model: Any) -> int:
    """Return the number of positions that vectors of an image take in the text of Kosmos-2."""
    return int(getattr(model.config, "latent_query_num", 0) or 0)


def _kosmos(ids: Tensor, model: Any) -> Tensor:
    """Return a mask of as many positions as Kosmos-2 has vectors of an image, after the first words."""
    mask = torch.zeros_like(ids)
    mask[:, BEFORE : BEFORE + _further(model)] = 1
    return mask


def _around(model: Any, kind: str) -> tuple[Tensor, Tensor]:
    """Return the tokens that begin and end an image in a text, if the config names them."""
    names = {"image": ("vision", "image"), "audio": ("audio",), "video": ("vision", "video")}[kind]
    config, found = model.config, []
    for end in ("start", "end"):
        ids = [getattr(config, f"{name}_{end}_token_id", None) for name in names]
        ids = [each for each in ids if isinstance(each, int)]
        found.append(torch.tensor([ids[:1]] * 2, dtype=torch.long).reshape(2, -1))
    return found[0], found[1]
