"""Refreshing the anchors of a relative projection during training of its encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from hf_stitch.adapters import unwrap
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.artefacts import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.options import Count, checked
from hf_stitch.relative import RelativeProjection
from hf_stitch.relative.projection import check_anchors
from hf_stitch.running import Processes
from hf_stitch.stitches.layer import source_positions
from hf_stitch.training.probe import check_whole, unnoticed


class AnchorRefresh(TrainerCallback):
    """Re-embed the anchors of a relative projection while its encoder is trained (Moschella et al. 2023).

    Gradients do not flow through the anchors. Module modes, random states and buffers are restored after each refresh.

    In a ``transformers.Trainer`` (``callbacks=[…]``) the anchors are refreshed before the first step and then every
    ``every`` steps. They are also refreshed for each evaluation, each checkpoint and the end of training. The next
    training step uses the previous anchors again, so that the evaluation frequency does not change training. (A resumed
    run continues with the anchors of the checkpoint.)

    In a custom training loop, call :meth:`step` before every optimizer step and :meth:`refresh` before evaluating.

    Args:
        model: Any module that contains exactly one :class:`~hf_stitch.relative.RelativeProjection`, for example a
            relative model with a trainable encoder (``model.source.requires_grad_(True)``).
        anchors: The k anchors in the order of the projection: raw samples for a :class:`~hf_stitch.StitchedModel`;
            for another module, a tensor ``(k, …)`` of inputs of ``encoder``.
        encoder: Function from a batch of anchors to their vectors, ``(batch, d)``. Required if ``model`` is not a
            stitched model. The mode and buffers of a module outside the model are restored as well.
        every: Number of optimizer steps between two refreshes.
        batch_size: Number of anchors per forward pass.
        training: Whether to embed in training mode, so that BatchNorm normalises the anchors with their own batch
            statistics, as it does for training batches; all anchors should then fit in one batch. Default: eval mode.

    Example:
        >>> encoder = nn.Linear(4, 3)
        >>> anchors = torch.randn(5, 4)
        >>> model = nn.Sequential(encoder, RelativeProjection.of(torch.randn(5, 3)), nn.Linear(5, 2))
        >>> refresh = AnchorRefresh(model, anchors, encoder, every=10)
        >>> refresh.step()  # before each step of the optimizer
        >>> torch.equal(model[1].anchors, encoder(anchors))
        True
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        anchors: Any,
        encoder: Callable[[Tensor], Tensor] | None = None,
        *,
        every: Count = 1,
        batch_size: Count = 64,
        training: bool = False,
    ) -> None:
        self.model = unwrap(model)
        projections = [module for module in self.model.modules() if isinstance(module, RelativeProjection)]
        if len(projections) != 1:
            raise ValueError(
                f"{type(self.model).__name__} contains {len(projections)} relative projections, expected exactly one; "
                "pass a module with only the projection to refresh"
            )
        self.projection, self.every, self.training = projections[0], every, training
        self.steps = 0
        self._training_anchors: Tensor | None = None
        # All modules that run; a module that is part of the model and also passed as encoder counts once.
        self._runs: nn.Module = nn.ModuleList([self.model, encoder]) if isinstance(encoder, nn.Module) else self.model
        if encoder is not None:
            batches: Any = anchors.split(batch_size)
            count, self._embed = len(anchors), lambda: [encoder(batch) for batch in batches]
        elif isinstance(self.model, StitchedModel):
            samples = Samples.of(anchors)
            count, self._embed = len(samples), _embedding(self.model, samples, batch_size)
        else:
            raise ValueError(f"{type(self.model).__name__} is not a stitched model: also pass encoder=…")
        if count != len(self.projection.anchors):
            raise ValueError(
                f"the projection has {len(self.projection.anchors)} anchors, got {count}; pass the same anchors in the "
                "same order"
            )

    def step(self) -> None:
        """Count an optimizer step and refresh the anchors if a refresh is due; call it before every step."""
        if self.steps % self.every == 0:
            self.refresh()
        self.steps += 1

    def refresh(self) -> None:
        """Embed the anchors with the current weights."""
        check_whole(self._runs)
        mode = _training if self.training else evaluating
        with unnoticed(self._runs, Processes.of(None)), mode(self._runs):
            vectors = torch.cat(self._embed())
            check_anchors(vectors)
        # After the context: inside it, the buffers of all processes are those of rank 0.
        self._put(vectors)

    @torch.no_grad()
    def _put(self, vectors: Tensor) -> None:
        """Set the anchors, and the mean of their relative representations if a stitched model stores it."""
        self.projection.anchors.copy_(vectors)
        if isinstance(self.model, StitchedModel) and self.model.stitch.body is self.projection:
            mean: Any = self.model.stitch.body_mean
            mean.copy_(self.projection(self.projection.anchors).mean(0))

    # -- in a Trainer -----------------------------------------------------------------------------------------------
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the anchors from before an evaluation or checkpoint, and refresh them if a refresh is due."""
        if self._training_anchors is not None:
            self._put(self._training_anchors)
            self._training_anchors = None
        self.steps = state.global_step
        self.step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refresh the anchors before an evaluation or a checkpoint."""
        if control.should_evaluate or control.should_save:
            if self._training_anchors is None:
                self._training_anchors = self.projection.anchors.clone()
            self.refresh()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refresh the anchors before an evaluation or a checkpoint."""
        self.on_step_end(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refresh the anchors for the final weights."""
        self._training_anchors = None
        self.refresh()


def _embedding(model: StitchedModel, samples: Samples, batch_size: int) -> Callable[[], list[Tensor]]:
    """Return a function that embeds raw samples with the source half of a stitched model; preprocessing runs once."""
    inputs = [model.preprocess(batch.samples) for batch in samples.batches(batch_size)]
    layer = model.stitch

    def embed() -> list[Tensor]:
        device = model.device
        outputs = (model.source(**{name: value.to(device) for name, value in batch.items()}) for batch in inputs)
        return [source_positions(output, layer.source, layer.target, layer.pooling) for output in outputs]

    return embed


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Put the model in training mode; modes and buffers are restored afterwards, also on error."""
    modes = {module: module.training for module in model.modules()}
    buffers = {
        buffer: buffer.clone()
        for module in model.modules()
        if not isinstance(module, RelativeProjection)
        for buffer in module.buffers(recurse=False)
    }
    try:
        for module in modes:
            module.training = True
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
