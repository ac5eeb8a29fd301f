"""An encoder with a map behind it, as a folder of sentence-transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_stitch.stitches import IdentityStitch, LowRankStitch, ResidualMLPStitch
from hf_stitch_embeddings.embedding_map import EmbeddingMap

MODULES = "modules.json"
KINDS = "sentence_transformers.models."
"""Where the classes of modules are in every version; version 6 finds them by this name, too."""


@dataclass(frozen=True)
class DenseLayer:
    """A layer ``activation(Wx + b)``.

    Attributes:
        weight: ``W``, ``(out, in)``.
        bias: ``b``, ``(out,)``; None if there is none.
        activation: Class of the activation function.
    """

    weight: Tensor
    bias: Tensor | None
    activation: type[nn.Module] = nn.Identity


def dense_layers(embedding_map: EmbeddingMap) -> list[DenseLayer]:
    """Write a map as dense layers.

    An affine map is one layer, a map of low rank two. A residual MLP is two: since ``gelu(z) - gelu(-z) = z``, the
    affine part passes through the hidden layer.

    Args:
        embedding_map: The map.

    Returns:
        The layers, which compute the map without normalisation.

    Raises:
        ValueError: If the map cannot be written in this way.

    Example:
        >>> from hf_stitch.stitches import LowRankStitch
        >>> [tuple(layer.weight.shape) for layer in dense_layers(EmbeddingMap.of(LowRankStitch(8, 6, rank=2)))]
        [(2, 8), (6, 2)]
    """
    stitch = embedding_map.stitch
    if isinstance(stitch, IdentityStitch) and stitch.in_features == stitch.out_features:
        return []
    if isinstance(stitch, LowRankStitch):
        return [DenseLayer(stitch.down.detach(), None), DenseLayer(stitch.up.detach(), _detached(stitch.bias))]
    if isinstance(stitch, ResidualMLPStitch):
        weight, zeros = stitch.weight.detach(), torch.zeros(2 * stitch.out_features)
        eye = torch.eye(stitch.out_features)
        inner = torch.cat([stitch.down.detach(), weight, -weight])
        return [
            DenseLayer(inner, torch.cat([stitch.down_bias.detach(), zeros]), nn.GELU),
            DenseLayer(torch.cat([stitch.up.detach(), eye, -eye], 1), stitch.bias.detach()),
        ]
    affine = embedding_map.affine()
    if affine is None:
        raise ValueError(
            f"{embedding_map!r} is no sequence of dense layers, the only modules that sentence-transformers loads "
            "without the code of another package; export another map, or serve this one with hf-stitch"
        )
    weight, bias = (torch.from_numpy(each) for each in affine)
    return [DenseLayer(weight, bias if bias.any() else None)]


def export_sentence_transformer(embedding_map: EmbeddingMap, encoder: str | Path, folder: str | Path) -> Path:
    """Write an encoder with the map behind it as a folder that sentence-transformers loads, versions 5 and 6.

    The folder of the encoder is copied, so that its prompts, similarity and tokenizer stay. Modules for the map are
    added and, if the map normalises, one for normalisation. The result needs no hf-stitch and no ``trust_remote_code``.

    Args:
        embedding_map: The map. In direction ``index`` it takes vectors of the old encoder, otherwise of the new one.
        encoder: Folder of that encoder, as saved by sentence-transformers. Save it with version 5 if version 5 is to
            load the result.
        folder: Folder to write; it must be new or empty.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If ``encoder`` is no folder of sentence-transformers.
        FileExistsError: If ``folder`` contains something.
        ValueError: If the map is no sequence of dense layers, or its width is not that of the encoder's last module
            that states one.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> with TemporaryDirectory() as place:
        ...     old = Path(place, "old")
        ...     old.mkdir()
        ...     _ = (old / "modules.json").write_text("[]")
        ...     new = export_sentence_transformer(EmbeddingMap.of(LinearStitch(4, 3)), old, Path(place, "new"))
        ...     [module["type"] for module in json.loads((new / "modules.json").read_text())]
        ['sentence_transformers.models.Dense', 'sentence_transformers.models.Normalize']
    """
    source, place = Path(encoder).expanduser(), Path(folder).expanduser()
    if not (source / MODULES).is_file():
        raise FileNotFoundError(f"{source} has no {MODULES}: it is no folder of sentence-transformers")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FileExistsError(f"{place} exists and is not an empty folder")
    layers = dense_layers(embedding_map)
    modules = json.loads((source / MODULES).read_text(encoding="utf-8"))
    _check_width(embedding_map, source, modules)
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place.parent, prefix=".export-") as temporary:
        fresh = Path(temporary, "model")
        shutil.copytree(source, fresh)
        for layer in layers:
            _write_dense(layer, fresh / _add(modules, "Dense"))
        if embedding_map.normalized:
            (fresh / _add(modules, "Normalize")).mkdir()
        (fresh / MODULES).write_text(json.dumps(modules, indent=2), encoding="utf-8")
        if place.exists():
            place.rmdir()
        fresh.replace(place)
    return place


def _add(modules: list[dict[str, Any]], kind: str) -> str:
    """Add a module to the list, and return the name of its folder."""
    number = len(modules)
    name = f"{number}_{kind}"
    modules.append({"idx": number, "name": str(number), "path": name, "type": KINDS + kind})
    return name


def _write_dense(layer: DenseLayer, folder: Path) -> None:
    folder.mkdir()
    activation = layer.activation
    config = {
        "in_features": layer.weight.shape[1],
        "out_features": layer.weight.shape[0],
        "bias": layer.bias is not None,
        "activation_function": f"{activation.__module__}.{activation.__name__}",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    state = {"linear.weight": layer.weight.float().contiguous()}
    if layer.bias is not None:
        state["linear.bias"] = layer.bias.float().contiguous()
    save_file(state, folder / "model.safetensors")


def _check_width(embedding_map: EmbeddingMap, source: Path, modules: list[dict[str, Any]]) -> None:
    """Check that the last module that states a width has that of the map."""
    for module in reversed(modules):
        config = source / str(module["path"]) / "config.json"
        if not config.is_file():
            continue
        stated = json.loads(config.read_text(encoding="utf-8"))
        for key in ("out_features", "word_embedding_dimension", "embedding_dimension"):
            if isinstance(width := stated.get(key), int):
                if width != embedding_map.in_features:
                    raise ValueError(
                        f"{embedding_map!r} takes vectors of width {embedding_map.in_features}, and {source} makes "
                        f"vectors of width {width}: is it the other encoder?"
                    )
                return


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
