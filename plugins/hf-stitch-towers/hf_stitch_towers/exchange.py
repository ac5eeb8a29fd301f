"""Another tower under the same decoder, without labels: :func:`exchange`, which ``hf_stitch.swap(part=…)`` runs."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.adapters import load_on
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.data import Data, PairedSamples
from hf_stitch.data.overlap import ContentSketch
from hf_stitch.matchers import ClosedFormMatcher
from hf_stitch.registry import registries
from hf_stitch.running import Run
from hf_stitch.scoring.measured import as_score
from hf_stitch.statistics import Moments
from hf_stitch_towers.folding import (
    CONTENT,
    EQUAL,
    CannotFoldError,
    Reading,
    Tower,
    difference,
    features_of,
    fold,
    paired_readers,
    read,
    replacing_features,
    tower_of,
    variants,
    with_tower,
)  # fmt: skip
from hf_stitch_towers.inputs import ImageAndTextProcessor
from hf_stitch_towers.outputs import TOKENS, Captions, Outputs, written
from hf_stitch_towers.result import (
    ANOTHER,
    EXCHANGED,
    MEAN,
    MOMENTS,
    NO_MAP,
    Caption,
    Exchanged,
    Figures,
)  # fmt: skip

AUTO = "auto"
CANDIDATES: Mapping[str, Mapping[str, Any]] = {"procrustes": {"scale": True}, "ridge": {}}
"""Matchers among which ``auto`` chooses, with their options."""

SHARE = 0.25
"""Share of the images that tests, without test data; and of the rest, share that chooses the matcher."""

FEWEST, LEAST = 8, {True: 43, False: 32}
"""Least number of images to choose by and to test on, and in all, with those to test on and without."""

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
            behind the old tower read.
        matcher: The method that fits the map; ``auto`` takes the one of ``procrustes`` and ``ridge`` with which the
            captions of images that fitted nothing stay more likely, in the tokens that the image decides: those that
            would be others if every image were the mean. Where there are none, the divergence of next tokens decides;
            of two towers, the cosine of embeddings.
        test_data: Samples to test on. Default: a quarter of the images.

    Returns:
        The network with the new tower, and its scores.

    Raises:
        ValueError: If the model has no such tower, the encoder does not fit, or images are too few.
    """
    old, new = load_on(model, run.processes.device), alone(load_on(encoder, run.processes.device), part)
    old, notes = ready(old)
    if new.processor is not None and not hasattr(new.processor, "save_pretrained"):
        notes.append("the processor of the encoder is a function, which no folder holds: keep it yourself")
    if matcher != AUTO and not isinstance(registries.matchers.build(matcher), ClosedFormMatcher):
        raise ValueError(f"matcher must be one in closed form, as procrustes or ridge, got {matcher!r}")
    samples, least = Samples.of(images), LEAST[test_data is None]
    if len(samples) < least:
        raise ValueError(f"{len(samples)} images are too few: pass {least} or more, better some hundred")
    rest, test = (samples, Samples.of(test_data)) if test_data is not None else samples.split(SHARE, run.seed)
    fit, choose = rest.split(SHARE, run.seed)
    if len(test) < FEWEST:
        raise ValueError(f"{len(test)} images to test on are too few: pass {FEWEST} or more as data")
    if shared := ContentSketch.of(rest).share(test):
        notes.append(f"{shared:.0%} of the test images are among those that fitted or chose: scores are too good")
    with evaluating(old.model):
        found = _exchanged(old, new, part, run, (fit, choose, rest, test), encoder_layer, target_layer, matcher)
    return replace(found, notes=(*notes, *found.notes))


def _exchanged(
    old: Adapter, new: Adapter, part: str, run: Run, parts: tuple[Samples, Samples, Samples, Samples],
    encoder_layer: str | None, target_layer: str | None, matcher: Any,
) -> Exchanged:  # fmt: skip
    """Exchange the tower: fit on the first samples, choose by the second, fit again on both, test on the last."""
    fit, choose, rest, test = parts
    tower = tower_of(old.model, part)
    try:
        reading = read(old.model, tower.name, full_inputs(old, fit.take(2)))
    except CannotFoldError as problem:
        if isinstance(problem.__cause__, Exception):
            raise ValueError(
                f"{type(old.model).__name__} does not run on these images: {problem.__cause__}"
            ) from problem
        raise ValueError(
            f"{problem}. Join the networks at layers of your choice: hf_stitch.stitch(encoder, network, images, "
            f"source_layer=…, target_layer=…); layers: {', '.join(old.layers)}"
        ) from problem
    job = _Job(old, new, tower, reading.readers, Outputs.of(old.model, part), run)
    place, why = _place(job, fit, reading, encoder_layer, target_layer)
    options = CANDIDATES if matcher == AUTO else {"": {}}
    maps = {name: place.fitted(registries.matchers.build(name or matcher, **given), fit)
            for name, given in options.items()}  # fmt: skip
    held: dict[str, float] = {}
    if len(maps) > 1:
        given = {name: each.features for name, each in maps.items()}
        found = job.scored(choose, {**given, MEAN: place.baselines(fit)[MEAN]})
        values = job.outputs.chosen_by(found)
        held = {name: values[name] for name in maps}
    best = max(maps, key=lambda name: held.get(name, 0.0))
    chosen = best or getattr(matcher, "name", str(matcher))
    final = place.fitted(registries.matchers.build(best or matcher, **options[best]), rest)
    rows: dict[str, Callable[[Samples], Tensor]] = {
        EXCHANGED: final.features, ANOTHER: lambda part: final.features(following(part, test)),
        **place.baselines(rest),
    }  # fmt: skip
    measured = job.scored(test, rows)
    network, error, more = final.finished(test)
    notes = [f"the map is not folded: {why}"] if why else []
    tokenizer, shown = getattr(old.processor, "tokenizer", None), test.take(min(len(test), SHOWN))
    captions: tuple[Caption, ...] = ()
    if tokenizer is not None and isinstance(job.outputs, Captions):
        both = written(old.model, full_inputs(old, shown))[0], final.written(network, shown)
        texts = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in both)
        captions = tuple(map(Caption, shown.ids, *texts))
    return Exchanged(
        _name(old), _name(new), part, chosen, held, len(rest) - (FEWEST if why else 0), len(test), test.fingerprint,
        _scores(measured, run.seed), not why, error, (*notes, *more), captions, network,
        tokenizer,
    )  # fmt: skip


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


# -- both networks ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Job:
    """Both networks, and what reads the old tower."""

    old: Adapter
    new: Adapter
    tower: Tower
    readers: tuple[str, ...]
    outputs: Outputs
    run: Run

    def batches(self, samples: Samples, label: str) -> Iterator[Any]:
        """Yield batches of this process."""
        with torch.no_grad():
            for _, batch, _ in PairedSamples(samples, samples).batches(self.run, label):
                yield batch

    def features(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return what the readers of the old tower read."""
        return features_of(self.old.model, self.readers, inputs)

    def like_old(self, features: Tensor) -> Tensor:
        """Return features in the dtype of the old network."""
        return features.to(next(self.old.model.parameters()).dtype)

    def mean(self, mean: Tensor) -> Callable[[Samples], Tensor]:
        """Return a mean as what is read of each image."""
        return lambda part: self.like_old(mean).expand_as(self.features(full_inputs(self.old, part)))

    def scored(
        self, samples: Samples, rows: Mapping[str, Callable[[Samples], Tensor]]
    ) -> dict[str, dict[str, np.ndarray]]:  # fmt: skip
        """Return the figures of each sample if the readers read other features, also those of the mean."""
        model, found = self.old.model, dict[str, dict[str, list[Tensor]]]()
        for batch in self.batches(samples, "comparing outputs"):
            part = part_of(batch)
            context = self.outputs.context(full_inputs(self.old, part))
            made = {"": self.outputs.plain(model(**context))}
            for name, features in rows.items():
                with replacing_features(model, self.readers, features(part)):
                    made[name] = self.outputs.plain(model(**context))
            for name, measured in self.outputs.measures(made).items():
                for measure, values in measured.items():
                    found.setdefault(name, {}).setdefault(measure, []).append(values)
        gathered = self.run.processes.gather(found)
        measures = {
            name: {measure: torch.cat([x for part in gathered for x in part[name][measure]]) for measure in row}
            for name, row in found.items()
        }
        return {name: row for name, row in self.outputs.figures_of(measures).items() if name}


def part_of(batch: Any) -> Samples:
    """Return the samples of a batch, under their ids."""
    return Samples.of(list(batch.samples), id=batch.samples.ids)


def following(part: Samples, whole: Samples) -> Samples:
    """Return for each sample of a part the one that follows it."""
    places = {name: place for place, name in enumerate(whole.ids)}
    return whole.select([(places[name] + 1) % len(whole) for name in part.ids])


def full_inputs(network: Adapter, samples: Samples) -> dict[str, Any]:
    """Return all arguments of a forward of a network."""
    return dict(network.preprocess(list(next(iter(samples.batches(len(samples)))).samples)))


def ready(network: Adapter) -> tuple[Adapter, list[str]]:
    """Return a network that knows what it reads beside an image, and what to know about that."""
    given, model = network.interface.given, cast("Any", network.model)
    if network.interface.prompt or not given:
        return network, []
    if not model.can_generate():  # two towers, of which one does not read what the other does
        return network.beside({name: value[0] for name, value in network.example.items() if name in given}), []
    if given != ("decoder_input_ids",):
        try:
            return network.beside(PROMPT), [f"images without a text were read with the text {PROMPT!r}"]
        except ValueError:  # samples have texts, or the message names what is missing
            return network, []
    configs: tuple[Any, ...] = model.generation_config, model.config
    first = next((x for each in configs if (x := getattr(each, "decoder_start_token_id", None)) is not None), None)
    if first is None:
        raise ValueError(
            f"the first token of the decoder of {type(model).__name__} is unknown: set "
            "model.generation_config.decoder_start_token_id"
        )
    return network.beside({"decoder_input_ids": [first]}), []


def alone(encoder: Adapter, part: str) -> Adapter:
    """Return an encoder; of one that reads two things, its tower alone."""
    if not encoder.interface.given:
        return encoder
    module = encoder.model.get_submodule(tower_of(encoder.model, part).name)
    return hf_stitch.load(module, processor=getattr(encoder.processor, "image_processor", encoder.processor))


# -- where the map goes -----------------------------------------------------------------------------------------------
class _Map(ABC):
    """A fitted map from a new tower to the readers of the old one."""

    @abstractmethod
    def features(self, samples: Samples) -> Tensor:
        """Return what the readers are to read."""

    @abstractmethod
    def written(self, network: Any, samples: Samples) -> Tensor:
        """Return the tokens that the finished network writes about images."""

    @abstractmethod
    def finished(self, samples: Samples) -> tuple[Any, float, list[str]]:
        """Return the network with the new tower, how far its outputs are from the mapped one's, and what to know."""


class _Place(ABC):
    """Where a map from the new tower goes."""

    @abstractmethod
    def fitted(self, matcher: Any, samples: Samples) -> _Map:
        """Fit a map."""

    @abstractmethod
    def baselines(self, samples: Samples) -> dict[str, Callable[[Samples], Tensor]]:
        """Return what a score has to beat."""


def _place(
    job: _Job, samples: Samples, reading: Reading, encoder_layer: str | None, target_layer: str | None
) -> tuple[_Place, str]:  # fmt: skip
    """Return where the map goes, and why it is not folded if it is not."""
    why = ""
    if encoder_layer is None and target_layer is None:
        for settings in variants(job.old.model.config):
            try:
                return _Folded.of(job, samples, reading, settings), ""
            except CannotFoldError as error:
                why = why or str(error)
    else:
        why = "a layer was named"
    return _Stitched.of(job, samples, reading, encoder_layer, target_layer), why


@dataclass(frozen=True)
class _Folded(_Place):
    """A map that is folded into the modules that read the tower."""

    job: _Job
    made: Any  # a network of the class with the new tower
    readers: Mapping[str, str]
    content: str  # argument of the encoder

    @classmethod
    def of(cls, job: _Job, samples: Samples, reading: Reading, settings: Mapping[str, Any]) -> _Folded:
        """Return the place, if the class takes the new tower."""
        made = with_tower(job.old.model, job.tower, job.new.model, settings)
        found = cls(job, made, {}, job.new.interface.content[0])
        part = samples.take(2)
        new = read(made, job.tower.name, found.inputs(part))
        if new.features.shape[:-1] != reading.features.shape[:-1]:
            raise CannotFoldError(
                f"the new tower has {new.features.shape[1]} positions, and the old one {reading.features.shape[1]}"
            )
        readers = paired_readers(reading, new, job.old.model)
        found = cls(job, made, readers, found.content)
        width, out = new.features.shape[-1], reading.features.shape[-1]
        trial = torch.eye(width, out, dtype=torch.float64), torch.zeros(out, dtype=torch.float64)
        if not (error := found.folded(*trial, part)[1]) <= found.bound:
            raise CannotFoldError(f"other modules of {type(made).__name__} read the tower, too (outputs: {error:.2g})")
        return found

    @property
    def bound(self) -> float:
        """Greatest difference that is rounding."""
        return EQUAL[torch.finfo(next(self.made.parameters()).dtype).bits < 32]

    def inputs(self, samples: Samples) -> dict[str, Any]:
        """Return the inputs of the network with the new tower."""
        own = full_inputs(self.job.old, samples)
        raw = list(next(iter(samples.batches(len(samples)))).samples)
        return {**own, self.job.tower.content: self.job.new.preprocess(images_of(raw))[self.content]}

    def new(self, samples: Samples) -> Tensor:
        """Return what would be read of the new tower."""
        return features_of(self.made, tuple(self.readers), self.inputs(samples))

    def folded(self, matrix: Tensor, bias: Tensor, samples: Samples) -> tuple[Any, float]:
        """Return the network with a map, and how far its outputs are from those of the mapped one."""
        made = copy.deepcopy(self.made)
        fold(self.job.old.model, made, self.readers, matrix, bias)
        part = samples.take(min(len(samples), 4))
        inputs = full_inputs(self.job.old, part), self.inputs(part)
        return made, difference(
            self.job.old.model, made, *inputs, self.job.tower, matrix, bias, self.job.outputs.plain
        )  # fmt: skip

    def fitted(self, matcher: Any, samples: Samples) -> _Map:
        """Fit a map to all positions, in one pass; without a bias if modules that read it have none."""
        moments: Moments | None = None
        biased = all(getattr(self.made.get_submodule(name), "bias", None) is not None for name in self.readers)
        for batch in self.job.batches(samples, "reading towers"):
            part = part_of(batch)
            old, new = self.job.features(full_inputs(self.job.old, part)), self.new(part)
            moments = moments or Moments(new.shape[-1], old.shape[-1])
            rows = new.flatten(0, -2).double(), old.flatten(0, -2).double()
            moments.update(*rows)
            if not biased:  # each row and its opposite: the mean is 0, and the map needs no bias
                moments.update(*(-each for each in rows))
        assert moments is not None
        if (accelerator := self.job.run.processes.accelerator) is not None:
            moments.all_reduce(accelerator)
        stitch = matcher.fit(moments, dtype=torch.float64)
        exact: Any = {"dtype": torch.float64, "device": self.job.old.device}
        stitch = stitch.to(exact["device"])
        with torch.no_grad():
            bias = stitch(torch.zeros(1, stitch.in_features, **exact))[0]
            matrix = stitch(torch.eye(stitch.in_features, **exact)) - bias
        bias = bias if biased else torch.zeros_like(bias)
        return _FoldedMap(self, matrix, bias)

    def baselines(self, samples: Samples) -> dict[str, Callable[[Samples], Tensor]]:
        """Return the mean, features as they are, and with matched moments."""
        sums: dict[str, Tensor] = {}
        count = 0  # rows on the first axis: images, or tiles of them
        for batch in self.job.batches(samples, "reading towers"):
            part = part_of(batch)
            old, new = self.job.features(full_inputs(self.job.old, part)).double(), self.new(part).double()
            count += len(old)
            for name, each in {"old": old, "old²": old.square(), "new": new, "new²": new.square()}.items():
                sums[name] = sums[name] + each.sum(0) if name in sums else each.sum(0)
        mean, own = sums["old"] / count, sums["new"] / count
        found = {MEAN: self.job.mean(mean)}
        if mean.shape == own.shape:
            old_size, new_size = sums["old²"] / count - mean.square(), sums["new²"] / count - own.square()
            size = (old_size / new_size.clamp(min=1e-12)).clamp(min=0).sqrt()
            found[NO_MAP] = self.new
            found[MOMENTS] = lambda part: self.job.like_old((self.new(part).double() - own) * size + mean)
        return found


@dataclass(frozen=True)
class _FoldedMap(_Map):
    """A map to fold."""

    place: _Folded
    matrix: Tensor
    bias: Tensor

    def features(self, samples: Samples) -> Tensor:
        """Return mapped features."""
        return self.place.job.like_old(self.place.new(samples).double() @ self.matrix + self.bias)

    def written(self, network: Any, samples: Samples) -> Tensor:
        """Let the network write."""
        return written(network.model, self.place.inputs(samples))[0]

    def finished(self, samples: Samples) -> tuple[Any, float, list[str]]:
        """Return the network of the same class."""
        made, error = self.place.folded(self.matrix, self.bias, samples)
        if not error <= self.place.bound:
            raise ValueError(f"the folded network computes something else (outputs differ by {error:.2g})")
        job = self.place.job
        old, new = job.old.interface.prompt, job.new.processor
        processor = with_images(job.old.processor, new, made.get_submodule(job.tower.name).config)
        network = hf_stitch.load(made, processor=processor, context=old or None)
        try:
            self.place.job.outputs.plain(made(**full_inputs(network, samples.take(2))))
        except Exception as problem:  # of a processor, or of the network that checks its marks
            return network, error, [f"its own processor does not fit, so pass it inputs: {problem}"]
        return network, error, []


@dataclass(frozen=True)
class _Stitched(_Place):
    """A map between two halves that stay two networks."""

    job: _Job
    layers: tuple[str, str]
    positions: int  # that the readers read, the last ones of the layer

    @classmethod
    def of(
        cls, job: _Job, samples: Samples, reading: Reading, encoder_layer: str | None, target_layer: str | None
    ) -> _Stitched:  # fmt: skip
        """Return the place: by default from the last layer of the encoder to what the readers read."""
        inputs = full_inputs(job.old, samples.take(2))
        wanted = reading.features
        found = None
        with torch.no_grad():
            for name, each in job.old.encode(inputs, [target_layer] if target_layer else list(job.old.layers)).items():
                values = each.values.flatten(2).mT if each.layout == "bchw" else each.values
                read = values[:, -wanted.shape[1] :]
                if read.shape == wanted.shape and torch.equal(read, wanted):
                    found = name
        if found is None:
            raise ValueError(
                f"no layer of {type(job.old.model).__name__} is what {', '.join(job.readers)} read of "
                f"{job.tower.name}; layers: {', '.join(job.old.layers)}"
            )
        return cls(job, (encoder_layer or job.new.layers[-1], found), wanted.shape[1])

    def fitted(self, matcher: Any, samples: Samples) -> _Map:
        """Fit a map between the layers."""
        source, target = self.layers
        images = Samples.of(
            images_of([each for batch in samples.batches(64) for each in batch.samples]), id=samples.ids
        )
        run = self.job.run
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about the few samples by which a stitch is scored, of which nothing is kept
            made = hf_stitch.stitch(
                self.job.new, self.job.old, images, source_layer=source, target_layer=target, matcher=matcher,
                paired_data=samples, test_size=FEWEST, task=None if self.job.old.task is None else "auto",
                batch_size=run.batch_size, seed=run.seed, progress=run.progress,
            )  # fmt: skip
        return _StitchedMap(self, made)

    def baselines(self, samples: Samples) -> dict[str, Callable[[Samples], Tensor]]:
        """Return the mean of the old tower."""
        total = sum(
            self.job.features(full_inputs(self.job.old, part_of(batch))).double().sum(0)
            for batch in self.job.batches(samples, "reading towers")
        )
        return {MEAN: self.job.mean(torch.as_tensor(total) / len(samples))}


@dataclass(frozen=True)
class _StitchedMap(_Map):
    """A stitched model."""

    place: _Stitched
    model: Any

    @torch.no_grad()
    def features(self, samples: Samples) -> Tensor:
        """Return mapped features."""
        new, layer = self.place.job.new, self.place.layers[0]
        raw = images_of(list(next(iter(samples.batches(len(samples)))).samples))
        made = self.model.stitch(new.encode(new.preprocess(raw), layer)[layer])
        values: Tensor = made.values.flatten(2).mT if made.layout == "bchw" else made.values
        return self.place.job.like_old(values[:, -self.place.positions :])

    def written(self, network: Any, samples: Samples) -> Tensor:
        """Let the stitched model write, from the context of its target."""
        raw = images_of(list(next(iter(samples.batches(len(samples)))).samples))
        ids: Tensor = network.generate(**network.preprocess(raw), max_new_tokens=TOKENS, do_sample=False)
        prompt: list[int] = next(iter(self.place.job.old.interface.prompt.values()), [])
        return ids[:, len(prompt) :] if ids[0, : len(prompt)].tolist() == list(prompt) else ids

    def finished(self, samples: Samples) -> tuple[Any, float, list[str]]:
        """Return the stitched model; what it computes is what was scored."""
        return self.model, 0.0, []


# -- processors -------------------------------------------------------------------------------------------------------
def images_of(samples: Sequence[Any]) -> list[Any]:
    """Return the images of samples, which can have a text beside them."""
    names = ("image", "audio", "video", *CONTENT.values())
    return [next(each[n] for n in names if n in each) if isinstance(each, Mapping) else each for each in samples]


def with_images(processor: Any, of_images: Any, config: Any) -> Any:
    """Return a processor of images and texts with another part for images; without one for texts, that part."""
    part = next((name for name in ("image_processor", "feature_extractor") if hasattr(processor, name)), None)
    if part is None or not hasattr(of_images, "save_pretrained"):
        return of_images
    if isinstance(processor, ImageAndTextProcessor):
        return replace(processor, image_processor=of_images)
    made = copy.copy(processor)
    setattr(made, part, of_images)
    if isinstance(getattr(made, "patch_size", None), int) and isinstance(getattr(config, "patch_size", None), int):
        made.patch_size = config.patch_size
    return made
