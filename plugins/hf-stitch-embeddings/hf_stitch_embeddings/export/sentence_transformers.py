"""Export of an encoder with a map as a sentence-transformers folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_stitch.hub import CARD
from hf_stitch.stitches import IdentityStitch, LowRankStitch, ResidualMLPStitch
from hf_stitch.storage.files import written_aside
from hf_stitch_embeddings.embedding_map import BEGIN, RECORD, EmbeddingMap

MODULES = "modules.json"
CLASSES = "sentence_transformers.models."
"""Import path of module classes in all versions; version 6 also accepts it."""
CONFIG = "config_sentence_transformers.json"
SIMILARITIES = {"cosine": "cosine", "dot": "dot", "l2": "euclidean"}
USE = """```python
from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer("path/to/this/folder").{queries}(["a text"])
```"""


@dataclass(frozen=True)
class DenseLayer:
    """Dense layer ``activation(Wx + b)``.

    Attributes:
        weight: ``W``, ``(out, in)``.
        bias: ``b``, ``(out,)``, or None.
        activation: Class of the activation function.
    """

    weight: Tensor
    bias: Tensor | None
    activation: type[nn.Module] = nn.Identity


def dense_layers(embedding_map: EmbeddingMap) -> list[DenseLayer]:
    """Convert a map to dense layers.

    An affine map becomes one layer, a low-rank map two. A residual MLP becomes two layers: since
    ``gelu(z) - gelu(-z) = z``, the affine part passes through the hidden layer.

    Args:
        embedding_map: The map.

    Returns:
        Layers that compute the map without normalisation.

    Raises:
        ValueError: If the map is not a sequence of dense layers.

    Example:
        >>> from hf_stitch.stitches import LowRankStitch
        >>> [tuple(layer.weight.shape) for layer in dense_layers(EmbeddingMap.of(LowRankStitch(8, 6, rank=2)))]
        [(2, 8), (6, 2)]
    """
    stitch = embedding_map.stitch
    if isinstance(stitch, IdentityStitch) and stitch.in_features == stitch.out_features:
        return []
    if isinstance(stitch, LowRankStitch):
        return [DenseLayer(stitch.down.detach(), None), DenseLayer(stitch.up.detach(), _detach(stitch.bias))]
    if isinstance(stitch, ResidualMLPStitch):
        weight, zeros = stitch.weight.detach(), torch.zeros(2 * stitch.out_features)
        eye = torch.eye(stitch.out_features)
        hidden_weight = torch.cat([stitch.down.detach(), weight, -weight])
        return [
            DenseLayer(hidden_weight, torch.cat([stitch.down_bias.detach(), zeros]), nn.GELU),
            DenseLayer(torch.cat([stitch.up.detach(), eye, -eye], 1), stitch.bias.detach()),
        ]
    affine = embedding_map.affine()
    if affine is None:
        raise ValueError(
            f"{embedding_map!r} cannot be written as dense layers, which sentence-transformers requires to load a map "
            "without custom code; export an affine map, or serve this map with hf-stitch"
        )
    weight, bias = (torch.from_numpy(array) for array in affine)
    return [DenseLayer(weight, bias if bias.any() else None)]


def export_sentence_transformer(embedding_map: EmbeddingMap, encoder: str | Path, folder: str | Path) -> Path:
    """Export an encoder followed by the map as a folder for sentence-transformers 5 and 6.

    The encoder's folder is copied with its prompts, similarity and tokenizer. Modules for the map are appended, and a
    ``Normalize`` module if the map normalises. Another ``Normalize`` module precedes them if the map requires unit
    vectors and the encoder does not normalise. The model card gets a section on the map. The result loads without
    hf-stitch and without ``trust_remote_code``.

    Args:
        embedding_map: The map. Direction ``index`` requires the old encoder; the directions ``query`` and ``adjoint``
            require the new one.
        encoder: Folder of the encoder, as saved by sentence-transformers. Save it with version 5 to load the result
            with version 5.
        folder: Folder to write; it must be new or empty.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If ``encoder`` is not a sentence-transformers folder.
        FileExistsError: If ``folder`` is not empty.
        ValueError: If the map is not a sequence of dense layers, or its width differs from the encoder's.

    Example:
        >>> from hf_stitch.stitches import LinearStitch
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as place:
        ...     old = Path(place, "old")
        ...     old.mkdir()
        ...     _ = (old / "modules.json").write_text("[]")
        ...     new = export_sentence_transformer(EmbeddingMap.of(LinearStitch(4, 3)), old, Path(place, "new"))
        ...     [module["type"] for module in json.loads((new / "modules.json").read_text())]
        ['sentence_transformers.models.Dense', 'sentence_transformers.models.Normalize']
    """
    source = Path(encoder).expanduser()
    with _new_folder(folder) as fresh:
        modules = _read_modules(source)
        layers = dense_layers(embedding_map)
        _check_width(source, modules, embedding_map.in_features, f"{embedding_map!r} requires")
        shutil.copytree(source, fresh, dirs_exist_ok=True)
        for path, kind, layer in _map_modules(embedding_map, layers, modules):
            modules.append({"idx": len(modules), "name": str(len(modules)), "path": path, "type": CLASSES + kind})
            _write_module(layer, fresh / path)
        (fresh / MODULES).write_text(json.dumps(modules, indent=2), encoding="utf-8")
        _write_card(embedding_map, fresh, USE.format(queries="encode"))
    return Path(folder).expanduser()


def export_query_document(
    embedding_map: EmbeddingMap, new_encoder: str | Path, old_encoder: str | Path, folder: str | Path
) -> Path:
    """Export an encoder with two routes: the new encoder and the map for queries, the old encoder for documents.

    The export serves an unchanged index of old vectors: ``encode_query`` and ``encode_document`` return vectors of the
    same space. Without a default route, ``encode`` without a task raises an error. The folder loads without hf-stitch
    in each version of sentence-transformers (5 or 6) that loads both encoders.

    Args:
        embedding_map: A map of direction ``query`` or ``adjoint``.
        new_encoder: Folder of the new encoder, as saved by sentence-transformers.
        old_encoder: Folder of the old encoder.
        folder: Folder to write; it must be new or empty.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If an encoder is not a sentence-transformers folder.
        FileExistsError: If ``folder`` is not empty.
        ValueError: If the map applies to documents, is not a sequence of dense layers, or its widths do not match the
            encoders (sentence-transformers only warns).
    """
    if embedding_map.direction == "index" or embedding_map.keeps_old:
        raise ValueError(f"{embedding_map!r} does not map new queries; use export_sentence_transformer")
    with _new_folder(folder) as fresh:
        layers = dense_layers(embedding_map)
        types: dict[str, str] = {}
        structure: dict[str, list[str]] = {}
        prompts: dict[str, str] = {}
        sides = {"query": Path(new_encoder).expanduser(), "document": Path(old_encoder).expanduser()}
        widths = {"query": embedding_map.in_features, "document": embedding_map.out_features}
        for route, source in sides.items():
            modules = _read_modules(source)
            verb = "requires" if route == "query" else "returns"
            _check_width(source, modules, widths[route], f"{embedding_map!r} {verb}")
            structure[route] = []
            for number, module in enumerate(modules):
                kind = str(module["type"])
                path = f"{route}_{number}_{kind.rpartition('.')[2]}"
                _copy_module(source, str(module["path"]), modules, fresh / path)
                types[path] = kind
                structure[route].append(path)
            if route == "query":
                for path, kind, layer in _map_modules(embedding_map, layers, modules):
                    types[f"query_{path}"] = CLASSES + kind
                    structure[route].append(f"query_{path}")
                    _write_module(layer, fresh / f"query_{path}")
            encoder_prompts = _read_config(source).get("prompts") or {}
            prompts[route] = encoder_prompts.get(route, "")
        parameters = {"default_route": None, "allow_empty_key": False}
        router = {"types": types, "structure": structure, "parameters": parameters}
        (fresh / "router_config.json").write_text(json.dumps(router, indent=2), encoding="utf-8")
        (fresh / MODULES).write_text(
            json.dumps([{"idx": 0, "name": "0", "path": "", "type": f"{CLASSES}Router"}], indent=2), encoding="utf-8"
        )
        config = {
            **_read_config(sides["query"]), "prompts": prompts, "default_prompt_name": None,
            "similarity_fn_name": SIMILARITIES[embedding_map.metric],
        }  # fmt: skip
        (fresh / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        _write_card(embedding_map, fresh, USE.format(queries="encode_query"))
    return Path(folder).expanduser()


def check_text_embeddings_inference(folder: str | Path) -> None:
    """Check whether text-embeddings-inference computes the same vectors as a sentence-transformers folder.

    The rules come from its source code; it was not run. It resolves modules by their version 5 names. After pooling it
    applies all dense modules, with Identity or Tanh as activation, and finally normalises unless the request disables
    it. It skips a ``Normalize`` between pooling and a dense module, which changes the result if a dense module has a
    bias. Without a bias, only the length changes, and the final normalisation removes the difference.

    Args:
        folder: The folder.

    Raises:
        ValueError: If the vectors differ; the message lists all reasons and remedies.
    """
    root = Path(folder).expanduser()
    modules = _read_modules(root)
    kinds = [str(module["type"]).removeprefix(CLASSES) for module in modules]
    reasons = [
        f"module {module['type']} is not supported"
        for module, kind in zip(modules, kinds, strict=True)
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize")
    ]
    dense = [root / str(module["path"]) for module, kind in zip(modules, kinds, strict=True) if kind == "Dense"]
    configs = [json.loads((path / "config.json").read_text(encoding="utf-8")) for path in dense]
    for config, dense_folder in zip(configs, dense, strict=True):
        name = str(config.get("activation_function", "")).rpartition(".")[2]
        if name not in ("Identity", "Tanh"):
            reasons.append(f"activation of {dense_folder.name} must be Identity or Tanh, got {name}")
    if dense and "Normalize" in kinds[: kinds.index("Dense")] and any(config.get("bias", True) for config in configs):
        reasons.append(
            "vectors are normalised before a map with a bias; fit a map without bias, e.g. Lstsq(intercept=False), or "
            "fit to unnormalised vectors and remove the Normalize module from the encoder"
        )
    if dense and kinds[-1] != "Normalize":
        reasons.append("outputs are not normalised; send requests with normalize=false")
    if reasons:
        raise ValueError(f"text-embeddings-inference does not reproduce {root}: {'; '.join(reasons)}")


def _read_modules(folder: Path) -> list[dict[str, Any]]:
    if not (folder / MODULES).is_file():
        raise FileNotFoundError(f"{folder} is not a sentence-transformers folder: {MODULES} is missing")
    modules: list[dict[str, Any]] = json.loads((folder / MODULES).read_text(encoding="utf-8"))
    return modules


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config


@contextmanager
def _new_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes ``folder`` on success and is removed after an error."""
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder")
    with written_aside(target) as fresh:
        fresh.mkdir()
        yield fresh


def _map_modules(
    embedding_map: EmbeddingMap, layers: list[DenseLayer], modules: list[dict[str, Any]]
) -> Iterator[tuple[str, str, DenseLayer | None]]:
    """Yield folder, kind and layer of each module to append to the encoder for the map.

    If the map requires unit vectors and the encoder does not normalise, the first module normalises.
    """
    unit_vector, first_modules = np.eye(1, embedding_map.in_features), []
    if modules and str(modules[-1]["type"]).endswith(".Normalize"):
        embedding_map.check_lengths(unit_vector, "the outputs of the encoder (its last module is Normalize)")
    elif embedding_map.record.get("input_normalized"):
        first_modules = [None]
    number = len(modules)
    for layer in [*first_modules, *layers, *([None] if embedding_map.normalized else [])]:
        kind = "Normalize" if layer is None else "Dense"
        yield f"{number}_{kind}", kind, layer
        number += 1


def _write_module(layer: DenseLayer | None, folder: Path) -> None:
    folder.mkdir()
    if layer is None:
        return
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


def _copy_module(source: Path, path: str, modules: list[dict[str, Any]], target: Path) -> None:
    """Copy a module; for a module at the root of the folder, skip the files of the remaining modules."""
    if path:
        if (source / path).is_dir():
            shutil.copytree(source / path, target)
        else:
            target.mkdir()  # a module without files, such as Normalize
        return
    module_folders = {str(module["path"]).partition("/")[0] for module in modules if module["path"]}
    shutil.copytree(source, target, ignore=lambda directory, names: (
        {*module_folders, MODULES, CONFIG, CARD} & set(names) if Path(directory) == source else set()
    ))  # fmt: skip


def _check_width(source: Path, modules: list[dict[str, Any]], width: int, requirement: str) -> None:
    """Check that the last width stated by a module equals the width of the map."""
    for module in reversed(modules):
        config = source / str(module["path"]) / "config.json"
        if not config.is_file():
            continue
        config_values = json.loads(config.read_text(encoding="utf-8"))
        for key in ("out_features", "word_embedding_dimension", "embedding_dimension"):
            if isinstance(encoder_width := config_values.get(key), int):
                if encoder_width != width:
                    raise ValueError(
                        f"{requirement} vectors of width {width}, but {source} returns width {encoder_width}: are the "
                        "encoders swapped?"
                    )
                return


def _write_card(embedding_map: EmbeddingMap, folder: Path, use: str) -> None:
    """Write the map's section above the encoder's model card, and its record as JSON."""
    path = folder / CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    head, rest = ("", text)
    if text.startswith("---\n") and "\n---\n" in text[4:]:  # the metadata stay at the top
        end = text.index("\n---\n", 4) + 5
        head, rest = text[:end], text[end:]
    section = embedding_map.card().partition("```python")[0].removeprefix(BEGIN).strip()
    encoder_card = f"\n\n# The encoder\n\n{rest.strip()}\n" if rest.strip() else "\n"
    path.write_text(f"{head}# Encoder with an embedding map\n\n{section}\n\n{use}{encoder_card}", encoding="utf-8")
    (folder / f"{RECORD}.json").write_text(json.dumps(embedding_map.recipe, indent=2), encoding="utf-8")


def _detach(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
