"""Shared parts of experiments 3 to 8, with two networks stitched at one layer."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_stitch import Adapter, Samples, StitchedModel, registries
from hf_stitch.artefacts.joining import join
from hf_stitch.data import PairedSamples
from hf_stitch.matchers import Matcher
from hf_stitch.pairs import CollectedPair, Pair
from hf_stitch.running import Run
from hf_stitch.stitches import StitchingLayer
from hf_stitch.training import TaskLoss

BATCH = 500
"""Images per forward."""


def collected(
    source: Adapter, target: Adapter, cuts: Sequence[tuple[str, str]], train: Samples
) -> CollectedPair:  # fmt: skip
    """Collect the statistics for closed-form matchers at pairs of cuts of two networks, in one pass over the images."""
    return CollectedPair(Pair(source, target).at(cuts), PairedSamples.of(train), Run(BATCH))


@torch.no_grad()
def logits(network: Adapter, test: Samples) -> Tensor:
    """Compute the logits of a network on samples."""
    outputs = (network.forward(network.preprocess(batch.samples)) for batch in test.batches(BATCH))
    return torch.cat([getattr(output, "logits", output) for output in outputs])


def direct(
    source: Adapter, target: Adapter, layer: str, matchers: Sequence[str | Matcher], train: Samples
) -> list[StitchedModel]:
    """Stitch two networks at a layer with each of several closed-form matchers."""
    statistics = collected(source, target, [(layer, layer)], train)
    stitches = [registries.matchers.build(matcher).match(statistics).only for matcher in matchers]
    return [join(source, layer, stitch, target, layer, task=target.task) for stitch in stitches]


def trained(matcher: TaskLoss, starts: Sequence[StitchedModel], target: Adapter, data: Samples) -> list[StitchingLayer]:
    """Train all stitching layers at once from their initial maps, in bfloat16 with float32 weights."""
    precision = "no" if matcher.objective.metrics else "bf16"  # metrics as penalties need full precision
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision)
    return matcher.fit(list(starts), data, target=target, accelerator=accelerator)
