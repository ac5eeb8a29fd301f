"""Masked language models: which tokens are behind masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_stitch.data.samples import chance
from hf_stitch.tasks.base import IGNORED, Answers, Array, Side, Whole, as_arrays, ratio, total
from hf_stitch.tasks.heads import logits_of
from hf_stitch.tasks.tokens import check_same_tokens, mask_of
from hf_stitch.tasks.words import OfTokens

SHARE, SEED = 0.15, 0
"""Share of the tokens of a text that are masked, and seed of the choice."""


class MaskedTokens(OfTokens):
    """Tokens of texts behind masks: how likely the true ones are, and whether the target predicts the same ones.

    Of each text, 15 % of the tokens (at least one, no special ones) become the mask token, in all that a job reads:
    when maps are fitted, trained and scored. The choice is a hash of the tokens of the text, so that all networks,
    batches, processes and jobs mask the same ones. No token is kept or replaced by a random one, as BERT was trained:
    this prepares networks for texts without masks, and here they are frozen.
    """

    name = "fill-mask"
    title = "masked tokens"
    family = "masked tokens"
    heads = ("ForMaskedLM",)
    models: ClassVar[Mapping[str, str]] = {"": "hf_stitch.artefacts.classification:StitchedModelForMaskedLM"}
    pipelines: ClassVar[Mapping[str, str]] = {"": name}
    figures: ClassVar[Mapping[str, bool]] = {
        "perplexity": False, "relative_perplexity": False, "cross_entropy": False,
        "relative_accuracy": True, "accuracy": True, "agreement": True, "kl_divergence": False,
    }  # fmt: skip
    compared = ("relative_perplexity", "perplexity", "relative_accuracy", "accuracy", "agreement")
    kept = ("tokens", "agreement", "right", "cross_entropy")
    record: ClassVar[Mapping[str, Any]] = {"masking": {"share": SHARE, "seed": SEED}}
    counted = "tokens"
    unused = "masked tokens are scored"
    nothing = "no text has a token that is not special"

    def inputs(self, network: Whole, samples: Sequence[Any]) -> Mapping[str, Any]:
        """Return the inputs of a network with masks."""
        return _masked(network, samples)[0]

    def asked(self, network: Any, samples: Sequence[Any], labels: Sequence[Any] | None) -> Tensor:
        """Return the tokens behind the masks."""
        return _masked(network, samples)[1]

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Measure the numbers of masked tokens, right ones and those that agree; of the target also the tokens."""
        (_, inputs), (twin, own) = source, target
        check_same_tokens(inputs, own)
        logits = {name: logits_of(output) for name, output in outputs.items()}
        asked = self.asked(self._network, twin.samples, None)
        measured, real = self.counts(logits, asked, twin), asked != IGNORED
        places = (~real).long().argsort(dim=1, stable=True)[:, : int(real.sum(1).max())]
        found = {"token": asked, "predicted": logits["target"].argmax(-1)}
        kept = {name: tokens.double().where(real, torch.nan).gather(1, places) for name, tokens in found.items()}
        measured["target"] |= as_arrays({"": kept})[""]
        return {**measured}

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of the most frequent token, with the token frequencies as probabilities."""
        target = measured["target"]
        tokens: Array = target["token"]
        kinds, counts = np.unique(tokens[~np.isnan(tokens)], return_counts=True)
        best, logs = kinds[counts.argmax()], np.append(np.log(counts / counts.sum()), 0.0)
        return {
            "tokens": target["tokens"],
            "right": (tokens == best).sum(1).astype(float),
            "agreement": (target["predicted"] == best).sum(1).astype(float),
            "cross_entropy": -logs[np.searchsorted(kinds, tokens)].sum(1),  # NaN is behind the last
        }

    def figures_of(self, own: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute perplexities, cross-entropy, accuracies and agreement per masked token."""
        own, target = ({name: total(weights, values) for name, values in row.items()} for row in (own, target))
        tokens = own["tokens"]
        loss, reference = own["cross_entropy"] / tokens, target["cross_entropy"] / tokens
        return {
            "perplexity": np.exp(loss), "relative_perplexity": np.exp(loss - reference), "cross_entropy": loss,
            "relative_accuracy": ratio(own["right"], target["right"]), "accuracy": own["right"] / tokens,
            **{name: own[name] / tokens for name in ("agreement", "kl_divergence") if name in own},
        }  # fmt: skip

    def usage(self) -> str:
        """Print the tokens behind masks."""
        return (
            'masks = inputs["input_ids"] == model.processor.mask_token_id\n'
            "print(model.processor.convert_ids_to_tokens(output.logits[masks].argmax(-1)))"
        )


def _masked(network: Any, samples: Sequence[Any]) -> tuple[dict[str, Any], Tensor]:
    """Return inputs with masks, and the tokens behind them; otherwise :data:`IGNORED`."""
    tokenizer = network.processor
    if getattr(tokenizer, "mask_token_id", None) is None:
        raise ValueError(
            f"fill-mask needs a tokenizer with a mask token, got {type(tokenizer).__name__}: pass one as processor= to "
            "hf_stitch.load, or use task=None"
        )
    if not getattr(network, "completes", True):
        raise ValueError(
            "align='prefix' reads texts with two tokenizers, and the source has no token for a mask of the target: "
            "stitch two masked language models with the same tokenizer, or use task=None"
        )
    inputs = dict(network.preprocess(samples))
    ids = inputs["input_ids"]
    free = mask_of(inputs) & ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=ids.device))
    asked = torch.full_like(ids, IGNORED)
    for row, of_text, where in zip(asked, ids, free, strict=True):
        places = where.nonzero()[:, 0][list(_chosen(tuple(of_text[where].tolist())))]
        row[places] = of_text[places]
    inputs["input_ids"] = ids.masked_fill(asked != IGNORED, tokenizer.mask_token_id)
    return inputs, asked


@lru_cache(maxsize=4096)  # several networks and predictors read each text
def _chosen(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return which tokens of a text are masked."""
    text = chance(SEED, repr(tokens)).hex()
    count = max(round(SHARE * len(tokens)), 1)
    return tuple(sorted(sorted(range(len(tokens)), key=lambda place: chance(SEED, f"{text} {place}"))[:count]))
