"""Callback that measures the similarity of a network in training with a reference, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import nn

from hf_stitch.adapters import Adapter, load_on, unwrap
from hf_stitch.adapters.checks import check_comparable
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison.asking import ROWS_OF, Asked
from hf_stitch.analysis.comparison.comparing import Comparison
from hf_stitch.analysis.comparison.weights import read_weights, same_layers
from hf_stitch.data import Data, check_same_order
from hf_stitch.metrics import Metric
from hf_stitch.options import Count, checked
from hf_stitch.representation import Pooling
from hf_stitch.running import Processes, Run
from hf_stitch.statistics import Weights, load_weights, save_weights
from hf_stitch.training.callback import Every, ProbingCallback
from hf_stitch.training.probe import optional_probe

logger = logging.getLogger(__name__)

OWN = ("start", "previous")
"""References to earlier states of the network in training."""

Readings = Mapping[str, Mapping[str, Weights]]
"""Weights of a network as metrics read them: label of the metric -> layer -> weights."""


class SimilarityCallback(ProbingCallback):
    """Callback that measures the similarity of each layer of a network in training with a reference.

    If the reference has layers of the same names, each layer is compared with the layer of the same name. Otherwise
    (another architecture), each layer is compared with the currently most similar layer of the reference; a warning is
    logged once, and :attr:`matches` contains the pairs. The callback records the activations of a reference network
    once and then releases the network.

    Metrics of weights do not require a probe. They compare layers of the same names, and also give a value for the
    whole network, named ``<name>/<metric>/whole network``.

    Values are named ``<name>/<metric>/<layer>``.

    Attributes:
        matches: Matched layer of the reference at the last measurement, by metric of activations and layer.
        probe: The samples; None without metrics of activations.

    Args:
        reference: A frozen network (an adapter, a module, or a name for :func:`hf_stitch.load`); ``"start"`` for the
            network in training at the first measurement; ``"previous"`` for the network at the previous measurement
            (the first measurement is then empty); or :class:`hf_stitch.Activations` of another run on the same samples.
        probe: Raw samples to measure on, a hundred or more, in a form that :meth:`hf_stitch.Samples.of` accepts.
            Required for metrics of activations.
        layers: Names of modules of the network in training. Default: its cuts. Metrics of weights include submodules of
            these; by default, they use all modules that they can read.
        metrics: Metrics, or their names in ``hf_stitch.registries.metrics``; metrics of outputs are not allowed.
        every: When to measure: ``"epoch"``, ``"eval"`` (at every evaluation) or a number of optimizer steps.
        pooling: Pooling of the activations (:meth:`hf_stitch.Representation.rows`).
        batch_size: Number of samples per forward pass.
        name: First part of the name of every value. Default: ``similarity_to_start``, ``similarity_to_previous`` or
            ``similarity_to_reference``.

    Example:
        >>> import torch, hf_stitch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> adapter = hf_stitch.load(net, example_inputs=torch.randn(2, 4))
        >>> callback = SimilarityCallback("start", probe=torch.randn(50, 4), layers=["0"])
        >>> {name: round(value, 6) for name, value in callback.measure(adapter, step=0).items()}
        {'similarity_to_start/linear_cka/0': 1.0}
    """

    @checked
    def __init__(
        self,
        reference: str | nn.Module | Adapter | Activations,
        probe: Data | None = None,
        layers: Iterable[str] | None = None,
        metrics: Iterable[str | Metric] = ("linear_cka",),
        *,
        every: Every = "epoch",
        pooling: Pooling = "mean",
        batch_size: Count = 64,
        name: str | None = None,
    ) -> None:
        own_state = reference if isinstance(reference, str) and reference in OWN else None
        super().__init__(name or f"similarity_to_{own_state or 'reference'}", every)
        self._asked = Asked.of(metrics, ROWS_OF[pooling])
        self._metrics, self._weight_metrics = self._asked.activations, self._asked.weights
        self.probe = optional_probe(probe, pooling, batch_size, runs=bool(self._metrics))
        if isinstance(reference, Activations):
            if self._weight_metrics:
                raise TypeError(
                    f"{next(iter(self._weight_metrics))} compares weights, but the reference contains activations; "
                    "pass a network as the reference"
                )
            assert self.probe is not None
            check_same_order(self.probe.samples.ids, reference.ids)
            if reference.pooling not in (None, pooling):
                raise ValueError(f"the reference activations have pooling={reference.pooling!r}, not {pooling!r}")
        self.matches: dict[str, dict[str, str]] = {}
        self._own = own_state  # "start" or "previous"; None for another network
        self._pending_reference: str | nn.Module | Adapter | Activations | None = reference  # until it is recorded
        self._layers = None if layers is None else tuple(layers)
        self._layer_names: tuple[str, ...] = ()
        self._reference: Activations | None = None
        self._reference_weights: Readings | None = None

    @property
    def _runs(self) -> bool:  # activations require forward passes, weights do not
        return bool(self._metrics)

    def _prepare(self, processes: Processes) -> None:
        if self._metrics:
            assert self.probe is not None
            self._layer_names = self._loaded.candidates if self._layers is None else self._layers
            if not self._layer_names:
                raise ValueError("no layers to measure: pass at least one name in layers=")
            self.probe.check_layers(self._loaded, self._layer_names)
        if self._weight_metrics:
            self._read(self._model)  # raises an error for unknown layers
        if self._own or self._pending_reference is None:
            return
        reference = self._pending_reference
        assert not isinstance(reference, str) or reference not in OWN
        if isinstance(reference, Activations):
            self._reference = reference
        else:
            self._read_reference(reference, processes)
        self._pending_reference = None
        if self._metrics and not self._by_name:
            logger.warning(
                "%s: the layers of the reference have different names; each layer is compared with the currently most "
                "similar layer of the reference (see .matches)",
                self.name,
            )

    def _read_reference(self, reference: str | nn.Module | Adapter, processes: Processes) -> None:
        """Record the activations and weights of a reference network that the metrics need."""
        if not self._metrics and isinstance(reference, nn.Module):
            model = unwrap(reference)
        else:
            adapter = load_on(reference, processes.device)
            model = adapter.model
        if model is self._model:
            raise ValueError("the reference is the network in training: use reference='start'")
        if self._weight_metrics:
            self._reference_weights = self._read(model)
            self._by_weights(self._read(self._model))  # errors occur before training
        if self._metrics:
            assert self.probe is not None
            check_comparable(self._loaded, adapter, self.probe.pooling)
            modules = dict(model.named_modules())
            layers = self._layer_names if modules.keys() >= set(self._layer_names) else adapter.layers
            self._reference = self.probe.activations(adapter, layers, processes)

    def _read(self, model: nn.Module) -> Readings:
        return read_weights(model, self._weight_metrics, self._layers)

    @property
    def _by_name(self) -> bool:
        return self._reference is not None and self._reference.values.keys() >= set(self._layer_names)

    def _figures(self, step: int, epoch: float | None, processes: Processes) -> dict[str, float]:
        is_first = self._reference is None and self._reference_weights is None
        figures = self._figures_of_activations(processes) if self._metrics else {}
        if self._weight_metrics:
            current = self._read(self._model)
            if self._reference_weights is None:
                self._reference_weights = current
            figures |= self._by_weights(current)
            if self._own == "previous":
                self._reference_weights = current
        return {} if is_first and self._own == "previous" else figures

    def _figures_of_activations(self, processes: Processes) -> dict[str, float]:
        assert self.probe is not None
        current = self.probe.activations(self._loaded, self._layer_names, processes)
        if self._reference is None:
            self._reference = current
        # Layers of the network and of the reference that are compared: each with its namesake, or all with all.
        comparisons = [([layer], [layer]) for layer in self._layer_names]
        if not self._by_name:
            comparisons = [(list(self._layer_names), list(self._reference.layers))]
        by_metric: dict[str, dict[str, tuple[str, float]]] = {label: {} for label in self._metrics}
        for layers, reference_layers in comparisons:
            for label, row in self._best_matches(current, layers, reference_layers, processes).items():
                by_metric[label] |= row
        self.matches = {label: {layer: match for layer, (match, _) in row.items()} for label, row in by_metric.items()}
        if self._own == "previous":
            self._reference = current
        return {f"{label}/{layer}": value for label, row in by_metric.items() for layer, (_, value) in row.items()}

    def _by_weights(self, current: Readings) -> dict[str, float]:
        assert self._reference_weights is not None
        figures: dict[str, float] = {}
        for label, metric in self._weight_metrics.items():
            values, undefined = same_layers(current[label], self._reference_weights[label], metric)
            for layer, reason in undefined.items():
                values[layer] = self._undefined(f"{label} of {layer}", ValueError(reason))
            figures |= {f"{label}/{layer}": value for layer, value in values.items()}
        return figures

    def _best_matches(
        self, current: Activations, layers: list[str], reference_layers: list[str], processes: Processes
    ) -> dict[str, dict[str, tuple[str, float]]]:
        """Find the most similar layer of the reference and its value, by metric and layer."""
        assert self._reference is not None
        run = Run(progress=False, processes=processes)
        try:
            for layer in layers:  # all processes have all activations, so all raise here or none does
                if not bool(current.values[layer].isfinite().all()):
                    raise ValueError(f"activations of layer {layer!r} are NaN or infinite")
            sides = (current, self._reference)
            atlas = Comparison(sides, self._asked, run, layers_a=layers, layers_b=reference_layers).run()
        except (ValueError, ArithmeticError) as error:
            undefined = self._undefined(f"similarity of {', '.join(layers)}", error)
            return {label: {layer: (reference_layers[0], undefined) for layer in layers} for label in self._metrics}
        by_metric: dict[str, dict[str, tuple[str, float]]] = {label: {} for label in self._metrics}
        for label, row in by_metric.items():
            best = atlas.best_matches(label)
            for place, layer in enumerate(layers):
                if layer in best:
                    row[layer] = best[layer], float(atlas[label][place, reference_layers.index(best[layer])])
                else:
                    reason = ValueError(atlas.why(label, layer, reference_layers[0]))
                    row[layer] = reference_layers[0], self._undefined(f"{label} of {layer}", reason)
        return by_metric

    def _begin(self) -> None:  # called at the start of each training run, resumed or not
        if self._own:
            self._reference = self._reference_weights = None

    def _save(self, folder: Path) -> None:  # called when the trainer saves a checkpoint, on rank 0
        if not self._own:  # the reference is not a state of this training run: nothing to save
            return
        if self._reference is not None:
            self._reference.save(folder / self._file)
        for label, weights in (self._reference_weights or {}).items():
            save_weights(weights, self._weights_file(folder, label), self._weight_metrics[label].name)

    def _resume(self, folder: Path, step: int) -> None:  # called after _begin, if training resumes
        if not self._own:
            return
        files = [folder / self._file] * bool(self._metrics)
        files += [self._weights_file(folder, label) for label in self._weight_metrics]
        if missing := [path for path in files if not path.is_file()]:
            raise ValueError(
                f"{self.name}: training resumes from step {step}, but the state of the {self._own} is not in the "
                f"checkpoint (expected {missing[0]}); attach the callback before training, and set "
                "TrainingArguments(resume_from_checkpoint=…) for another folder"
            )
        if self._metrics:
            assert self.probe is not None
            saved = Activations.load(folder / self._file)
            check_same_order(self.probe.samples.ids, saved.ids)
            if absent := [layer for layer in self._layer_names if layer not in saved.values]:
                raise ValueError(
                    f"{folder / self._file} lacks layer {absent[0]!r}; to resume, use layers among "
                    f"{', '.join(saved.layers)}"
                )
            self._reference = saved
        if self._weight_metrics:
            self._reference_weights = {
                label: load_weights(self._weights_file(folder, label), metric.name)
                for label, metric in self._weight_metrics.items()
            }
            for label, weights in self._read(self._model).items():
                saved_layers = tuple(self._reference_weights[label])
                if saved_layers != tuple(weights):
                    raise ValueError(
                        f"{self._weights_file(folder, label)} contains the layers {', '.join(saved_layers)}, but the "
                        f"callback measures {', '.join(weights)}; to resume, use the same layers"
                    )

    @property
    def _file(self) -> str:
        return f"{self.name}.safetensors"

    def _weights_file(self, folder: Path, label: str) -> Path:
        return folder / f"{self.name}-weights-{list(self._weight_metrics).index(label)}.safetensors"
