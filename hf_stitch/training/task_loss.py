"""Task-loss matching: stitching layers trained on the task, with both networks frozen."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

import torch

from hf_stitch.adapters import Adapter, load
from hf_stitch.artefacts.joining import join_all
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import PairedSamples, Samples
from hf_stitch.matchers import ClosedFormMatcher, Matched, RowsMatcher, TrainedMatcher
from hf_stitch.options import Count, Natural, NonNegative, Positive, checked
from hf_stitch.pairs import Cell, CollectedPair, Pair, Split
from hf_stitch.papers import BALOGH_2025, CSISZARIK_2021, MAI_2026, Paper
from hf_stitch.provenance import versions
from hf_stitch.reference import weights_hash
from hf_stitch.registry import registries
from hf_stitch.running import Processes
from hf_stitch.scoring.halves import target_changes
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.heads import check_head, task_named
from hf_stitch.training.loop import DivergedError, Schedule, StepCallback, TrainingSchedule, train
from hf_stitch.training.objective import ANSWERS, L1, Answer, Objective
from hf_stitch.training.prepared import Augment, Networks, Prepared
from hf_stitch.training.sharding import sharded
from hf_stitch.training.stitches import Stitches, plain, trainable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelerate import Accelerator

PRESETS: dict[str, dict[str, Any]] = {
    "csiszarik2021": {"labels": "target", "epochs": 30, "batch_size": 128, "lr": 1e-3, "schedule": "step"},
    "balogh2025": {
        "labels": "hard",
        "epochs": 30,
        "batch_size": 256,
        "lr": 1e-3,
        "weight_decay": 1e-5,
        "schedule": "constant",
    },
    "final_features": {
        "initial": "random",
        "feature_steps": 100,
        "max_steps": 100,
        "batch_size": 64,
        "lr": 1e-2,
        "schedule": "cosine",
    },
}
"""Options of experiments: Csiszárik et al. 2021 (section 5, appendix A.3, code), Balogh & Jelasity 2025; and training
from a random map that first matches final features (after Mai et al. 2026, with our own steps)."""


@dataclass(frozen=True)
class TaskLoss(TrainedMatcher):
    """Matcher that trains the stitching layer on the task loss, from an initial map; both networks stay frozen.

    ``T ∘ stitch ∘ R`` is trained with Adam (Csiszárik et al. 2021, section 4.1). Activations of the source are computed
    once if samples are not augmented. The front half of the target does not run in training steps, and gradients are
    not computed for it. BatchNorm uses its running statistics, which stay unchanged.

    The initial map determines the kind of map: ``lstsq`` gives an affine map, ``lstsq`` without intercept a linear map,
    ``low_rank`` (or ``random`` with a rank) a bottleneck, ``residual_mlp`` a network next to an affine map. A masked
    map stays masked.

    ``fitted`` of each map contains ``steps``, ``n`` (number of samples) and the final ``loss``.

    Attributes:
        initial: Matcher of the initial map, of moments or rows: a name, a dict of name and options, or a matcher.
        orthogonal: Whether affine maps are kept orthogonal during training (plain weights afterwards). They start from
            the orthogonal map nearest to the initial one.
        labels: Labels of the cross-entropy: ``"hard"`` for the labels of the data, ``"target"`` or ``"source"`` for the
            soft labels of the whole parent network, or a mixture as a dict of weights above 0.
        temperature: Temperature of soft labels, above 0 (Hinton et al. 2015; the loss is multiplied by its square).
        penalties: Weights of penalties added to the loss: ``"l1"``, the sum of the absolute weights without biases;
            ``"proximal_l1"``, the same as a soft threshold after each step, which sets weights of affine maps exactly
            to 0; and differentiable metrics between the transformed rows and the rows of the target in a batch, for
            example ``{"linear_cka": 0.5}``. A metric is left out of a batch with fewer rows than it needs, for example
            the last batch of an epoch.
        feature_steps: Number of initial steps that match final features. They minimise the squared distance between the
            activations at the last cut of the target with and without the stitch, averaged over the features and
            positions of a sample and then over samples (Mai et al. 2026).
        epochs: Number of passes over the samples.
        max_steps: Number of optimizer steps; replaces ``epochs`` if given.
        batch_size: Number of samples of a step over all processes; with gradient accumulation, of each part of a step.
        lr: Initial learning rate.
        weight_decay: L2 penalty of Adam.
        schedule: Learning rate schedule: ``step`` (divided by 10 after one third and again after two thirds of the
            steps), ``constant``, ``linear`` or ``cosine``.
        max_grad_norm: Maximal gradient norm of each stitch; ``None`` for no clipping.
        shuffle: Whether to shuffle the samples in every epoch.
        patience: Number of epochs without improvement on the validation samples after which a stitch stops; ``None``
            for no limit.
        seed: Seed of the sample order and of augmentation.

    Example:
        >>> import hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> stitched = hf_stitch.stitch(a, b, torch.randn(200, 4), source_layer="1", target_layer="1",
        ...                             matcher=TaskLoss(epochs=2), task="image-classification", progress=False)
        >>> stitched.stitch.body.fitted["steps"]
        4
    """

    name: ClassVar[str] = "task_loss"
    title: ClassVar[str] = "task-loss matching"
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021, BALOGH_2025, MAI_2026)
    initial: Any = "lstsq"
    orthogonal: bool = False
    labels: Answer | Mapping[Answer, Positive] = "target"
    temperature: Positive = 1.0
    penalties: Mapping[str, float] = field(default_factory=dict)
    feature_steps: Natural = 0
    epochs: Count = 30
    max_steps: Count | None = None
    batch_size: Count = 128
    lr: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    schedule: Schedule = "step"
    max_grad_norm: Positive | None = None
    shuffle: bool = True
    patience: Count | None = None
    seed: Natural = 0

    def __post_init__(self) -> None:
        """Build the initial matcher and validate the options."""
        initial = registries.matchers.build(self.initial)
        if not isinstance(initial, ClosedFormMatcher | RowsMatcher):
            raise ValueError(
                f"initial must be a matcher of moments or of rows, got {initial.name!r}; use for example 'lstsq'"
            )
        object.__setattr__(self, "initial", initial)
        super().__post_init__()
        _ = self.objective  # checks labels and penalties
        if self.orthogonal and getattr(initial, "rank", None) is not None:
            raise ValueError(f"orthogonal=True requires a map of full rank, but initial={initial} is a bottleneck")
        if self.orthogonal and (self.weight_decay or any(name in self.penalties for name in L1)):
            raise ValueError(
                "orthogonal=True fixes the norm of the weights: remove weight_decay and the penalties 'l1' and "
                "'proximal_l1'"
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Make a matcher with the options of an experiment.

        Args:
            name: Name of the preset in :data:`PRESETS`: ``csiszarik2021``, ``balogh2025`` or ``final_features``.
            **changes: Options that override the preset.

        Example:
            >>> TaskLoss.preset("balogh2025", epochs=1).batch_size
            256
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}. Available: {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    @property
    def objective(self) -> Objective:
        """The training objective."""
        weights = {self.labels: 1.0} if isinstance(self.labels, str) else self.labels
        labels = {str(name): weight for name, weight in weights.items()}
        return Objective(labels, self.temperature, dict(self.penalties))

    def to_dict(self) -> dict[str, Any]:
        """Return the name and all options as JSON values."""
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "initial"}
        plain_values = {k: dict(v) if isinstance(v, Mapping) else v for k, v in options.items()}
        return {"name": self.name, "initial": self.initial.to_dict(), **plain_values}

    def check(self, pair: Pair, data: Split) -> None:
        """Check the initial matcher, and the samples and the task against the options."""
        super().check(pair, data)
        self._check(data.train.a, pair.task)

    def _check(self, samples: Samples, task: str | None, validation_data: Samples | None = None) -> None:
        if task is None:
            raise ValueError("task_loss requires a task with logits; pass task= to stitch()")
        if self.temperature != 1 and not task_named(task).has_probabilities:
            raise ValueError(f"temperature must be 1 for {task}, a task without probabilities, got {self.temperature}")
        for sample_set in (samples, validation_data):
            if sample_set is not None and self._uses_labels(task) and task_named(task).labels(sample_set) is None:
                raise ValueError(
                    "labels='hard' requires labelled samples; pass Samples.of(data, label=…), or use labels='target'"
                )
        if self.patience is not None and validation_data is None:
            raise ValueError(
                "patience requires validation samples: call TaskLoss(…).fit(stitched, data, validation_data=…), or "
                "remove patience"
            )

    def samples_trained(self, count: int) -> int:
        """Return the number of samples that training reads, including repetitions."""
        steps = self.max_steps or self.epochs * math.ceil(count / self.batch_size)
        return (steps + self.feature_steps) * min(self.batch_size, count)

    def _uses_labels(self, task: str | None) -> bool:
        return "hard" in self.objective.labels and not task_named(task).unused

    def rehearse(self, pair: Pair, data: Split) -> None:
        """Run one batch through identity maps, so that errors of training occur before fitting."""
        super().rehearse(pair, data)
        models = join_all(pair, {cell: pair.identity(cell) for cell in pair.cells})
        models_by_name = {str(number): model for number, model in enumerate(models.values())}
        networks, device = self._networks(models_by_name, pair.target, None), _device(models_by_name["0"])
        layers = {name: model.stitch for name, model in models_by_name.items()}
        with _frozen(list(models_by_name.values()), device):
            self._check_first_batch(
                self._groups(networks, layers, device), networks, data.train.a, data.train.b, None, 1
            )

    def trained(
        self, collected: CollectedPair, layers: Mapping[Cell, StitchingLayer], folder: Path | None
    ) -> Matched:  # fmt: skip
        """Train all stitches in one call, so that the activations of the source are computed once."""
        samples = collected.samples
        cells, models = list(layers), list(join_all(collected.pair, layers).values())
        try:
            trained_layers: list[StitchingLayer | None] = [*self.fit(
                models, samples.a, target=collected.pair.target, paired_data=samples.b if samples.differ else None,
                checkpoint_dir=folder, progress=collected.run.progress,
            )]  # fmt: skip
            reasons: Mapping[int, str] = {}
        except DivergedError as error:
            trained_layers, reasons = error.trained, error.reasons
            if all(layer is None for layer in trained_layers):
                if len(cells) == 1:
                    raise
                first = f"{self.label}: {' -> '.join(cells[0])}"
                text = f"all stitches of the matcher diverged, first {first}: {reasons.get(0, error)}"
                raise DivergedError(text, reasons) from error
        layers_by_cell = {cell: layer for cell, layer in zip(cells, trained_layers, strict=True) if layer is not None}
        return Matched(layers_by_cell, {cells[index]: DivergedError(reason) for index, reason in reasons.items()})

    def _check_first_batch(
        self,
        groups: Sequence[Stitches],
        networks: Networks,
        samples: Samples,
        others: Samples,
        validation_data: Samples | None,
        processes: int,
    ) -> None:
        count = min(max(self.batch_size // processes, 1), len(samples))
        first, paired = (next(iter(side.batches(count))) for side in (samples, others))
        if networks.task.per_token:
            networks.task.check_some(any(map(networks.has_predictions, samples.batches(count))), samples)
        batch = networks.prepare(first.samples, paired.samples, networks.labels_of(first)).to(_device(networks.first))
        outputs = max(stitches.check(batch) for stitches in groups)
        if self._uses_labels(networks.first.task):
            for sample_set in (samples, validation_data):
                if sample_set is not None:
                    networks.task.check_labels(sample_set, outputs)

    @overload
    def fit(self, stitched: StitchedModel, data: Any, *_: Any, **options: Any) -> StitchingLayer: ...
    @overload
    def fit(self, stitched: Sequence[StitchedModel], data: Any, *_: Any, **options: Any) -> list[StitchingLayer]: ...
    @checked
    def fit(
        self, stitched: StitchedModel | Sequence[StitchedModel], data: Any, *, target: Any = None, source: Any = None,
        paired_data: Any = None, validation_data: Any = None, augment: Augment | None = None,
        accelerator: Accelerator | None = None, checkpoint_dir: str | Path | None = None, save_every: Count = 500,
        cache_size: float = 8e9, shard: bool = False, callback: StepCallback | None = None, progress: bool = True,
    ) -> StitchingLayer | list[StitchingLayer]:  # fmt: skip
        """Train the stitching layer of a stitched model, starting from its current maps.

        The option ``initial`` is not used here: :func:`hf_stitch.stitch` fits the initial map before it calls this
        method. One call trains several stitched models with the same target and computes the activations of the sources
        once. Models with the same cut of the target are trained together in one batch, and cuts in sequence; the
        results equal separate training. Maps in half precision are trained in float32.

        Args:
            stitched: The stitched model, or several models; they are not changed.
            data: Raw samples in a form that :meth:`hf_stitch.Samples.of` accepts.
            target: The whole target. Default: the original network of the model, or the network that its config refers
                to.
            source: The whole source, used for ``labels="source"``. Default: as for ``target``.
            paired_data: Raw samples for the target, with the same ids in the same order. Default: ``data``.
            validation_data: Held-out samples. Loss and accuracy on them are logged after every epoch, and each
                stitching layer ends with the weights of its lowest validation loss.
            augment: Function from raw samples and a ``torch.Generator`` to augmented samples, called for every batch.
                Both networks receive the same augmented samples; ``paired_data`` are not augmented. Activations are
                then not stored in files. The random changes depend on the number of processes.
            accelerator: Accelerator for several processes, mixed precision, gradient accumulation and trackers
                (``accelerator.log`` is called with the loss of every step). The result equals training in one process,
                except for penalties that are metrics, which each process computes on its part of a batch.
            checkpoint_dir: Folder for the training state, to resume interrupted training with bit-identical results.
                Several cuts of the target have subfolders ``0``, ``1``, ….
            save_every: Number of steps between two saved states.
            cache_size: Maximal disk space in bytes for the stored activations, separately for training and validation
                samples. Larger activations are recomputed for each batch, with a warning.
            shard: Whether each of several processes keeps an equal part of the frozen halves' weights (FSDP2) and
                gathers the weights of a block when it runs. The stitch stays whole. The networks that compute soft
                labels are not sharded: use ``labels="hard"`` if they do not fit in memory.
            callback: Function called before the first step and after every step with the number of completed steps and
                the list of stitching layers trained together.
            progress: Whether to show a progress bar.

        Raises:
            DivergedError: If a loss or the weights of a stitch are NaN or infinite. The remaining stitches are trained
                to the end: ``error.trained`` contains them, ``error.reasons`` describes the diverged stitches.
        """
        models = [stitched] if isinstance(stitched, StitchedModel) else list(stitched)
        _check_models(models)
        accelerator = _default_accelerator(_device(models[0])) if accelerator is None else accelerator
        processes = Processes(accelerator)
        with processes.together("TaskLoss.fit"):
            samples, others, held_out = self._samples(models[0], data, paired_data, validation_data)
            by_name = {str(i): model for i, model in enumerate(models)}
            layers = {name: trainable(model.stitch, self.orthogonal) for name, model in by_name.items()}
            networks = self._networks(by_name, target, source)
            if networks.target is not None:
                _check_same_network(networks.target, models[0])
            accumulation = accelerator.gradient_accumulation_steps
            steps = self.max_steps or self.epochs * math.ceil(len(samples) / (self.batch_size * accumulation))
            schedule = TrainingSchedule(steps, *(getattr(self, f.name) for f in fields(TrainingSchedule)[1:]))
            trained_layers: dict[str, StitchingLayer] = {}
            reasons: dict[str, str] = {}
            with ExitStack() as stack:
                stack.enter_context(_frozen(models, accelerator.device))
                if shard and processes.count > 1:
                    halves = [half for model in models for half in (model.source, model.target)]
                    stack.enter_context(sharded(halves, accelerator.device, processes.count))
                groups = self._groups(networks, layers, accelerator.device)
                self._check_first_batch(groups, networks, samples, others, held_out, processes.count)
                checkpoints: list[Checkpoint | None] = [None] * len(groups)
                if checkpoint_dir is not None:
                    recipe = {
                        "matcher": self.to_dict(), "steps": steps, "data": samples.fingerprint,
                        "paired_data": others.fingerprint, "validation_data": held_out and held_out.fingerprint,
                        "augment": _qualified_name(augment), "accumulation": accumulation, "processes": processes.count,
                        "mixed_precision": accelerator.mixed_precision, "versions": versions(),
                    }  # fmt: skip
                    checkpoints = _begin_all(Path(checkpoint_dir), recipe, groups, by_name, processes)
                temporary = Path(processes.agree(stack.enter_context(tempfile.TemporaryDirectory())))
                prepare = partial(
                    Prepared, networks, limit=int(cache_size), batch_size=max(self.batch_size, 64),
                    processes=processes, in_step=shard,
                )  # fmt: skip
                label = processes.shown("preparing", progress)
                inputs = prepare(samples, others, folder=temporary / "training", augment=augment, progress=label)
                validation = None
                if held_out is not None:
                    label = processes.shown("preparing validation", progress)
                    validation = prepare(
                        held_out, held_out, folder=temporary / "held out", augment=None, progress=label
                    )
                for stitches, checkpoint in zip(groups, checkpoints, strict=True):
                    names = stitches.names
                    losses, steps_done, new_reasons = train(
                        stitches, inputs.only(names), schedule, accelerator=accelerator, processes=processes,
                        checkpoint=checkpoint, save_every=save_every, callback=callback, progress=progress,
                        validation=None if validation is None else validation.only(names),
                    )  # fmt: skip
                    accelerator.wait_for_everyone()
                    reasons |= new_reasons
                    outcomes = zip(names, stitches.trained, steps_done.tolist(), losses.tolist(), strict=True)
                    for name, layer, count, loss in outcomes:
                        if name not in new_reasons:
                            trained_layers[name] = plain(layer, by_name[name].stitch).to(_device(by_name[name]))
                            for part in trained_layers[name].parts:
                                results = {"n": len(samples), "steps": count, "loss": loss}
                                getattr(trained_layers[name], part).fitted = results
            layers_in_order = [trained_layers.get(name) for name in by_name]
            if reasons:
                raise self._error(reasons, layers_in_order, checkpoint_dir)
            return trained_layers["0"] if isinstance(stitched, StitchedModel) else list(trained_layers.values())

    def _samples(
        self, model: StitchedModel, data: Any, paired_data: Any, validation_data: Any
    ) -> tuple[Samples, Samples, Samples | None]:
        """Check and return the samples for the sources, for the target, and for validation."""
        if paired_data is not None and validation_data is not None:
            raise ValueError("paired_data and validation_data cannot be combined yet; remove one")
        pairs = PairedSamples.of(data, paired_data)
        task = task_named(model.task)
        numbered_pairs = pairs.with_first(task.numbered(pairs.a, model.config))
        samples, others = numbered_pairs.a, numbered_pairs.b
        held_out = None if validation_data is None else task.numbered(Samples.of(validation_data), model.config)
        if self._uses_labels(model.task):
            task.warn_of_labels(samples, model.config)
        self._check(samples, model.task, held_out)
        return samples, others, held_out

    def _error(
        self, diverged: Mapping[str, str], trained: Sequence[StitchingLayer | None], folder: str | Path | None
    ) -> DivergedError:
        advice = f"lower lr (now {self.lr}), set max_grad_norm, or check the inputs for NaN and infinite values"
        name, reason = next(iter(diverged.items()))
        text = f"stitch {name!r} diverged: {reason}"
        if len(diverged) > 1:
            text = f"{len(diverged)} of {len(trained)} stitches diverged, first {name!r}: {reason}"
        saved = "no state was saved" if folder is None else f"the last saved state is in {folder}"
        reasons = {int(index): f"training diverged: {cause}; {advice}" for index, cause in diverged.items()}
        return DivergedError(f"{text}; {saved}: {advice}", reasons, trained)

    def _groups(self, networks: Networks, layers: Mapping[str, StitchingLayer], device: torch.device) -> list[Stitches]:
        """Group the stitches by their cut of the target, in order of first appearance."""
        stitches_by_cut: dict[str, dict[str, StitchingLayer]] = {}
        for name, model in networks.models.items():
            stitches_by_cut.setdefault(model.target.cut.layer, {})[name] = layers[name]
        backs = [networks.models[next(iter(group))].target for group in stitches_by_cut.values()]
        return [
            Stitches(group, back, networks.task, self.objective, networks.last, networks.origins).to(device)
            for group, back in zip(stitches_by_cut.values(), backs, strict=True)
        ]

    def _networks(self, models: Mapping[str, StitchedModel], target: Any, source: Any) -> Networks:
        objective, first_model = self.objective, next(iter(models.values()))
        requested = {name for name in ANSWERS if name in objective.labels}
        requested |= {"there"} if objective.metrics else set()
        requested |= {"features"} if self.feature_steps else set()
        target_network = source_network = None
        if requested & {"target", "there", "features"}:
            target_network = first_model.parent("target") if target is None else load(target)
        if "source" in requested:
            source_network = first_model.parent("source") if source is None else load(source)
        last_layer = (
            target_network.layers[-1]
            if target_network is not None and "features" in requested
            else first_model.target.cut.layer
        )
        return Networks(models, target_network, source_network, frozenset(requested), last_layer)


def _check_models(models: Sequence[StitchedModel]) -> None:
    if not models:
        raise ValueError("stitched must contain at least one model, got an empty sequence")
    for model in models:
        check_head(model)
    targets = {json.dumps(m.config.target["reference"], sort_keys=True): m.config.target["reference"] for m in models}
    if len(targets) > 1:
        descriptions = ", ".join(
            sorted(f"{parent['id']} ({parent['weights_hash'][:15]})" for parent in targets.values())
        )
        raise ValueError(
            f"models trained together must have the same target, got {descriptions}; train each group separately"
        )


def _networks_of(model: StitchedModel) -> list[Any]:
    """Return weight hashes and cuts of both halves, and the token mapping of the source."""
    halves = ((model.config.source, model.source), (model.config.target, model.target))
    return [
        [config["reference"]["weights_hash"], half.cut.layer, *([config["reading"]] if "reading" in config else [])]
        for config, half in halves
    ]


def _device(model: StitchedModel) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _default_accelerator(device: torch.device) -> Accelerator:
    """Return the accelerator of the launched processes, or a new one for this process alone, in full precision."""
    from accelerate import Accelerator as Default

    accelerator = Processes.of(None).accelerator or Default(cpu=device.type == "cpu")
    if accelerator.mixed_precision != "no" or (
        accelerator.num_processes == 1 and accelerator.device.type != device.type
    ):
        raise ValueError(
            f"an earlier Accelerator of this process (of a Trainer?) uses device {accelerator.device} and mixed "
            f"precision {accelerator.mixed_precision!r}, but the model is on {device} in full precision; pass "
            "accelerator= to use these settings, or train in another process"
        )
    return accelerator


def _begin_all(
    folder: Path,
    recipe: Mapping[str, Any],
    groups: Sequence[Stitches],
    models: Mapping[str, StitchedModel],
    processes: Processes,
) -> list[Checkpoint | None]:
    """Begin or resume the training of each group; several groups use separate folders."""
    checkpoints: list[Checkpoint | None] = []
    for number, stitches in enumerate(groups):
        group_recipe = {
            **recipe,
            "networks": [_networks_of(models[name]) for name in stitches.names],
            "stitches": [[layer.to_dict(), weights_hash(layer)] for layer in stitches.trained],
        }
        path, refusal = folder if len(groups) == 1 else folder / str(number), None
        checkpoints.append(checkpoint := Checkpoint(path, 0, lasting=processes.rank == 0))
        try:
            checkpoint.begin(json.loads(json.dumps(group_recipe)), dict)
        except ValueError as error:  # possible on rank 0 only, which saves the state
            refusal = str(error)
        if (reason := processes.agree(refusal)) is not None:
            raise ValueError(reason)
    return checkpoints


def _qualified_name(augment: Augment | None) -> str | None:
    if augment is None:
        return None
    function: Any = augment if hasattr(augment, "__qualname__") else type(augment)
    return f"{function.__module__}.{function.__qualname__}"


def _check_same_network(whole: Adapter, model: StitchedModel) -> None:
    """Raise an error if the weights, config or processor of a target differ from the target of the model."""
    changes = target_changes(model, whole)
    if changes:
        raise ValueError(
            f"the target differs from the target of the stitched model in {', '.join(changes)} "
            f"({'; '.join(text for texts in changes.values() for text in texts)}); pass the original network"
        )


@contextmanager
def _frozen(models: Sequence[StitchedModel], device: torch.device) -> Iterator[None]:
    """Move the models to a device, in eval mode with frozen halves; all states are restored afterwards."""
    devices = [_device(model) for model in models]
    modes = [(module, module.training) for model in models for module in model.modules()]
    halves = [half for model in models for half in (model.source, model.target)]
    trainable_parameters = [parameter for half in halves for parameter in half.parameters() if parameter.requires_grad]
    try:
        for model in models:
            torch.nn.Module.to(model, device).eval()
        for half in halves:
            half.requires_grad_(False)
        yield
    finally:
        for model, model_device in zip(models, devices, strict=True):
            torch.nn.Module.to(model, model_device)
        for module, mode in modes:
            module.training = mode
        for parameter in trainable_parameters:
            parameter.requires_grad_(True)
