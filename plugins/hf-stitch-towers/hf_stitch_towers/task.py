"""The task of networks that write a text about an image: do stitched models predict the next tokens of the target?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.tasks.base import IGNORED, Answers, Array, Side, logits_of, total
from hf_stitch.tasks.tokens import PerToken
from hf_stitch_towers.examples import placeholder

__all__ = ["ImageTextToText"]


class ImageTextToText(PerToken):
    """Next tokens of a text that follows an image, compared with those that the whole target predicts.

    Tokens up to the last mark of an image do not count, nor does padding. With a fixed context, what counts begins with
    the context and ends with the first token of the answer.

    Example:
        >>> task = ImageTextToText()
        >>> task.name, task.compared
        ('image-text-to-text', ('agreement', 'kl_divergence'))
    """

    name = "image-text-to-text"
    title = "the next token of a text about an image"
    family = "next tokens about images"
    models: ClassVar[Mapping[str, str]] = {"": "hf_stitch_towers.model:StitchedModelForImageTextToText"}
    pipelines: ClassVar[Mapping[str, str]] = {"": name}
    figures: ClassVar[Mapping[str, bool]] = {"agreement": True, "kl_divergence": False}
    compared = ("agreement", "kl_divergence")
    kept = ("tokens", "agreement", "kl_divergence")
    counted = "tokens"
    unused = "next tokens are compared with those of the target"
    nothing = "no text has a token behind its image"

    def __init__(self, network: Any = None) -> None:
        """Read the mark of an image in the config of a network, if one is given."""
        model = getattr(getattr(network, "target", network), "model", None)
        self._mark = None if model is None or not hasattr(model, "config") else placeholder(model, "image")

    def about(self, network: Any) -> Self:
        """Return the task of a network, in whose texts a token stands for the image."""
        return type(self)(network)

    def difference(self, network: Adapter, output: Any) -> str:
        """Return what this task needs and the output of a network is not."""
        shape, ids = tuple(logits_of(output).shape), _ids(network.example, logits_of(output).shape[1])
        found = f"but {type(network.model).__name__} outputs {shape}"
        return "" if len(shape) == 3 and ids is not None else f"logits for each token of a text, {found}"

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Measure the number of tokens, those that agree, and the divergence of their distributions."""
        twin, own = target
        logits = {name: logits_of(output) for name, output in outputs.items()}
        found = _ids(own, logits["target"].shape[1])
        assert found is not None
        ids, real = found
        if self._mark is not None and bool((marks := ids == self._mark).any()):
            last = (marks * torch.arange(1, ids.shape[1] + 1, device=ids.device)).amax(1, keepdim=True)
            real = real & (torch.arange(1, ids.shape[1] + 1, device=ids.device) >= last)
        asked = torch.where(real, 0, IGNORED)
        return {**self.counts(logits, asked, twin, labelled=False)}

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of the predictions for other samples, drawn at random."""
        target = measured["target"]
        count = len(target["tokens"])
        return {"tokens": target["tokens"], "agreement": np.full(count, np.nan)}

    def figures_of(self, own: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute agreement and divergence per token."""
        sums = {name: total(weights, values) for name, values in own.items()}
        return {name: sums[name] / sums["tokens"] for name in self.figures if name in sums}

    def apart(self, own: Answers, target: Answers) -> Array:
        """Return the divergence per token."""
        tokens = own["tokens"]
        divergence = own.get("kl_divergence", tokens - own["agreement"])
        return np.divide(divergence, tokens, out=np.zeros_like(tokens), where=tokens > 0)

    def shown(self, answers: Answers, place: int, names: Mapping[int, str]) -> str:
        """Return the number of tokens for which the target predicts the same."""
        return f"{answers['agreement'][place]:.0f} of {answers['tokens'][place]:.0f} tokens as the target"

    def usage(self) -> str:
        """Write an answer."""
        return "print(model.generate(**inputs, max_new_tokens=20))"


def _ids(inputs: Mapping[str, Any], length: int) -> tuple[Tensor, Tensor] | None:
    """Return the tokens to which logits belong, and which of them are real; GIT has those of the image before them."""
    texts = [
        (name, inputs[name]) for name in ("decoder_input_ids", "input_ids") if isinstance(inputs.get(name), Tensor)
    ]
    same = [each for each in texts if each[1].shape[1] == length]
    for name, ids in same or [each for each in texts if each[1].shape[1] < length][-1:]:
        mask = inputs.get("attention_mask" if name == "input_ids" else "decoder_attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        before = (length - ids.shape[1], 0)
        return functional.pad(ids, before, value=-1), functional.pad(real, before, value=False)
    return None
