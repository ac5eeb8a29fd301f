"""Anchors that keep up with an encoder in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from hf_stitch.adapters import unwrap
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.artefacts import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.processes import Processes
from hf_stitch.relative import RelativeProjection
from hf_stitch.relative.projection import check_anchors
from hf_stitch.stitches.layer import source_positions
from hf_stitch.training.probe import check_whole, unnoticed


class AnchorRefresh(TrainerCallback):
    """Embeds the anchors of a relative projection anew while the encoder before it learns (Moschella et al. 2023).

    No gradient passes through the anchors, and training does not notice: modes, random states and buffers are left as
    they were. In a ``transformers.Trainer`` (``callbacks=[…]``) it does so before the first step and every so many,
    and, so that evaluation and checkpoints have the anchors of the weights at hand, before these and at the end; the
    next step has those from before again, so that how often one evaluates changes nothing (a run that is resumed goes
    on with the checkpoint's). In a loop of one's own, call :meth:`step` before every step and :meth:`refresh` before
    evaluating.

    Args:
        model: Any module that holds one :class:`~hf_stitch.relative.RelativeProjection`, such as a relative model whose
            encoder is trained too (``model.source.requires_grad_(True)``).
        anchors: The anchors, in their order: for a :class:`~hf_stitch.StitchedModel`, raw samples; for another module,
            what its ``encoder`` takes, (k, …).
        encoder: From a batch of anchors to their vectors, (batch, d). Needed unless the model is a stitched one. A
            module that is not within the model is put in the same mode meanwhile, and left as it was, too.
        every: Steps from one time to the next.
        batch_size: Anchors per forward.
        training: Whether the encoder is in training mode meanwhile, so that BatchNorm normalises anchors by their own
            statistics, as it does what it learns from; give all anchors in one batch then. Otherwise in eval mode.

    Raises:
        ValueError: If the module holds no projection or several, there are more or fewer anchors than it has, there is
            no encoder, or ``every`` or ``batch_size`` is below 1.

    Example:
        >>> encoder = nn.Linear(4, 3)
        >>> anchors = torch.randn(5, 4)
        >>> model = nn.Sequential(encoder, RelativeProjection.of(torch.randn(5, 3)), nn.Linear(5, 2))
        >>> refresh = AnchorRefresh(model, anchors, encoder, every=10)
        >>> refresh.step()  # before each step of the optimizer
        >>> torch.equal(model[1].anchors, encoder(anchors))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        anchors: Any,
        encoder: Callable[[Tensor], Tensor] | None = None,
        *,
        every: int = 1,
        batch_size: int = 64,
        training: bool = False,
    ) -> None:
        self.model = unwrap(model)
        found = [module for module in self.model.modules() if isinstance(module, RelativeProjection)]
        if len(found) != 1:
            raise ValueError(
                f"{type(self.model).__name__} holds {len(found)} relative projections, and one is refreshed: give the "
                "module that holds that one"
            )
        if every < 1 or batch_size < 1:
            raise ValueError(f"every and batch_size must be at least 1, got {every} and {batch_size}")
        self.projection, self.every, self.training = found[0], every, training
        self.steps = 0
        self._interrupted: Tensor | None = None
        # All that runs: of modules given twice, within the model and by themselves, each counts once.
        self._runs: nn.Module = nn.ModuleList([self.model, encoder]) if isinstance(encoder, nn.Module) else self.model
        if encoder is not None:
            batches: Any = anchors.split(batch_size)
            count, self._embed = len(anchors), lambda: [encoder(batch) for batch in batches]
        elif isinstance(self.model, StitchedModel):
            samples = Samples.of(anchors)
            count, self._embed = len(samples), _embedding(self.model, samples, batch_size)
        else:
            raise ValueError(
                f"{type(self.model).__name__} is no stitched model: say how anchors are encoded, encoder=…"
            )
        if count != len(self.projection.anchors):
            raise ValueError(f"the projection has {len(self.projection.anchors)} anchors, got {count}")

    def step(self) -> None:
        """Embed the anchors anew if it is time to; call it before every step."""
        if self.steps % self.every == 0:
            self.refresh()
        self.steps += 1

    def refresh(self) -> None:
        """Embed the anchors anew.

        Raises:
            ValueError: If anchors get the same vector, NaN or infinity, or the model's weights are sharded.
        """
        check_whole(self._runs)
        mode = _training if self.training else evaluating
        with unnoticed(self._runs, Processes.of(None)), mode(self._runs):
            vectors = torch.cat(self._embed())
            check_anchors(vectors)
        # Outside: where several processes train, buffers inside are those of the first for the time being.
        self._put(vectors)

    @torch.no_grad()
    def _put(self, vectors: Tensor) -> None:
        """These anchors, and their mean where a stitched model keeps it."""
        self.projection.anchors.copy_(vectors)
        if isinstance(self.model, StitchedModel) and self.model.stitch.body is self.projection:
            mean: Any = self.model.stitch.body_mean
            mean.copy_(self.projection(self.projection.anchors).mean(0))

    # -- in a Trainer -----------------------------------------------------------------------------------------------
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refresh every so many steps; in between, train with the anchors from before an evaluation or checkpoint."""
        if self._interrupted is not None:
            self._put(self._interrupted)
            self._interrupted = None
        self.steps = state.global_step
        self.step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refresh before an evaluation or a checkpoint."""
        if control.should_evaluate or control.should_save:
            if self._interrupted is None:
                self._interrupted = self.projection.anchors.clone()
            self.refresh()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refresh before an evaluation or a checkpoint."""
        self.on_step_end(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refresh a last time."""
        self._interrupted = None
        self.refresh()


def _embedding(model: StitchedModel, samples: Samples, batch_size: int) -> Callable[[], list[Tensor]]:
    """What embeds raw samples, preprocessed once, by a stitched model's own front half."""
    inputs = [model.preprocess(batch.samples) for batch in samples.batches(batch_size)]
    layer = model.stitch

    def embed() -> list[Tensor]:
        device = model.device
        seen = (model.source(**{name: value.to(device) for name, value in batch.items()}) for batch in inputs)
        return [source_positions(each, layer.source, layer.target, layer.pooling) for each in seen]

    return embed


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """The model in training mode; modes and buffers as they were afterwards, also on error."""
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
