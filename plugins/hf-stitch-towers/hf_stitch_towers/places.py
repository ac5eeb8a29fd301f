"""Where a map from a new tower goes: into the modules that read the old one, or between two networks."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

import hf_stitch
from hf_stitch import Adapter, Samples
from hf_stitch.artefacts.saving import check_saves
from hf_stitch.data import PairedSamples
from hf_stitch.data.samples import ids_of
from hf_stitch.representation import Representation
from hf_stitch.running import Run
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
    variants,
    with_tower,
)  # fmt: skip
from hf_stitch_towers.inputs import OF_TEXT, WHOLE, Hearing, ImageAndTextProcessor, inputs_of
from hf_stitch_towers.outputs import Outputs, divided, greedy, text_of, written
from hf_stitch_towers.result import MEAN, MOMENTS, NO_MAP

FEWEST = 8
"""Least number of images to choose by and to test on."""

NORMAL = ("image_mean", "image_std", "do_rescale", "rescale_factor", "do_normalize", "resample")
"""What an image processor says about colours."""

BLOCK = re.compile(r"\.\d+$")
"""Ends of the names of blocks."""

Features = Callable[[Samples], Tensor]
"""Returns what is read of the images of samples."""


@dataclass(frozen=True)
class Job:
    """Both networks, the tower, and what is compared."""

    old: Adapter
    new: Adapter
    tower: Tower
    outputs: Outputs
    run: Run

    @torch.no_grad()
    def check(self, samples: Samples) -> None:
        """Check that the old network runs on samples, and that its output can be compared.

        Raises:
            ValueError: If it does not.
        """
        inputs = full_inputs(self.old, samples.take(2))
        try:
            output = self.old.model(**inputs)
        except Exception as problem:  # the code of the network can raise anything
            name = type(self.old.model).__name__
            raise ValueError(f"{name} does not run on these images: {problem}") from problem
        self.outputs.plain(output)

    def batches(self, samples: Samples, label: str) -> Iterator[Samples]:
        """Yield the samples of this process in batches, under their ids."""
        with torch.no_grad():
            for _, batch, _ in PairedSamples(samples, samples).batches(self.run, label):
                yield Samples.of(list(batch.samples), id=ids_of(batch.samples))

    def means(self, samples: Samples, of: Callable[[Samples], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return means over the first axis (images, or tiles of them), of the samples of all processes."""
        sums, count = dict[str, Tensor](), 0
        for part in self.batches(samples, "reading towers"):
            made = of(part)
            count += len(next(iter(made.values())))
            for name, each in made.items():
                total = each.double().sum(0)
                sums[name] = sums[name] + total if name in sums else total
        gathered = [each for each in self.run.processes.gather((sums, count)) if each[1]]
        counts = sum(count for _, count in gathered)
        return {
            name: torch.stack([each[name].to(self.old.device) for each, _ in gathered]).sum(0) / counts
            for name in gathered[0][0]
        }

    def like_old(self, features: Tensor) -> Tensor:
        """Return features in the dtype of the old network."""
        return features.to(next(self.old.model.parameters()).dtype)


@dataclass(frozen=True)
class Finished:
    """A network with another tower.

    Attributes:
        model: A network of the class, or a stitched model.
        reader: What makes inputs of raw samples for it.
        processor: The processor of images and texts to save beside it; ``None`` if there is none.
        error: How far its outputs are from those of the mapped one, over the largest.
        notes: What to know.
    """

    model: Any
    reader: Any
    processor: Any
    error: float
    notes: tuple[str, ...] = ()


class Map(ABC):
    """A fitted map from a new tower to what reads the old one."""

    @abstractmethod
    def features(self, samples: Samples) -> Tensor:
        """Return what is to be read of the new tower."""

    @abstractmethod
    def written(self, model: Any, samples: Samples) -> Tensor:
        """Return the tokens that the finished network writes about images."""

    @abstractmethod
    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Return the inputs of the finished network for raw samples, as those that were scored."""

    @abstractmethod
    def finished(self, samples: Samples) -> Finished:
        """Return the network with the new tower."""


@dataclass(frozen=True)
class Place(ABC):
    """Where a map from the new tower goes.

    Attributes:
        job: Both networks.
    """

    job: Job

    @abstractmethod
    def fitted(self, matchers: Mapping[str, Any], samples: Samples) -> tuple[dict[str, Map], dict[str, Features]]:
        """Fit a map by each matcher; return the maps, and what their scores have to beat."""

    @abstractmethod
    def old(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return what is read of the old tower."""

    @abstractmethod
    def reader(self, inputs: Mapping[str, Any]) -> Callable[[Tensor], Any]:
        """Return a function from features to the output of the old network that reads them instead of its tower."""

    def mean(self, mean: Tensor) -> Features:
        """Return a mean as what is read of each image."""
        return lambda part: self.job.like_old(mean).expand_as(self.old(full_inputs(self.job.old, part)))


@torch.no_grad()
def check_tower(own: Any, encoder: Adapter, images: Sequence[Any]) -> None:
    """Check that the tower of a class computes what its encoder does, of which it has the weights and the config.

    Raises:
        CannotFoldError: If its states are others: the encoder has code or settings that its config does not tell.
    """
    body: Any = getattr(encoder.model, "base_model", encoder.model)
    dtype = next(own.parameters()).dtype
    try:
        inputs = encoder.preprocess(images)
        one, other = (each(**inputs)[0].double() for each in (own.to(body.dtype), body))
    except Exception:  # of a tower that does not run alone: outputs of the network are compared later
        return
    finally:
        own.to(dtype)
    apart = float((one - other).abs().max() / other.abs().max()) if one.shape == other.shape else float("inf")
    if not apart <= EQUAL[min(torch.finfo(each).bits for each in (dtype, body.dtype)) < 32]:
        raise CannotFoldError(
            f"{type(body).__name__} computes something else than its config tells (states: {apart:.2g})"
        )


def place_of(
    job: Job, samples: Samples, encoder_layer: str | None, target_layer: str | None
) -> tuple[Place, str]:  # fmt: skip
    """Return where the map goes, and why it is not folded if it is not."""
    if encoder_layer is not None or target_layer is not None:
        return Stitched.of(job, samples, None, encoder_layer, target_layer), "a layer was named"
    why, reading = "", None
    try:
        reading = read(job.old.model, job.tower.name, full_inputs(job.old, samples.take(2)))
    except CannotFoldError as problem:
        why = str(problem)
    for settings in [] if reading is None else variants(job.old.model.config):
        try:
            return Folded.of(job, samples, cast("Reading", reading), settings), ""
        except CannotFoldError as problem:
            why = why or str(problem)
    return Stitched.of(job, samples, reading, None, None), why


# -- folded -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Folded(Place):
    """A map that is folded into the modules that read the tower.

    Attributes:
        made: A network of the class with the new tower.
        reading: What reads the old tower.
        readers: Reader of the new tower -> that of the old one.
    """

    made: Any
    reading: Reading
    readers: Mapping[str, str]

    @classmethod
    def of(cls, job: Job, samples: Samples, reading: Reading, settings: Mapping[str, Any]) -> Folded:
        """Return the place, if the class takes the new tower."""
        made = with_tower(job.old.model, job.tower, job.new.model, settings)
        part = samples.take(2)
        check_tower(made.get_submodule(job.tower.name), job.new, images_of(raw_of(part)))
        new = read(made, job.tower.name, cls(job, made, reading, {}).inputs(part))
        if new.features.shape[:-1] != reading.features.shape[:-1] or new.groups != reading.groups:
            raise CannotFoldError(
                f"the new tower has {new.groups * new.features.shape[-2]} positions, and the old one "
                f"{reading.groups * reading.features.shape[-2]}"
            )
        found = cls(job, made, reading, paired_readers(reading, new, job.old.model))
        found.check(part, new.features)
        width, out = new.features.shape[-1] // new.groups, reading.features.shape[-1] // reading.groups
        trial = torch.eye(width, out, dtype=torch.float64), torch.zeros(out, dtype=torch.float64)
        if not (error := found.folded(*trial, part)[1]) <= found.bound:
            raise CannotFoldError(f"other modules of {type(made).__name__} read the tower, too (outputs: {error:.2g})")
        return found

    @torch.no_grad()
    def check(self, samples: Samples, features: Tensor) -> None:
        """Check that modules are those of the old network but for readers, and that nothing else reads the tower."""
        before, tower = self.job.old.model.state_dict(), self.job.tower
        for name, value in self.made.state_dict().items():
            known = name in before and before[name].shape == value.shape
            if not (known or name.startswith(f"{tower.name}.") or name.rpartition(".")[0] in self.readers):
                raise CannotFoldError(f"{type(self.made).__name__} has no weights for {name} with this tower")
        inputs = self.inputs(samples)
        others = {**inputs, tower.content: inputs[tower.content].flip(0)}
        with replacing_features(self.made, tuple(self.readers), features):
            both = [self.job.outputs.plain(self.made(**each)) for each in (inputs, others)]
        if not torch.equal(*both):
            raise CannotFoldError(f"other modules of {type(self.made).__name__} read the tower, too")

    @property
    def bound(self) -> float:
        """Greatest difference that is rounding."""
        return EQUAL[torch.finfo(next(self.made.parameters()).dtype).bits < 32]

    def inputs(self, samples: Samples) -> dict[str, Any]:
        """Return the inputs of the network with the new tower."""
        own, name = full_inputs(self.job.old, samples), self.job.tower.content
        encoder, shape = self.job.new, own[name].shape
        if several_tiles(self.job.old):
            return {**own, name: tiles_for(encoder, own[name], self.job.old)}
        new = encoder.preprocess(images_of(raw_of(samples)))[encoder.interface.content[0]]
        own = {key: value for key, value in own.items() if key not in WHOLE}  # of the pixels of the other processor
        return {**own, name: new[:, None] if len(shape) == 5 and new.dim() == 4 else new}

    def old(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return what the readers of the old tower read."""
        return features_of(self.job.old.model, self.reading.readers, inputs)

    def new(self, samples: Samples) -> Tensor:
        """Return what would be read of the new tower."""
        return features_of(self.made, tuple(self.readers), self.inputs(samples))

    def reader(self, inputs: Mapping[str, Any]) -> Callable[[Tensor], Any]:
        """Return a function that runs the old network with other features in front of the readers."""

        def run(features: Tensor) -> Any:
            with replacing_features(self.job.old.model, self.reading.readers, features):
                return self.job.old.model(**inputs)

        return run

    def folded(self, matrix: Tensor, bias: Tensor, samples: Samples) -> tuple[Any, float]:
        """Return the network with a map, and how far its outputs are from those of the mapped one."""
        made, model, part = copy.deepcopy(self.made), self.job.old.model, samples.take(min(len(samples), 4))
        fold(model, made, self.readers, matrix, bias, self.reading.groups)
        inputs = full_inputs(self.job.old, part), self.inputs(part)
        return made, difference(model, made, *inputs, self.job.tower, matrix, bias, self.job.outputs.plain)

    def fitted(self, matchers: Mapping[str, Any], samples: Samples) -> tuple[dict[str, Map], dict[str, Features]]:
        """Fit maps to all positions, in one pass; without a bias if modules that read them have none."""
        moments: Moments | None = None
        biased = all(getattr(self.made.get_submodule(name), "bias", None) is not None for name in self.readers)

        def powers(part: Samples) -> dict[str, Tensor]:
            nonlocal moments
            old, new = self.old(full_inputs(self.job.old, part)), self.new(part)
            rows = [each.unflatten(-1, (self.reading.groups, -1)).flatten(0, -2) for each in (new, old)]
            moments = moments or Moments(rows[0].shape[-1], rows[1].shape[-1])
            moments.update(*rows)
            if not biased:  # each row and its opposite: the mean is 0, and the map needs no bias
                moments.update(*(-each for each in rows))
            old, new = old.double(), new.double()
            return {"old": old, "old²": old.square(), "new": new, "new²": new.square()}

        means = self.job.means(samples, powers)
        assert moments is not None
        if (accelerator := self.job.run.processes.accelerator) is not None:
            moments.all_reduce(accelerator)
        if not biased:  # of as many rows as there are
            moments.count.div_(2, rounding_mode="floor")
            moments.scatter.div_(2)
        maps: dict[str, Map] = {}
        exact: Any = {"dtype": torch.float64, "device": self.job.old.device}
        for name, matcher in matchers.items():
            stitch = matcher.fit(moments, dtype=torch.float64).to(exact["device"])
            with torch.no_grad():
                bias = stitch(torch.zeros(1, stitch.in_features, **exact))[0]
                matrix = stitch(torch.eye(stitch.in_features, **exact)) - bias
            maps[name] = FoldedMap(self, matrix, bias if biased else torch.zeros_like(bias))
        mean, own = means["old"], means["new"]
        baselines: dict[str, Features] = {MEAN: self.mean(mean)}
        if mean.shape == own.shape:
            old_size, new_size = means["old²"] - mean.square(), means["new²"] - own.square()
            size = (old_size / new_size.clamp(min=1e-12)).clamp(min=0).sqrt()
            baselines[NO_MAP] = self.new
            baselines[MOMENTS] = lambda part: self.job.like_old((self.new(part).double() - own) * size + mean)
        return maps, baselines


@dataclass(frozen=True)
class FoldedMap(Map):
    """A map to fold."""

    place: Folded
    matrix: Tensor
    bias: Tensor

    def features(self, samples: Samples) -> Tensor:
        """Return mapped features."""
        rows = self.place.new(samples).double().unflatten(-1, (self.place.reading.groups, -1))
        return self.place.job.like_old((rows @ self.matrix + self.bias).flatten(-2))

    def written(self, model: Any, samples: Samples) -> Tensor:
        """Let the network write."""
        return written(model, self.place.inputs(samples))[1]

    def finished(self, samples: Samples) -> Finished:
        """Return the network of the same class."""
        made, error = self.place.folded(self.matrix, self.bias, samples)
        if not error <= self.place.bound:
            raise ValueError(f"the folded network computes something else (outputs differ by {error:.2g})")
        job = self.place.job
        new = job.new.processor
        own, part = self.place.inputs(samples.take(2)), samples.take(2)
        config, problem = made.get_submodule(job.tower.name).config, ""
        first = with_images(job.old.processor, new, config)
        several = hasattr(first, "image_processor") and hasattr(new, "save_pretrained")
        others = composed(job.old.processor, new, {job.tower.content: own[job.tower.content]}) if several else ()
        context = getattr(job.old, "prompt", None) or job.old.interface.prompt or None
        for processor in (first, *others):
            try:
                found = full_inputs(hf_stitch.load(made, processor=processor, context=context), part)
                job.outputs.plain(made(**found))
            except Exception as error_of:  # of a processor, or of the network that checks its marks
                problem = problem or str(error_of)
                continue
            texts = all(torch.equal(found[name], own[name]) for name in job.old.interface.given)
            if texts and _same(found[job.tower.content], own[job.tower.content]):
                return Finished(made, self, processor if hasattr(processor, "save_pretrained") else None, error)
            problem = problem or "it prepares images or texts in another way than was scored"
        note = (
            f"no processor fits the network, so use preprocess of the result, or load the encoder with a "
            f"{type(_images_part(job.old.processor)).__name__} of its size: {problem}"
        )
        return Finished(made, self, None, error, (note,))

    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Return the inputs of the network of the class."""
        return self.place.inputs(Samples.of(list(samples)))


# -- stitched ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Stitched(Place):
    """A map between two halves that stay two networks.

    Attributes:
        source: Layer of the new tower.
        target: Layer of the old network.
    """

    source: str
    target: str

    @classmethod
    def of(
        cls, job: Job, samples: Samples, reading: Reading | None, encoder_layer: str | None, target_layer: str | None
    ) -> Stitched:  # fmt: skip
        """Return the place: by default from the last layer of the encoder to what is read of the old tower."""
        known = [encoder_layer] if encoder_layer else list(job.new.layers)
        if several_tiles(job.old):
            raise ValueError(
                f"{type(job.old.model).__name__} divides images into tiles, which an encoder reads if the class can "
                f"hold it, and {type(job.new.model).__name__} cannot take that place: take one of the same image size"
            )
        target = target_layer or _last_of_tower(job, samples, reading, known)
        cut, _ = job.old.cut(target)
        if cut.padding in OF_TEXT:
            raise ValueError(
                f"layer {target!r} of {type(job.old.model).__name__} is in its decoder, where positions are those of "
                f"the text: name a layer before it as target_layer; layers: {', '.join(job.old.layers)}"
            )
        alike = [name for name in known if _kind(job.new, name) == _kind(job.old, target)]
        return cls(job, (alike or known)[-1], target)

    def entering(self, inputs: Mapping[str, Any]) -> Representation:
        """Return what enters the layer of the old network."""
        return self.job.old.encode(inputs, self.target)[self.target]

    def old(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the activations of the layer."""
        return self.entering(inputs).values

    def reader(self, inputs: Mapping[str, Any]) -> Callable[[Tensor], Any]:
        """Return a function that runs the old network from the layer on."""
        entering = self.entering(inputs)
        return lambda features: self.job.old.decode(entering.replace(values=features), self.target)

    def fitted(self, matchers: Mapping[str, Any], samples: Samples) -> tuple[dict[str, Map], dict[str, Features]]:
        """Fit maps between the layers."""
        maps: dict[str, Map] = {name: self._stitched(matcher, samples) for name, matcher in matchers.items()}
        means = self.job.means(samples, lambda part: {MEAN: self.old(full_inputs(self.job.old, part))})
        baselines: dict[str, Features] = {MEAN: self.mean(means[MEAN])}
        if self.job.new.spec(self.source).width == self.job.old.spec(self.target).width:
            baselines[NO_MAP] = self._stitched("identity", samples).features
        return maps, baselines

    def _stitched(self, matcher: Any, samples: Samples) -> StitchedMap:
        """Stitch both networks."""
        images = Samples.of(
            images_of([each for batch in samples.batches(64) for each in batch.samples]), id=samples.ids
        )
        run = self.job.run
        with warnings.catch_warnings():  # about the few samples by which a stitch is scored, of which nothing is kept
            warnings.simplefilter("ignore")
            made = hf_stitch.stitch(
                self.job.new, self.job.old, images, source_layer=self.source, target_layer=self.target,
                matcher=matcher, paired_data=samples, test_size=FEWEST,
                task=None if self.job.old.task is None else "auto", batch_size=run.batch_size, seed=run.seed,
                progress=run.progress,
            )  # fmt: skip
        return StitchedMap(self, made)


@dataclass(frozen=True)
class StitchedMap(Map):
    """A stitched model."""

    place: Stitched
    model: Any

    @torch.no_grad()
    def features(self, samples: Samples) -> Tensor:
        """Return mapped features."""
        new, layer = self.place.job.new, self.place.source
        made = self.model.stitch(new.encode(new.preprocess(images_of(raw_of(samples))), layer)[layer])
        return self.place.job.like_old(made.values)

    def written(self, model: Any, samples: Samples) -> Tensor:
        """Let the stitched model write, in the context of the original."""
        own = full_inputs(self.place.job.old, samples)
        before, model.generation_config = model.generation_config, greedy(self.place.job.old.model)
        try:
            ids = model.generate(**self._inputs(samples, own))
        finally:
            model.generation_config = before
        return divided(ids, own[text_of(self.place.job.old.model)[0]])[1]

    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Return the inputs of the stitched model, with the texts of samples."""
        known = Samples.of(list(samples))
        return self._inputs(known, full_inputs(self.place.job.old, known))

    def _inputs(self, samples: Samples, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the stitched model: images for its source, and what its target reads beside them."""
        names, content = getattr(self.model, "context_names", ()), self.place.job.old.interface.content
        beside = {name: own[name] for name in names if name in own and name not in content}
        return {**self.model.preprocess(images_of(raw_of(samples))), **beside}

    def finished(self, samples: Samples) -> Finished:
        """Return the stitched model."""
        old = self.place.job.old
        error = self._error(samples.take(min(len(samples), 4)))
        processor = with_images(old.processor, self.place.job.new.processor, None)
        found, notes = None, []
        if hasattr(processor, "tokenizer"):
            found = fitting(
                old, self.place.job.new, samples.take(1), self.model.preprocess(images_of(raw_of(samples.take(1))))
            )
            self.model.processor = self.model.processor if found is None else found
            if found is None:
                why = f"load the encoder with a {type(_images_part(old.processor)).__name__} of its size"
                notes.append(
                    f"no {type(processor).__name__} makes what both networks read, as a pipeline needs; "
                    + ("its patches are packed: use preprocess" if old.interface.packed else f"for one, {why}")
                )
        self.model.evaluation = self.model.config.scores = None  # of the few samples that a stitch needs
        try:
            check_saves(self.model)
        except ValueError as problem:  # now, and not when someone comes back to save it
            notes.append(str(problem))
        return Finished(self.model, self, found, error, tuple(notes))

    @torch.no_grad()
    def _error(self, samples: Samples) -> float:
        """Return how far the outputs of the stitched model are from those that were scored."""
        job, own = self.place.job, full_inputs(self.place.job.old, samples)
        wanted = job.outputs.plain(self.place.reader(own)(self.features(samples)))
        found = job.outputs.plain(self.model(**self._inputs(samples, own)))
        error = float((wanted - found).abs().max() / wanted.abs().max())
        if not error <= EQUAL[torch.finfo(wanted.dtype).bits < 32]:
            raise ValueError(
                f"the stitched model computes something else than was scored (outputs differ by {error:.2g})"
            )
        return error


def _last_of_tower(job: Job, samples: Samples, reading: Reading | None, known: Sequence[str]) -> str:
    """Return the layer that is what modules read of the tower; or else its last one, or the first one behind it.

    A layer of the same kind as layers of the encoder goes before others: positions or vectors, and blocks, so that
    the norm of the old tower follows the map.
    """
    old, tower = job.old, job.tower.name
    if reading is not None:
        inputs = full_inputs(old, samples.take(2))
        for name, each in reversed(old.encode(inputs, list(old.layers)).items()):
            values = each.values.flatten(2).mT if each.layout == "bchw" else each.values
            rows = values[:, -reading.features.shape[1] :]
            if rows.shape == reading.features.shape and torch.equal(rows, reading.features):
                if _kind(old, name)[0] in {_kind(job.new, each)[0] for each in known}:
                    return name
                break  # vectors, and the encoder has positions alone, or the other way round
    inside = [name for name in old.layers if name == tower or name.startswith(f"{tower}.")]
    behind = [name for name in old.layers if old.cut(name)[0].padding not in OF_TEXT]
    if not (inside or behind):
        raise ValueError(
            f"{type(old.model).__name__} cannot be cut in or behind {tower}, so that no other tower can take its "
            f"place; layers: {', '.join(old.layers) or 'none'}"
        )
    kinds = {_kind(job.new, name) for name in known}
    alike = [name for name in inside if _kind(old, name) in kinds]
    blocks = [name for name in alike if BLOCK.search(name)] if BLOCK.search(known[-1]) else []
    further = [name for name in behind if name not in inside and _kind(old, name) in kinds]
    return (blocks or alike or further[:1] or inside or behind[:1])[-1]


def several_tiles(network: Adapter) -> bool:
    """Return whether a network reads several tiles of each image."""
    known = network.interface
    return any(len(shape) == 4 and shape[0] > 1 and name not in known.packed for name, shape in known.shapes.items())


def _kind(network: Adapter, layer: str) -> tuple[bool, bool]:
    """Return whether a layer has vectors, and not positions, and whether positions have a grid."""
    spec = network.cut(layer)[0].spec
    return spec.layout == "bd", spec.grid is not None


# -- samples, processors and encoders ---------------------------------------------------------------------------------
def raw_of(samples: Samples) -> Sequence[Any]:
    """Return all samples, with their ids."""
    return next(iter(samples.batches(len(samples)))).samples


def full_inputs(network: Adapter, samples: Samples) -> dict[str, Any]:
    """Return all arguments of a forward of a network."""
    return dict(network.preprocess(raw_of(samples)))


def images_of(samples: Sequence[Any]) -> list[Any]:
    """Return the images of samples, which can have a text beside them."""
    names = ("image", "audio", "video", *(name for known in CONTENT.values() for name in known))
    return [next(each[n] for n in names if n in each) if isinstance(each, Mapping) else each for each in samples]


def with_images(processor: Any, of_images: Any, config: Any) -> Any:
    """Return a processor of images and texts with another part for images; without one for texts, that part."""
    of_images = getattr(of_images, "extractor", of_images)
    part = next((name for name in ("image_processor", "feature_extractor") if hasattr(processor, name)), None)
    if part is None or not hasattr(of_images, "save_pretrained"):
        return of_images
    if isinstance(processor, ImageAndTextProcessor):
        return replace(processor, image_processor=of_images)
    made = copy.copy(processor)
    if hasattr(old := getattr(processor, part), "image_grid_pinpoints"):  # which divides images into tiles
        normal = {name: getattr(of_images, name) for name in ("image_mean", "image_std")}
        of_images = type(old).from_dict({**old.to_dict(), **normal})
    setattr(made, part, of_images)
    if isinstance(getattr(made, "patch_size", None), int) and isinstance(getattr(config, "patch_size", None), int):
        made.patch_size = config.patch_size
    return made


def fitting(network: Adapter, encoder: Adapter, samples: Samples, images: Mapping[str, Tensor]) -> Any:
    """Return a processor of images for an encoder, and of texts for a network; ``None`` if there is none.

    Args:
        network: The network that reads both, with its processor.
        encoder: The encoder, with its processor.
        samples: A sample.
        images: What the encoder reads of its image.

    Returns:
        A processor that makes these inputs, and texts as the network reads them: with as many marks of an image as the
        old tower has positions, which some processors count by patches.
    """
    wanted, raw = full_inputs(network, samples), raw_of(samples)
    known, prompt, content = network.interface, getattr(network, "prompt", None), network.interface.content[0]
    for processor in composed(network.processor, encoder.processor, images):
        sizes = range(1, 65) if isinstance(getattr(processor, "patch_size", None), int) else ()
        for size in (None, *sizes):
            made = processor if size is None else copy.copy(processor)
            if size is not None:
                made.patch_size = size
            with suppress(Exception):  # of a processor that does not take this size
                found = inputs_of(raw, made, known, network.model, prompt)
                same = all(torch.equal(found[name], wanted[name]) for name in known.given)
                if same and _same(found[content], next(iter(images.values()))):
                    return made.processor if isinstance(made, ImageAndTextProcessor) else made
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two inputs are the same up to rounding, and axes of length 1."""
    atol = 1e-4 if min(torch.finfo(each.dtype).bits for each in (one, other)) >= 32 else EQUAL[True]
    return one.numel() == other.numel() and torch.allclose(one.flatten().float(), other.flatten().float(), atol=atol)


def _images_part(processor: Any) -> Any:
    """Return the part of a processor that reads images or sound."""
    names = ("image_processor", "feature_extractor")
    return next((getattr(processor, name) for name in names if hasattr(processor, name)), processor)


def composed(processor: Any, of_images: Any, images: Mapping[str, Tensor]) -> Iterator[Any]:
    """Yield processors of both: with that of the encoder, and with the own one that prepares images as that does."""
    yield with_images(processor, of_images, None)
    old, new = _images_part(processor), getattr(of_images, "extractor", of_images)
    height, width = next(iter(images.values())).shape[-2:]
    longest = {"longest_edge": max(height, width)}
    sizes: tuple[dict[str, Any], ...] = (
        {}, {"size": {"height": height, "width": width}},
        {"size": longest, "max_image_size": longest, "do_image_splitting": False},
    )  # fmt: skip
    normal = {name: getattr(new, name) for name in NORMAL if getattr(new, name, None) is not None}
    for size in sizes if hasattr(old, "from_dict") and normal else ():
        yield with_images(processor, type(old).from_dict({**old.to_dict(), **normal, **size}), None)


def tiles_for(encoder: Adapter, tiles: Tensor, network: Adapter) -> Tensor:
    """Return the tiles of images as an encoder reads them: normalised in its way, and of its size.

    Raises:
        ValueError: If both processors do not say how they normalise, or tiles have another size than its images.
    """
    wanted = encoder.interface.shapes[encoder.interface.content[0]]
    old, new = (getattr(each.processor, "image_processor", each.processor) for each in (network, encoder))
    known = all(getattr(each, "image_mean", None) is not None for each in (old, new))
    scales = {(getattr(each, "do_rescale", True), getattr(each, "rescale_factor", None)) for each in (old, new)}
    known = known and len(scales) == 1
    if not known or tuple(tiles.shape[-3:]) != wanted:
        raise ValueError(
            f"{type(network.model).__name__} reads {tiles.shape[1]} tiles of {tuple(tiles.shape[-3:])} of an image, "
            f"and {type(encoder.model).__name__} images of {wanted}: both need a processor of transformers that says "
            "how it normalises (image_mean, image_std), and the same size"
        )
    values = []
    for each in (old, new):
        moments = (each.image_mean, each.image_std) if getattr(each, "do_normalize", True) else ((0.0,), (1.0,))
        values += [torch.tensor(moment).to(tiles)[:, None, None] for moment in moments]
    mean, std, own_mean, own_std = values
    present = tiles.flatten(2).any(2)[..., None, None, None]  # tiles of zeros are padding
    return ((tiles * std + mean - own_mean) / own_std).where(present, 0)


def hearing(encoder: Adapter) -> Adapter:
    """Return an encoder whose feature extractor, if it has one, makes features of each waveform."""
    part = getattr(encoder.processor, "feature_extractor", encoder.processor)
    if not hasattr(part, "sampling_rate"):
        return encoder
    made = copy.copy(encoder)
    made.processor = Hearing(part, encoder.interface.content[0])
    return made


def rate_of(processor: Any) -> int | None:
    """Return the sampling rate of a processor of sound; ``None`` for others."""
    part = getattr(processor, "extractor", getattr(processor, "feature_extractor", processor))
    return getattr(part, "sampling_rate", None)


def tower_alone(encoder: Adapter, tower: Tower) -> Adapter:
    """Return the tower of an encoder that reads two things as a network of its own, with the inputs that it gets."""
    module: Any = encoder.model.get_submodule(tower.name)
    seen: dict[str, Any] = {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        seen.update({name: value for name, value in bound.items() if isinstance(value, Tensor)})

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            encoder.forward(encoder.example)
    finally:
        handle.remove()
    processor = encoder.processor
    part = next((name for name in ("image_processor", "feature_extractor") if hasattr(processor, name)), None)
    content = next(name for name, value in seen.items() if value.is_floating_point())
    return hf_stitch.load(
        module, example_inputs=seen, content=content, processor=getattr(processor, part) if part else processor
    )
