"""Models without a head: how close their outputs are to those of the target, sample by sample."""

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
"""Number of nearest neighbours; half of the other samples if there are fewer than 20."""

PARTS = ("sentence_embedding", "text_embeds", "image_embeds", "last_hidden_state", "logits", "pooler_output")
"""Parts of an output that become vectors, in order of preference; then the first tensor."""


class Vectors(Task):
    """One vector per sample of the outputs of a model without a head, and how close it is to the target's."""

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
        found = {name: _vectors(output, target if name == "target" else source) for name, output in outputs.items()}
        check_predictions(found["target"], target[0], "the output of the target is")
        return {name: {"vector": values} for name, values in found.items()}

    def joined(self, parts: Mapping[str, Sequence[Answers]], samples: Samples) -> dict[str, Answers]:
        """Concatenate the vectors of batches."""
        found = {name: [row["vector"] for row in rows] for name, rows in parts.items()}
        if len(widths := {part.shape[1] for rows in found.values() for part in rows}) > 1:
            raise ValueError(
                f"the outputs have {', '.join(map(str, sorted(widths)))} numbers for different samples or stitches, so "
                "that they cannot be compared; pass samples of one size, or a target with one vector per sample"
            )
        device = found["target"][0].device
        return {name: {"vector": torch.cat([row.to(device) for row in rows])} for name, rows in found.items()}

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the stitched vectors of other samples: of each, the next one on a random cycle."""
        own = measured["stitched"]["vector"]
        cycle = torch.from_numpy(np.random.default_rng(seed).permutation(len(own)))
        partners = torch.empty_like(cycle)
        partners[cycle] = cycle.roll(1)
        return {"vector": own[partners.to(own.device)]}

    def drawn(self, measured: Mapping[str, Answers], *, resamples: int, seed: int) -> dict[str, dict[str, Array]]:
        """Compute the figures of every predictor on all samples, and on bootstrap resamples shared by all predictors.

        - ``r2``: share of the variation of the target's vectors about their mean that the predictor's explain.
        - ``cosine``: mean cosine of a predicted vector and the target's vector of the sample, both relative to the
          target's mean vector.
        - ``cka``: linear CKA. Its resamples are linear in the weights of the samples (with the influence function),
          because a resample that contains a sample twice would increase it.
        - ``knn_overlap``: share of the nearest neighbours (by the same cosine) of a sample, among all samples, that
          both have in common.

        A figure that is undefined (CKA of constant vectors, a single sample) is NaN.
        """
        target = measured["target"]["vector"].double()
        weights = np.concatenate(list(resampled(len(target), resamples, seed)))
        drawn = torch.from_numpy(weights).to(target.device)
        found = {
            who: _figures(row["vector"].double(), target, drawn) for who, row in measured.items() if who != "target"
        }
        return {who: {name: values.cpu().numpy() for name, values in row.items()} for who, row in found.items()}


def _figures(own: Tensor, target: Tensor, weights: Tensor) -> dict[str, Tensor]:
    count, mean = weights.sum(1), target.mean(0)
    x, y, about = own - own.mean(0), target - mean, own - mean
    variation = weights @ y.square().sum(1) - (weights @ y).square().sum(1) / count
    lengths = about.norm(dim=1) * y.norm(dim=1)
    cosines = (about * y).sum(1) / lengths
    undefined = torch.full_like(count, torch.nan)
    constant = x.norm() <= 1e-6 * own.norm() or y.norm() <= 1e-6 * target.norm()
    k = min(NEIGHBOURS, (len(own) - 1) // 2)
    near = k > 0 and not constant and bool((lengths > 0).all())
    near = near and not any(alike(rows / rows.norm(dim=1, keepdim=True)) for rows in (about, y))
    return {
        "r2": 1 - (weights @ (own - target).square().sum(1)) / variation.where(variation > 0, torch.nan),
        "cosine": weights @ cosines / count,
        "cka": undefined if constant else _cka(x, y, weights),
        "knn_overlap": weights @ shared_neighbours(about, y, k, "cosine") / count if near else undefined,
    }


def _cka(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Linear CKA of centred rows, and of weighted rows to first order.

    HSIC is a mean over the samples of ``Σⱼ ⟨xᵢ, xⱼ⟩ ⟨yᵢ, yⱼ⟩``. Its influence function is twice the deviation of a
    sample's term from the mean, as a sample is in its own term and in those of all others.
    """
    cross, own_x, own_y = (_hsic_terms(a, b) for a, b in ((x, y), (x, x), (y, y)))
    share = weights / weights.sum(1, keepdim=True)
    xy, xx, yy = (2 * (share @ terms) - terms.mean() for terms in (cross, own_x, own_y))
    product = xx * yy
    return xy / product.where((xx > 0) & (yy > 0), torch.nan).sqrt()


def _hsic_terms(x: Tensor, y: Tensor) -> Tensor:
    """``Σⱼ ⟨xᵢ, xⱼ⟩ ⟨yᵢ, yⱼ⟩`` for every i, from d × d or n × n products, whichever are smaller."""
    if x.shape[1] * y.shape[1] <= len(x) ** 2:
        return ((x @ (x.T @ y)) * y).sum(1)
    return ((x @ x.T) * (y @ y.T)).sum(1)


def _vectors(output: Any, side: Side) -> Tensor:
    batch, mask = side[0], side[1].get("attention_mask")
    values = tensor_of(output, len(batch.samples))
    if values is None:
        raise ValueError(
            f"an output of type {type(output).__name__} has no floating-point tensor with a row for each of "
            f"{len(batch.samples)} samples, so that the model cannot be scored; wrap the target in a module that "
            "outputs one vector per sample"
        )
    if values.dim() != 3:
        return values.reshape(len(values), -1)
    if mask is None or mask.shape != values.shape[:2]:
        return values.mean(1)
    weights = mask[..., None].to(values)
    return (values * weights).sum(1) / weights.sum(1)


def tensor_of(output: Any, n: int) -> Tensor | None:
    """Return the tensor of an output that becomes vectors of n samples; ``None`` if there is none."""
    if isinstance(output, Mapping):
        named = [output[part] for part in PARTS if output.get(part) is not None]
        return next((found for item in (*named, *output.values()) if (found := tensor_of(item, n)) is not None), None)
    if isinstance(output, Sequence) and not isinstance(output, str):
        return next((found for item in output if (found := tensor_of(item, n)) is not None), None)
    fits = isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 0 and len(output) == n
    return output if fits else None
