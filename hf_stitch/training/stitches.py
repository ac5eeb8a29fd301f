"""Several trainable stitches into one frozen target half, as one module that computes the loss of each stitch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from hf_stitch.adapters.cutting.halves import Back
from hf_stitch.representation import Representation
from hf_stitch.stitches import IdentityStitch, LinearStitch, Stitch, StitchingLayer
from hf_stitch.stitches.layer import paired_rows
from hf_stitch.stitches.linear import AffineStitch
from hf_stitch.tasks.base import Task, logits_of
from hf_stitch.training.objective import Objective
from hf_stitch.training.prepared import FEATURES, PreparedBatch


def trainable(layer: StitchingLayer, orthogonal: bool) -> StitchingLayer:
    """Return a trainable copy of a stitching layer; identity maps become affine maps.

    Maps in half precision are converted to float32 because small updates would be lost to rounding.
    """
    clone = copy.deepcopy(layer)
    for part in clone.parts:
        stitch: Stitch = getattr(clone, part)
        if isinstance(stitch, IdentityStitch):
            stitch = _affine(stitch)
        if not any(parameter.is_floating_point() for parameter in stitch.parameters()):
            raise ValueError(
                f"the {part} map of the stitch is {stitch}, without trainable parameters; start from another map, for "
                "example initial='lstsq'"
            )
        stitch.to(torch.promote_types(_dtype(stitch), torch.float32))
        if orthogonal:
            _make_orthogonal(part, stitch)
        setattr(clone, part, stitch.requires_grad_(True))
    return clone


def plain(layer: StitchingLayer, initial: StitchingLayer) -> StitchingLayer:
    """Return a copy of a trained layer with plain weights, without parametrizations."""
    clone = copy.deepcopy(layer)
    for part in clone.parts:
        stitch = getattr(clone, part)
        if parametrize.is_parametrized(stitch):
            parametrize.remove_parametrizations(stitch, "weight", leave_parametrized=True)
        stitch.to(_dtype(getattr(initial, part)))
    return clone.eval()


def _dtype(stitch: Stitch) -> torch.dtype:
    """Return the dtype of the weights; float32 for an identity, which does not have weights."""
    return next((p.dtype for p in stitch.parameters() if p.is_floating_point()), torch.float32)


def _affine(identity: IdentityStitch) -> LinearStitch:
    affine = LinearStitch(identity.in_features, identity.out_features)
    affine.load_state_dict({"weight": identity.matrix(), "bias": torch.zeros(identity.out_features)})
    affine.fitted = dict(identity.fitted)
    return affine


def _make_orthogonal(part: str, stitch: Stitch) -> None:
    if type(stitch) is not LinearStitch:
        raise ValueError(f"orthogonal=True requires affine maps, but the {part} map is {stitch}")
    with torch.no_grad():
        left, _, right = torch.linalg.svd(stitch.weight.double(), full_matrices=False)
        stitch.weight.copy_(left @ right)
    parametrizations.orthogonal(stitch, "weight", orthogonal_map="matrix_exp")


class Stitches(nn.Module):
    """Stitching layers at the same target cut, with the frozen target half, which runs them in one batch."""

    def __init__(
        self,
        layers: Mapping[str, StitchingLayer],
        back: Back,
        task: Task,
        objective: Objective,
        last: str,
        origins: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.names = tuple(layers)
        self.layers = nn.ModuleList(layers.values())
        self.back = back
        self._task, self._objective, self._last, self._origins = task, objective, last, origins

    @property
    def trained(self) -> list[StitchingLayer]:
        """The stitching layers in the order of the names."""
        return [layer for layer in self.layers if isinstance(layer, StitchingLayer)]

    def train(self, mode: bool = True) -> Stitches:
        """Set the mode of the stitching layers; the frozen half stays in eval mode."""
        super().train(mode)
        self.back.eval()
        return self

    def forward(self, batch: PreparedBatch, total: float, share: float = 1.0, features: bool = False) -> Tensor:
        """Compute the loss of each stitch."""
        mapped = self._mapped(batch)
        if features:
            return torch.stack(
                [_distance(values, batch.activations[FEATURES], total) for values in self._features(mapped)]
            )
        losses = []
        for layer, representation, logits in zip(self.trained, mapped, self._logits(mapped), strict=True):
            loss = self._objective.loss(self._task, logits.to(_at_least_float32(logits.dtype)), batch.answers) / total
            if self._objective.penalties and share:
                loss = loss + share * self._objective.penalty(layer, self._rows(layer, representation, batch))
            losses.append(loss)
        return torch.stack(losses)

    def shrink(self, rate: float, active: Tensor) -> None:
        """Apply the proximal step of the objective to the active stitches."""
        for layer, is_active in zip(self.trained, active.tolist(), strict=True):
            if is_active:
                self._objective.shrink(layer, rate)

    @torch.no_grad()
    def check(self, batch: PreparedBatch) -> int:
        """Check with one batch that the objective can be computed."""
        if "proximal_l1" in self._objective.penalties:
            for name, layer in zip(self.names, self.trained, strict=True):
                for part in layer.parts:
                    if not isinstance(stitch := getattr(layer, part), AffineStitch):
                        raise ValueError(
                            f"the penalty 'proximal_l1' requires affine maps, but the {part} map of stitch {name!r} "
                            f"is {stitch}; use the penalty 'l1'"
                        )
        mapped = self._mapped(batch)
        for layer, representation, logits in zip(self.trained, mapped, self._logits(mapped), strict=True):
            for kind, answers in batch.answers.items():
                if kind != "hard" and answers.shape != logits.shape:
                    raise ValueError(
                        f"labels={kind!r} requires the same classes: the {kind} outputs logits of shape "
                        f"{tuple(answers.shape)}, the target of shape {tuple(logits.shape)}"
                    )
            if (rows := self._rows(layer, representation, batch)) is not None:
                for name, least in self._objective.missing_rows(*rows).items():
                    raise ValueError(
                        f"the penalty {name!r} requires at least {least} rows, but the batch of a process has "
                        f"{len(rows[0])}; raise batch_size"
                    )
        if (expected := batch.activations.get(FEATURES)) is not None:
            for outputs in self._features(mapped):
                if outputs.shape != expected.values.shape:
                    raise ValueError(
                        f"final features have shape {tuple(outputs.shape)} through the stitch, but "
                        f"{tuple(expected.values.shape)} in the target; use pooling='none' or 'flatten', or set "
                        "feature_steps=0"
                    )
        return logits.shape[-1]

    @torch.no_grad()
    def right(self, batch: PreparedBatch) -> Tensor:
        """Count the correct predictions of each stitch."""
        mapped = self._mapped(batch)
        labels = batch.answers.get("hard")
        if labels is None:
            labels = self._task.decided(next(iter(batch.answers.values())))
        return torch.stack([self._task.right(logits, labels) for logits in self._logits(mapped)])

    def _mapped(self, batch: PreparedBatch) -> list[Representation]:
        return [
            layer(batch.activations[f"source/{self._origins[name]}"])
            for name, layer in zip(self.names, self.layers, strict=True)
        ]

    def _logits(self, mapped: Sequence[Representation]) -> Sequence[Tensor]:
        if len(mapped) > 1 and len({x.values.shape for x in mapped}) == 1:
            return logits_of(self._run(_concatenated(mapped))).chunk(len(mapped))
        return [logits_of(self._run(x)) for x in mapped]

    def _run(self, representation: Representation) -> Any:
        parameter = next((p for p in self.back.parameters() if p.is_floating_point()), representation.values)
        return self.back(representation.replace(values=representation.values.to(parameter.dtype)))

    def _features(self, mapped: Sequence[Representation]) -> list[Tensor]:
        """Compute the activations at the last cut of the target for each stitch."""
        if self._last == self.back.cut.layer:
            return [x.values for x in mapped]
        outputs: list[Tensor] = []
        module = self.back.model.get_submodule(self._last)
        handle = module.register_forward_hook(lambda module, args, output: outputs.append(_first_tensor(output)))
        try:
            for x in mapped:
                self._run(x)
        finally:
            handle.remove()
        return outputs

    def _rows(
        self, layer: StitchingLayer, mapped: Representation, batch: PreparedBatch
    ) -> tuple[Tensor, Tensor] | None:
        reference = batch.activations.get(f"there/{self.back.cut.layer}")
        return None if reference is None else paired_rows(mapped, reference, layer.pooling)["body"]


def _concatenated(representations: Sequence[Representation]) -> Representation:
    masks = [x.mask for x in representations]
    mask = torch.cat([m for m in masks if m is not None]) if masks[0] is not None else None
    return representations[0].replace(values=torch.cat([x.values for x in representations]), mask=mask)


def _distance(values: Tensor, features: Representation, total: float) -> Tensor:
    """Return the squared distance, averaged over real positions and features, summed over samples, over ``total``."""
    dtype = _at_least_float32(values.dtype)
    squared = functional.mse_loss(values.to(dtype), features.values.to(dtype), reduction="none")
    if features.mask is None:
        return squared.flatten(1).mean(1).sum() / total
    by_position = squared.mean(-1) * features.mask
    return (by_position.sum(1) / features.mask.sum(1).clamp(min=1)).sum() / total


def _first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
