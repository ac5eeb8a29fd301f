"""What a comparison is asked for, and of which networks: checked once, for two sides and for many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_stitch.adapters import Adapter, load_on, unwrap
from hf_stitch.adapters.checks import check_meet
from hf_stitch.adapters.loading import NetworkLike
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison.alignment import Align, aligned
from hf_stitch.analysis.comparison.rows import POOLINGS, Rows, per_sample
from hf_stitch.analysis.comparison.sides import Network, Reader, Side
from hf_stitch.analysis.comparison.weights import WeightSide
from hf_stitch.data import Samples, check_same_order
from hf_stitch.metrics import ActivationMetric, Metric, WeightMetric
from hf_stitch.reference import weights_hash
from hf_stitch.registry import registries
from hf_stitch.running import Run

Comparable = NetworkLike | Activations


@dataclass(frozen=True)
class Asked:
    """Metrics by their labels, those of activations and those of weights, and which vectors are rows."""

    activations: Mapping[str, ActivationMetric]
    weights: Mapping[str, WeightMetric]
    rows: Rows = "mean"
    align: Align = "tokens"

    @classmethod
    def of(
        cls, metrics: Iterable[str | Mapping[str, Any] | Metric], rows: Rows = "mean", align: Align = "tokens"
    ) -> Asked:
        """Check what is asked for, and build the metrics."""
        if align == "offsets" and rows != "positions":
            raise ValueError(f"align='offsets' needs rows='positions', got rows={rows!r}: its rows are not tokens")
        activations: dict[str, ActivationMetric] = {}
        weights: dict[str, WeightMetric] = {}
        for label, metric in registries.metrics.build_all(metrics, needed=True).items():
            if isinstance(metric, WeightMetric):
                weights[label] = metric
            elif not isinstance(metric, ActivationMetric):
                raise TypeError(
                    f"{metric!r} is neither an ActivationMetric nor a WeightMetric; derive it from one of them"
                )
            elif not metric.routes:
                raise ValueError(f"metric {label} compares {metric.statistic}, not layers; call its function instead")
            else:
                activations[label] = metric
        return cls(activations, weights, rows, align)

    def check(self, run: Run, *data: Any, **tests: int) -> None:
        """Refuse samples and tests of samples that these metrics, or these rows, have no use for."""
        tested = any(tests.values())
        if self.weights and (run.planning or tested):
            raise ValueError(
                f"{', '.join(self.weights)} compares weights: it has no plan, no permutations and no resamples"
            )
        if self.weights and not self.activations and any(each is not None for each in data):
            raise ValueError(f"{', '.join(self.weights)} compares weights, without samples; leave data out")
        if tested and not per_sample(self.rows):
            raise ValueError(
                f"{', '.join(tests)} of layers exchange or leave out whole samples, which takes one row per sample: "
                "use rows='mean', 'flat', 'cls' or 'last'. For the positions of two layers, use "
                "hf_stitch.analysis.permutation_test(…, samples=…) or bootstrap(…, samples=…)"
            )


class Sides:
    """Networks and saved activations by name. Each network is loaded once, whatever is asked of it."""

    def __init__(self, given: Mapping[str, Comparable], run: Run) -> None:
        self._given, self._device = given, run.processes.device
        self._loaded: dict[object, Adapter] = {}

    def _load(self, network: str | nn.Module | Adapter) -> Adapter:
        key = network if isinstance(network, str) else id(network)
        if key not in self._loaded:
            self._loaded[key] = load_on(network, self._device)
        return self._loaded[key]

    def weights(self) -> dict[str, WeightSide]:
        """Return the networks whose weights are compared. A module needs no example inputs."""
        found = {}
        for name, network in self._given.items():
            if isinstance(network, Activations):
                raise TypeError(f"{name} is saved activations, which contain no weights; pass the network itself")
            if isinstance(network, nn.Module):
                module: nn.Module = unwrap(network)
                described: dict[str, Any] = {"class": type(module).__name__, "weights": weights_hash(module)}
            else:
                adapter = self._load(network)
                module = adapter.model
                described = {"reference": adapter.pinned.to_dict(), "class": type(module).__name__}
            found[name] = WeightSide(module, described)
        return found

    def reading(self, asked: Asked, data: Any, paired_data: Any = None) -> dict[str, Side]:
        """Return all sides, of which the last one reads the paired data; check that they meet."""
        both = {"data": data, "paired_data": paired_data}
        given = {argument: each for argument, each in both.items() if each is not None}
        reads = dict.fromkeys(self._given, "data")
        if paired_data is not None:
            reads[[*reads][-1]] = "paired_data"
        for argument in given:
            own = [name for name, what in reads.items() if what == argument]
            if all(isinstance(self._given[name], Activations) for name in own):
                are = "are" if len(own) > 1 else "is"
                raise ValueError(
                    f"{' and '.join(own)} {are} saved activations, which take no data; leave {argument} out"
                )
        readers = {argument: Reader(Samples.of(each)) for argument, each in given.items()}
        sides = {name: self._side(name, readers.get(argument), asked) for name, argument in reads.items()}
        first, *others = sides.values()
        for side in others:
            check_same_order(*(s.reader.samples if isinstance(s, Network) else s.ids for s in (first, side)))
            if isinstance(first, Network) and isinstance(side, Network):
                # With aligned offsets the tokenizers may differ, so the check is that of a pooled comparison.
                check_meet(first.adapter, side.adapter, "mean" if asked.align == "offsets" else POOLINGS[asked.rows])
        return sides

    def _side(self, name: str, reader: Reader | None, asked: Asked) -> Side:
        given = self._given[name]
        if isinstance(given, Activations):
            if given.pooling not in (None, POOLINGS[asked.rows]):
                raise ValueError(
                    f"the activations of {name} were recorded with pooling={given.pooling!r}, and rows={asked.rows!r} "
                    f"needs pooling={POOLINGS[asked.rows]!r}"
                )
            if asked.rows == "tokens" and given.pooling == "none":
                raise ValueError(
                    f"the activations of {name} have no prefix tokens, which rows='tokens' needs: use rows='positions'"
                )
            return given
        if reader is None:
            raise ValueError(f"{name} is a network and needs samples to run on: pass data")
        return Network(self._load(given), reader)

    def pair(self, asked: Asked, data: Any, paired_data: Any) -> tuple[Side, ...]:
        """Return both sides, or a single one if they are the same network or activations on the same samples."""
        a, b = self.reading(asked, data, paired_data).values()
        one = a is b
        if isinstance(a, Network) and isinstance(b, Network) and a.reader is b.reader:
            one = a.adapter.model is b.adapter.model and a.adapter.processor is b.adapter.processor
        sides = (a,) if one else (a, b)
        return aligned(sides) if asked.align == "offsets" else sides
