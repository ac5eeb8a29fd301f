"""Where the map of a tower exchange goes.

It is folded into the weights of the modules after the old tower (:class:`Folded`), or is the stitching layer between
two networks of a stitched model (:class:`Stitched`).
"""

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
    HALF_TOLERANCE,
    CannotFoldError,
    Reading,
    Tower,
    difference,
    features_of,
    fold,
    paired_readers,
    read,
    replacing_features,
    tolerance,
    variants,
    with_tower,
)  # fmt: skip
from hf_stitch_towers.inputs import OF_TEXT, WHOLE, ImageAndTextProcessor, WaveformProcessor, inputs_of
from hf_stitch_towers.outputs import Outputs, generate_greedily, greedy, split_generated, text_of
from hf_stitch_towers.result import MEAN, MOMENTS, NO_MAP

FEWEST = 8
"""Minimum number of images that choose the matcher, and of test images."""

NORMAL = ("image_mean", "image_std", "do_rescale", "rescale_factor", "do_normalize", "resample")
"""Fields of an image processor that scale and normalise colours."""

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

    def means(self, samples: Samples, tensors_of: Callable[[Samples], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return means over the first axis (images or tiles), over the samples of all processes."""
        sums, count = dict[str, Tensor](), 0
        for batch in self.batches(samples, "reading towers"):
            tensors = tensors_of(batch)
            count += len(next(iter(tensors.values())))
            for name, tensor in tensors.items():
                batch_sum = tensor.double().sum(0)
                sums[name] = sums[name] + batch_sum if name in sums else batch_sum
        gathered = self.run.processes.gather((sums, count))  # one pair per process
        sums_of_processes = [process_sums for process_sums, process_count in gathered if process_count]
        total = sum(process_count for _, process_count in gathered)
        return {
            name: torch.stack([process_sums[name].to(self.old.device) for process_sums in sums_of_processes]).sum(0)
            / total
            for name in sums_of_processes[0]
        }

    def like_old(self, features: Tensor) -> Tensor:
        """Return features in the dtype of the old network."""
        return features.to(next(self.old.model.parameters()).dtype)


@dataclass(frozen=True)
class Finished:
    """Network with a new tower.

    Attributes:
        model: A network of the class, or a stitched model.
        preprocessor: Map with the method ``preprocess`` for raw samples.
        processor: Processor of images and texts to save with the network, if there is one.
        error: Largest difference between its outputs and the outputs with mapped features, over the largest output.
        notes: Remarks on the result.
    """

    model: Any
    preprocessor: Any
    processor: Any
    error: float
    notes: tuple[str, ...] = ()


class Map(ABC):
    """Fitted map from a new tower to the modules after the old tower."""

    @abstractmethod
    def features(self, samples: Samples) -> Tensor:
        """Return the mapped features of the new tower."""

    @abstractmethod
    def generate(self, model: Any, samples: Samples) -> Tensor:
        """Return the tokens that the network with the new tower generates for images."""

    @abstractmethod
    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Return the inputs of the network with the new tower for raw samples, as in scoring."""

    @abstractmethod
    def finish(self, samples: Samples) -> Finished:
        """Return the network with the new tower."""


@dataclass(frozen=True)
class Place(ABC):
    """Where the map from the new tower goes.

    Attributes:
        job: Both networks.
    """

    job: Job

    @abstractmethod
    def fit_maps(self, matchers: Mapping[str, Any], samples: Samples) -> tuple[dict[str, Map], dict[str, Features]]:
        """Fit a map with each matcher; return the maps and the baselines."""

    @abstractmethod
    def old(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the features of the old tower."""

    @abstractmethod
    def run_with(self, inputs: Mapping[str, Any]) -> Callable[[Tensor], Any]:
        """Return a function from features to the output of the old network with these features."""

    def mean(self, mean: Tensor) -> Features:
        """Return features that equal a mean for each image."""
        return lambda batch: self.job.like_old(mean).expand_as(self.old(full_inputs(self.job.old, batch)))


@torch.no_grad()
def check_tower(tower: Any, encoder: Adapter, images: Sequence[Any]) -> None:
    """Check that a tower built from the config and the weights of an encoder has the hidden states of the encoder.

    Raises:
        CannotFoldError: If the hidden states differ, because the encoder has code or settings outside of its config.
    """
    backbone: Any = getattr(encoder.model, "base_model", encoder.model)
    dtype = next(tower.parameters()).dtype
    try:
        inputs = encoder.preprocess(images)
        networks = tower.to(backbone.dtype), backbone
        tower_states, encoder_states = (network(**inputs)[0].double() for network in networks)
    except Exception:  # the tower does not run alone: outputs of the network are compared later
        return
    finally:
        tower.to(dtype)
    error = float("inf")
    if tower_states.shape == encoder_states.shape:
        error = float((tower_states - encoder_states).abs().max() / encoder_states.abs().max())
    if not error <= tolerance(dtype, backbone.dtype):
        raise CannotFoldError(
            f"{type(backbone).__name__} cannot be rebuilt from its config (hidden states differ by {error:.2g})"
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
    for config_changes in [] if reading is None else variants(job.old.model.config):
        try:
            return Folded.of(job, samples, cast("Reading", reading), config_changes), ""
        except CannotFoldError as problem:
            reason = reason or str(problem)
    return Stitched.of(job, samples, reading, None, None), reason


# -- folded -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Folded(Place):
    """Map folded into the modules that read the tower, here called readers.

    Attributes:
        network: A network of the class with the new tower.
        reading: Features and readers of the old tower.
        readers: Reader of the new tower -> reader of the old tower; the empty string for an additional reader.
    """

    network: Any
    reading: Reading
    readers: Mapping[str, str]

    @classmethod
    def of(cls, job: Job, samples: Samples, reading: Reading, settings: Mapping[str, Any]) -> Folded:
        """Return the place, if the class accepts the new tower."""
        network = with_tower(job.old.model, job.tower, job.new.model, settings)
        batch = samples.take(2)
        check_tower(network.get_submodule(job.tower.name), job.new, images_of(raw_of(batch)))
        unpaired = cls(job, network, reading, {})  # for its inputs only: readers are paired below
        new = read(network, job.tower.name, unpaired.inputs(batch))
        if new.features.shape[:-1] != reading.features.shape[:-1] or new.groups != reading.groups:
            raise CannotFoldError(
                f"the towers must have the same number of positions, got {new.groups * new.features.shape[-2]} for the "
                f"new and {reading.groups * reading.features.shape[-2]} for the old tower"
            )
        place = cls(job, network, reading, paired_readers(reading, new, job.old.model))
        place.check(batch, new.features)
        new_width, old_width = (x.features.shape[-1] // x.groups for x in (new, reading))
        trial_map = torch.eye(new_width, old_width, dtype=torch.float64), torch.zeros(old_width, dtype=torch.float64)
        if not (error := place.fold_map(*trial_map, batch)[1]) <= place.bound:
            raise CannotFoldError(
                f"further modules of {type(network).__name__} read the tower (outputs differ by {error:.2g})"
            )
        return place

    @torch.no_grad()
    def check(self, samples: Samples, features: Tensor) -> None:
        """Check that all modules but the readers have the old weights, and that only readers read the tower."""
        old_weights, tower = self.job.old.model.state_dict(), self.job.tower
        for name, weight in self.network.state_dict().items():
            unchanged = name in old_weights and old_weights[name].shape == weight.shape
            if not (unchanged or name.startswith(f"{tower.name}.") or name.rpartition(".")[0] in self.readers):
                raise CannotFoldError(f"{type(self.network).__name__} lacks weights for {name} with this tower")
        inputs = self.inputs(samples)
        flipped_inputs = {**inputs, tower.content: inputs[tower.content].flip(0)}
        with replacing_features(self.network, tuple(self.readers), features):
            compared = [self.job.outputs.plain(self.network(**arguments)) for arguments in (inputs, flipped_inputs)]
        if not torch.equal(*compared):
            raise CannotFoldError(f"further modules of {type(self.network).__name__} read the tower")

    @property
    def bound(self) -> float:
        """Maximum difference due to rounding."""
        return tolerance(next(self.network.parameters()).dtype)

    def inputs(self, samples: Samples) -> dict[str, Any]:
        """Return the inputs of the network with the new tower."""
        inputs, content = full_inputs(self.job.old, samples), self.job.tower.content
        encoder, shape = self.job.new, inputs[content].shape
        if several_tiles(self.job.old):
            return {**inputs, content: tiles_for(encoder, inputs[content], self.job.old)}
        images = encoder.preprocess(images_of(raw_of(samples)))[encoder.interface.content[0]]
        images = images[:, None] if len(shape) == 5 and images.dim() == 4 else images
        # masks in WHOLE describe pixels of the old processor
        return {**{key: value for key, value in inputs.items() if key not in WHOLE}, content: images}

    def old(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the features of the old tower at its readers."""
        return features_of(self.job.old.model, self.reading.readers, inputs)

    def new(self, samples: Samples) -> Tensor:
        """Return the features of the new tower, without a map."""
        return features_of(self.network, tuple(self.readers), self.inputs(samples))

    def run_with(self, inputs: Mapping[str, Any]) -> Callable[[Tensor], Any]:
        """Return a function that runs the old network with replaced features."""

        def run(features: Tensor) -> Any:
            with replacing_features(self.job.old.model, self.reading.readers, features):
                return self.job.old.model(**inputs)

        return run

    def fold_map(self, matrix: Tensor, bias: Tensor, samples: Samples) -> tuple[Any, float]:
        """Return the network with a folded map, and the difference to the outputs with mapped features."""
        network, model, batch = copy.deepcopy(self.network), self.job.old.model, samples.take(min(len(samples), 4))
        fold(model, network, self.readers, matrix, bias, self.reading.groups)
        inputs = full_inputs(self.job.old, batch), self.inputs(batch)
        return network, difference(model, network, *inputs, self.job.tower, matrix, bias, self.job.outputs.plain)

    def fit_maps(self, matchers: Mapping[str, Any], samples: Samples) -> tuple[dict[str, Map], dict[str, Features]]:
        """Fit maps on all positions of the features, in one pass; without a bias if the readers lack biases."""
        moments: Moments | None = None
        biased = all(getattr(self.network.get_submodule(name), "bias", None) is not None for name in self.readers)

        def features_and_squares(batch: Samples) -> dict[str, Tensor]:
            nonlocal moments
            old, new = self.old(full_inputs(self.job.old, batch)), self.new(batch)
            rows = [features.unflatten(-1, (self.reading.groups, -1)).flatten(0, -2) for features in (new, old)]
            moments = moments or Moments(rows[0].shape[-1], rows[1].shape[-1])
            moments.update(*rows)
            if not biased:  # each row and its negative: the mean is 0, so the bias is 0
                moments.update(*(-features for features in rows))
            old, new = old.double(), new.double()
            return {"old": old, "old²": old.square(), "new": new, "new²": new.square()}

        means = self.job.means(samples, features_and_squares)
        assert moments is not None
        if (accelerator := self.job.run.processes.accelerator) is not None:
            moments.all_reduce(accelerator)
        if not biased:  # restore the number of rows
            moments.count.div_(2, rounding_mode="floor")
            moments.scatter.div_(2)
        maps: dict[str, Map] = {}
        options: Any = {"dtype": torch.float64, "device": self.job.old.device}
        for name, matcher in matchers.items():
            stitch = matcher.fit(moments, dtype=torch.float64).to(options["device"])
            with torch.no_grad():
                bias = stitch(torch.zeros(1, stitch.in_features, **options))[0]
                matrix = stitch(torch.eye(stitch.in_features, **options)) - bias
            maps[name] = FoldedMap(self, matrix, bias if biased else torch.zeros_like(bias))
        mean, new_mean = means["old"], means["new"]
        baselines: dict[str, Features] = {MEAN: self.mean(mean)}
        if mean.shape == new_mean.shape:
            old_variance, new_variance = means["old²"] - mean.square(), means["new²"] - new_mean.square()
            scale = (old_variance / new_variance.clamp(min=1e-12)).clamp(min=0).sqrt()
            baselines[NO_MAP] = self.new
            baselines[MOMENTS] = lambda batch: self.job.like_old((self.new(batch).double() - new_mean) * scale + mean)
        return maps, baselines


@dataclass(frozen=True)
class FoldedMap(Map):
    """Affine map to fold."""

    place: Folded
    matrix: Tensor
    bias: Tensor

    def features(self, samples: Samples) -> Tensor:
        """Return the mapped features of the new tower."""
        rows = self.place.new(samples).double().unflatten(-1, (self.place.reading.groups, -1))
        return self.place.job.like_old((rows @ self.matrix + self.bias).flatten(-2))

    def generate(self, model: Any, samples: Samples) -> Tensor:
        """Generate texts with the network."""
        return generate_greedily(model, self.place.inputs(samples))[1]

    def finish(self, samples: Samples) -> Finished:
        """Return the network of the same class."""
        network, error = self.place.fold_map(self.matrix, self.bias, samples)
        if not error <= self.place.bound:
            raise ValueError(f"the outputs of the folded network differ from the mapped network by {error:.2g}")
        job = self.place.job
        encoder_processor = job.new.processor
        expected, batch = self.place.inputs(samples.take(2)), samples.take(2)
        config, problem = network.get_submodule(job.tower.name).config, ""
        preferred = with_images(job.old.processor, encoder_processor, config)
        can_compose = hasattr(preferred, "image_processor") and hasattr(encoder_processor, "save_pretrained")
        images = {job.tower.content: expected[job.tower.content]}
        fallbacks = candidate_processors(job.old.processor, encoder_processor, images) if can_compose else ()
        context = getattr(job.old, "prompt", None) or job.old.interface.prompt or None
        for processor in (preferred, *fallbacks):
            try:
                inputs = full_inputs(hf_stitch.load(network, processor=processor, context=context), batch)
                job.outputs.plain(network(**inputs))
            except Exception as exception:  # from a processor, or from the network's check of placeholder tokens
                problem = problem or str(exception)
                continue
            same_texts = all(torch.equal(inputs[name], expected[name]) for name in job.old.interface.given)
            if same_texts and _same(inputs[job.tower.content], expected[job.tower.content]):
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
        """Choose the layers: by default the last layer of the encoder and the features of the old tower."""
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
        same_kind = [name for name in encoder_layers if _kind(job.new, name) == _kind(job.old, target)]
        return cls(job, (same_kind or encoder_layers)[-1], target)

    def representation(self, inputs: Mapping[str, Any]) -> Representation:
        """Return the representation of the old network at the target layer."""
        return self.job.old.encode(inputs, self.target)[self.target]

    def old(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the activations of the old network at the target layer."""
        return self.representation(inputs).values

    def run_with(self, inputs: Mapping[str, Any]) -> Callable[[Tensor], Any]:
        """Return a function that runs the old network from the target layer on."""
        representation = self.representation(inputs)
        return lambda features: self.job.old.decode(representation.replace(values=features), self.target)

    def fit_maps(self, matchers: Mapping[str, Any], samples: Samples) -> tuple[dict[str, Map], dict[str, Features]]:
        """Fit maps from the source layer to the target layer."""
        maps: dict[str, Map] = {name: self._stitch(matcher, samples) for name, matcher in matchers.items()}
        means = self.job.means(samples, lambda batch: {MEAN: self.old(full_inputs(self.job.old, batch))})
        baselines: dict[str, Features] = {MEAN: self.mean(means[MEAN])}
        if self.job.new.spec(self.source).width == self.job.old.spec(self.target).width:
            baselines[NO_MAP] = self._stitch("identity", samples).features
        return maps, baselines

    def _stitch(self, matcher: Any, samples: Samples) -> StitchedMap:
        """Stitch the source layer to the target layer with a matcher."""
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
        """Return the mapped features of the new tower."""
        new, layer = self.place.job.new, self.place.source
        representation = self.model.stitch(new.encode(new.preprocess(images_of(raw_of(samples))), layer)[layer])
        return self.place.job.like_old(representation.values)

    def generate(self, model: Any, samples: Samples) -> Tensor:
        """Generate texts with the stitched model, in the context of the original."""
        inputs = full_inputs(self.place.job.old, samples)
        original_config, model.generation_config = model.generation_config, greedy(self.place.job.old.model)
        try:
            ids = model.generate(**self._inputs(samples, inputs))
        finally:
            model.generation_config = original_config
        return split_generated(ids, inputs[text_of(self.place.job.old.model)[0]])[1]

    def preprocess(self, samples: Any) -> dict[str, Any]:
        """Return the inputs of the stitched model, including the texts of samples."""
        parsed = Samples.of(list(samples))
        return self._inputs(parsed, full_inputs(self.place.job.old, parsed))

    def _inputs(self, samples: Samples, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the stitched model: images for its source, and the context of its target."""
        names, content = getattr(self.model, "context_names", ()), self.place.job.old.interface.content
        context = {name: inputs[name] for name in names if name in inputs and name not in content}
        return {**self.model.preprocess(images_of(raw_of(samples))), **context}

    def finish(self, samples: Samples) -> Finished:
        """Return the stitched model."""
        old = self.place.job.old
        error = self._error(samples.take(min(len(samples), 4)))
        processor = with_images(old.processor, self.place.job.new.processor, None)
        matching, notes = None, []
        if hasattr(processor, "tokenizer"):
            matching = matching_processor(
                old, self.place.job.new, samples.take(1), self.model.preprocess(images_of(raw_of(samples.take(1))))
            )
            self.model.processor = self.model.processor if matching is None else matching
            if matching is None:
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
        return Finished(self.model, self, matching, error, tuple(notes))

    @torch.no_grad()
    def _error(self, samples: Samples) -> float:
        """Return the difference between the outputs of the stitched model and the outputs used for scores."""
        job, inputs = self.place.job, full_inputs(self.place.job.old, samples)
        expected = job.outputs.plain(self.place.run_with(inputs)(self.features(samples)))
        outputs = job.outputs.plain(self.model(**self._inputs(samples, inputs)))
        error = float((expected - outputs).abs().max() / expected.abs().max())
        if not error <= tolerance(expected.dtype):
            raise ValueError(f"the outputs of the stitched model differ from the scored outputs by {error:.2g}")
        return error


def _last_of_tower(job: Job, samples: Samples, reading: Reading | None, encoder_layers: Sequence[str]) -> str:
    """Return the target layer: the layer with the features that the modules after the tower read.

    Without such a layer of the same kind as a layer of the encoder (:func:`_kind`), the order is: the last block of the
    tower of this kind (so that the norm of the tower follows the map), its last layer of this kind, the first layer of
    this kind after it, the last layer of the tower, the first layer before the decoder.
    """
    old, tower = job.old, job.tower.name
    if reading is not None:
        inputs = full_inputs(old, samples.take(2))
        for name, representation in reversed(old.encode(inputs, list(old.layers)).items()):
            values = representation.values.flatten(2).mT if representation.layout == "bchw" else representation.values
            rows = values[:, -reading.features.shape[1] :]
            if rows.shape == reading.features.shape and torch.equal(rows, reading.features):
                if _kind(old, name)[0] in {_kind(job.new, layer)[0] for layer in encoder_layers}:
                    return name
                break  # vectors against positions, or the reverse
    in_tower = [name for name in old.layers if name == tower or name.startswith(f"{tower}.")]
    before_decoder = [name for name in old.layers if old.cut(name)[0].padding not in OF_TEXT]
    if not (in_tower or before_decoder):
        raise ValueError(
            f"{type(old.model).__name__} cannot be cut in or after {tower}, so the tower cannot be replaced; layers: "
            f"{', '.join(old.layers) or 'none'}"
        )
    encoder_kinds = {_kind(job.new, name) for name in encoder_layers}
    same_kind = [name for name in in_tower if _kind(old, name) in encoder_kinds]
    blocks = [name for name in same_kind if BLOCK.search(name)] if BLOCK.search(encoder_layers[-1]) else []
    after_tower = [name for name in before_decoder if name not in in_tower and _kind(old, name) in encoder_kinds]
    return (blocks or same_kind or after_tower[:1] or in_tower or before_decoder[:1])[-1]


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
    keys = ("image", "audio", "video", *(name for arguments in CONTENT.values() for name in arguments))
    return [
        next(sample[key] for key in keys if key in sample) if isinstance(sample, Mapping) else sample
        for sample in samples
    ]


def with_images(processor: Any, image_processor: Any, config: Any) -> Any:
    """Return `processor` with its image part replaced.

    The result is the new part alone if `processor` does not have an image part or the new part cannot be saved.
    """
    image_processor = getattr(image_processor, "extractor", image_processor)
    attribute = next((name for name in ("image_processor", "feature_extractor") if hasattr(processor, name)), None)
    if attribute is None or not hasattr(image_processor, "save_pretrained"):
        return image_processor
    if isinstance(processor, ImageAndTextProcessor):
        return replace(processor, image_processor=image_processor)
    copied = copy.copy(processor)
    if hasattr(old_processor := getattr(processor, attribute), "image_grid_pinpoints"):  # divides images into tiles
        colours = {name: getattr(image_processor, name) for name in ("image_mean", "image_std")}
        image_processor = type(old_processor).from_dict({**old_processor.to_dict(), **colours})
    setattr(copied, attribute, image_processor)
    if isinstance(getattr(copied, "patch_size", None), int) and isinstance(getattr(config, "patch_size", None), int):
        copied.patch_size = config.patch_size
    return copied


def matching_processor(network: Adapter, encoder: Adapter, samples: Samples, images: Mapping[str, Tensor]) -> Any:
    """Return a processor that prepares images for an encoder and texts for a network; ``None`` without a match.

    Args:
        network: The network for both, with its processor.
        encoder: The encoder, with its processor.
        samples: One sample, for comparing inputs.
        images: Inputs of the encoder for the image of this sample.

    Returns:
        A processor with the same inputs for the encoder, and the same texts for the network, including one placeholder
        token per position of the old tower.
    """
    expected, raw_samples = full_inputs(network, samples), raw_of(samples)
    interface, prompt, content = network.interface, getattr(network, "prompt", None), network.interface.content[0]
    for processor in candidate_processors(network.processor, encoder.processor, images):
        # some processors derive the number of placeholders from `patch_size`, so sizes 1-64 are tried
        patch_sizes = range(1, 65) if isinstance(getattr(processor, "patch_size", None), int) else ()
        for patch_size in (None, *patch_sizes):
            candidate = processor if patch_size is None else copy.copy(processor)
            if patch_size is not None:
                candidate.patch_size = patch_size
            with suppress(Exception):  # the processor may not accept this size
                inputs = inputs_of(raw_samples, candidate, interface, network.model, prompt)
                same_texts = all(torch.equal(inputs[name], expected[name]) for name in interface.given)
                if same_texts and _same(inputs[content], next(iter(images.values()))):
                    return candidate.processor if isinstance(candidate, ImageAndTextProcessor) else candidate
    return None


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two inputs are equal up to rounding and axes of length 1."""
    atol = 1e-4 if min(torch.finfo(tensor.dtype).bits for tensor in (first, second)) >= 32 else HALF_TOLERANCE
    return first.numel() == second.numel() and torch.allclose(
        first.flatten().float(), second.flatten().float(), atol=atol
    )


def _images_part(processor: Any) -> Any:
    """Return the part of a processor for images or sound."""
    names = ("image_processor", "feature_extractor")
    return next((getattr(processor, name) for name in names if hasattr(processor, name)), processor)


def candidate_processors(processor: Any, encoder_processor: Any, images: Mapping[str, Tensor]) -> Iterator[Any]:
    """Yield processors with the encoder's image part, and with the old image part in the settings of the encoder."""
    yield with_images(processor, encoder_processor, None)
    old_part, new_part = _images_part(processor), getattr(encoder_processor, "extractor", encoder_processor)
    height, width = next(iter(images.values())).shape[-2:]
    longest = {"longest_edge": max(height, width)}
    size_settings: tuple[dict[str, Any], ...] = (
        {}, {"size": {"height": height, "width": width}},
        {"size": longest, "max_image_size": longest, "do_image_splitting": False},
    )  # fmt: skip
    colours = {name: getattr(new_part, name) for name in NORMAL if getattr(new_part, name, None) is not None}
    for settings in size_settings if hasattr(old_part, "from_dict") and colours else ():
        yield with_images(processor, type(old_part).from_dict({**old_part.to_dict(), **colours, **settings}), None)


def tiles_for(encoder: Adapter, tiles: Tensor, network: Adapter) -> Tensor:
    """Return the tiles of images as inputs of an encoder, with its normalisation.

    Raises:
        ValueError: If the normalisation of a processor is unknown, or the size of tiles differs from the encoder's
            images.
    """
    shape = encoder.interface.shapes[encoder.interface.content[0]]
    processors = [
        getattr(adapter.processor, "image_processor", adapter.processor) for adapter in (network, encoder)
    ]  # fmt: skip
    have_moments = all(getattr(processor, "image_mean", None) is not None for processor in processors)
    scales = {(getattr(x, "do_rescale", True), getattr(x, "rescale_factor", None)) for x in processors}
    if not have_moments or len(scales) != 1 or tuple(tiles.shape[-3:]) != shape:
        raise ValueError(
            f"{type(network.model).__name__} reads {tiles.shape[1]} tiles of {tuple(tiles.shape[-3:])} per image, and "
            f"{type(encoder.model).__name__} images of {shape}: both require transformers processors with image_mean "
            "and image_std, and the same size"
        )
    colour_moments = []
    for processor in processors:
        normalises = getattr(processor, "do_normalize", True)
        moments = (processor.image_mean, processor.image_std) if normalises else ((0.0,), (1.0,))
        colour_moments += [torch.tensor(moment).to(tiles)[:, None, None] for moment in moments]
    old_mean, old_std, new_mean, new_std = colour_moments
    present = tiles.flatten(2).any(2)[..., None, None, None]  # zero tiles are padding
    return ((tiles * old_std + old_mean - new_mean) / new_std).where(present, 0)


def with_waveforms(encoder: Adapter) -> Adapter:
    """Return an encoder with a processor for single waveforms, if it has a feature extractor."""
    extractor = getattr(encoder.processor, "feature_extractor", encoder.processor)
    if not hasattr(extractor, "sampling_rate"):
        return encoder
    adapter = copy.copy(encoder)
    adapter.processor = WaveformProcessor(extractor, encoder.interface.content[0])
    return adapter


def rate_of(processor: Any) -> int | None:
    """Return the sampling rate of an audio processor; ``None`` for processors of other kinds."""
    extractor = getattr(processor, "extractor", getattr(processor, "feature_extractor", processor))
    return getattr(extractor, "sampling_rate", None)


def tower_alone(encoder: Adapter, tower: Tower) -> Adapter:
    """Return the tower of a multimodal encoder as a separate network, with its recorded inputs as example."""
    module: Any = encoder.model.get_submodule(tower.name)
    recorded: dict[str, Any] = {}

    def record(module: Any, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        recorded.update({name: value for name, value in bound.items() if isinstance(value, Tensor)})

    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with torch.no_grad():
            encoder.forward(encoder.example)
    finally:
        handle.remove()
    processor = encoder.processor
    attribute = next((name for name in ("image_processor", "feature_extractor") if hasattr(processor, name)), None)
    content = next(name for name, value in recorded.items() if value.is_floating_point())
    processor = getattr(processor, attribute) if attribute else processor
    return hf_stitch.load(module, example_inputs=recorded, content=content, processor=processor)
