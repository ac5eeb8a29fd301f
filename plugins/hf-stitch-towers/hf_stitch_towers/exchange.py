"""Another tower under the same decoder, without labels: :func:`exchange`, which ``hf_stitch.swap(part=…)`` runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hf_stitch import Adapter, Samples
from hf_stitch.adapters import load_on
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.data import Data
from hf_stitch.data.overlap import ContentSketch
from hf_stitch.matchers import ClosedFormMatcher
from hf_stitch.registry import registries
from hf_stitch.running import Run
from hf_stitch.scoring.measured import as_score
from hf_stitch_towers.answers import asked_of
from hf_stitch_towers.examples import start_of
from hf_stitch_towers.folding import tower_of
from hf_stitch_towers.outputs import Captions, Outputs, written
from hf_stitch_towers.places import (
    FEWEST,
    Features,
    Job,
    Place,
    full_inputs,
    hearing,
    place_of,
    rate_of,
    raw_of,
    several_tiles,
    tower_alone,
)
from hf_stitch_towers.result import ANOTHER, EXCHANGED, MEAN, ORIGINAL, Caption, Exchanged, Figures

AUTO = "auto"
CANDIDATES = ("procrustes", "procrustes:scale=True", "ridge")
"""Matchers among which ``auto`` chooses."""

SHARE = 0.25
"""Share of the images that tests, without test data; and of the rest, share that chooses the matcher."""

LEAST = {True: 43, False: 32}
"""Least number of images, with those to test on and without."""

PARTS = ("vision", "audio")
"""Towers that can be exchanged."""

RESAMPLES = 1000

SHOWN = 8
"""Number of test images whose captions are kept."""

PROMPT = "Describe the image."
"""Text beside images that come without one, for a network that was loaded without a context."""


def exchange(
    model: Any, encoder: Any, images: Data, part: str, run: Run, *,
    encoder_layer: str | None = None, target_layer: str | None = None, matcher: Any = AUTO,
    test_data: Data | None = None,
) -> Exchanged:  # fmt: skip
    """Replace a tower of a network by another encoder and a closed-form map, fitted to images without labels.

    The map goes from what the class of the model would read of the new tower to what it reads of the old one. Where the
    class takes the new tower, and what reads it is linear, the map is folded into the weights of these modules: the
    result is a network of the same class. Otherwise both networks are joined to a stitched model.

    Outputs are compared with those of the original: next tokens along the captions that it writes for test images, or
    the embeddings of a network of two towers.

    Args:
        model: The network, in any form that :func:`hf_stitch.load` takes.
        encoder: The new encoder, with its own processor.
        images: Images, or samples of an image and a text that the model reads with it; labels are not needed.
        part: Which tower: ``vision`` or ``audio``.
        run: How the job runs.
        encoder_layer: Layer at which the encoder is cut, if the map cannot be folded. Default: its last one.
        target_layer: Layer of the model that the map leads to, if it cannot be folded. Default: what the modules
            behind the old tower read, or else its last layer.
        matcher: The method that fits the map; ``auto`` takes the one of ``procrustes``, with a scale or without, and
            ``ridge`` with which the captions of images that fitted nothing stay more likely, in the tokens that the
            image decides: those that would be others if every image were the mean. Where there are none, the divergence
            of next tokens decides; of two towers, the cosine of embeddings.
        test_data: Samples to test on. Default: a quarter of the images.

    Returns:
        The network with the new tower, and its scores.

    Raises:
        ValueError: If the model has no such tower, the encoder does not fit, or images are too few.
    """
    if part not in PARTS:
        raise ValueError(f"part must be {' or '.join(map(repr, PARTS))}, got {part!r}")
    if run.planning:
        raise ValueError("an exchange of a tower has no plan: try it with fewer images, of which it needs some hundred")
    old, read = ready(load_on(model, run.processes.device))
    notes: list[str] = []
    new = load_on(encoder, run.processes.device)
    if new.interface.given:
        new = tower_alone(new, tower_of(new.model, part))
    if new.processor is not None and not hasattr(new.processor, "save_pretrained"):
        notes.append("the processor of the encoder is a function, which no folder holds: keep it yourself")
    new = hearing(new)
    rates = {rate for each in (old.processor, new.processor) if (rate := rate_of(each)) is not None}
    if len(rates) > 1:
        raise ValueError(f"both networks need sound of one sampling rate, got {' and '.join(map(str, sorted(rates)))}")
    matchers = registries.matchers.build_all(CANDIDATES if matcher == AUTO else [matcher])
    if wrong := [name for name, each in matchers.items() if not isinstance(each, ClosedFormMatcher)]:
        raise ValueError(f"matcher must be one in closed form, as procrustes or ridge, got {wrong[0]}")
    samples, least = Samples.of(images), LEAST[test_data is None]
    if len(samples) < least:
        raise ValueError(f"{len(samples)} images are too few: pass {least} or more, better some hundred")
    rest, test = (samples, Samples.of(test_data)) if test_data is not None else divided(samples, run.seed)
    if read and not all(
        isinstance(each := raw_of(part.take(1))[0], Mapping) and "text" in each for part in (rest, test)
    ):
        notes.append(f"images without a text were read with the text {read!r}")
    elif any(isinstance(each, Mapping) and "text" in each for each in raw_of(rest.take(1))):
        notes.append("each sample was read with its own text")
    fit, choose = divided(rest, run.seed)
    if len(test) < FEWEST:
        raise ValueError(f"{len(test)} images to test on are too few: pass {FEWEST} or more as data")
    if shared := ContentSketch.of(rest).share(test):
        notes.append(f"{shared:.0%} of the test images are among those that fitted or chose: scores are too good")
    with evaluating(old.model):
        found = _exchanged(old, new, part, run, (fit, choose, rest, test), encoder_layer, target_layer, matchers)
    return replace(found, notes=(*notes, *found.notes))


def _exchanged(
    old: Adapter, new: Adapter, part: str, run: Run, parts: tuple[Samples, Samples, Samples, Samples],
    encoder_layer: str | None, target_layer: str | None, matchers: Mapping[str, Any],
) -> Exchanged:  # fmt: skip
    """Exchange the tower: fit on the first samples, choose by the second, fit again on both, test on the last."""
    fit, choose, rest, test = parts
    tokenizer = getattr(old.processor, "tokenizer", None)
    job = Job(old, new, tower_of(old.model, part), Outputs.of(old.model, part, tokenizer), run)
    asked, untold = asked_of(test, tokenizer) if isinstance(job.outputs, Captions) else ({}, "")
    job.check(fit)
    place, why = place_of(job, fit, encoder_layer, target_layer)
    held: dict[str, float] = {}
    if len(matchers) > 1:
        maps, baselines = place.fitted(matchers, fit)
        given = {name: each.features for name, each in maps.items()}
        values = job.outputs.chosen_by(scored(place, choose, {**given, MEAN: baselines[MEAN]}))
        held = {name: values[name] for name in maps}
    best = max(matchers, key=lambda name: held.get(name, 0.0))
    maps, baselines = place.fitted({best: matchers[best]}, rest)
    final = maps[best]
    rows: dict[str, Features] = {
        EXCHANGED: final.features, ANOTHER: lambda part: final.features(following(part, test)), **baselines,
    }  # fmt: skip
    if several_tiles(old):  # another image may have another number of them
        del rows[ANOTHER]
    job.outputs.asked = asked
    measured = scored(place, test, rows)
    done = final.finished(test)
    notes = [note for note in (f"the map is not folded: {why}" if why else "", untold) if note]
    shown = test.take(min(len(test), SHOWN))
    captions: tuple[Caption, ...] = ()
    if tokenizer is not None and isinstance(job.outputs, Captions):
        both = written(old.model, full_inputs(old, shown))[1], final.written(done.model, shown)
        texts = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in both)
        captions = tuple(map(Caption, shown.ids, *texts))
    return Exchanged(
        _name(old), _name(new), part, best, held, len(rest) - (FEWEST if why else 0), len(test), test.fingerprint,
        _scores(measured, run.seed), not why, done.error, (*notes, *done.notes), captions, done.model,
        done.processor or tokenizer, done.reader,
    )  # fmt: skip


def scored(place: Place, samples: Samples, rows: Mapping[str, Features]) -> dict[str, dict[str, np.ndarray]]:
    """Return the figures of each sample if the old network reads other features, also those of the mean."""
    job, found = place.job, dict[str, dict[str, list[Tensor]]]()
    for part in job.batches(samples, "comparing outputs"):
        contexts = job.outputs.contexts(full_inputs(job.old, part), part.ids)
        made = {ORIGINAL: [job.outputs.kept(place, job.old.model(**each)) for place, each in enumerate(contexts)]}
        read = {name: features(part) for name, features in rows.items()}
        for at, context in enumerate(contexts):
            run = place.reader(context)
            for name, features in read.items():
                made.setdefault(name, []).append(job.outputs.kept(at, run(features)))
        for name, measured in job.outputs.measures(made).items():
            for measure, values in measured.items():
                found.setdefault(name, {}).setdefault(measure, []).append(values)
    gathered = job.run.processes.gather(found)
    measures = {
        name: {measure: torch.cat([x for part in gathered for x in part[name][measure]]) for measure in row}
        for name, row in found.items()
    }
    return job.outputs.figures_of(measures)


def divided(samples: Samples, seed: int) -> tuple[Samples, Samples]:
    """Divide samples into those to fit by and the rest, as if they had no labels."""
    places = {name: place for place, name in enumerate(samples.ids)}
    parts = samples.unlabelled().split(SHARE, seed)
    one, other = (samples.select([places[name] for name in part.ids]) for part in parts)
    return one, other


def following(part: Samples, whole: Samples) -> Samples:
    """Return for each sample of a part one that is half of all further: neighbours may share an image, or a class."""
    places = {name: place for place, name in enumerate(whole.ids)}
    return whole.select([(places[name] + len(whole) // 2) % len(whole) for name in part.ids])


def _name(network: Adapter) -> str:
    """Return the name of a network, or of its class."""
    return type(network.model).__name__ if network.reference.id is None else str(network.reference)


def _scores(measured: Mapping[str, Mapping[str, np.ndarray]], seed: int) -> dict[str, Figures]:
    """Return means over images with intervals; all rows share the resamples."""
    count = len(next(iter(next(iter(measured.values())).values())))
    draws = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the image decides no token of any image of a resample
        return {
            who: {name: as_score(np.concatenate([[np.nanmean(values)], np.nanmean(values[draws], 1)]))
                  for name, values in row.items()}
            for who, row in measured.items()
        }  # fmt: skip


def ready(network: Adapter) -> tuple[Adapter, str]:
    """Return a network that knows what it reads beside an image, and a text that was chosen for that, if one was."""
    given, model = network.interface.given, cast("Any", network.model)
    if network.interface.prompt or not given:
        return network, ""
    if not model.can_generate():  # two towers, of which one does not read what the other does
        return network.beside({name: value[0] for name, value in network.example.items() if name in given}), ""
    if given != ("decoder_input_ids",):
        try:
            return network.beside(PROMPT), PROMPT
        except ValueError:  # samples have texts, or the message names what is missing
            return network, ""
    first = start_of(model)
    if first is None:
        raise ValueError(
            f"the first token of the decoder of {type(model).__name__} is unknown: set "
            "model.generation_config.decoder_start_token_id"
        )
    return network.beside({"decoder_input_ids": [first]}), ""
