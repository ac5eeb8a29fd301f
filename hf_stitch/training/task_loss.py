"""Task-loss matching: a stitch trained on the task, both networks frozen."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args, overload

import torch

from hf_stitch.adapters import Adapter, load
from hf_stitch.analysis.scoring import check_labels
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples, check_same_order
from hf_stitch.matchers import ClosedFormMatcher, TrainedMatcher
from hf_stitch.papers import BALOGH_2025, CSISZARIK_2021, Paper
from hf_stitch.processes import Processes
from hf_stitch.provenance import versions
from hf_stitch.reference import weights_hash
from hf_stitch.registry import registries
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.training.loop import StepCallback, train
from hf_stitch.training.maps import plain, trainable
from hf_stitch.training.objective import ANSWERS, Objective
from hf_stitch.training.prepared import Augment, Networks, Prepared
from hf_stitch.training.schedule import Schedule, TrainingSchedule
from hf_stitch.training.stitches import Stitches

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
}
"""Options of published experiments: Csiszárik et al. 2021 (section 5, appendix A.3, code), Balogh & Jelasity 2025."""


@dataclass(frozen=True)
class TaskLoss(TrainedMatcher):
    """Train the stitch on the task's loss, from a start of one's choice; both networks stay as they are.

    ``T ∘ stitch ∘ R`` is trained with Adam (Csiszárik et al. 2021, section 4.1). What the source says is computed once
    where samples are not augmented; the target's half before the cut never runs for it, and takes no part in a
    gradient. Of BatchNorm running statistics are used and left as they are.

    Which maps are trained follows from the start: ``lstsq`` gives an affine map, ``lstsq`` without intercept a linear
    one, ``low_rank`` (or ``random`` with a rank) a bottleneck, a stitch that is masked stays so.

    ``fitted`` of a map holds ``steps``, ``n`` and the ``loss`` at the end.

    Attributes:
        initial: The matcher of the start, by name, as a dict of name and options, or built.
        orthogonal: Whether affine maps are kept orthogonal (plain weights afterwards); they start from the orthogonal
            map nearest to the initial one.
        labels: What predictions are held against: ``"hard"`` labels of the data, or soft ones, the answers of the whole
            ``"target"`` or ``"source"``; a mixture as a dict of weights.
        temperature: Of soft labels, above 0 (Hinton et al. 2015; gradients are scaled back by its square).
        penalties: What is added to the loss, by weight: ``"l1"``, the sum of the absolute weights, and differentiable
            metrics of the transformed rows of a batch with the target's (``{"linear_cka": 0.5}``); a batch of fewer
            rows than a metric takes, as the last of an epoch may be, goes without it.
        feature_steps: Steps before all others that bring the target's final features (its last cut) close to its own:
            the squared distance, its mean over the positions of a sample, then over samples.
        epochs: Passes over the samples.
        max_steps: Optimizer steps, instead of epochs.
        batch_size: Samples of a step, over all processes.
        lr: Learning rate.
        weight_decay: L2 penalty of Adam.
        schedule: ``step`` (a tenth after one third and again after two), ``constant``, ``linear`` or ``cosine``.
        max_grad_norm: Norm that the gradient of each stitch is cut to.
        shuffle: Whether samples come in another order in every epoch.
        patience: With a validation: a stitch is done after so many epochs without improvement.
        seed: Of the order and of augmentation.

    Example:
        >>> import hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> stitched = hf_stitch.stitch(a, b, torch.randn(200, 4), source_layer="1", target_layer="1", matcher=TaskLoss(epochs=2),
        ...                             task="image-classification", progress=False)
        >>> stitched.stitch.body.fitted["steps"]
        4
    """

    name: ClassVar[str] = "task_loss"
    title: ClassVar[str] = "task-loss matching"
    papers: ClassVar[tuple[Paper, ...]] = (
        CSISZARIK_2021,
        BALOGH_2025,
    )
    initial: Any = "lstsq"
    orthogonal: bool = False
    labels: str | Mapping[str, float] = "target"
    temperature: float = 1.0
    penalties: Mapping[str, float] = field(default_factory=dict)
    feature_steps: int = 0
    epochs: int = 30
    max_steps: int | None = None
    batch_size: int = 128
    lr: float = 1e-3
    weight_decay: float = 0.0
    schedule: Schedule = "step"
    max_grad_norm: float | None = None
    shuffle: bool = True
    patience: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Build what was named, and refuse what is out of range."""
        initial = registries.matchers.build(self.initial)
        if not isinstance(initial, ClosedFormMatcher):
            raise ValueError(f"initial must be a matcher that is fitted in closed form, got {initial.name!r}")
        object.__setattr__(self, "initial", initial)
        for name, least in (("epochs", 1), ("batch_size", 1), ("feature_steps", 0), ("seed", 0)):
            _check_count(name, getattr(self, name), least)
        for name in ("max_steps", "patience"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1)
        for name, above in (("lr", True), ("weight_decay", False), ("max_grad_norm", True)):
            value = getattr(self, name)
            if name == "max_grad_norm" and value is None:
                continue
            if not (isinstance(value, float | int) and math.isfinite(value) and (value > 0 if above else value >= 0)):
                raise ValueError(f"{name} must be a number {'>' if above else '>='} 0, got {value!r}")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {self.schedule!r}")
        _ = self.objective  # checks labels and penalties
        if self.orthogonal and getattr(initial, "rank", None) is not None:
            raise ValueError(f"an orthogonal map has full rank, and initial={initial} goes through a bottleneck")
        if self.orthogonal and (self.weight_decay or "l1" in self.penalties):
            raise ValueError("an orthogonal map has weights of fixed size: leave weight_decay and the penalty 'l1' out")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The options of a published experiment, some changed.

        Raises:
            ValueError: If there is no such preset.

        Example:
            >>> TaskLoss.preset("balogh2025", epochs=1).batch_size
            256
        """
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        labels = {self.labels: 1.0} if isinstance(self.labels, str) else dict(self.labels)
        return Objective(labels, self.temperature, dict(self.penalties))

    def to_dict(self) -> dict[str, Any]:
        """The name and every option as JSON values."""
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "initial"}
        plain_values = {k: dict(v) if isinstance(v, Mapping) else v for k, v in options.items()}
        return {"name": self.name, "initial": self.initial.to_dict(), **plain_values}

    def check(self, samples: Samples, task: str | None, validation_data: Samples | None = None) -> None:
        """Refuse samples and tasks that cannot be trained on.

        Raises:
            ValueError: If there is no head, hard labels are missing, or patience has no validation.
        """
        if task is None:
            raise ValueError("task_loss needs a head whose predictions can be scored; stitch with a task")
        for shown in (samples, validation_data):
            if shown is not None and self._asks_labels(task) and shown.labels is None:
                raise ValueError(
                    "labels='hard' needs labelled samples, and these have none; name the column, as in "
                    "Samples.of(data, label=…), or train on labels='target'"
                )
        if self.patience is not None and validation_data is None:
            raise ValueError(
                "patience needs a validation: train by TaskLoss(…).fit(stitched, data, validation=…), or leave it out"
            )

    def _asks_labels(self, task: str | None) -> bool:
        return "hard" in self.objective.labels and task != "text-generation"

    def rehearse(self, stitched: StitchedModel, data: Any, *, target: Any = None, paired_data: Any = None) -> None:
        """Take one batch all the way through a model with whatever stitch, for :func:`hf_stitch.stitch`.

        Raises:
            ValueError: If labels are no classes of the target, a parent answers with other classes, penalties take more
                rows than a batch has, or final features cannot be matched.
        """
        samples = Samples.of(data)
        others = samples if paired_data is None else Samples.of(paired_data)
        networks = self._networks({"0": stitched}, target, None)
        layers = {"0": stitched.stitch}
        with _frozen([stitched], _device(stitched)):
            stitches = Stitches(layers, stitched.target, self.objective, networks.last)
            self._rehearse(stitches, networks, samples, others, None, 1)

    def _rehearse(
        self,
        stitches: Stitches,
        networks: Networks,
        samples: Samples,
        others: Samples,
        validation_data: Samples | None,
        processes: int,
    ) -> None:
        count = min(max(self.batch_size // processes, 1), len(samples))
        one, other = (next(iter(side.batches(count))) for side in (samples, others))
        seen = networks.prepare(one.samples, other.samples, one.labels)
        classes = stitches.check(seen.to(_device(networks.first)))
        if self._asks_labels(networks.first.task):
            for shown in (samples, validation_data):
                if shown is not None:
                    check_labels(shown, classes)

    @overload
    def fit(self, stitched: StitchedModel, data: Any, *_: Any, **options: Any) -> StitchingLayer: ...
    @overload
    def fit(self, stitched: Sequence[StitchedModel], data: Any, *_: Any, **options: Any) -> list[StitchingLayer]: ...
    def fit(
        self, stitched: StitchedModel | Sequence[StitchedModel], data: Any, *, target: Any = None, source: Any = None,
        paired_data: Any = None, validation_data: Any = None, augment: Augment | None = None,
        accelerator: Accelerator | None = None, checkpoint_dir: str | Path | None = None, save_every: int = 500,
        cache_size: float = 8e9, callback: StepCallback | None = None, progress: bool = True,
    ) -> StitchingLayer | list[StitchingLayer]:  # fmt: skip
        """Train from the stitch that the model has (``initial`` is for :func:`hf_stitch.stitch`, which fits it first).

        Several stitched models that end in the same cut of the same target are trained at once, in one batch through
        that target; each ends as it would alone. Maps of half precision are trained in float32.

        Args:
            stitched: The model with its first stitch, or several; they are not changed.
            data: Raw samples: what :meth:`hf_stitch.Samples.of` takes.
            target: The whole target; default: the live one that the model was made of, or the one that it names.
            source: The whole source, if its answers are labels.
            paired_data: Where the target is to see other samples, with the same ids in the same order.
            validation_data: Held-out samples; their loss and accuracy are logged after every epoch, and the best layers are
                kept.
            augment: From raw samples and a ``torch.Generator`` to changed samples, anew in every step; both networks
                see the same, but for ``paired_data``, which stay. Nothing is kept in files then. Several processes
                draw other changes than one.
            accelerator: For several processes, mixed precision, gradient accumulation and trackers (``accelerator.log``
                is called with the loss of every step). The result is that of one process, but for penalties that are
                metrics: each process takes them of its part of a batch.
            checkpoint_dir: A folder for the state; training that was interrupted goes on from there, to the same bits.
            save_every: Steps between two states.
            cache_size: Bytes of disk that what the networks say may take, of the samples and of the validation each;
                where it takes more, it is computed anew for each batch, and a warning says so.
            callback: Called with 0 and after every step with the number of steps done and the layers.
            progress: Show a progress bar.

        Returns:
            The trained stitching layer, or a list of them.

        Raises:
            ValueError: If the task has no head, labels are missing or no classes of the target, a parent whose answers
                are labels has other classes, a map has nothing to train, models end in different cuts, samples do not
                correspond, or the folder holds another training (what differs is said). All of it is found out with
                one batch, before the data are read.
            DivergedError: If a loss is not finite; the message names the step. The last state saved is kept.
        """
        models = [stitched] if isinstance(stitched, StitchedModel) else list(stitched)
        samples = Samples.of(data)
        others = samples if paired_data is None else Samples.of(paired_data)
        check_same_order(samples, others)
        if save_every < 1:
            raise ValueError(f"save_every must be at least 1, got {save_every}")
        held_out = None if validation_data is None else Samples.of(validation_data)
        if paired_data is not None and held_out is not None:
            raise ValueError("paired_data and validation do not go together yet: leave one of them out")
        _check_models(models)
        self.check(samples, models[0].task, held_out)
        names = [str(i) for i in range(len(models))]
        layers = {n: trainable(m.stitch, self.orthogonal) for n, m in zip(names, models, strict=True)}
        accelerator = _default(_device(models[0])) if accelerator is None else accelerator
        processes = Processes(accelerator)
        networks = self._networks(dict(zip(names, models, strict=True)), target, source)
        if networks.target is not None:
            _check_same_network(networks.target, models[0])
        every = accelerator.gradient_accumulation_steps
        steps = self.max_steps or self.epochs * math.ceil(len(samples) / (self.batch_size * every))
        schedule = TrainingSchedule(steps, *(getattr(self, f.name) for f in fields(TrainingSchedule)[1:]))
        with ExitStack() as stack:
            stack.enter_context(_frozen(models, accelerator.device))
            stitches = Stitches(layers, models[0].target, self.objective, networks.last).to(accelerator.device)
            self._rehearse(stitches, networks, samples, others, held_out, processes.count)
            state = None
            if checkpoint_dir is not None:
                recipe = {
                    "matcher": self.to_dict(), "steps": steps, "data": samples.fingerprint,
                    "paired_data": others.fingerprint, "validation_data": held_out and held_out.fingerprint,
                    "augment": _name(augment), "networks": [_networks_of(m) for m in models],
                    "stitches": [[layer.to_dict(), weights_hash(layer)] for layer in layers.values()],
                    "accumulation": every, "processes": processes.count,
                    "mixed_precision": accelerator.mixed_precision, "versions": versions(),
                }  # fmt: skip
                state = _begin(Path(checkpoint_dir), json.loads(json.dumps(recipe)), processes)
            temporary = Path(processes.agree(stack.enter_context(tempfile.TemporaryDirectory())))

            def prepared(part: Samples, other: Samples, name: str, change: Augment | None) -> Prepared:
                folder = temporary / name
                folder.mkdir(exist_ok=True)
                return Prepared(
                    networks, part, other, folder=folder, augment=change, limit=int(cache_size),
                    batch_size=max(self.batch_size, 64), processes=processes, progress=name if progress else None,
                )  # fmt: skip

            seen = prepared(samples, others, "preparing", augment)
            judged = None if held_out is None else prepared(held_out, held_out, "preparing validation", None)
            losses, done = train(
                stitches, seen, schedule, accelerator=accelerator, processes=processes, checkpoint=state,
                save_every=save_every, validation=judged, callback=callback, progress=progress,
            )  # fmt: skip
            accelerator.wait_for_everyone()
        trained = [
            plain(layer, model.stitch).to(_device(model)) for layer, model in zip(stitches.trained, models, strict=True)
        ]
        for layer, count, loss in zip(trained, done.tolist(), losses.tolist(), strict=True):
            for part in layer.parts:
                getattr(layer, part).fitted = {"n": len(samples), "steps": count, "loss": loss}
        return trained[0] if isinstance(stitched, StitchedModel) else trained

    def _networks(self, places: Mapping[str, StitchedModel], target: Any, source: Any) -> Networks:
        objective, first = self.objective, next(iter(places.values()))
        wanted = {name for name in ANSWERS if name in objective.labels}
        wanted |= {"there"} if objective.metrics else set()
        wanted |= {"features"} if self.feature_steps else set()
        whole = own = None
        if wanted & {"target", "there", "features"}:
            whole = first.parent("target") if target is None else load(target)
        if "source" in wanted:
            own = first.parent("source") if source is None else load(source)
        last = whole.layers[-1] if whole is not None and "features" in wanted else first.target.cut.layer
        return Networks(places, whole, own, frozenset(wanted), last)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _check_models(models: Sequence[StitchedModel]) -> None:
    """Make sure that there are some, and that they end in the same half."""
    if not models:
        raise ValueError("there is no stitched model to train")
    ends = {json.dumps([m.config.target["reference"], m.target.cut.layer], sort_keys=True) for m in models}
    if len(ends) > 1:
        found = ", ".join(sorted({f"{m.config.target['reference']['id']} at {m.target.cut.layer}" for m in models}))
        raise ValueError(
            f"stitches are trained at once if they end in the same cut of the same target, got {found}; train each "
            "group by itself"
        )


def _networks_of(model: StitchedModel) -> list[Any]:
    """Which halves: hashes of the weights, and cuts."""
    halves = ((model.config.source, model.source), (model.config.target, model.target))
    return [[config["reference"]["weights_hash"], half.cut.layer] for config, half in halves]


def _device(model: StitchedModel) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _default(device: torch.device) -> Accelerator:
    """The accelerator of the processes that were launched, or of this one alone, in full precision.

    Raises:
        ValueError: If an earlier one in this process has set another device or precision, which all later ones share.
    """
    from accelerate import Accelerator as Default

    found = Processes.of(None).accelerator or Default(cpu=device.type == "cpu")
    if found.mixed_precision != "no" or (found.num_processes == 1 and found.device.type != device.type):
        raise ValueError(
            f"an Accelerator made before in this process has device {found.device} and mixed precision "
            f"{found.mixed_precision!r}, which all later ones share, and the model is on {device}: pass accelerator= "
            "if that is meant"
        )
    return found


def _begin(folder: Path, recipe: Mapping[str, Any], processes: Processes) -> Checkpoint:
    """Begin or refuse: the first process does, the others hear of it."""
    state, refused = Checkpoint(folder, 0, True), None
    if processes.rank == 0:
        try:
            state.begin(recipe, dict)
        except ValueError as error:
            refused = str(error)
    if (why := processes.agree(refused)) is not None:
        raise ValueError(why)
    return state


def _name(augment: Augment | None) -> str | None:
    """What changes the samples, as far as it has a name."""
    if augment is None:
        return None
    named: Any = augment if hasattr(augment, "__qualname__") else type(augment)
    return f"{named.__module__}.{named.__qualname__}"


def _check_same_network(whole: Adapter, model: StitchedModel) -> None:
    """Make sure that a target is the one that the model was made of."""
    expected = (model.config.target or {})["reference"]["weights_hash"]
    if expected is not None and (found := whole.pinned.weights_hash) != expected:
        raise ValueError(
            f"the target has other weights than the one that the model was stitched from (hash {found}, expected "
            f"{expected}); pass that one"
        )


@contextmanager
def _frozen(models: Sequence[StitchedModel], device: torch.device) -> Iterator[None]:
    """The models on a device, in eval mode, their halves taking no gradient; as they were afterwards."""
    places = [_device(model) for model in models]
    modes = [(module, module.training) for model in models for module in model.modules()]
    halves = [half for model in models for half in (model.source, model.target)]
    trained = [parameter for half in halves for parameter in half.parameters() if parameter.requires_grad]
    try:
        for model in models:
            torch.nn.Module.to(model, device).eval()
        for half in halves:
            half.requires_grad_(False)
        yield
    finally:
        for model, place in zip(models, places, strict=True):
            torch.nn.Module.to(model, place)
        for module, mode in modes:
            module.training = mode
        for parameter in trained:
            parameter.requires_grad_(True)
