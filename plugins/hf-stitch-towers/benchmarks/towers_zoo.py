"""Sweep over all multimodal types of transformers (images, video or sound with text): which cuts are exact.

``python -m benchmarks.towers_zoo`` updates ``docs/towers_zoo.json``, with a row per type of network, and
``docs/towers_zoo.md``. A second run resumes where the first run stopped. Each type runs in a separate process with a
time limit. All networks are tiny and random.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import fnmatch
import inspect
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from hf_stitch_towers.examples import MEDIA, PLACEHOLDERS, TEXTS
from hf_stitch_towers.folding import tower_of
from hf_stitch_towers.places import tower_alone
from PIL import Image
from torch import nn
from tqdm import tqdm
from transformers.models.auto import modeling_auto

import hf_stitch
from benchmarks import exactness, tiny, zoo, zoo_records
from hf_stitch.adapters.cutting.forwards import evaluating

FILE = zoo_records.FILE.with_name("towers_zoo.json")
PAGE = FILE.with_suffix(".md")
SECONDS = 180
PARTS = ("tower", "projector", "decoder")

BRIDGE = re.compile(r"proj|connector|merger|align|bridge|qformer|resampler|adapter|perceiver|pool|norm|head", re.I)
"""Names of modules between a tower and a decoder."""

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "t5gemma2": {"mm_tokens_per_image": 4},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "gemma4": {"text_config": {"hidden_size_per_layer_input": 0}, "vision_config": {}},
    "aria": {"projector_patch_to_query_dict": {"4": 4, "16": 4}},
}
"""Type -> values of its config that do not follow from the rules of :mod:`benchmarks.tiny`."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Outcome for one type.

    Attributes:
        family: Model type of transformers.
        model: Class of the network.
        content: Argument for images, video or sound.
        tower: Number of exact cuts in the tower.
        projector: Number of exact cuts between the tower and the decoder.
        decoder: Number of exact cuts at the positions of the text.
        refused: Number of refused candidates.
        reason: Reason for missing cuts or refused candidates.
        inexact: First difference found by an independent check; empty if all cuts are exact.
        exchange: Outcome of an exchange of the tower: ``folded``, ``stitched``, or the reason for a failure.
        built: Whether a tiny network of the type could be built and run.
        seconds: Duration of the examination.
        versions: Versions of the libraries.
    """

    family: str
    model: str = ""
    content: str = ""
    tower: int = 0
    projector: int = 0
    decoder: int = 0
    refused: int = 0
    reason: str = ""
    inexact: str = ""
    exchange: str = ""
    built: bool = True
    seconds: float = 0.0
    versions: str = zoo.VERSIONS

    @property
    def cuts(self) -> int:
        """Number of exact cuts."""
        return self.tower + self.projector + self.decoder


# -- types and networks -----------------------------------------------------------------------------------------------
def types() -> dict[str, str]:
    """Return all model types with a class that accepts images, video or sound and a text -> name of that class."""
    listed: dict[str, set[str]] = {}
    for table in (name for name in dir(modeling_auto) if name.startswith("MODEL") and name.endswith("MAPPING_NAMES")):
        for kind, names in getattr(modeling_auto, table).items():
            listed.setdefault(kind, set()).update([names] if isinstance(names, str) else names)
    classes = {}
    for kind, names in sorted(listed.items()):
        for name in sorted(names, key=lambda n: ("ForConditionalGeneration" not in n, n.endswith("Model"), n)):
            try:
                takes = inspect.signature(getattr(transformers, name).forward).parameters
            except (AttributeError, ImportError):  # a class that is missing, or requires a missing library
                continue
            if any(argument in takes for argument in MEDIA) and any(argument in takes for argument in TEXTS):
                classes.setdefault(kind, name)
    return classes


def config_of(kind: str, keep: tuple[str, ...] = (), sections: bool = False) -> Any:
    """Return a tiny config of a type, with parts that fit together and placeholder tokens in the vocabulary."""
    if kind in COMPOSED:
        return COMPOSED[kind]()
    tiny.EXCEPTIONS[kind] = {**tiny.EXCEPTIONS.get(kind, {}), **EXCEPTIONS.get(kind, {})}
    config = tiny.config(kind, keep)
    for part in _parts(config):
        _repair(part, sections)
    if "omni" in kind and not hasattr(config, "vision_start_token_id"):
        config.vision_start_token_id = config.audio_start_token_id = 3
    _placeholders(config)
    return config


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PreTrainedConfig):
            yield from _parts(value)


def _value(config: Any, name: str) -> Any:
    """Return a value of a config; ``None`` if it is missing or differs between layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers does not export the class of this error
        return None


def _repair(config: Any, sections: bool) -> None:
    """Make dependent sizes of a config consistent."""
    heads, keys = _value(config, "num_attention_heads"), _value(config, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(keys, int) and (keys > heads or heads % keys):
        config.num_key_value_heads = heads
    for rope in (_value(config, name) for name in ("rope_parameters", "rope_scaling")):
        if not (isinstance(rope, dict) and (sections or "mrope_section" in rope) and isinstance(heads, int)):
            continue
        half = (_value(config, "head_dim") or config.hidden_size // heads) // 2
        half = int(half * rope.get("partial_rotary_factor", 1.0))
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if getattr(config, "image_grid_pinpoints", None):
        side = getattr(getattr(config, "vision_config", config), "image_size", 64)
        config.image_grid_pinpoints = [[side, side], [side, 2 * side]]
    for name, most in LARGE.items():
        if isinstance(size := _value(config, name), int) and size > most:
            setattr(config, name, most)


LARGE = {"embed_dim": 64, "layers": 4, "attention_heads": 4, "depth": 4, "latent_query_num": 8}
"""Further names of sizes in some types, and their maximum."""


def _placeholders(config: Any) -> None:
    """Give each special token of a config a distinct id in the small vocabulary."""
    size = min(getattr(config.get_text_config(), "vocab_size", 200) or 200, 200)
    free = iter(range(size - 1, 2, -1))
    for part in _parts(config):
        placeholder_names = {name for names in PLACEHOLDERS.values() for name in names if hasattr(part, name)}
        ids = {name for name, value in vars(part).items() if name.endswith(("token_id", "token_index"))}
        for name in sorted(placeholder_names | ids):
            value = getattr(part, name)
            if (name in placeholder_names and value is None) or (isinstance(value, int) and not 0 <= value < size):
                first = getattr(config, name, None)
                shared = part is not config and isinstance(first, int) and 0 <= first < size
                setattr(part, name, first if shared else next(free))


SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip


def _captioner() -> Any:
    tower = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
    return _worded(transformers.VisionEncoderDecoderConfig, tower)


def _worded(kind: Any, tower: Any) -> Any:
    words = transformers.GPT2Config(
        vocab_size=200, n_embd=64, n_layer=4, n_head=4, n_positions=128, add_cross_attention=True, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    config = kind.from_encoder_decoder_configs(tower, words)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _dual() -> Any:
    tower = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
    return transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        tower, transformers.BertConfig(**SMALL, vocab_size=200), projection_dim=64
    )


def _speech() -> Any:
    tower = transformers.Wav2Vec2Config(
        **SMALL, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, vocab_size=200, num_feat_extract_layers=2,
    )  # fmt: skip
    return _worded(transformers.SpeechEncoderDecoderConfig, tower)


COMPOSED = {"vision-encoder-decoder": _captioner, "vision-text-dual-encoder": _dual, "speech-encoder-decoder": _speech}
"""Type -> function that returns its config, for types that join two networks of other types."""


def network(kind: str, name: str, keep: tuple[str, ...] = (), sections: bool | None = None) -> nn.Module:
    """Return a tiny network of a type, with random weights."""
    network_class = getattr(transformers, name)
    if sections is None:
        sections = "mrope_section" in inspect.getsource(sys.modules[network_class.__module__])
    config = config_of(kind, keep, sections)
    if not isinstance(config, network_class.config_class):
        config = next((part for part in _parts(config) if isinstance(part, network_class.config_class)), config)
    torch.manual_seed(0)
    return tiny.shaken(network_class._from_config(config))


# -- one type -----------------------------------------------------------------------------------------------------
def examine(kind: str, name: str) -> Row:
    """Find and check the cuts of a type. Errors are stored in the row."""
    started = time.perf_counter()
    row, failures = Row(kind, name, built=False), list[Exception]()
    for keep, sections in (((), None), ((), True), (("image_size",), None)):
        try:
            model = network(kind, name, keep, sections)
            row = dataclasses.replace(row, built=True)
            row = _examined(row, hf_stitch.load(model))
            if row.cuts:
                row = dataclasses.replace(row, exchange=exchanged(model))
            break
        except Exception as error:  # the code of the library can raise anything
            failures.append(error)
    else:
        row = dataclasses.replace(row, reason=_message(failures[0]))
    return dataclasses.replace(row, seconds=round(time.perf_counter() - started, 1))


def _message(error: Exception) -> str:
    return zoo.told(error).partition(" See https://")[0]


def _examined(row: Row, adapter: hf_stitch.Adapter) -> Row:
    row = dataclasses.replace(row, content=adapter.interface.content[0])
    layers = adapter.layers
    infos = [adapter.verify_cut(candidate) for candidate in adapter.candidates]
    reasons = [candidate.reason for candidate in infos if candidate.status != "verified"]
    inexact = check(adapter, layers)
    counts = Counter(part_of(adapter, layer) for layer in layers)
    cause = reasons[0][:400] if reasons else "" if layers else "none of the modules lies on every path from the content"
    return dataclasses.replace(row, **counts, refused=len(reasons), reason=cause, inexact=inexact)


# -- exchanges --------------------------------------------------------------------------------------------------------
PART = {"image": "vision", "audio": "audio", "video": "vision"}
COUNT = 52
SAME = 1e-5
"""Number of images of an exchange, and maximum divergence with a copy of the same tower."""


@dataclasses.dataclass(frozen=True)
class Noise:
    """Processor that replaces each image by noise seeded by its pixels.

    Attributes:
        shape: Shape of the noise.
        begins: Fixed first columns of rows, (…, columns), for patches that begin with their coordinates.
    """

    shape: tuple[int, ...]
    begins: torch.Tensor | None = None
    image_mean: ClassVar[tuple[float, ...]] = (0.0, 0.0, 0.0)
    image_std: ClassVar[tuple[float, ...]] = (1.0, 1.0, 1.0)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Return the noise."""
        seed = int(np.asarray(image).astype(int).sum())
        noise = torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))
        if self.begins is not None:
            noise[..., : self.begins.shape[-1]] = self.begins
        return noise


def prompted(model: nn.Module) -> hf_stitch.Adapter:
    """Load a network with a processor of noise, and with a context for images."""
    bare = hf_stitch.load(model)
    name = bare.interface.content[0]
    begins = bare.example[name][0, ..., :2] if name == "flattened_patches" else None
    network = hf_stitch.load(model, processor=Noise(bare.interface.shapes[name], begins))
    long = dataclasses.replace(network.interface, max_tokens=None)  # tiny configs have few positions
    network.interface = long
    if not network.interface.given:
        return network
    values = {key: value for key, value in network.example.items() if isinstance(value, torch.Tensor)}
    return network.beside({key: value[0] for key, value in values.items() if key != name and len(value) == 2})


def encoder_of(model: nn.Module, part: str) -> tuple[hf_stitch.Adapter, bool]:
    """Return a copy of the tower as a separate network and ``True``; a ViT and ``False`` if it does not run alone."""
    with contextlib.suppress(Exception):  # towers that require inputs from their network, such as grids of patches
        alone = tower_alone(hf_stitch.load(copy.deepcopy(model)), tower_of(model, part))
        name = alone.interface.content[0]
        noise = Noise(alone.interface.shapes[name])
        tower = hf_stitch.load(alone.model, example_inputs=alone.example, content=name, processor=noise)
        if tower.layers:
            return tower, True
    torch.manual_seed(1)
    vit = transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)).eval()
    return hf_stitch.load(vit, processor=Noise((3, 32, 32))), False


def exchanged(model: nn.Module) -> str:
    """Exchange the tower for a copy, which must not change outputs, or for a ViT, and return the outcome."""
    try:
        network = prompted(model)
        part = PART[MEDIA[network.interface.content[0]]]
        encoder, same = encoder_of(model, part)
        draw = np.random.default_rng(0)
        images = [Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)) for _ in range(COUNT)]
        job = partial(hf_stitch.swap, network, encoder, images, part=part, progress=False)
        try:
            outcome = job(matcher="lstsq")
        except ValueError as error:
            if "at least" not in str(error):
                raise
            outcome = job(matcher="ridge")
    except Exception as error:  # the code of the library can raise anything
        return _message(error)
    how = "folded" if outcome.folded else "stitched"
    if same and outcome.matcher == "lstsq":
        row = outcome.scores["exchanged"]
        apart = row["kl_divergence"].value if "kl_divergence" in row else 1 - row["cosine"].value
        return how if apart < SAME else f"{how}, but a copy of the tower changes outputs ({apart:.2g})"
    return f"{how} (ViT)" if not same else how


def part_of(adapter: hf_stitch.Adapter, layer: str) -> str:
    """Return the part of a network that contains a cut."""
    cut, _ = adapter.cut(layer)
    if adapter.interface.modality == "text" or cut.padding in ("masked", "behind"):
        return "decoder"
    stacked = re.search(r"\.\d+$", layer)
    return "projector" if not stacked and BRIDGE.search(layer.rpartition(".")[2]) else "tower"


def check(adapter: hf_stitch.Adapter, layers: Iterable[str]) -> str:
    """Compare both halves of every cut with the whole model on new inputs; return the first difference, or ``""``."""
    for seed, samples in ((11, 3), (12, 5)):
        inputs = drawn(adapter, samples, seed)
        with torch.no_grad(), evaluating(adapter.model):
            expected = adapter.interface.kept(adapter.model(**{**adapter.interface.options, **inputs}))
            for layer in layers:
                output = adapter.decode(adapter.encode(inputs, layer)[layer], layer)
                if not exactness.agree(exactness.bits(expected), exactness.bits(output)):
                    return f"{layer}, {samples} samples"
    return ""


def drawn(adapter: hf_stitch.Adapter, samples: int, seed: int) -> dict[str, Any]:
    """Return the example with a new number of samples and new values of the content."""
    inputs = adapter._survey()._probes.vary(samples)
    name, generator = adapter.interface.content[0], torch.Generator().manual_seed(seed)
    if inputs[name].is_floating_point():
        new = torch.randn(inputs[name].shape, generator=generator).to(inputs[name])
        if name == "flattened_patches":  # they begin with their rows and columns
            new[..., :2] = inputs[name][..., :2]
        inputs[name] = new
    return inputs


# -- all types --------------------------------------------------------------------------------------------------------
def read(file: Path = FILE) -> dict[str, Row]:
    """Return the existing rows, by type."""
    return {row.family: row for row in zoo_records.rows_of(Row, file)}


INTRODUCTION = """# Multimodal networks

This page lists the exact cuts of multimodal networks: every model type of transformers with a class that reads images,
video or sound together with a text. Each network has a tiny config with random weights, and
`hf_stitch.load(network)` loads it without example inputs
([hf-stitch-towers](https://github.com/hf-stitch/hf-stitch/tree/main/plugins/hf-stitch-towers)).
`python -m benchmarks.towers_zoo` examines types without a row for the installed versions, and writes this page.

The columns *tower*, *projector* (between tower and decoder) and *decoder* count cuts: both parts together give the
outputs of the network, bit for bit, on images and batches that the verification did not use. Positions in the decoder
are text positions. In decoders that attend to the tower in every block (Whisper, Florence-2), only the last block is
not bypassed. *Refused* counts candidates that cannot be cut.

*Exchange* is the outcome of `hf_stitch.swap(network, tower, images, part=…)` with a copy of the tower: *folded* into a
network of the same class, or *stitched*; the outputs must not change. If the tower cannot run alone (grids of patches),
a *ViT* replaces it. Otherwise the cell has the error.

A type without cuts is *refused* because of the network (random outputs, missing gradients), because the tiny config
does not lead to a valid example (`hf_stitch.load` then requires `example_inputs`; the sizes of this config may be the
cause, not the type), or because it took more than three minutes. A type is *not built* if transformers rejects the tiny
config, which says nothing about the type.
"""


def report(rows: Mapping[str, Row]) -> str:
    """Return the text of the page."""
    all_rows = [rows[kind] for kind in sorted(rows)]
    cut, refused = [row for row in all_rows if row.cuts], [row for row in all_rows if row.built and not row.cuts]
    unbuilt = [row for row in all_rows if not row.built]
    versions = "; ".join(sorted({row.versions for row in all_rows}))
    lines = [
        INTRODUCTION,
        textwrap.fill(
            f"Of {len(all_rows)} types, {len(cut)} have exact cuts ({sum(row.decoder > 0 for row in cut)} of them in "
            f"the decoder, {sum(row.cuts for row in all_rows)} cuts in all, "
            f"{sum(bool(row.inexact) for row in all_rows)} inexact), {len(refused)} are refused by name, and "
            f"{len(unbuilt)} could not be built from a tiny config. "
            f"{_count(cut, 'folded')} towers are exchanged within the class, {_count(cut, 'stitched')} by a stitch. "
            f"Measured with {versions}.",
            120,
        ),
        "",
        "## Exact cuts\n",
        "| type | class | content | tower | projector | decoder | refused | exchange | reason |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.family} | {row.model} | {row.content} | {row.tower} | {row.projector} | {row.decoder} "
            f"| {row.refused} | {_cell(row.exchange, 160)} | {_cell(row.inexact or row.reason, 160)} |"
            for row in cut
        ),
    ]
    for title, several in (("Refused by name", refused), ("Not built", unbuilt)):
        lines += [f"\n## {title}\n", "| type | class | reason |", "|---|---|---|"]
        lines += [f"| {row.family} | {row.model} | {_cell(row.reason)} |" for row in several]
    return "\n".join(lines) + "\n"


def _count(rows: Iterable[Row], how: str) -> int:
    return sum(row.exchange.startswith(how) for row in rows)


def _cell(text: str, most: int = 400) -> str:
    """Return a table cell; messages are quoted as code."""
    cell = text[:most].replace("|", "\\|").replace("`", "'") + ("…" if len(text) > most else "")
    return f"`{cell}`" if " " in cell else cell


def main() -> None:
    """Update the rows and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="examine types that match, e.g. 'llava*'")
    parser.add_argument("--again", action="store_true", help="examine types again that have a row of these versions")
    parser.add_argument("--failed", action="store_true", help="examine types without cuts again")
    parser.add_argument("--page", action="store_true", help="write the page only")
    options = parser.parse_args()
    zoo.quiet()
    rows, kinds = read(), types()
    selected = [
        kind
        for kind in kinds
        if fnmatch.fnmatch(kind, options.only)
        and (
            options.again or kind not in rows or rows[kind].versions != zoo.VERSIONS
            or (options.failed and not rows[kind].cuts)
        )
    ]  # fmt: skip
    for kind in tqdm([] if options.page else selected, "types", file=sys.stderr):
        started = time.perf_counter()
        fields = zoo.apart(partial(examine, kind, kinds[kind]), SECONDS)
        seconds = round(time.perf_counter() - started, 1)
        row = rows[kind] = Row(**{"family": kind, "model": kinds[kind], "seconds": seconds, **fields})
        zoo_records.write_rows((rows[family] for family in sorted(rows)), FILE)
        print(f"{kind}: {row.tower}+{row.projector}+{row.decoder} {row.inexact} {row.reason[:300]}", flush=True)
    PAGE.write_text(report(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
