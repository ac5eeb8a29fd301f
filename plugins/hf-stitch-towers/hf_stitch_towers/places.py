"""Places of a map from a new tower: folded into the modules after the old tower, or between two networks."""

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
from hf_stitch_towers.inputs import OF_TEXT, WHOLE, ImageAndTextProcessor, WaveformProcessor, inputs_of
from hf_stitch_towers.outputs import Outputs, greedy, split_generated, text_of, written
from hf_stitch_towers.result import MEAN, MOMENTS, NO_MAP

FEWEST = 8
"""Minimum number of images for choosing and for testing, each."""

NORMAL = ("image_mean", "image_std", "do_rescale", "rescale_factor", "do_normalize", "resample")
"""Fields of an image processor for colours."""

BLOCK = re.compile(r"\.\d+$")
"""Suffix of the names of blocks."""

Features = Callable[[Samples], Tensor]
"""Function from samples to features of their images."""


@dataclass(frozen=True)
class Job:
    """Both networks, the tower, and the comparison of outputs."""

    old: Adapter
    new: Adapter
    tower: Tower
    outputs: Outputs
    run: Run

    @torch.no_grad()
    def check(self, samples: Samples) -> None:
        """Check that the old network runs on samples, and that its output can be compared.

        Raises:
            ValueError: If the check fails.
        """
        inputs = full_inputs(self.old, samples.take(2))
        try:
            output = self.old.model(**inputs)
        except Exception as problem:  # the code of the network can raise anything
            name = type(self.old.model).__name__
            raise ValueError(f"{name} cannot run on these images: {problem}") from problem
        self.outputs.plain(output)

    def batches(self, samples: Samples, label: str) -> Iterator[Samples]:
        """Yield the samples of this process in batches, with their ids."""
        with torch.no_grad():
            for _, batch, _ in PairedSamples(samples, samples).batches(self.run, label):
                yield Samples.of(list(batch.samples), id=ids_of(batch.samples))

    def means(self, samples: Samples, of: Callable[[Samples], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return means over the first axis (images or tiles), over the samples of all processes."""
        sums, count = dict[str, Tensor](), 0
        for part in self.batches(samples, "reading towers"):
            tensors = of(part)
            count += len(next(iter(tensors.values())))
            for name, tensor in tensors.items():
                total = tensor.double().sum(0)
                sums[name] = sums[name] + total if name in sums else total
        gathered = [tensor for tensor in self.run.processes.gather((sums, count)) if tensor[1]]
        counts = sum(count for _, count in gathered)
        return {
            name: torch.stack([tensor[name].to(self.old.device) for tensor, _ in gathered]).sum(0) / counts
            for name in gathered[0][0]
        }

    def like_old(self, features: Tensor) -> Tensor:
        """Return features in the dtype of the old network."""
        return features.to(next(self.old.model.parameters()).dtype)


@dataclass(frozen=True)
class Finished:
    """Network with a new tower.

    Attributes:
        model: A network of the class, or a stitched model.
        reader: Converts raw samples to its inputs.
        processor: The processor of images and texts to save with it; ``None`` without a processor.
        error: Difference between its outputs and the outputs with mapped features, over the largest output.
        notes: Remarks on the result.
    """

    model: Any
    reader: Any
    processor: Any
    error: float
    notes: tuple[str, ...] = ()


class Map(ABC):
    """Fitted map from a new tower to the modules after the old tower."""

    @abstractmethod
    def features(self, samples: Samples) -> Tensor:
        """Return the mapped features of the new tower."""

    @abstractmethod
    def written(self, model: Any, samples: Samples) -> Tensor:
        """Return the tokens that the finished network writes about images."""

    @abstractmethod
    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Return the inputs of the finished network for raw samples, as for scoring."""

    @abstractmethod
    def finished(self, samples: Samples) -> Finished:
        """Return the network with the new tower."""


@dataclass(frozen=True)
class Place(ABC):
    """Place of a map from the new tower.

    Attributes:
        job: Both networks.
    """

    job: Job

    @abstractmethod
    def fitted(self, matchers: Mapping[str, Any], samples: Samples) -> tuple[dict[str, Map], dict[str, Features]]:
        """Fit a map with each matcher; return the maps and the baselines."""

    @abstractmethod
    def old(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the features of the old tower."""

    @abstractmethod
    def reader(self, inputs: Mapping[str, Any]) -> Callable[[Tensor], Any]:
        """Return a function from features to the output of the old network with these features."""

    def mean(self, mean: Tensor) -> Features:
        """Return features that equal a mean for each image."""
        return lambda part: self.job.like_old(mean).expand_as(self.old(full_inputs(self.job.old, part)))


@torch.no_grad()
def check_tower(tower: Any, encoder: Adapter, images: Sequence[Any]) -> None:
    """Check that a tower built from the config and the weights of its encoder has the same hidden states.

    Raises:
        CannotFoldError: If the hidden states differ, because the encoder has code or settings outside of its config.
    """
    body: Any = getattr(encoder.model, "base_model", encoder.model)
    dtype = next(tower.parameters()).dtype
    try:
        inputs = encoder.preprocess(images)
        one, second = (module(**inputs)[0].double() for module in (tower.to(body.dtype), body))
    except Exception:  # the tower does not run alone: outputs of the network are compared later
        return
    finally:
        tower.to(dtype)
    apart = float((one - second).abs().max() / second.abs().max()) if one.shape == second.shape else float("inf")
    if not apart <= EQUAL[min(torch.finfo(module).bits for module in (dtype, body.dtype)) < 32]:
        raise CannotFoldError(
            f"{type(body).__name__} cannot be rebuilt from its config (hidden states differ by {apart:.2g})"
        )


def place_of(
    job: Job, samples: Samples, encoder_layer: str | None, target_layer: str | None
) -> tuple[Place, str]:  # fmt: skip
    """Return the place of the map, and the reason if it is not folded."""
    if encoder_layer is not None or target_layer is not None:
        return Stitched.of(job, samples, None, encoder_layer, target_layer), "a layer was passed"
    reason, reading = "", None
    try:
        reading = read(job.old.model, job.tower.name, full_inputs(job.old, samples.take(2)))
    except CannotFoldError as problem:
        reason = str(problem)
    for settings in [] if reading is None else variants(job.old.model.config):
        try:
            return Folded.of(job, samples, cast("Reading", reading), settings), ""
        except CannotFoldError as problem:
            reason = reason or str(problem)
    return Stitched.of(job, samples, reading, None, None), reason


# -- folded -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Folded(Place):
    """Map folded into the modules that read the tower.

    Attributes:
        made: A network of the class with the new tower.
        reading: Features and readers of the old tower.
        readers: Reader of the new tower -> reader of the old tower.
    """

    made: Any
    reading: Reading
    readers: Mapping[str, str]

    @classmethod
    def of(cls, job: Job, samples: Samples, reading: Reading, settings: Mapping[str, Any]) -> Folded:
        """Return the place, if the class accepts the new tower."""
        network = with_tower(job.old.model, job.tower, job.new.model, settings)
        part = samples.take(2)
        check_tower(network.get_submodule(job.tower.name), job.new, images_of(raw_of(part)))
        new = read(network, job.tower.name, cls(job, network, reading, {}).inputs(part))
        if new.features.shape[:-1] != reading.features.shape[:-1] or new.groups != reading.groups:
            raise CannotFoldError(
                f"the towers must have the same number of positions, got {new.groups * new.features.shape[-2]} for the "
                f"new and {reading.groups * reading.features.shape[-2]} for the old tower"
            )
        place = cls(job, network, reading, paired_readers(reading, new, job.old.model))
        place.check(part, new.features)
        width, out = new.features.shape[-1] // new.groups, reading.features.shape[-1] // reading.groups
        trial = torch.eye(width, out, dtype=torch.float64), torch.zeros(out, dtype=torch.float64)
        if not (error := place.folded(*trial, part)[1]) <= place.bound:
            raise CannotFoldError(
                f"further modules of {type(network).__name__} read the tower (outputs differ by {error:.2g})"
            )
        return place

    @torch.no_grad()
    def check(self, samples: Samples, features: Tensor) -> None:
        """Check that all modules but the readers have the old weights, and that only readers read the tower."""
        before, tower = self.job.old.model.state_dict(), self.job.tower
        for name, value in self.made.state_dict().items():
            unchanged = name in before and before[name].shape == value.shape
            if not (unchanged or name.startswith(f"{tower.name}.") or name.rpartition(".")[0] in self.readers):
                raise CannotFoldError(f"{type(self.made).__name__} lacks weights for {name} with this tower")
        inputs = self.inputs(samples)
        others = {**inputs, tower.content: inputs[tower.content].flip(0)}
        with replacing_features(self.made, tuple(self.readers), features):
            both = [self.job.outputs.plain(self.made(**arguments)) for arguments in (inputs, others)]
        if not torch.equal(*both):
            raise CannotFoldError(f"further modules of {type(self.made).__name__} read the tower")

    @property
    def bound(self) -> float:
        """Maximum difference due to rounding."""
        return EQUAL[torch.finfo(next(self.made.parameters()).dtype).bits < 32]

    def inputs(self, samples: Samples) -> dict[str, Any]:
        """Return the inputs of the network with the new tower."""
        inputs, name = full_inputs(self.job.old, samples), self.job.tower.content
        encoder, shape = self.job.new, inputs[name].shape
        if several_tiles(self.job.old):
            return {**inputs, name: tiles_for(encoder, inputs[name], self.job.old)}
        new = encoder.preprocess(images_of(raw_of(samples)))[encoder.interface.content[0]]
        inputs = {
            key: value for key, value in inputs.items() if key not in WHOLE
        }  # they describe pixels of the old processor
        return {**inputs, name: new[:, None] if len(shape) == 5 and new.dim() == 4 else new}

    def old(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the features of the old tower at its readers."""
        return features_of(self.job.old.model, self.reading.readers, inputs)

    def new(self, samples: Samples) -> Tensor:
        """Return the features of the new tower, without a map."""
        return features_of(self.made, tuple(self.readers), self.inputs(samples))

    def reader(self, inputs: Mapping[str, Any]) -> Callable[[Tensor], Any]:
        """Return a function that runs the old network with replaced features."""

        def run(features: Tensor) -> Any:
            with replacing_features(self.job.old.model, self.reading.readers, features):
                return self.job.old.model(**inputs)

        return run

    def folded(self, matrix: Tensor, bias: Tensor, samples: Samples) -> tuple[Any, float]:
        """Return the network with a folded map, and the difference of its outputs to the mapped network."""
        network, model, part = copy.deepcopy(self.made), self.job.old.model, samples.take(min(len(samples), 4))
        fold(model, network, self.readers, matrix, bias, self.reading.groups)
        inputs = full_inputs(self.job.old, part), self.inputs(part)
        return network, difference(model, network, *inputs, self.job.tower, matrix, bias, self.job.outputs.plain)

    def fitted(self, matchers: Mapping[str, Any], samples: Samples) -> tuple[dict[str, Map], dict[str, Features]]:
        """Fit maps to all positions, in one pass; without a bias if the readers lack biases."""
        moments: Moments | None = None
        biased = all(getattr(self.made.get_submodule(name), "bias", None) is not None for name in self.readers)

        def powers(part: Samples) -> dict[str, Tensor]:
            nonlocal moments
            old, new = self.old(full_inputs(self.job.old, part)), self.new(part)
            rows = [features.unflatten(-1, (self.reading.groups, -1)).flatten(0, -2) for features in (new, old)]
            moments = moments or Moments(rows[0].shape[-1], rows[1].shape[-1])
            moments.update(*rows)
            if not biased:  # each row and its negative: the mean is 0, so the bias is 0
                moments.update(*(-features for features in rows))
            old, new = old.double(), new.double()
            return {"old": old, "old²": old.square(), "new": new, "new²": new.square()}

        means = self.job.means(samples, powers)
        assert moments is not None
        if (accelerator := self.job.run.processes.accelerator) is not None:
            moments.all_reduce(accelerator)
        if not biased:  # restore the number of rows
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
        mean, new_mean = means["old"], means["new"]
        baselines: dict[str, Features] = {MEAN: self.mean(mean)}
        if mean.shape == new_mean.shape:
            old_size, new_size = means["old²"] - mean.square(), means["new²"] - new_mean.square()
            size = (old_size / new_size.clamp(min=1e-12)).clamp(min=0).sqrt()
            baselines[NO_MAP] = self.new
            baselines[MOMENTS] = lambda part: self.job.like_old((self.new(part).double() - new_mean) * size + mean)
        return maps, baselines


@dataclass(frozen=True)
class FoldedMap(Map):
    """Affine map to fold."""

    place: Folded
    matrix: Tensor
    bias: Tensor

    def features(self, samples: Samples) -> Tensor:
        """Return mapped features."""
        rows = self.place.new(samples).double().unflatten(-1, (self.place.reading.groups, -1))
        return self.place.job.like_old((rows @ self.matrix + self.bias).flatten(-2))

    def written(self, model: Any, samples: Samples) -> Tensor:
        """Generate texts with the network."""
        return written(model, self.place.inputs(samples))[1]

    def finished(self, samples: Samples) -> Finished:
        """Return the network of the same class."""
        network, error = self.place.folded(self.matrix, self.bias, samples)
        if not error <= self.place.bound:
            raise ValueError(f"the outputs of the folded network differ from the mapped network by {error:.2g}")
        job = self.place.job
        new = job.new.processor
        expected, part = self.place.inputs(samples.take(2)), samples.take(2)
        config, problem = network.get_submodule(job.tower.name).config, ""
        first = with_images(job.old.processor, new, config)
        several = hasattr(first, "image_processor") and hasattr(new, "save_pretrained")
        others = composed(job.old.processor, new, {job.tower.content: expected[job.tower.content]}) if several else ()
        context = getattr(job.old, "prompt", None) or job.old.interface.prompt or None
        for processor in (first, *others):
            try:
                inputs = full_inputs(hf_stitch.load(network, processor=processor, context=context), part)
                job.outputs.plain(network(**inputs))
            except Exception as error_of:  # from a processor, or from the network's check of placeholder tokens
                problem = problem or str(error_of)
                continue
            texts = all(torch.equal(inputs[name], expected[name]) for name in job.old.interface.given)
            if texts and _same(inputs[job.tower.content], expected[job.tower.content]):
                return Finished(network, self, processor if hasattr(processor, "save_pretrained") else None, error)
            problem = problem or "it prepares images or texts differently than in scoring"
        note = (
            f"the network does not have a matching processor: use preprocess of the result, or load the encoder with a "
            f"{type(_images_part(job.old.processor)).__name__} of its size ({problem})"
        )
        return Finished(network, self, None, error, (note,))

    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Return the inputs of the network of the class."""
        return self.place.inputs(Samples.of(list(samples)))


# -- stitched ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Stitched(Place):
    """Map between two halves of a stitched model.

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
        """Return the place: by default from the last layer of the encoder to the features of the old tower."""
        encoder_layers = [encoder_layer] if encoder_layer else list(job.new.layers)
        if several_tiles(job.old):
            raise ValueError(
                f"{type(job.old.model).__name__} divides images into tiles, so the encoder must fit into its class, "
                f"unlike {type(job.new.model).__name__}: use an encoder with the same image size"
            )
        target = target_layer or _last_of_tower(job, samples, reading, encoder_layers)
        cut, _ = job.old.cut(target)
        if cut.padding in OF_TEXT:
            raise ValueError(
                f"target_layer must be before the decoder of {type(job.old.model).__name__}, got {target!r}; layers: "
                f"{', '.join(job.old.layers)}"
            )
        alike = [name for name in encoder_layers if _kind(job.new, name) == _kind(job.old, target)]
        return cls(job, (alike or encoder_layers)[-1], target)

    def entering(self, inputs: Mapping[str, Any]) -> Representation:
        """Return the representation at the layer of the old network."""
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
            images_of([sample for batch in samples.batches(64) for sample in batch.samples]), id=samples.ids
        )
        run = self.job.run
        with warnings.catch_warnings():  # about few samples for scores, which are discarded
            warnings.simplefilter("ignore")
            model = hf_stitch.stitch(
                self.job.new, self.job.old, images, source_layer=self.source, target_layer=self.target,
                matcher=matcher, paired_data=samples, test_size=FEWEST,
                task=None if self.job.old.task is None else "auto", batch_size=run.batch_size, seed=run.seed,
                progress=run.progress,
            )  # fmt: skip
        return StitchedMap(self, model)


@dataclass(frozen=True)
class StitchedMap(Map):
    """Map of a stitched model."""

    place: Stitched
    model: Any

    @torch.no_grad()
    def features(self, samples: Samples) -> Tensor:
        """Return mapped features."""
        new, layer = self.place.job.new, self.place.source
        representation = self.model.stitch(new.encode(new.preprocess(images_of(raw_of(samples))), layer)[layer])
        return self.place.job.like_old(representation.values)

    def written(self, model: Any, samples: Samples) -> Tensor:
        """Generate texts with the stitched model, in the context of the original."""
        inputs = full_inputs(self.place.job.old, samples)
        before, model.generation_config = model.generation_config, greedy(self.place.job.old.model)
        try:
            ids = model.generate(**self._inputs(samples, inputs))
        finally:
            model.generation_config = before
        return split_generated(ids, inputs[text_of(self.place.job.old.model)[0]])[1]

    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Return the inputs of the stitched model, including the texts of samples."""
        parsed = Samples.of(list(samples))
        return self._inputs(parsed, full_inputs(self.place.job.old, parsed))

    def _inputs(self, samples: Samples, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the stitched model: images for its source, and the context of its target."""
        names, content = getattr(self.model, "context_names", ()), self.place.job.old.interface.content
        beside = {name: inputs[name] for name in names if name in inputs and name not in content}
        return {**self.model.preprocess(images_of(raw_of(samples))), **beside}

    def finished(self, samples: Samples) -> Finished:
        """Return the stitched model."""
        old = self.place.job.old
        error = self._error(samples.take(min(len(samples), 4)))
        processor = with_images(old.processor, self.place.job.new.processor, None)
        fitting_processor, notes = None, []
        if hasattr(processor, "tokenizer"):
            fitting_processor = fitting(
                old, self.place.job.new, samples.take(1), self.model.preprocess(images_of(raw_of(samples.take(1))))
            )
            self.model.processor = self.model.processor if fitting_processor is None else fitting_processor
            if fitting_processor is None:
                advice = f"load the encoder with a {type(_images_part(old.processor)).__name__} of its size"
                notes.append(
                    f"a pipeline requires a {type(processor).__name__} for both networks, which is not available: "
                    + ("patches are packed, use preprocess" if old.interface.packed else advice)
                )
        self.model.evaluation = self.model.config.scores = None  # scores on few samples
        try:
            check_saves(self.model)
        except ValueError as problem:  # report it now, not when saving
            notes.append(str(problem))
        return Finished(self.model, self, fitting_processor, error, tuple(notes))

    @torch.no_grad()
    def _error(self, samples: Samples) -> float:
        """Return the difference between the outputs of the stitched model and the scored outputs."""
        job, inputs = self.place.job, full_inputs(self.place.job.old, samples)
        expected = job.outputs.plain(self.place.reader(inputs)(self.features(samples)))
        outputs = job.outputs.plain(self.model(**self._inputs(samples, inputs)))
        error = float((expected - outputs).abs().max() / expected.abs().max())
        if not error <= EQUAL[torch.finfo(expected.dtype).bits < 32]:
            raise ValueError(f"the outputs of the stitched model differ from the scored outputs by {error:.2g}")
        return error


def _last_of_tower(job: Job, samples: Samples, reading: Reading | None, encoder_layers: Sequence[str]) -> str:
    """Return the layer read by the modules after the tower, or its last layer, or the first layer after it.

    Layers of the same kind as layers of the encoder (positions or vectors) are preferred, and blocks, so that the norm
    of the old tower follows the map.
    """
    old, tower = job.old, job.tower.name
    if reading is not None:
        inputs = full_inputs(old, samples.take(2))
        for name, representation in reversed(old.encode(inputs, list(old.layers)).items()):
            values = representation.values.flatten(2).mT if representation.layout == "bchw" else representation.values
            rows = values[:, -reading.features.shape[1] :]
            if rows.shape == reading.features.shape and torch.equal(rows, reading.features):
                if _kind(old, name)[0] in {_kind(job.new, representation)[0] for representation in encoder_layers}:
                    return name
                break  # vectors against positions, or the reverse
    inside = [name for name in old.layers if name == tower or name.startswith(f"{tower}.")]
    behind = [name for name in old.layers if old.cut(name)[0].padding not in OF_TEXT]
    if not (inside or behind):
        raise ValueError(
            f"{type(old.model).__name__} cannot be cut in or after {tower}, so the tower cannot be replaced; layers: "
            f"{', '.join(old.layers) or 'none'}"
        )
    kinds = {_kind(job.new, name) for name in encoder_layers}
    alike = [name for name in inside if _kind(old, name) in kinds]
    blocks = [name for name in alike if BLOCK.search(name)] if BLOCK.search(encoder_layers[-1]) else []
    further = [name for name in behind if name not in inside and _kind(old, name) in kinds]
    return (blocks or alike or further[:1] or inside or behind[:1])[-1]


def several_tiles(network: Adapter) -> bool:
    """Return whether a network reads several tiles of each image."""
    interface = network.interface
    return any(
        len(shape) == 4 and shape[0] > 1 and name not in interface.packed for name, shape in interface.shapes.items()
    )


def _kind(network: Adapter, layer: str) -> tuple[bool, bool]:
    """Return whether a layer has vectors instead of positions, and whether its positions have a grid."""
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
    """Return the images of samples with or without a text."""
    names = ("image", "audio", "video", *(name for arguments in CONTENT.values() for name in arguments))
    return [
        next(sample[n] for n in names if n in sample) if isinstance(sample, Mapping) else sample for sample in samples
    ]


def with_images(processor: Any, of_images: Any, config: Any) -> Any:
    """Return a processor of images and texts with a new part for images; without a part for texts, the new part."""
    of_images = getattr(of_images, "extractor", of_images)
    part = next((name for name in ("image_processor", "feature_extractor") if hasattr(processor, name)), None)
    if part is None or not hasattr(of_images, "save_pretrained"):
        return of_images
    if isinstance(processor, ImageAndTextProcessor):
        return replace(processor, image_processor=of_images)
    combined = copy.copy(processor)
    if hasattr(old := getattr(processor, part), "image_grid_pinpoints"):  # divides images into tiles
        normal = {name: getattr(of_images, name) for name in ("image_mean", "image_std")}
        of_images = type(old).from_dict({**old.to_dict(), **normal})
    setattr(combined, part, of_images)
    if isinstance(getattr(combined, "patch_size", None), int) and isinstance(getattr(config, "patch_size", None), int):
        combined.patch_size = config.patch_size
    return combined


def fitting(network: Adapter, encoder: Adapter, samples: Samples, images: Mapping[str, Tensor]) -> Any:
    """Return a processor of images for an encoder and of texts for a network; ``None`` without a match.

    Args:
        network: The network for both, with its processor.
        encoder: The encoder, with its processor.
        samples: A sample.
        images: Inputs of the encoder for its image.

    Returns:
        A processor with the same inputs for the encoder, and the same texts for the network: with one placeholder token
        per position of the old tower, which some processors count by patches.
    """
    expected, raw = full_inputs(network, samples), raw_of(samples)
    interface, prompt, content = network.interface, getattr(network, "prompt", None), network.interface.content[0]
    for processor in composed(network.processor, encoder.processor, images):
        sizes = range(1, 65) if isinstance(getattr(processor, "patch_size", None), int) else ()
        for size in (None, *sizes):
            candidate = processor if size is None else copy.copy(processor)
            if size is not None:
                candidate.patch_size = size
            with suppress(Exception):  # the processor may not accept this size
                inputs = inputs_of(raw, candidate, interface, network.model, prompt)
                same = all(torch.equal(inputs[name], expected[name]) for name in interface.given)
                if same and _same(inputs[content], next(iter(images.values()))):
                    return candidate.processor if isinstance(candidate, ImageAndTextProcessor) else candidate
    return None


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two inputs are equal up to rounding and axes of length 1."""
    atol = 1e-4 if min(torch.finfo(tensor.dtype).bits for tensor in (first, second)) >= 32 else EQUAL[True]
    return first.numel() == second.numel() and torch.allclose(
        first.flatten().float(), second.flatten().float(), atol=atol
    )


def _images_part(processor: Any) -> Any:
    """Return the part of a processor for images or sound."""
    names = ("image_processor", "feature_extractor")
    return next((getattr(processor, name) for name in names if hasattr(processor, name)), processor)


def composed(processor: Any, of_images: Any, images: Mapping[str, Tensor]) -> Iterator[Any]:
    """Yield processors for images and texts: with the encoder's image part, and with the old part in its settings."""
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
    """Return the tiles of images as inputs of an encoder, with its normalisation.

    Raises:
        ValueError: If the normalisation of a processor is unknown, or the size of tiles differs from the encoder's
            images.
    """
    shape = encoder.interface.shapes[encoder.interface.content[0]]
    old, new = (
        getattr(processor.processor, "image_processor", processor.processor) for processor in (network, encoder)
    )
    normalised = all(getattr(processor, "image_mean", None) is not None for processor in (old, new))
    scales = {
        (getattr(processor, "do_rescale", True), getattr(processor, "rescale_factor", None)) for processor in (old, new)
    }
    normalised = normalised and len(scales) == 1
    if not normalised or tuple(tiles.shape[-3:]) != shape:
        raise ValueError(
            f"{type(network.model).__name__} reads {tiles.shape[1]} tiles of {tuple(tiles.shape[-3:])} per image, and "
            f"{type(encoder.model).__name__} images of {shape}: both require transformers processors with image_mean "
            "and image_std, and the same size"
        )
    values = []
    for processor in (old, new):
        moments = (
            (processor.image_mean, processor.image_std)
            if getattr(processor, "do_normalize", True)
            else ((0.0,), (1.0,))
        )
        values += [torch.tensor(moment).to(tiles)[:, None, None] for moment in moments]
    mean, std, own_mean, own_std = values
    present = tiles.flatten(2).any(2)[..., None, None, None]  # zero tiles are padding
    return ((tiles * std + mean - own_mean) / own_std).where(present, 0)


def with_waveforms(encoder: Adapter) -> Adapter:
    """Return an encoder with a processor for single waveforms, if it has a feature extractor."""
    part = getattr(encoder.processor, "feature_extractor", encoder.processor)
    if not hasattr(part, "sampling_rate"):
        return encoder
    adapter = copy.copy(encoder)
    adapter.processor = WaveformProcessor(part, encoder.interface.content[0])
    return adapter


def rate_of(processor: Any) -> int | None:
    """Return the sampling rate of an audio processor; ``None`` for processors of other kinds."""
    part = getattr(processor, "extractor", getattr(processor, "feature_extractor", processor))
    return getattr(part, "sampling_rate", None)


def tower_alone(encoder: Adapter, tower: Tower) -> Adapter:
    """Return the tower of a multimodal encoder as a separate network, with its recorded inputs as example."""
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
