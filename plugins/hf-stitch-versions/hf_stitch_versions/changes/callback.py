"""Callback that measures how far training moved a network from its start: :class:`DiffCallback`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from hf_stitch import Samples
from hf_stitch.data import Data
from hf_stitch.options import Count, checked
from hf_stitch.running import Processes, Run
from hf_stitch.training import ProbingCallback
from hf_stitch.training.callback import Every
from hf_stitch.training.probe import unnoticed
from hf_stitch_versions.changes.family import Version, distances, family_of, tensors_of, weight_distance
from hf_stitch_versions.changes.family_result import Family
from hf_stitch_versions.changes.outputs import Measure


class DiffCallback(ProbingCallback):
    """Callback that compares a network in training with its start, on fixed samples.

    Logs ``diff/KL`` (or ``diff/squared_difference`` for networks without classes), ``diff/agreement`` and
    ``diff/weight_change``. Training is the same as without the callback. The weights at the start are copied to the
    CPU, and each measurement copies the weights that changed; :attr:`family` is made from these copies at the end. Full
    fine-tuning stores one copy of the network per measurement, a PEFT adapter one copy of the adapter.

    Args:
        data: Raw samples, a few hundred.
        every: When to measure: ``"epoch"``, ``"eval"`` (at every evaluation) or a number of optimizer steps.
        batch_size: Number of samples per forward pass.
        name: Prefix of the names of all logged values.

    Attributes:
        family: Comparison of all measured steps, set at the end of training and written to ``diff.json`` in the
            ``output_dir`` of the ``Trainer``; ``None`` before. After resuming, it has the start and the later steps.

    Raises:
        ValueError: As in :class:`hf_stitch.training.ProbingCallback`.

    Example:
        >>> import torch, hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> callback = DiffCallback(torch.randn(50, 4))
        >>> _ = callback.measure(adapter, step=0)
        >>> _ = net[2].weight.data.mul_(1.1)
        >>> sorted(callback.measure(adapter, step=10))
        ['diff/squared_difference', 'diff/weight_change']
        >>> callback.to_family().networks
        ('0', '10')
    """

    @checked
    def __init__(self, data: Data, every: Every = "eval", *, batch_size: Count = 64, name: str = "diff") -> None:
        super().__init__(name, every)
        self._samples, self._batch_size = Samples.of(data), batch_size
        self.family: Family | None = None
        self._start: Mapping[str, Tensor] = {}
        self._changed: dict[int, dict[str, Tensor]] = {}  # step -> weights that differ from the start

    def to_family(self) -> Family:
        """Compare all steps measured so far; each step runs once per batch.

        Returns:
            The comparison, with step numbers as names.

        Raises:
            ValueError: If fewer than two steps were measured.
        """
        return self._family(Processes.of(None))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare all measured steps, and write the comparison."""
        if len(self._changed) > 1:
            self.family = self._family(Processes(self._attached.accelerator))
            self.family.save(Path(str(args.output_dir), f"{self.name}.json"))

    def _family(self, processes: Processes) -> Family:
        if len(self._changed) < 2:
            raise ValueError(
                f"{self.name} requires at least two measured steps, got {len(self._changed)}: train longer"
            )
        versions = {str(step): self._version(step) for step in self._changed}
        with processes.together(self.name), unnoticed(self._model, processes):
            return family_of(versions, self._samples, self._run(processes))

    def _prepare(self, processes: Processes) -> None:
        self._measure_of = Measure.of(self._loaded.task)

    def _begin(self) -> None:
        self._start, self._changed, self.family = {}, {}, None

    def _figures(self, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        current = {name: value.detach().to("cpu", copy=True) for name, value in tensors_of(self._model).items()}
        if not self._changed:
            self._start, self._changed = current, {step: {}}
            return {}
        self._changed[step] = {
            name: value for name, value in current.items() if not torch.equal(value, self._start[name])
        }
        first = next(iter(self._changed))
        versions = {str(first): self._version(first), str(step): self._version(step)}
        gaps, agreement = distances(versions, self._samples, self._measure_of, self._run(processes))
        before, after = (version.weights() for version in versions.values())
        (change, _), _ = weight_distance(before, after, (f"step {first}", f"step {step}"))
        figures = {
            self._measure_of.name.replace(" ", "_"): float(gaps[:, 0, 1].mean()),
            "weight_change": change,
        }
        return figures if agreement is None else figures | {"agreement": float(agreement[:, 0, 1].mean())}

    def _save(self, folder: Path) -> None:
        save_file({name: value.contiguous() for name, value in self._start.items()}, folder / self._file)

    def _resume(self, folder: Path, step: int) -> None:
        if not (folder / self._file).is_file():
            raise ValueError(
                f"{self.name}: cannot resume from step {step}, because the checkpoint lacks the weights of the start "
                f"({folder / self._file}). Was the callback attached when the checkpoint was saved?"
            )
        self._start, self._changed = load_file(folder / self._file), {0: {}}

    @property
    def _file(self) -> str:
        return f"{self.name}-start.safetensors"

    def _version(self, step: int) -> Version:
        return Version(self._loaded, {**self._start, **self._changed[step]})

    def _run(self, processes: Processes) -> Run:
        return Run(batch_size=self._batch_size, progress=False, processes=processes)
