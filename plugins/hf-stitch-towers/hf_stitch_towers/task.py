"""Task of image-to-text networks: agreement of a stitched model with the next tokens of the target."""

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
    """Next tokens of a text about an image, compared with the predictions of the whole target.

    Tokens up to the last image placeholder token and padding do not count. With a fixed context, the compared tokens
    are the context and the first token of the answer.

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
    unused = "next tokens are compared with the target"
    nothing = "texts do not have tokens after their image"

    def __init__(self, network: Any = None) -> None:
        """Get the image placeholder token from the config of a network, if one is passed."""
        model = getattr(getattr(network, "target", network), "model", None)
        self._mark = None if model is None or not hasattr(model, "config") else placeholder(model, "image")

    def about(self, network: Any) -> Self:
        """Return the task for the image placeholder token of a network."""
        return type(self)(network)

    def difference(self, network: Adapter, output: Any) -> str:
        """Return the difference between the required and the actual output of a network."""
        shape, ids = tuple(logits_of(output).shape), _ids(network.example, logits_of(output).shape[1])
        actual = f"but {type(network.model).__name__} outputs {shape}"
        return "" if len(shape) == 3 and ids is not None else f"logits for each token of a text, {actual}"

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Return the number of tokens, the number of equal predictions, and the divergence of the distributions."""
        twin, inputs = target
        logits = {name: logits_of(output) for name, output in outputs.items()}
        tokens = _ids(inputs, logits["target"].shape[1])
        assert tokens is not None
        ids, real = tokens
        if self._mark is not None and bool((marks := ids == self._mark).any()):
            last = (marks * torch.arange(1, ids.shape[1] + 1, device=ids.device)).amax(1, keepdim=True)
            real = real & (torch.arange(1, ids.shape[1] + 1, device=ids.device) >= last)
        counted = torch.where(real, 0, IGNORED)
        return {**self.counts(logits, counted, twin, labelled=False)}

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of predictions for randomly drawn other samples."""
        target = measured["target"]
        count = len(target["tokens"])
        return {"tokens": target["tokens"], "agreement": np.full(count, np.nan)}

    def figures_of(self, answers: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute agreement and divergence per token."""
        sums = {name: total(weights, values) for name, values in answers.items()}
        return {name: sums[name] / sums["tokens"] for name in self.figures if name in sums}

    def apart(self, answers: Answers, target: Answers) -> Array:
        """Return the divergence per token."""
        tokens = answers["tokens"]
        divergence = answers.get("kl_divergence", tokens - answers["agreement"])
        return np.divide(divergence, tokens, out=np.zeros_like(tokens), where=tokens > 0)

    def shown(self, answers: Answers, place: int, names: Mapping[int, str]) -> str:
        """Return the number of tokens with the same prediction as the target."""
        return f"{answers['agreement'][place]:.0f} of {answers['tokens'][place]:.0f} tokens as the target"

    def usage(self) -> str:
        """Return a line of code that generates an answer."""
        return "print(model.generate(**inputs, max_new_tokens=20))"


def _ids(inputs: Mapping[str, Any], length: int) -> tuple[Tensor, Tensor] | None:
    """Return the token of each position of the logits, and the mask of text tokens; GIT has image positions first."""
    texts = [
        (name, inputs[name]) for name in ("decoder_input_ids", "input_ids") if isinstance(inputs.get(name), Tensor)
    ]
    same = [text for text in texts if text[1].shape[1] == length]
    for name, ids in same or [text for text in texts if text[1].shape[1] < length][-1:]:
        mask = inputs.get("attention_mask" if name == "input_ids" else "decoder_attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        before = (length - ids.shape[1], 0)
        return functional.pad(ids, before, value=-1), functional.pad(real, before, value=False)
    return None
