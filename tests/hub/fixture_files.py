"""Files of what is no model: stitches, anchors, activations, recordings, and those of plugins.

Beside each is a file with the values that it contains, or with an input and its output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fixture_models import anchors as anchor_set
from fixture_networks import LAYER, bert, classifiers, images, points, rows, texts, vit
from hf_stitch_embeddings import EmbeddingMap, fit_embedding_map, normalized
from hf_stitch_filter_atoms import PatchCovariance
from hf_stitch_transfer import SparseAutoencoder
from safetensors.torch import save_file
from torch import nn

import hf_stitch
from hf_stitch import Adapter
from hf_stitch.analysis import extract_activations
from hf_stitch.relative import RelativeProjection
from hf_stitch.stitches import (
    IdentityStitch,
    LinearStitch,
    LowRankStitch,
    MaskedStitch,
    PiecewiseStitch,
    ResidualMLPStitch,
    Stitch,
)
from hf_stitch.stitches.linear import LowRankResidualStitch
from hf_stitch.stitches.sequence import AttentionStitch
from hf_stitch.training import DynamicsRecorder


def keep(values: dict[str, Any], path: Path) -> None:
    tensors = {name: torch.as_tensor(value).detach().contiguous() for name, value in values.items()}
    save_file(tensors, f"{path}.answer.safetensors")


# -- stitches ----------------------------------------------------------------------------------------------------------
def stitches(folder: Path) -> None:
    """One map of each built-in class, in a file of its own."""
    torch.manual_seed(0)
    made: dict[str, Stitch] = {
        "attention": AttentionStitch(4, 3, heads=2, width=4, causal=True),
        "identity": IdentityStitch(4, 3),
        "linear": LinearStitch(4, 3),
        "low_rank": LowRankStitch(4, 3, rank=2),
        "low_rank_residual": LowRankResidualStitch(4, 3, rank=2),
        "masked": MaskedStitch.of(weight=rows(3, 4, 6), mask=rows(3, 4, 5) > 0, bias=rows(1, 3, 7)[0]),
        "piecewise": PiecewiseStitch(4, 3, pieces=2),
        "relative": RelativeProjection.of(rows(3, 4, 8), similarities=["cosine", "inner"]),
        "residual_mlp": ResidualMLPStitch(4, 3, hidden=5),
    }
    given = rows(10, 4, 9).reshape(2, 5, 4)
    for name, stitch in made.items():
        for parameter in stitch.parameters():
            nn.init.normal_(parameter)  # some are 0 at first
        stitch.fitted = {"samples": 10, "ridge": 0.5}
        stitch.eval().save(folder / f"{name}.safetensors")
    with torch.no_grad():
        keep({"input": given, **{name: stitch(given) for name, stitch in made.items()}}, folder)


def autoencoder(folder: Path) -> None:
    torch.manual_seed(0)
    made = SparseAutoencoder(4, 6, "jumprelu", metadata={"hook_name": "blocks.3"}).eval()
    for parameter in made.parameters():
        nn.init.uniform_(parameter, 0, 1)
    made.save_saelens(folder)
    with torch.no_grad():
        keep({"input": rows(5), "output": made(rows(5)), "features": made.encode(rows(5))}, folder)


# -- samples -----------------------------------------------------------------------------------------------------------
def anchors(folder: Path) -> None:
    found = anchor_set()
    found.save_pretrained(folder)
    values = {f"values.{place}": each.values for place, each in enumerate(found.encoded)}
    pictures = torch.stack([each["image"] for each in images()])
    among = torch.tensor(found.among(hf_stitch.Samples.of(list(pictures))))
    keep({"images": pictures, "among": among, **values}, folder)


def activations(modality: str, path: Path) -> None:
    """Activations of tokens, with a mask, or on a grid, with names as ids."""
    adapter, data, layers = (
        (bert(), texts(), [LAYER["bert"]]) if modality == "texts" else (vit(), images(), [LAYER["vit"], "vit.layers.1"])
    )
    found = extract_activations(adapter, hf_stitch.Samples.of(data[:5]), layers=layers, pooling="none", progress=False)
    if modality == "images":
        found = replace(found, ids=[f"picture {i}" for i in range(5)])
    found.save(path)
    keep({**found.values, **({} if found.mask is None else {"mask": found.mask})}, path)


def record(recorder: DynamicsRecorder, adapter: Adapter) -> None:
    """Measure a network at three steps, between which its weights move."""
    for step in range(3):
        recorder.measure(adapter, step=step)
        with torch.no_grad():
            for parameter in adapter.model.parameters():
                parameter += 0.3 * rows(1, parameter.numel(), step).reshape(parameter.shape)


def recordings(folder: Path) -> None:
    record(DynamicsRecorder(folder, points(20), layers=["1", "3"]), classifiers()[0])


def recordings_of_weights(folder: Path) -> None:
    """Weights that a callback has recorded, for a metric of a plugin."""
    adapter = hf_stitch.load(convolutions(), example_inputs=torch.zeros(2, 1, 6, 6))
    record(DynamicsRecorder(folder, metric="weight_cosine"), adapter)


# -- plugins -----------------------------------------------------------------------------------------------------------
def encoders(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of an encoder, and of another one that is the first, rotated, with noise."""
    old = normalized(rows(n, 8, seed).numpy())
    turn = torch.linalg.qr(rows(8, 8, 99)).Q.numpy()
    return old, normalized(old @ turn + 0.05 * rows(n, 8, seed + 7).numpy())


@cache
def fitted_map() -> EmbeddingMap:
    return fit_embedding_map(*encoders(300), map="ridge", direction="index", index_size=20_000, progress=False)


def embedding_map(adjoint: bool, folder: Path) -> None:
    """A map between the vectors of two encoders, with its scores; or the transposed map, for new queries."""
    made, given = (fitted_map().adjoint() if adjoint else fitted_map()), encoders(5)[adjoint]
    made.save_pretrained(folder)
    keep({"input": given, "output": made(given)}, folder)


def convolutions(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Linear(18, 3))


def patch_covariance(path: Path) -> None:
    found = PatchCovariance.of(convolutions(), [rows(4, 36).reshape(4, 1, 6, 6)])
    found.save(path)
    keep(dict(found.factors), path)


FILES: dict[str, Callable[[Path], None]] = {
    "stitches": stitches,
    "autoencoder": autoencoder,
    "anchors": anchors,
    "activations_of_texts.safetensors": partial(activations, "texts"),
    "activations_of_images.npz": partial(activations, "images"),
    "activations_of_texts": partial(activations, "texts"),  # Arrow files
    "recordings": recordings,
    "recordings_of_weights": recordings_of_weights,
    "embedding_map": partial(embedding_map, False),
    "adjoint_map": partial(embedding_map, True),
    "patch_covariance.safetensors": patch_covariance,
}
"""Name of a file or folder -> function that writes it."""
