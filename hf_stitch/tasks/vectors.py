"""Task of models without a head: closeness of their outputs to the outputs of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_stitch.data import Samples
from hf_stitch.metrics._neighbours import alike, shared_neighbours
from hf_stitch.tasks.base import Answers, Array, Side, Task, check_predictions, resampled

NEIGHBOURS = 10
"""Number of nearest neighbours."""

SMALLEST_POOL = 10 * NEIGHBOURS
"""Minimum number of samples for a share of common neighbours: by chance, a tenth of them is common."""

PARTS = ("sentence_embedding", "text_embeds", "image_embeds", "last_hidden_state", "logits", "pooler_output")
"""Parts of an output to use as vectors, in order of preference; then the first tensor."""


class Vectors(Task):
    """One output vector per sample of a model without a head, and its closeness to the target's vector."""

    name = "feature-extraction"
    title = "vectors without a head"
    models: ClassVar[Mapping[str, str]] = {"": "hf_stitch.artefacts.modeling:StitchedModel"}
    figures: ClassVar[Mapping[str, bool]] = dict.fromkeys(("r2", "cosine", "cka", "knn_overlap"), True)
    unused = "a model without a head is compared with its target by outputs"

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Return the vector of each sample.

        It is an embedding, or the mean over positions of ``last_hidden_state`` (of real tokens) or of another output
        with three axes, or the output itself, flattened.
        """
        vectors = {name: _vectors(output, target if name == "target" else source) for name, output in outputs.items()}
        check_predictions(vectors["target"], target[0], "the output of the target is")
        return {name: {"vector": values} for name, values in vectors.items()}

    def joined(self, parts: Mapping[str, Sequence[Answers]], samples: Samples) -> dict[str, Answers]:
        """Concatenate the vectors of batches."""
        vectors = {name: [row["vector"] for row in rows] for name, rows in parts.items()}
        if len(widths := {part.shape[1] for rows in vectors.values() for part in rows}) > 1:
            raise ValueError(
                "outputs must have the same size for all samples and stitches, got "
                f"{', '.join(map(str, sorted(widths)))} numbers; pass samples of one size, or a target with one "
                "vector per sample"
            )
        device = vectors["target"][0].device
        return {name: {"vector": torch.cat([row.to(device) for row in rows])} for name, rows in vectors.items()}

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the stitched vectors of other samples: the next sample of each on a random cycle."""
        vectors = measured["stitched"]["vector"]
        cycle = torch.from_numpy(np.random.default_rng(seed).permutation(len(vectors)))
        partners = torch.empty_like(cycle)
        partners[cycle] = cycle.roll(1)
        return {"vector": vectors[partners.to(vectors.device)]}

    def drawn(self, measured: Mapping[str, Answers], *, resamples: int, seed: int) -> dict[str, dict[str, Array]]:
        """Compute the figures of every predictor on all samples, and on bootstrap resamples shared by all predictors.

        - ``r2``: share of the variation of the target's vectors about their mean that the predictor explains.
        - ``cosine``: mean cosine of a predicted vector and the target's vector of the sample, both relative to the
          target's mean vector.
        - ``cka``: linear CKA. Its resamples are linear in the weights of the samples (with the influence function),
          because a resample that contains a sample twice would increase it.
        - ``knn_overlap``: share of common nearest neighbours (10, by the same cosine) of a sample among all samples;
          undefined for fewer than 100 samples, where chance alone finds more than a tenth.

        A figure that is undefined (CKA of constant vectors, a single sample) is NaN.
        """
        target = measured["target"]["vector"].double()
        weights = np.concatenate(list(resampled(len(target), resamples, seed)))
        on_device = torch.from_numpy(weights).to(target.device)
        figures = {
            who: _figures(row["vector"].double(), target, on_device) for who, row in measured.items() if who != "target"
        }
        return {who: {name: values.cpu().numpy() for name, values in row.items()} for who, row in figures.items()}


def _figures(predicted: Tensor, target: Tensor, weights: Tensor) -> dict[str, Tensor]:
    count, mean = weights.sum(1), target.mean(0)
    x, y, about = predicted - predicted.mean(0), target - mean, predicted - mean
    variation = weights @ y.square().sum(1) - (weights @ y).square().sum(1) / count
    lengths = about.norm(dim=1) * y.norm(dim=1)
    cosines = (about * y).sum(1) / lengths
    undefined = torch.full_like(count, torch.nan)
    constant = x.norm() <= 1e-6 * predicted.norm() or y.norm() <= 1e-6 * target.norm()
    near = len(predicted) >= SMALLEST_POOL and not constant and bool((lengths > 0).all())
    near = near and not any(alike(rows / rows.norm(dim=1, keepdim=True)) for rows in (about, y))
    return {
        "r2": 1 - (weights @ (predicted - target).square().sum(1)) / variation.where(variation > 0, torch.nan),
        "cosine": weights @ cosines / count,
        "cka": undefined if constant else _cka(x, y, weights),
        "knn_overlap": weights @ shared_neighbours(about, y, NEIGHBOURS, "cosine") / count if near else undefined,
    }


def _cka(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Compute linear CKA of centred rows, and of weighted rows to first order.

    HSIC is a mean over the samples of ``Σⱼ ⟨xᵢ, xⱼ⟩ ⟨yᵢ, yⱼ⟩``. Its influence function is twice the deviation of a
    sample's term from the mean, because a sample occurs in its own term and in the terms of all other samples.
    """
    cross, own_x, own_y = (_hsic_terms(a, b) for a, b in ((x, y), (x, x), (y, y)))
    share = weights / weights.sum(1, keepdim=True)
    xy, xx, yy = (2 * (share @ terms) - terms.mean() for terms in (cross, own_x, own_y))
    product = xx * yy
    return xy / product.where((xx > 0) & (yy > 0), torch.nan).sqrt()


def _hsic_terms(x: Tensor, y: Tensor) -> Tensor:
    """Compute ``Σⱼ ⟨xᵢ, xⱼ⟩ ⟨yᵢ, yⱼ⟩`` for every i, from d × d or n × n products, whichever are smaller."""
    if x.shape[1] * y.shape[1] <= len(x) ** 2:
        return ((x @ (x.T @ y)) * y).sum(1)
    return ((x @ x.T) * (y @ y.T)).sum(1)


def _vectors(output: Any, side: Side) -> Tensor:
    batch, mask = side[0], side[1].get("attention_mask")
    values = tensor_of(output, len(batch.samples))
    if values is None:
        raise ValueError(
            f"an output of type {type(output).__name__} must contain a floating-point tensor with a row for each of "
            f"{len(batch.samples)} samples; wrap the target in a module that outputs one vector per sample"
        )
    if values.dim() != 3:
        return values.reshape(len(values), -1)
    if mask is None or mask.shape != values.shape[:2]:
        return values.mean(1)
    weights = mask[..., None].to(values)
    return (values * weights).sum(1) / weights.sum(1)


def tensor_of(output: Any, n: int) -> Tensor | None:
    """Return the tensor in an output to use as vectors of n samples, or ``None``."""
    if isinstance(output, Mapping):
        preferred = [output[part] for part in PARTS if output.get(part) is not None]
        return next(
            (tensor for element in (*preferred, *output.values()) if (tensor := tensor_of(element, n)) is not None),
            None,
        )
    if isinstance(output, Sequence) and not isinstance(output, str):
        return next((tensor for element in output if (tensor := tensor_of(element, n)) is not None), None)
    is_usable = isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 0 and len(output) == n
    return output if is_usable else None
