"""Stitches into one frozen half as one module, and the loss of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.adapters.cutting.halves import Back
from hf_stitch.artefacts.outputs import logits_of
from hf_stitch.representation import Representation
from hf_stitch.stitches import StitchingLayer
from hf_stitch.stitches.layer import paired_rows
from hf_stitch.training.objective import Objective
from hf_stitch.training.prepared import PreparedBatch


class Stitches(nn.Module):
    """Stitches of one target cut, and the frozen half behind it, through which all of them go in one batch.

    Args:
        layers: By name.
        back: The target from the cut on.
        objective: What is minimised.
        last: The target's last cut.
    """

    def __init__(self, layers: Mapping[str, StitchingLayer], back: Back, objective: Objective, last: str) -> None:
        super().__init__()
        self.names = tuple(layers)
        self.layers = nn.ModuleList(layers.values())
        self.back = back
        self._objective, self._last = objective, last

    @property
    def trained(self) -> list[StitchingLayer]:
        """The layers, in the order of the names."""
        return [layer for layer in self.layers if isinstance(layer, StitchingLayer)]

    def train(self, mode: bool = True) -> Stitches:
        """The frozen half stays in eval mode."""
        super().train(mode)
        self.back.eval()
        return self

    def forward(self, seen: PreparedBatch, total: float, share: float = 1.0, features: bool = False) -> Tensor:
        """The loss of each stitch ``(stitches,)``.

        Args:
            seen: Samples.
            total: What a sum over samples is divided by: how many samples (of language models, tokens) there are.
            share: Weight of the penalties, which are no sums over samples: the share of a step that these samples are.
            features: The squared distance of final features instead of the objective.
        """
        mapped = [layer(seen.sources[name]) for name, layer in zip(self.names, self.layers, strict=True)]
        if features:
            assert seen.features is not None
            said = self._features(mapped)
            return torch.stack([_distance(one, seen.features, total) for one in said])
        losses = []
        for layer, one, logits in zip(self.trained, mapped, self._logits(mapped), strict=True):
            loss = self._objective.loss(logits.to(_at_least_float32(logits.dtype)), seen.answers) / total
            if self._objective.penalties and share:
                loss = loss + share * self._objective.penalty(layer, self._rows(layer, one, seen))
            losses.append(loss)
        return torch.stack(losses)

    @torch.no_grad()
    def check(self, seen: PreparedBatch) -> int:
        """Refuse what cannot be minimised, by a batch.

        Returns:
            Number of classes that the target predicts (of language models, tokens).

        Raises:
            ValueError: If a parent answers with other classes, a penalty takes more rows than a batch has, or final
                features have another shape through the stitch.
        """
        mapped = [layer(seen.sources[name]) for name, layer in zip(self.names, self.layers, strict=True)]
        for layer, one, logits in zip(self.trained, mapped, self._logits(mapped), strict=True):
            for kind, answers in seen.answers.items():
                if kind != "hard" and answers.shape != logits.shape:
                    raise ValueError(
                        f"labels={kind!r}: the {kind} answers a batch with {tuple(answers.shape)} and the target with "
                        f"{tuple(logits.shape)}; soft labels need the same classes"
                    )
            if (rows := self._rows(layer, one, seen)) is not None:
                for name, least in self._objective.missing_rows(*rows).items():
                    raise ValueError(
                        f"the penalty {name!r} takes at least {least} rows, and a process has {len(rows[0])} of a "
                        "batch; raise batch_size"
                    )
        if (wanted := seen.features) is not None:
            for said in self._features(mapped):
                if said.shape != wanted.values.shape:
                    raise ValueError(
                        f"final features are {tuple(said.shape)} through the stitch and {tuple(wanted.values.shape)} "
                        "in the target: they can be matched with pooling='none' or 'flatten' only; set "
                        "feature_steps=0"
                    )
        return logits.shape[-1]

    @torch.no_grad()
    def right(self, seen: PreparedBatch) -> Tensor:
        """How many samples (tokens) each stitch predicts as the first kind of labels would have it ``(stitches,)``."""
        mapped = [layer(seen.sources[name]) for name, layer in zip(self.names, self.layers, strict=True)]
        answers = next(iter(seen.answers[name] for name in ("hard", *seen.answers) if name in seen.answers))
        wanted = answers if not answers.is_floating_point() else answers.argmax(-1)
        return torch.stack([(logits.argmax(-1) == wanted).sum() for logits in self._logits(mapped)])

    def _logits(self, mapped: Sequence[Representation]) -> Sequence[Tensor]:
        if len(mapped) > 1 and len({one.values.shape for one in mapped}) == 1:
            return logits_of(self._run(_one_batch(mapped))).chunk(len(mapped))
        return [logits_of(self._run(one)) for one in mapped]

    def _run(self, representation: Representation) -> Any:
        parameter = next((p for p in self.back.parameters() if p.is_floating_point()), representation.values)
        return self.back(representation.replace(values=representation.values.to(parameter.dtype)))

    def _features(self, mapped: Sequence[Representation]) -> list[Tensor]:
        """What the target says at its last cut, of each."""
        if self._last == self.back.cut.layer:
            return [one.values for one in mapped]
        found: list[Tensor] = []
        module = self.back.model.get_submodule(self._last)
        handle = module.register_forward_hook(lambda module, args, output: found.append(_first(output)))
        try:
            for one in mapped:
                self._run(one)
        finally:
            handle.remove()
        return found

    def _rows(self, layer: StitchingLayer, mapped: Representation, seen: PreparedBatch) -> tuple[Tensor, Tensor] | None:
        return None if seen.there is None else paired_rows(mapped, seen.there, layer.pooling)["body"]


def _one_batch(representations: Sequence[Representation]) -> Representation:
    """Several batches as one."""
    masks = [one.mask for one in representations]
    mask = torch.cat([m for m in masks if m is not None]) if masks[0] is not None else None
    return representations[0].replace(values=torch.cat([one.values for one in representations]), mask=mask)


def _distance(values: Tensor, features: Representation, total: float) -> Tensor:
    """The squared distance for each number, its mean over each sample's real positions, summed over the samples."""
    wide = _at_least_float32(values.dtype)
    each = functional.mse_loss(values.to(wide), features.values.to(wide), reduction="none")
    if features.mask is None:
        return each.flatten(1).mean(1).sum() / total
    of_positions = each.mean(-1) * features.mask
    return (of_positions.sum(1) / features.mask.sum(1).clamp(min=1)).sum() / total


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
