"""Another vision tower under a captioner, and one tower of a CLIP-like pair, by maps of unlabelled images.

Usage: python -m benchmarks.towers [table] [choice] [clip] [verb] [confirm]

Towers are published networks of CIFAR-10: two Tiny-10 (T0, T1; last features 2×2×64) and two ResNet-20 (R0, R1;
8×8×64), frozen throughout. A captioner is a linear projector and a small GPT-2, trained together on captions of 12,000
images, once for each old tower and seed, and then frozen. *pooled*: the mean of the positions is one soft token before
the text. *grid*: the text cross-attends to all positions. The old tower is then exchanged for another one: a map from
its features (resized to the old grid) to the old ones is fitted in closed form to images without captions or labels.

Captions are templates with a class word, and perhaps how bright the picture is (tone) or its colour (tint), which no
tower was trained to tell. Choices are read off by likelihood: which of ten class words, three tones or three tints
comes next after an opening whose parts were seen, but never together.

``table`` measures the exchange beside its baselines, ``choice`` the regret of choosing the map by images held out of
those that it is fitted to, and ``clip`` exchanges a tower of a CLIP-like pair, and asks whether a rotation fitted to
images alone also maps texts (arXiv 2602.17584). ``verb`` does the same exchange with the same networks by
``hf_stitch.swap(…, part="vision")``, in classes of transformers (:mod:`benchmarks.towers_verb`). ``confirm`` repeats
this with captioners and test images that played no part when its rule of choice was made.

The verdicts, fixed before the figures. *As good as retraining*: of a pair and kind, the accuracy of the map that is
chosen automatically (least KL), from 1,000 unlabelled images of CIFAR-10, over the accuracy of the projector that is
retrained on the captions of these images to convergence. Reached if the lower end of the 95 % interval of the ratio is
at least .95. *Inherited*: T0 → R0 with this map is more accurate than T0, by the lower end of the interval of the
difference. Intervals are paired bootstraps over the 2,500 test images; the value of an image is its mean over three
seeds (of the captioner and of the images drawn).

Data and published networks are read from the folder ``HF_STITCH_SHARED``, by default ``../shared``. Features and
trained networks are kept in a temporary folder. Install the plugins ``hf-stitch-studies`` and ``hf-stitch-towers``, or
have them beside.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.diff import SHARED
from benchmarks.timing import machine
from hf_stitch import registries
from hf_stitch.relative import RelativeProjection
from hf_stitch.representation import Representation
from hf_stitch.statistics import Moments
from hf_stitch.stitches import IdentityStitch, LinearStitch, Stitch

KEPT = Path(tempfile.gettempdir()) / "hf-stitch-benchmark-towers"

PARTS = {
    "train": ("cifar10/train", 0, 12_000),
    "pool": ("cifar10/train", 30_000, 4_000),
    "other": ("cifar100/train", 0, 4_000),
    "unseen": ("cifar10/test", 6_000, 4_000),
    "test": ("cifar10/test", 0, 2_500),
    "fresh": ("cifar10/test", 2_500, 2_500),
}
"""Part -> data, first row and number of images. Towers were trained on all of ``cifar10/train``."""

TOWERS = {f"{x[0].upper()}{i}": f"drfrankenstein_{x}/in{i}-gn{i}" for x in ("tiny10", "resnet20") for i in (0, 1)}
PAIRS = (("T0", "T1"), ("T0", "R0"), ("R0", "R1"), ("R0", "T0"))
KINDS = ("pooled", "grid")
SEEDS, FRESH_SEEDS = (0, 1, 2), (3, 4, 5)
SIZES = (50, 200, 1_000)
CANDIDATES: dict[str, dict[str, Any]] = {"identity": {}, "procrustes": {"scale": True}, "ridge": {"ridge": "gcv"}}
RULES = ("automatic", "by agreement", "by decided words")
FOLDS, HELD_OUT = 5, 40
"""Folds of the automatic choice, and images of a fold that are scored at most."""

Rows = dict[str, Tensor]
"""Score -> value of each test image."""


# -- captions ----------------------------------------------------------------------------------------------------------
WORDS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
OTHERS = ["plane", "car", "fowl", "kitten", "doe", "puppy", "toad", "pony", "boat", "lorry"]
TONES, TINTS = ("dark", "plain", "bright"), ("reddish", "greenish", "bluish")
OPENINGS = ("a photo of", "a picture of", "here we see", "this image shows", "look at", "one can see")
DOES = ["flies", "drives", "sings", "sleeps", "runs", "barks", "jumps", "gallops", "sails", "carries"]
ENDINGS = ("", "outside", "and nothing else", "which is {kind}", "that {does}")
ADJECTIVES = ("", "{tone} ", "{tint} ", "{tone} {tint} ")
FORMS = [*itertools.product(OPENINGS, ("a", "one"), ADJECTIVES, (0, 1), ENDINGS)]
PROMPT = "this image shows one"  # never seen together
SEEN = torch.tensor([f"{form[0]} {form[1]}" != PROMPT for form in FORMS])
FULL = torch.tensor([form[2] == ADJECTIVES[-1] for form in FORMS])
PAD, BEGIN, END = 0, 1, 2


def sentence(label: int, tone: int, tint: int, form: tuple[Any, ...]) -> str:
    """Write a caption."""
    opening, article, adjectives, synonym, ending = form
    kind = "a vehicle" if label in (0, 1, 8, 9) else "an animal"
    text = f"{opening} {article} {adjectives}{(WORDS, OTHERS)[synonym][label]} {ending}"
    return text.format(tone=TONES[tone], tint=TINTS[tint], kind=kind, does=DOES[label]).strip()


@cache
def captions() -> tuple[Tensor, dict[str, int]]:
    """Return the tokens of all captions, (class, tone, tint, form, token), and the number of each word."""
    sizes = 10, len(TONES), len(TINTS), len(FORMS)
    cells = itertools.product(*(range(size) for size in sizes))
    split = [sentence(*cell[:3], FORMS[cell[3]]).split() for cell in cells]
    words = {word: i for i, word in enumerate(sorted({word for row in split for word in row}), 3)}
    length = 2 + max(map(len, split))
    rows = [[BEGIN, *(words[word] for word in row), END] for row in split]
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows]).view(*sizes, length), words


def drawn(meanings: Tensor, forms: Tensor, draw: torch.Generator) -> Tensor:
    """Draw a caption of each meaning (class, tone, tint) among forms."""
    chosen = forms.nonzero()[:, 0][torch.randint(int(forms.sum()), (len(meanings),), generator=draw)]
    return captions()[0][(*meanings.T, chosen)]


# -- images and features -----------------------------------------------------------------------------------------------
@cache
def pictures(part: str) -> Tensor:
    """Return the images of a part, uint8."""
    place, start, count = PARTS[part]
    rows = pq.read_table(SHARED / "data" / f"{place}.parquet").slice(start, count)["img"].to_pylist()
    arrays = [np.array(Image.open(BytesIO(row["bytes"])).convert("RGB")) for row in rows]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


@cache
def meanings(part: str) -> Tensor:
    """Return the class, tone and tint of each image; tones and tints have equal shares of the images of ``train``."""

    def colours(name: str) -> Tensor:
        return kept(f"colours-{name}", lambda: pictures(name).float().mean((2, 3)))

    place, start, count = PARTS[part]
    labels = pq.read_table(SHARED / "data" / f"{place}.parquet").slice(start, count)["label"].to_pylist()
    base, here = colours("train"), colours(part)
    tones = torch.bucketize(here.mean(1), base.mean(1).quantile(torch.tensor([1 / 3, 2 / 3])))
    tinted = base - base.mean(1, keepdim=True)
    tints = ((here - here.mean(1, keepdim=True) - tinted.mean(0)) / tinted.std(0)).argmax(1)
    return torch.stack([torch.tensor(labels), tones, tints], 1)


def kept(name: str, work: Callable[[], Any]) -> Any:
    """Read from the temporary folder, or compute and keep."""
    path = KEPT / f"{name}.pt"
    if not path.exists():
        KEPT.mkdir(exist_ok=True)
        torch.save(work(), path)
    return torch.load(path, weights_only=True)


@cache
@torch.no_grad()
def grid(tower: str, part: str) -> Tensor:
    """Return the last features of a tower before its mean over positions, (images, channels, height, width)."""
    from studies.dr_frankenstein.networks import normalised, read

    def work() -> Tensor:
        model, _ = read(SHARED / f"models/{TOWERS[tower]}.safetensors")
        found: list[Tensor] = []
        layer = model.get_submodule("bn8" if tower[0] == "T" else "layer3")
        layer.register_forward_hook(lambda _, __, output: found.append(functional.relu(output)))
        for batch in pictures(part).split(250):
            model(normalised(batch))
        return torch.cat(found)

    return kept(f"features-{tower}-{part}", work)


@cache
def features(tower: str, part: str, kind: str, like: str = "") -> Tensor:
    """Return features as rows, (images, positions, channels), on the grid of another tower."""
    found = grid(tower, part)
    if kind == "pooled":
        return found.mean((2, 3))[:, None]
    size = (2, 2) if (like or tower)[0] == "T" else (8, 8)
    return Representation(found, "bchw").resize(size).positions().contiguous()


# -- captioners --------------------------------------------------------------------------------------------------------
class Captioner(nn.Module):
    """A projector and a decoder of captions."""

    def __init__(self, kind: str, width: int = 64) -> None:
        super().__init__()
        self.kind = kind
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=width, n_layer=2, n_head=4, n_positions=32, bos_token_id=BEGIN, eos_token_id=END,
            add_cross_attention=kind == "grid", **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )  # fmt: skip
        self.projector, self.decoder = nn.Linear(64, width), transformers.GPT2LMHeadModel(config)

    def forward(self, rows: Tensor | None, ids: Tensor) -> Tensor:
        """Return the logits of the next token at each token; without features, of the text alone."""
        read = None if rows is None else self.projector(rows)
        if self.kind == "grid" or read is None:
            places = torch.arange(ids.shape[1])[None] + (self.kind == "pooled")
            return self.decoder(ids, encoder_hidden_states=read, position_ids=places, use_cache=False).logits
        embedded = torch.cat([read, self.decoder.transformer.wte(ids)], 1)
        return self.decoder(inputs_embeds=embedded, use_cache=False).logits[:, read.shape[1] :]


def caption_loss(model: Captioner, rows: Tensor | None, ids: Tensor) -> Tensor:
    """Return the loss of captions."""
    right = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100)
    return functional.cross_entropy(model(rows, ids[:, :-1]).flatten(0, 1), right.flatten())


@cache
def captioner(tower: str, kind: str, seed: int, steps: int = 700) -> Captioner:
    """Return the trained captioner of a tower."""
    torch.manual_seed(seed)
    model = Captioner(kind)

    def work() -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
        rows, known = features(tower, "train", kind), meanings("train")
        for _ in range(steps):
            chosen = torch.randint(len(rows), (64,), generator=draw)
            alone = float(torch.rand((), generator=draw)) < 0.1  # so that the text alone is a fair baseline
            optimizer.zero_grad()
            caption_loss(model, None if alone else rows[chosen], drawn(known[chosen], SEEN, draw)).backward()
            optimizer.step()
            schedule.step()
        return model.state_dict()

    model.load_state_dict(kept(f"captioner-{tower}-{kind}-{seed}", work))
    return model.eval().requires_grad_(False)


def retrained(
    model: Captioner, rows: Tensor, known: Tensor, seed: int, start: Stitch | None = None, epochs: int = 200
) -> Captioner:
    """Retrain the projector alone until captions of a fifth of the images, held out, are no more likely."""
    twin, draw = copy.deepcopy(model), torch.Generator().manual_seed(100 + seed)
    if isinstance(start, LinearStitch):
        projector = model.projector
        twin.projector.weight.data = projector.weight @ start.weight.detach()
        twin.projector.bias.data = projector.bias + projector.weight @ start.bias.detach()
    twin.projector.requires_grad_(True)
    cut = len(rows) * 4 // 5
    held, ids = rows[cut:][:500], drawn(known[cut:][:500], SEEN, draw)
    best, state, waited, rate = float("inf"), copy.deepcopy(twin.projector.state_dict()), 0, 1e-2
    optimizer = torch.optim.AdamW(twin.projector.parameters(), lr=rate, weight_decay=0.01)
    for _ in range(epochs):
        for _ in range(12):
            chosen = torch.randint(cut, (64,), generator=draw)
            optimizer.zero_grad()
            caption_loss(twin, rows[chosen], drawn(known[chosen], SEEN, draw)).backward()
            optimizer.step()
        with torch.no_grad():
            now = float(caption_loss(twin, held, ids))
        waited += 1
        if now < best - 1e-4:
            best, state, waited = now, copy.deepcopy(twin.projector.state_dict()), 0
        if waited == 6:
            twin.projector.load_state_dict(state)
            waited, rate = 0, rate / 4
            if rate < 5e-4:
                break
            optimizer = torch.optim.AdamW(twin.projector.parameters(), lr=rate, weight_decay=0.01)
    twin.projector.load_state_dict(state)
    return twin.requires_grad_(False)


# -- the exchange ------------------------------------------------------------------------------------------------------
def fitted(new: Tensor, old: Tensor, matcher: str, **options: Any) -> Stitch:
    """Fit a map of rows of one tower to those of another, of the same images."""
    if matcher == "identity":
        return IdentityStitch(new.shape[-1], old.shape[-1])
    moments = Moments(new.shape[-1], old.shape[-1]).update(new.flatten(0, -2), old.flatten(0, -2))
    return registries.matchers.build(matcher, **options).fit(moments)


@cache
def images_drawn(seed: int, part: str) -> Tensor:
    """Return the order in which images of a part are drawn."""
    return torch.randperm(PARTS[part][2], generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def written(model: Captioner, rows: Tensor) -> Tensor:
    """Return the captions that a captioner writes, greedily."""
    ids = torch.full((len(rows), 1), BEGIN)
    for _ in range(captions()[0].shape[-1] - 1):
        following = model(rows, ids)[:, -1].argmax(1, keepdim=True)
        ids = torch.cat([ids, following.masked_fill((ids[:, -1:] == END) | (ids[:, -1:] == PAD), PAD)], 1)
    return ids


@torch.no_grad()
def automatic(model: Captioner, new: Tensor, old: Tensor) -> tuple[str, ...]:
    """Choose a map by images held out, along the captions that the original writes.

    Returns:
        The map with the least KL of next tokens, the one whose likeliest next tokens agree most (then by KL), and the
        one for which those tokens are likeliest that the image decides: the text alone would go on with another one.
    """
    losses: dict[str, list[float]] = {name: [0.0, 0.0, 0.0] for name in CANDIDATES}
    for fold in range(FOLDS):
        out = torch.arange(fold, len(new), FOLDS)
        rest = torch.ones(len(new), dtype=torch.bool).index_fill(0, out, False)
        out = out[:HELD_OUT]
        ids = written(model, old[out])
        right, real = model(old[out], ids[:, :-1]).log_softmax(-1), ids[:, 1:] != PAD
        decides = real & (model(None, ids[:, :-1]).argmax(-1) != right.argmax(-1))
        for name, options in CANDIDATES.items():
            logits = model(fitted(new[rest], old[rest], name, **options)(new[out]), ids[:, :-1]).log_softmax(-1)
            differ = (logits.argmax(-1) != right.argmax(-1)) & real
            losses[name][0] += float(divergence(right, logits, ids).sum())
            losses[name][1] += float(differ.sum())
            losses[name][2] -= float((logits.gather(2, ids[:, 1:, None])[..., 0] * decides).sum())
    orders = (0,), (1, 0), (2,)
    return tuple(min(losses, key=lambda name: [losses[name][i] for i in order]) for order in orders)


def divergence(right: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean KL of next tokens over the tokens of each caption."""
    each = (right.exp() * (right - logits.log_softmax(-1))).sum(-1)
    real = ids[:, 1:] != PAD
    return (each * real).sum(1) / real.sum(1)


@torch.no_grad()
def scored(model: Captioner, rows: Tensor | None, original: Rows | None = None, part: str = "test") -> Rows:
    """Score a captioner on the test images; agreement and KL are with the original."""
    known = meanings(part)
    numbers = captions()[1]
    ids = drawn(known, torch.ones(len(FORMS), dtype=torch.bool), torch.Generator().manual_seed(7))
    prompt = torch.tensor([[BEGIN, *(numbers[word] for word in PROMPT.split())]])
    found = defaultdict(list)
    for chosen in torch.arange(len(known)).split(500):
        given = None if rows is None else rows[chosen]
        logits = model(given, ids[chosen, :-1]).log_softmax(-1)
        following = model(given, prompt.expand(len(chosen), -1))[:, -1]
        right, real = ids[chosen, 1:], ids[chosen, 1:] != PAD
        found["likelihood"].append((logits.gather(2, right[..., None])[..., 0] * real).sum(1) / real.sum(1))
        found["logits"].append(logits)
        for i, (name, words) in enumerate((("accuracy", WORDS), ("tone", TONES), ("tint", TINTS))):
            choice = following[:, [numbers[word] for word in words]].argmax(1)
            found[name].append((choice == known[chosen, i]).float())
            if name == "accuracy":
                found["choice"].append(choice)
    result = {name: torch.cat(values) for name, values in found.items()}
    if original is not None:
        result["agreement"] = (result["choice"] == original["choice"]).float()
        result["kl"] = divergence(original["logits"], result["logits"], ids)
        del result["logits"]
    return result


@cache
def setting(pair: tuple[str, str], kind: str, seed: int, part: str = "test") -> tuple[Captioner, Rows]:
    """Return the captioner of the old tower, and its scores."""
    model = captioner(pair[0], kind, seed)
    return model, scored(model, features(pair[0], part, kind), part=part)


@cache
def exchanges(pair: tuple[str, str], kind: str, seed: int) -> dict[str, Rows]:
    """Score all maps of an exchange: ``"50 pool ridge"`` -> scores; two of them are chosen by images held out."""
    model, original = setting(pair, kind, seed)
    test = features(pair[1], "test", kind, pair[0])
    same = scored(model, fitted(test, features(pair[0], "test", kind), "identity")(test), original)
    rows: dict[str, Rows] = {}
    for part, size in itertools.product(("pool", "other", "unseen"), SIZES):
        if part == "unseen" and size < SIZES[-1]:
            continue
        chosen = images_drawn(seed, part)[:size]
        new, old = features(pair[1], part, kind, pair[0])[chosen], features(pair[0], part, kind)[chosen]
        for name, options in CANDIDATES.items():
            with torch.no_grad():
                mapped = test if name == "identity" else fitted(new, old, name, **options)(test)
            rows[f"{size} {part} {name}"] = same if name == "identity" else scored(model, mapped, original)
        for rule, name in zip(RULES, automatic(model, new, old), strict=True):
            rows[f"{size} {part} {rule}"] = rows[f"{size} {part} {name}"]
    return rows


@cache
def baselines(pair: tuple[str, str], kind: str, seed: int) -> dict[str, Rows]:
    """Score what stands beside the maps."""
    model, original = setting(pair, kind, seed)
    old, test = features(pair[0], "test", kind), features(pair[1], "test", kind, pair[0])
    chosen = images_drawn(seed, "pool")[: SIZES[-1]]
    ours, theirs = features(pair[0], "pool", kind)[chosen], features(pair[1], "pool", kind, pair[0])[chosen]
    mean, matched = ours.mean((0, 1)), (test - theirs.mean((0, 1))) / theirs.std((0, 1)).clamp(min=1e-6)
    ridge = fitted(theirs, ours, "ridge")
    there = Representation(grid(pair[0], "test"), "bchw").resize((2, 2) if pair[1][0] == "T" else (8, 8))
    back = old if kind == "pooled" else there.resize((2, 2) if pair[0][0] == "T" else (8, 8)).positions()
    found = {
        "old tower": scored(model, old, original),
        "old, by the new grid": scored(model, back, original),
        "no map": scored(model, IdentityStitch(test.shape[-1], old.shape[-1])(test), original),
        "mean only": scored(model, mean.expand_as(old), original),
        "matched moments": scored(model, matched * ours.std((0, 1)) + mean, original),
        "another image": scored(model, old.roll(1, 0), original),
        "text alone": scored(model, None, original),
    }
    for name, part, rows, start in (
        ("retrained, 1,000", "pool", theirs, None),
        ("map, then retrained", "pool", theirs, ridge),
        ("retrained, all", "train", features(pair[1], "train", kind, pair[0]), None),
    ):
        known = meanings("pool")[chosen] if part == "pool" else meanings("train")
        found[name] = scored(retrained(model, rows, known, seed, start), test, original)
    return found


# -- figures -----------------------------------------------------------------------------------------------------------
def interval(figure: Callable[..., Tensor], *values: Tensor, draws: int = 2_000) -> tuple[float, float, float]:
    """Return a figure of means over images, and its 95 % interval from a paired bootstrap of the images."""
    weights = torch.distributions.Multinomial(len(values[0]), torch.ones(len(values[0])))
    torch.manual_seed(0)
    counts = weights.sample((draws,)) / len(values[0])
    low, high = figure(*(counts @ value for value in values)).quantile(torch.tensor([0.025, 0.975])).tolist()
    return float(figure(*(value.mean() for value in values))), low, high


def shown(found: tuple[float, float, float]) -> str:
    """Write a figure and its interval."""
    return f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def table(console: Console) -> None:
    """Print the exchange of towers, its baselines and the verdicts."""
    verdicts, accuracies = [], Table("pair", "kind", title="accuracy over ten class words")
    for pair, kind in itertools.product(PAIRS, KINDS):
        began = time.process_time()
        each = [baselines(pair, kind, seed) | exchanges(pair, kind, seed) for seed in SEEDS]
        names = [name for name in each[0]["no map"] if name != "choice"]
        scores = {row: {x: torch.stack([rows[row][x] for rows in each]).mean(0) for x in names} for row in each[0]}
        ceiling, title = scores["retrained, 1,000"]["accuracy"], " → ".join(pair)
        others = [name for name in names if name != "accuracy"]
        found = Table("row", "accuracy", "seeds", "ratio to retrained", *others, title=f"{title}, {kind}")
        for row, values in scores.items():
            seeds = [float(rows[row]["accuracy"].mean()) for rows in each]
            figures = interval(lambda x: x, values["accuracy"]), interval(torch.div, values["accuracy"], ceiling)
            means = [f"{float(values[name].mean()):.3f}" for name in others]
            found.add_row(row, shown(figures[0]), f"{min(seeds):.3f}–{max(seeds):.3f}", shown(figures[1]), *means)
        console.print(found)
        best = scores["1000 pool automatic"]["accuracy"]
        ratio = interval(torch.div, best, ceiling)
        verdicts.append((f"{title} {kind}: ratio", ratio, ratio[1] >= 0.95))
        if pair == ("T0", "R0"):
            gain = interval(torch.sub, best, scores["old tower"]["accuracy"])
            verdicts.append((f"{title} {kind}: gain", gain, gain[1] > 0))
        console.print(f"{time.process_time() - began:.0f} CPU s", highlight=False)
        sys.stdout.flush()
        rows = [row for row in scores if row.endswith("automatic") or row[0].isalpha()]
        for row in rows[len(accuracies.columns) - 2 :]:
            accuracies.add_column(row)
        accuracies.add_row(title, kind, *(f"{float(scores[row]['accuracy'].mean()):.3f}" for row in rows))
    console.print(accuracies)
    for what, value, reached in verdicts:
        console.print(what, shown(value), "reached" if reached else "MISSED", highlight=False)


def choice(console: Console) -> None:
    """Print the regret of the automatic choice by two rules, and of always taking one map."""
    rules = (*RULES, *CANDIDATES)
    found = Table("images", "kind", "best by KL", *rules, title="mean regret on test images: KL, accuracy")
    for part, size, kind in itertools.product(("pool", "other"), SIZES, KINDS):
        regrets: dict[str, list[list[float]]] = defaultdict(list)
        for pair, seed in itertools.product(PAIRS, SEEDS):
            rows = {rule: exchanges(pair, kind, seed)[f"{size} {part} {rule}"] for rule in rules}
            figures = {rule: (float(x["kl"].mean()), -float(x["accuracy"].mean())) for rule, x in rows.items()}
            least = [min(x) for x in zip(*figures.values(), strict=True)]
            for rule, x in figures.items():
                regrets[rule].append([a - b for a, b in zip(x, least, strict=True)])
        right = sum(kl == 0 for kl, _ in regrets["automatic"])
        cells = [", ".join(f"{x:.4f}" for x in np.mean(regrets[rule], 0)) for rule in rules]
        source = "CIFAR-10" if part == "pool" else "CIFAR-100"
        found.add_row(f"{size} {source}", kind, f"{right} of {len(PAIRS) * len(SEEDS)}", *cells)
    console.print(found)


# -- CLIP-like pairs ---------------------------------------------------------------------------------------------------
class Clip(nn.Module):
    """A linear head on pooled features, and a small transformer of captions."""

    def __init__(self, deep: bool, width: int = 32) -> None:
        super().__init__()
        self.deep, inner = deep, 64 if deep else 48
        self.head, self.words = nn.Linear(64, width), nn.Embedding(64, inner)
        self.places = nn.Parameter(torch.randn(32, inner) * 0.1)
        layer = nn.TransformerEncoderLayer(inner, 4, 2 * inner, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2 if deep else 1, enable_nested_tensor=False)
        self.last, self.scale = nn.Linear(inner, width), nn.Parameter(torch.tensor(2.0))

    def image(self, rows: Tensor) -> Tensor:
        """Return embeddings of pooled features, of length 1."""
        return functional.normalize(self.head(rows), dim=-1)

    def text(self, ids: Tensor) -> Tensor:
        """Return embeddings of captions, of length 1: of the mean of the tokens, or of the last one."""
        padding = ids == PAD
        states = self.layers(self.words(ids) + self.places[: ids.shape[1]], src_key_padding_mask=padding)
        if self.deep:
            states = states.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True)
        else:
            states = states[torch.arange(len(ids)), (~padding).sum(1) - 1]
        return functional.normalize(self.last(states), dim=-1)


GALLERY = 1_000
"""Number of test images, and of their captions, among which is retrieved."""

DEEP = {"T0": False, "T1": True, "R0": True, "R1": False}
CONTROLS = {
    ("T0", "T1"): ("R0", "R1"), ("T0", "R0"): ("T1", "R1"), ("R0", "R1"): ("T0", "T1"), ("R0", "T0"): ("R1", "T1"),
}  # fmt: skip
"""Another pair, of which no network is in the first."""


@cache
@torch.enable_grad()
def clip_pair(tower: str, seed: int, steps: int = 500) -> Clip:
    """Return a trained pair; captions of the same meaning count as right."""
    torch.manual_seed(10 * seed + list(TOWERS).index(tower))
    model = Clip(DEEP[tower])

    def work() -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(10 * seed + list(TOWERS).index(tower))
        rows, known = features(tower, "train", "pooled")[:, 0], meanings("train")
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
        for _ in range(steps):
            chosen = torch.randint(len(rows), (192,), generator=draw)
            images = model.image(rows[chosen])
            scores = images @ model.text(drawn(known[chosen], SEEN & FULL, draw)).T * model.scale.exp()
            same = (known[chosen][:, None] == known[chosen][None]).all(-1).float()
            right = same / same.sum(1, keepdim=True)
            optimizer.zero_grad()
            (functional.cross_entropy(scores, right) + functional.cross_entropy(scores.T, right)).backward()
            optimizer.step()
            schedule.step()
        return model.state_dict()

    model.load_state_dict(kept(f"clip-{tower}-{seed}", work))
    return model.eval().requires_grad_(False)


Map = Callable[[Tensor], Tensor]


def unit(stitch: Map) -> Map:
    """Let a map return vectors of length 1."""
    return lambda rows: functional.normalize(stitch(rows).detach(), dim=-1)


def rotation(new: Tensor, old: Tensor) -> Map:
    """Fit one rotation about the origin."""
    return unit(fitted(new, old, "procrustes", center=False))


def about(turn: Map, new: Tensor, old: Tensor) -> Map:
    """Turn vectors about the mean of some, which becomes the mean of others; the turn is that of centred vectors."""
    zero = turn(torch.zeros(1, new.shape[1]))
    return unit(lambda rows: turn(rows - new.mean(0)) - zero + old.mean(0))


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return captions of all 90 meanings in forms that no pair was trained on, and their meanings."""
    forms = (~SEEN & FULL).nonzero()[:, 0]
    known = torch.cartesian_prod(torch.arange(10), torch.arange(3), torch.arange(3), forms)
    return captions()[0][tuple(known.T)], known[:, :3]


@cache
def same_meaning() -> Tensor:
    """Return which of the first test images have the same class, tone and tint."""
    known = meanings("test")[:GALLERY]
    return (known[:, None] == known[None]).all(-1)


def recalls(images: Tensor, captioned: Tensor, prompts: Tensor) -> Rows:
    """Return the zero-shot accuracy of classes, and the recall of meanings both ways among some test images."""
    known, labels = meanings("test"), texts()[1][:, 0]
    classes = torch.stack([functional.normalize(prompts[labels == i].mean(0), dim=0) for i in range(10)])
    found: Rows = {"zero-shot": ((images @ classes.T).argmax(1) == known[:, 0]).float()}
    scores, right = images[:GALLERY] @ captioned[:GALLERY].T, same_meaning()
    for name, each in (("image → text", scores), ("text → image", scores.T)):
        hits = right.gather(1, each.topk(5).indices).float()
        found |= {f"{name} R@1": hits[:, 0], f"{name} R@5": hits.amax(1)}
    return found


@torch.no_grad()
def clip(console: Console) -> None:
    """Print the exchange of a tower of CLIP-like pairs, and what a rotation fitted to images does to texts."""
    known, count = meanings("test"), PARTS["test"][2]
    ids = torch.cat([drawn(known, ~SEEN & FULL, torch.Generator().manual_seed(8)), texts()[0]])
    scores: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    alike: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def embedded(tower: str, seed: int, part: str) -> Tensor:
        return clip_pair(tower, seed).image(features(tower, part, "pooled")[:, 0])

    def add(row: str, side: str, images: Tensor, written: Tensor) -> None:
        for name, values in recalls(images, written[:count], written[count:]).items():
            scores[row][f"{side}: {name}"].append(values)

    for (old, new), seed in itertools.product(PAIRS, SEEDS[:2]):
        f_old, f_new = (embedded(tower, seed, "test") for tower in (old, new))
        g_old, g_new = (clip_pair(tower, seed).text(ids) for tower in (old, new))
        order = {part: images_drawn(seed, part)[:1_000] for part in ("pool", "other")}
        fit = {x: (embedded(new, seed, x)[order[x]], embedded(old, seed, x)[order[x]]) for x in order}
        control = (embedded(tower, seed, "pool")[order["pool"]] for tower in reversed(CONTROLS[old, new]))
        draw = torch.Generator().manual_seed(seed)
        seen = drawn(meanings("train")[:1_000], SEEN & FULL, draw)
        unpaired = drawn(meanings("train")[1_000:2_000], SEEN & FULL, draw)
        turned = torch.linalg.qr(torch.randn(32, 32, generator=draw))[0]
        centred = fitted(*fit["pool"], "procrustes")
        maps: dict[str, tuple[Map, Map]] = {
            name: (each, each)
            for name, each in {
                "no map": lambda rows: rows,
                "random rotation": partial(torch.matmul, other=turned),
                "rotation of another pair": rotation(*control),
                **{f"rotation, {n:,} images": rotation(*(x[:n] for x in fit["pool"])) for n in SIZES},
                "rotation, 1,000 of CIFAR-100": rotation(*fit["other"]),
                "Procrustes, centred, scaled": unit(fitted(*fit["pool"], "procrustes", scale=True)),
                "ridge": unit(fitted(*fit["pool"], "ridge")),
                "rotation of 1,000 captions": rotation(*(clip_pair(tower, seed).text(seen) for tower in (new, old))),
            }.items()
        }
        means = clip_pair(new, seed).text(seen), clip_pair(old, seed).text(unpaired)
        maps["rotation, each side about its mean"] = (about(centred, *fit["pool"]), about(centred, *means))
        for name, (of_images, of_texts) in maps.items():
            moved, written = of_images(f_new), of_texts(g_new)
            add(name, "image", moved, g_old)
            add(name, "text", f_old, written)
            right = texts()[1]
            nearest = right[(written[count:] @ g_old[count:].T).argmax(1)] == right
            for what, values in (
                ("cosine of images", (moved * f_old).sum(1)),
                ("cosine of texts", (written[count:] * g_old[count:]).sum(1)),
                ("nearest text has the meaning", nearest.all(1).float()),
                ("its class", nearest[:, 0].float()),
            ):
                alike[name][what].append(values)
        for center, n in itertools.product((False, True), SIZES):
            anchors = [RelativeProjection.of(x[:n], center=center) for x in fit["pool"]]
            row = f"relative, {n:,} anchors{', centred' * center}"
            add(row, "image", *(functional.normalize(by(x)) for by, x in zip(anchors, (f_new, g_old), strict=True)))
            add(row, "text", functional.normalize(anchors[1](f_old)), functional.normalize(anchors[0](g_new)))
        for row, images, written in (("old pair", f_old, g_old), ("new pair", f_new, g_new)):
            for side in ("image", "text"):
                add(row, side, images, written)
    for side in ("image", "text"):
        names = [name for name in scores["no map"] if name.startswith(side)]
        table = Table(
            "row", *(x.split(": ")[1] for x in names), title=f"{side} tower exchanged, mean of pairs and seeds"
        )
        for row, values in scores.items():
            table.add_row(row, *(shown(interval(lambda x: x, torch.stack(values[x]).mean(0))) for x in names))
        console.print(table)
    pairs = [f"{' → '.join(pair)}, {side}" for pair in PAIRS for side in ("image", "text")]
    table = Table("row", *pairs, title="zero-shot, by the tower that is exchanged, mean of seeds")
    for row, values in scores.items():
        both = torch.stack([torch.stack(values[f"{side}: zero-shot"]).mean(1) for side in ("image", "text")], 1)
        table.add_row(row, *(f"{x:.3f}" for x in both.view(len(PAIRS), -1, 2).mean(1).flatten().tolist()))
    console.print(table)
    table = Table("map", *alike["no map"], title="the same map on images and on texts")
    for row, values in alike.items():
        table.add_row(row, *(f"{float(torch.stack(x).mean()):.3f}" for x in values.values()))
    console.print(table)


def verb(console: Console) -> None:
    """Print the exchange by the public verb."""
    from benchmarks.towers_verb import verb as by_verb

    by_verb(console)


def confirm(console: Console) -> None:
    """Print the exchange by the public verb with fresh captioners and test images; what was in doubt comes first."""
    from benchmarks.towers_verb import verb as by_verb

    doubted, better = (("R0", "T0"), "grid"), ("T0", "R0")
    rows = sorted(itertools.product(PAIRS, KINDS), key=lambda row: (row != doubted, row[0] != better))
    by_verb(console, FRESH_SEEDS, "fresh", rows)


def main() -> None:
    """Print the named figures, or all."""
    if not (SHARED / "data").is_dir():
        print(f"skipped: no data in {SHARED}")
        return
    torch.set_num_threads(1)
    console = Console(width=170)
    jobs = {"table": table, "clip": clip, "choice": choice, "verb": verb, "confirm": confirm}
    for name in [x for x in sys.argv[1:] if x in jobs] or jobs:
        began = time.process_time()
        jobs[name](console)
        console.print(f"{name}: {time.process_time() - began:.0f} CPU s", highlight=False)
    console.print(machine())


if __name__ == "__main__":
    main()
