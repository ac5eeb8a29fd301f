"""The exchange of :mod:`benchmarks.towers` by the public verb, ``hf_stitch.swap(…, part="vision")``.

Usage: python -m benchmarks.towers [verb] [confirm]

The same trained networks in classes of transformers. A tower is a model of its own, which configs name. *pooled* is a
LLaVA with a GPT-2: its projector is that of the captioner, then the identity. *grid* is a vision-encoder-decoder, whose
keys and values hold the projector. Their log-probabilities are those of the captioners, which is asserted.

The verdicts, fixed before the figures. *Same*: the network that the verb returns and plain torch with the same map
differ in accuracy by at most .01, in the mean over seeds. *As good as retraining*: as in the table, for the map that
the verb chooses. *Inherited*: T0 → R0 with it is more accurate than T0, as in the table. The regret of its choice is
that over the three maps of which it chooses.
"""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

import hf_stitch
from benchmarks.towers import (
    BEGIN,
    END,
    KINDS,
    PAD,
    PAIRS,
    SEEDS,
    SHARED,
    SIZES,
    TOWERS,
    Captioner,
    Rows,
    features,
    fitted,
    images_drawn,
    interval,
    meanings,
    pictures,
    retrained,
    scored,
    setting,
    shown,
)  # fmt: skip

IMAGE = 63
"""Token that stands for an image in texts of a LLaVA; no word has it."""

TESTED = 500
"""Number of test images whose captions the verb compares; accuracies are those of all test images."""

MAPS = {"procrustes": "procrustes", "scaled": "procrustes:scale=True", "ridge": "ridge"}
"""Maps that the verb is told to fit, and plain torch, too; ``auto`` chooses of them."""


# -- networks ----------------------------------------------------------------------------------------------------------
class TowerConfig(transformers.PretrainedConfig):
    """Which published tower, and whether its positions are pooled."""

    model_type = "benchmark_tower"

    def __init__(self, tower: str = "T0", pooled: bool = False, **options: Any) -> None:
        self.tower, self.pooled, self.hidden_size, self.image_size, self.num_channels = tower, pooled, 64, 32, 3
        super().__init__(**options)


class TowerModel(transformers.PreTrainedModel):
    """A published tower up to its last features."""

    config_class, main_input_name = TowerConfig, "pixel_values"

    def __init__(self, config: TowerConfig) -> None:
        from studies.dr_frankenstein.networks import ResNet20, Tiny10

        super().__init__(config)
        self.body = trunk(Tiny10() if config.tower[0] == "T" else ResNet20())
        self.post_init()

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """Return features, (images, positions, channels), as all that there is."""
        found = self.body(pixel_values)
        rows = found.mean((2, 3))[:, None] if self.config.pooled else found.flatten(2).mT.contiguous()
        return BaseModelOutputWithPooling(last_hidden_state=rows, hidden_states=(rows,))


transformers.AutoConfig.register(TowerConfig.model_type, TowerConfig)
transformers.AutoModel.register(TowerConfig, TowerModel)


def trunk(network: Any) -> nn.Sequential:
    """Return the modules of a published network up to its last features."""
    tiny = [name for i in range(1, 9) for name in (f"conv{i}", f"bn{i}", "")]
    names = tiny if hasattr(network, "conv8") else ["conv1", "bn1", "", "layer1", "layer2", "layer3"]
    return nn.Sequential(*(network.get_submodule(name) if name else nn.ReLU() for name in names))


def tower(name: str, kind: str) -> TowerModel:
    """Return a published tower with its weights."""
    from studies.dr_frankenstein.networks import read

    made = TowerModel(TowerConfig(name, kind == "pooled")).eval()
    made.body.load_state_dict(trunk(read(SHARED / f"models/{TOWERS[name]}.safetensors")[0]).state_dict())
    return made


@torch.no_grad()
def network(model: Captioner, name: str) -> Any:
    """Return the network of transformers that computes what the captioner of a tower does."""
    vision, text = tower(name, model.kind), copy.deepcopy(model.decoder.config)
    ends = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    if model.kind == "grid":
        both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision.config, text)
        made: Any = transformers.VisionEncoderDecoderModel(both).eval()
        made.encoder.load_state_dict(vision.state_dict())
        made.decoder.load_state_dict(model.decoder.state_dict())
        for block in made.decoder.transformer.h:
            reader = block.crossattention.c_attn
            reader.bias += model.projector.bias @ reader.weight
            reader.weight.copy_(model.projector.weight.T @ reader.weight)
        ends["decoder_start_token_id"] = BEGIN
    else:
        text.tie_word_embeddings = False  # LLaVA looks for the embeddings under the name that Llama gives them
        config = transformers.LlavaConfig(
            vision_config=vision.config, text_config=text, image_token_id=IMAGE, projector_hidden_act="linear",
            vision_feature_select_strategy="full", vision_feature_layer=-1, image_seq_length=1,
        )  # fmt: skip
        made = transformers.LlavaForConditionalGeneration(config).eval()
        made.model.vision_tower.load_state_dict(vision.state_dict())
        made.model.language_model.load_state_dict(model.decoder.transformer.state_dict())
        made.lm_head.load_state_dict(model.decoder.lm_head.state_dict())
        made.model.multi_modal_projector.linear_1.load_state_dict(model.projector.state_dict())
        made.model.multi_modal_projector.linear_2.weight.copy_(torch.eye(text.n_embd))
        made.model.multi_modal_projector.linear_2.bias.zero_()
    made.generation_config = transformers.GenerationConfig(**ends)
    return made


def reading(model: Any, kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a network as a function of pixels and tokens, which is called as a captioner is."""

    def logits(pixels: Tensor, ids: Tensor) -> Tensor:
        if kind == "grid":
            return model(pixel_values=pixels, decoder_input_ids=ids).logits
        marked = torch.cat([torch.full((len(ids), 1), IMAGE), ids], 1)
        return model(pixel_values=pixels, input_ids=marked).logits[:, 1:]

    return logits


# -- the exchange ------------------------------------------------------------------------------------------------------
def images(part: str, order: Tensor) -> list[Image.Image]:
    """Return images of a part as they are."""
    return [Image.fromarray(pictures(part)[i].permute(1, 2, 0).numpy()) for i in order.tolist()]


def by_verb(pair: tuple[str, str], kind: str, seed: int, part: str) -> tuple[dict[str, Rows], dict[str, Any]]:
    """Score the old network and what the verb returns; return its results, too."""
    from studies.dr_frankenstein.networks import normalise, normalised

    (model, original), pixels = setting(pair, kind, seed, part), normalised(pictures(part))
    score = partial(scored, part=part)
    old, context = network(model, pair[0]), {"input_ids": [IMAGE, BEGIN]}
    pool, test = images("pool", images_drawn(seed, "pool")[: SIZES[-1]]), images(part, torch.arange(TESTED))
    found, results = {"old network": score(reading(old, kind), pixels)}, dict[str, Any]()
    error = float((found["old network"].pop("logits") - original["logits"]).abs().max())
    assert error < 1e-5, error
    for name, matcher in {"auto": "auto", **MAPS}.items():
        reader = hf_stitch.load(old, processor=normalise, context=context if kind == "pooled" else None)
        encoder = hf_stitch.load(tower(pair[1], kind), processor=normalise)
        results[name] = swapped = hf_stitch.swap(
            reader, encoder, pool, part="vision", data=test, matcher=matcher, seed=seed, progress=False
        )
        found[name] = score(reading(swapped.model, kind), pixels, original)
    return found, results


def in_torch(pair: tuple[str, str], kind: str, seed: int, part: str) -> dict[str, Rows]:
    """Score the same maps in plain torch, and the projector that is retrained on captions of the same images."""
    (model, original), score = setting(pair, kind, seed, part), partial(scored, part=part)
    test, chosen = features(pair[1], part, kind, pair[0]), images_drawn(seed, "pool")[: SIZES[-1]]
    new, old = features(pair[1], "pool", kind, pair[0])[chosen], features(pair[0], "pool", kind)[chosen]
    with torch.no_grad():
        maps = {name: fitted(new, old, matcher)(test) for name, matcher in MAPS.items()}
    found = {name: score(model, rows, original) for name, rows in maps.items()}
    return {**found, "retrained": score(retrained(model, new, meanings("pool")[chosen], seed), test, original)}


def verb(
    console: Console, seeds: Sequence[int] = SEEDS, part: str = "test",
    rows: Sequence[tuple[tuple[str, str], str]] = (*itertools.product(PAIRS, KINDS),),
) -> None:  # fmt: skip
    """Print the exchange by the verb beside plain torch, and the verdicts."""
    columns = "folded", "chosen", "old network", "auto", *MAPS, "retrained", "ratio of auto", "regret", "decided words"
    found = Table("pair", "kind", *columns, title="accuracy over ten class words by the verb, mean of seeds")
    columns = "torch", "verb − torch", "most of a seed", "same word"
    beside = Table("pair, kind", "map", *columns, title="the same map in plain torch")
    verdicts = []
    for pair, kind in rows:
        began, title = time.process_time(), " → ".join(pair)
        runs = [(*by_verb(pair, kind, seed, part), in_torch(pair, kind, seed, part)) for seed in seeds]
        ours, theirs = ({x: torch.stack([run[i][x]["accuracy"] for run in runs]) for x in runs[0][i]} for i in (0, 2))
        mean, autos = {name: float(x.mean()) for name, x in ours.items()}, [run[1]["auto"] for run in runs]
        ratio = interval(torch.div, ours["auto"].mean(0), theirs["retrained"].mean(0))
        verdicts.append((f"{title} {kind}: ratio", shown(ratio), ratio[1] >= 0.95))
        if pair == ("T0", "R0"):
            gain = interval(torch.sub, ours["auto"].mean(0), ours["old network"].mean(0))
            verdicts.append((f"{title} {kind}: gain", shown(gain), gain[1] > 0))
        decided = sum(each.scores["exchanged"]["decided_agreement"].value for each in autos) / len(autos)
        figures = [*mean.values(), float(theirs["retrained"].mean())]
        regret = torch.stack([ours[name].mean(1) for name in MAPS]).amax(0) - ours["auto"].mean(1)
        cells = [
            title, kind, ", ".join(str(x.folded) for x in autos), ", ".join(x.matcher for x in autos),
            *(f"{x:.3f}" for x in figures), shown(ratio), f"{float(regret.mean()):.4f}", f"{decided:.3f}",
        ]  # fmt: skip
        found.add_row(*cells)
        console.print(*cells, highlight=False)  # at once, in case that the run is ended
        for name in MAPS:
            gaps, torch_mean = (ours[name] - theirs[name]).mean(1), float(theirs[name].mean())
            same = min(float((run[0][name]["choice"] == run[2][name]["choice"]).float().mean()) for run in runs)
            gap = f"{float(gaps.mean()):+.4f}"
            beside.add_row(f"{title} {kind}", name, f"{torch_mean:.3f}", gap, f"{gaps.abs().max():.4f}", f"{same:.4f}")
            verdicts.append((f"{title} {kind}: verb − torch, {name}", gap, abs(float(gaps.mean())) <= 0.01))
        console.print(title, kind, [(x.matcher, x.held_out, x.error, x.notes) for x in autos], highlight=False)
        console.print(f"{time.process_time() - began:.0f} CPU s", highlight=False)
        sys.stdout.flush()
    console.print(found, beside)
    for what, value, reached in verdicts:
        console.print(what, value, "reached" if reached else "MISSED", highlight=False)
