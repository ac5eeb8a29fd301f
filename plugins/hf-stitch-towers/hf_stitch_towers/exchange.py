"""Replace a tower under a decoder without labels: :func:`exchange`, called by ``hf_stitch.swap(part=…)``."""

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
from hf_stitch_towers.answers import references_of
from hf_stitch_towers.examples import start_of
from hf_stitch_towers.folding import tower_of
from hf_stitch_towers.outputs import Captions, Outputs, generate_greedily
from hf_stitch_towers.places import (
    FEWEST,
    Features,
    Job,
    Place,
    full_inputs,
    place_of,
    rate_of,
    raw_of,
    several_tiles,
    tower_alone,
    with_waveforms,
)
from hf_stitch_towers.result import ANOTHER, EXCHANGED, MEAN, ORIGINAL, Caption, Exchanged, Figures

AUTO = "auto"
"""Value of ``matcher`` that chooses one of :data:`CANDIDATES`."""

CANDIDATES = ("procrustes", "procrustes:scale=True", "ridge")
"""Matchers that ``auto`` compares."""

SHARE = 0.25
"""Share of test images without ``test_data``, and share of the remaining images that choose the matcher."""

LEAST, LEAST_WITH_TEST = 32, 43
"""Minimum number of images with ``test_data``, so that :data:`SHARE` of them is FEWEST; and without ``test_data``."""

PARTS = ("vision", "audio")
"""Towers that can be exchanged."""

RESAMPLES = 1000
"""Number of bootstrap resamples of the test images."""

SHOWN = 8
"""Number of test images with stored captions."""

PROMPT = "Describe the image."
"""Text for images without a text, if the network was loaded without a context."""


def exchange(
    model: Any, encoder: Any, images: Data, part: str, run: Run, *,
    encoder_layer: str | None = None, target_layer: str | None = None, matcher: Any = AUTO,
    test_data: Data | None = None,
) -> Exchanged:  # fmt: skip
    """Replace a tower of a network by a new encoder and a closed-form map, fitted to images without labels.

    The map goes from the features of the new tower to the features of the old tower, as read by the modules after it.
    If the class of the model accepts the new tower and these modules are linear, the map is folded into their weights:
    the result is a network of the same class. Otherwise both networks are joined to a stitched model.

    Outputs are compared with the original: next tokens of the captions that it writes for test images, or the
    embeddings of a network of two towers.

    Args:
        model: The network, in any form accepted by :func:`hf_stitch.load`.
        encoder: The new encoder, with its own processor.
        images: Images, or samples of an image and a text; labels are not required.
        part: The tower to replace: ``vision`` or ``audio``.
        run: Options and processes of the run.
        encoder_layer: Layer of the encoder before the map, if the map cannot be folded. Default: its last layer.
        target_layer: Layer of the model after the map, if the map cannot be folded. Default: the layer read by the
            modules after the old tower, or its last layer.
        matcher: The method that fits the map. ``auto`` chooses among ``procrustes``, with and without a scale, and
            ``ridge``, by the likelihood of captions of held-out images, in tokens decided by the image: tokens that
            would change if every image were the mean. Without such tokens, the divergence of next tokens decides; for
            two towers, the cosine of embeddings.
        test_data: Samples to test on. Default: a quarter of the images.

    Returns:
        The network with the new tower, and its scores.

    Raises:
        ValueError: If the model lacks such a tower, the encoder does not fit, or there are too few images.
    """
    if part not in PARTS:
        raise ValueError(f"part must be {' or '.join(map(repr, PARTS))}, got {part!r}")
    if run.planning:
        raise ValueError(
            "plans are not available for tower exchanges: try a small number of images, a few hundred suffice"
        )
    old, context_text = with_context(load_on(model, run.processes.device))
    notes: list[str] = []
    new = load_on(encoder, run.processes.device)
    if new.interface.given:
        new = tower_alone(new, tower_of(new.model, part))
    if new.processor is not None and not hasattr(new.processor, "save_pretrained"):
        notes.append("the processor of the encoder is a function and cannot be saved: store it separately")
    new = with_waveforms(new)
    rates = {rate for network in (old, new) if (rate := rate_of(network.processor)) is not None}
    if len(rates) > 1:
        raise ValueError(f"both networks must use the same sampling rate, got {' and '.join(map(str, sorted(rates)))}")
    matchers = registries.matchers.build_all(CANDIDATES if matcher == AUTO else [matcher])
    if wrong := [name for name, candidate in matchers.items() if not isinstance(candidate, ClosedFormMatcher)]:
        raise ValueError(f"matcher must have a closed form, such as procrustes or ridge, got {wrong[0]}")
    samples, least = Samples.of(images), LEAST_WITH_TEST if test_data is None else LEAST
    if len(samples) < least:
        raise ValueError(f"{len(samples)} images are too few: pass at least {least}, or better a few hundred")
    rest, test = (samples, Samples.of(test_data)) if test_data is not None else split_unlabelled(samples, run.seed)
    if context_text and not all(_have_texts(dataset) for dataset in (rest, test)):
        notes.append(f"images without a text got the text {context_text!r}")
    elif _have_texts(rest):
        notes.append("each sample was used with its own text")
    fit, choose = split_unlabelled(rest, run.seed)
    if len(test) < FEWEST:
        raise ValueError(f"{len(test)} test images are too few: pass at least {FEWEST}")
    if shared := ContentSketch.of(rest).share(test):
        notes.append(
            f"{shared:.0%} of the test images were also used for fitting or choosing: scores are too optimistic"
        )
    with evaluating(old.model):
        exchanged = _exchanged(old, new, part, run, (fit, choose, rest, test), encoder_layer, target_layer, matchers)
    return replace(exchanged, notes=(*notes, *exchanged.notes))


def _exchanged(
    old: Adapter, new: Adapter, part: str, run: Run, splits: tuple[Samples, Samples, Samples, Samples],
    encoder_layer: str | None, target_layer: str | None, matchers: Mapping[str, Any],
) -> Exchanged:  # fmt: skip
    """Exchange the tower.

    The four sets of samples fit the candidates, choose one of them, fit it again (both sets together), and test it.
    """
    fit, choose, rest, test = splits
    tokenizer = getattr(old.processor, "tokenizer", None)
    job = Job(old, new, tower_of(old.model, part), Outputs.of(old.model, part, tokenizer), run)
    references, no_accuracy = references_of(test, tokenizer) if isinstance(job.outputs, Captions) else ({}, "")
    job.check(fit)
    place, reason = place_of(job, fit, encoder_layer, target_layer)
    held_out: dict[str, float] = {}
    if len(matchers) > 1:
        maps, baselines = place.fit_maps(matchers, fit)
        features = {name: fitted_map.features for name, fitted_map in maps.items()}
        scores = job.outputs.chosen_by(scored(place, choose, {**features, MEAN: baselines[MEAN]}))
        held_out = {name: scores[name] for name in maps}
    best = max(matchers, key=lambda name: held_out.get(name, 0.0))
    maps, baselines = place.fit_maps({best: matchers[best]}, rest)
    final = maps[best]
    rows: dict[str, Features] = {
        EXCHANGED: final.features, ANOTHER: lambda batch: final.features(half_away(batch, test)), **baselines,
    }  # fmt: skip
    if several_tiles(old):  # the number of tiles may differ between images
        del rows[ANOTHER]
    job.outputs.asked = references  # only test samples have references
    measured = scored(place, test, rows)
    finished = final.finish(test)
    notes = [note for note in (f"the map is not folded: {reason}" if reason else "", no_accuracy) if note]
    shown_samples = test.take(min(len(test), SHOWN))
    captions: tuple[Caption, ...] = ()
    if tokenizer is not None and isinstance(job.outputs, Captions):
        original_ids = generate_greedily(old.model, full_inputs(old, shown_samples))[1]
        all_ids = original_ids, final.generate(finished.model, shown_samples)
        texts = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in all_ids)
        captions = tuple(map(Caption, shown_samples.ids, *texts))
    # a stitched place holds out FEWEST samples of `rest` from the fit
    return Exchanged(
        _name(old), _name(new), part, best, held_out, len(rest) - (FEWEST if reason else 0), len(test),
        test.fingerprint, _scores(measured, run.seed), not reason, finished.error, (*notes, *finished.notes), captions,
        finished.model, finished.processor or tokenizer, finished.preprocessor,
    )  # fmt: skip


def scored(place: Place, samples: Samples, rows: Mapping[str, Features]) -> dict[str, dict[str, np.ndarray]]:
    """Run the old network with the features of each row; return row -> metric -> value of each sample."""
    job, collected = place.job, dict[str, dict[str, list[Tensor]]]()
    for batch in job.batches(samples, "comparing outputs"):
        contexts = job.outputs.contexts(full_inputs(job.old, batch), batch.ids)
        outputs = {
            ORIGINAL: [job.outputs.kept(number, job.old.model(**context)) for number, context in enumerate(contexts)]
        }
        features_by_row = {name: features_of(batch) for name, features_of in rows.items()}
        for number, context in enumerate(contexts):
            run = place.run_with(context)
            for name, features in features_by_row.items():
                outputs.setdefault(name, []).append(job.outputs.kept(number, run(features)))
        for name, row in job.outputs.measures(outputs).items():
            for measure, values in row.items():
                collected.setdefault(name, {}).setdefault(measure, []).append(values)
    gathered = job.run.processes.gather(collected)
    measures = {
        name: {measure: torch.cat([x for process in gathered for x in process[name][measure]]) for measure in row}
        for name, row in collected.items()
    }
    return job.outputs.figures_of(measures)


def split_unlabelled(samples: Samples, seed: int) -> tuple[Samples, Samples]:
    """Split off :data:`SHARE` of the samples as second part, without stratification by labels."""
    index = {name: number for number, name in enumerate(samples.ids)}
    parts = samples.unlabelled().split(SHARE, seed)
    first, second = (samples.select([index[name] for name in part.ids]) for part in parts)
    return first, second


def half_away(batch: Samples, whole: Samples) -> Samples:
    """Return for each sample the sample half the dataset away, because neighbours may share an image or a class."""
    index = {name: number for number, name in enumerate(whole.ids)}
    return whole.select([(index[name] + len(whole) // 2) % len(whole) for name in batch.ids])


def _have_texts(samples: Samples) -> bool:
    """Return whether the first of the samples has a text."""
    first = raw_of(samples.take(1))[0]
    return isinstance(first, Mapping) and "text" in first


def _name(network: Adapter) -> str:
    """Return the name of a network, or of its class."""
    return type(network.model).__name__ if network.reference.id is None else str(network.reference)


def _scores(measured: Mapping[str, Mapping[str, np.ndarray]], seed: int) -> dict[str, Figures]:
    """Return means over images with confidence intervals from the same resamples for all rows."""
    count = len(next(iter(next(iter(measured.values())).values())))
    draws = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # resamples without a token decided by the image
        return {
            row_name: {name: as_score(np.concatenate([[np.nanmean(values)], np.nanmean(values[draws], 1)]))
                  for name, values in row.items()}
            for row_name, row in measured.items()
        }  # fmt: skip


def with_context(network: Adapter) -> tuple[Adapter, str]:
    """Return a network with a context for images, and the text of this context; empty if it does not require a text."""
    names, model = network.interface.given, cast("Any", network.model)
    if network.interface.prompt or not names:
        return network, ""
    if not model.can_generate():  # two independent towers
        return network.beside({name: value[0] for name, value in network.example.items() if name in names}), ""
    if names != ("decoder_input_ids",):
        try:
            return network.beside(PROMPT), PROMPT
        except ValueError:  # samples have texts, or a later error names the missing argument
            return network, ""
    first = start_of(model)
    if first is None:
        raise ValueError(
            f"the first token of the decoder of {type(model).__name__} is unknown: set "
            "model.generation_config.decoder_start_token_id"
        )
    return network.beside({"decoder_input_ids": [first]}), ""
