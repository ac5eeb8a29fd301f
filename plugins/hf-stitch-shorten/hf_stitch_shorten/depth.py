"""Find the block with the best features, and cut the network off after it: :func:`best_depth`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_stitch import Adapter, Samples
from hf_stitch.adapters import load_on
from hf_stitch.data import Data, PairedSamples
from hf_stitch.options import Within, checked
from hf_stitch.results import Result
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch.scoring.measured import Score, as_score
from hf_stitch.tasks.base import resampled
from hf_stitch.tasks.vectors import tensor_of
from hf_stitch_shorten.folder import front_matter, save_network
from hf_stitch_shorten.forms import check_form
from hf_stitch_shorten.plain import rebuild_error, without
from hf_stitch_shorten.stacks import Stack, run as tapped, stacks
from hf_stitch_shorten.workflow import TOLERANCE

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

RESAMPLES, INNER = 1000, 3
"""Number of bootstrap resamples of the samples, and of inner folds that choose the depth."""

Place = tuple[str, str]
"""A block and a pooling."""


@dataclass(frozen=True)
class Depth(Result):
    """Accuracies of the features after each block, returned by :func:`best_depth`.

    Attributes:
        network: The network.
        n: Number of samples.
        data: Fingerprint of the samples.
        score: The probe.
        accuracies: Block -> pooling -> accuracy of a probe on held-out samples.
        block: Last block of the network after cutting.
        pooling: The best pooling at this block.
        chosen: Accuracy of choosing block and pooling, on folds not used for the choice.
        last: The same for the last block, where only the pooling is chosen.
        gain: Paired difference of both.
        model: The network up to the block; not saved with the result.
    """

    derived: ClassVar[tuple[str, ...]] = ("verdict",)

    network: str
    n: int
    data: str
    score: str
    accuracies: Mapping[str, Mapping[str, float]]
    block: str
    pooling: str
    chosen: Score
    last: Score
    gain: Score
    model: Adapter | None = field(default=None, compare=False, repr=False, metadata={"saved": False})

    @property
    def pays(self) -> bool:
        """Whether choosing the depth is better than the last block, with confidence."""
        return self.gain.low > 0

    @property
    def verdict(self) -> str:
        """Summary in a sentence."""
        blocks = list(self.accuracies)
        place = f"{self.block} ({blocks.index(self.block) + 1} of {len(blocks)} blocks, pooling {self.pooling})"
        accuracy = f"accuracy {self.chosen} on held-out folds, {self.last} after the last block"
        if self.pays:
            return f"The best features are after {place}: {accuracy}."
        return f"No block is better than the last one with confidence; the best is {place}: {accuracy}."

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the network up to the block as an ordinary folder, with its processor and a card.

        Args:
            folder: The folder; files of an earlier save are replaced atomically.

        Raises:
            ValueError: If the result was loaded from a file, without the network, or the network is a custom module.
        """
        title = f"{self.network}, cut off after {self.block}"
        save_network(
            self.model, Path(folder), f"{front_matter(self.model, self.network)}\n# {title}\n\n{self.verdict}\n"
        )

    def __rich__(self) -> Table:
        """Return a table of accuracies, blocks by poolings."""
        from rich.table import Table

        poolings = list(next(iter(self.accuracies.values())))
        table = Table(
            "block", *poolings, title=f"accuracy of {self.score} on {self.n} samples", caption=self.verdict,
            caption_justify="left",
        )  # fmt: skip
        for block, row in self.accuracies.items():
            table.add_row(
                block, *(f"{row[name]:.3f}" for name in poolings), style="bold" if block == self.block else ""
            )
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame of accuracies, blocks by poolings."""
        import pandas

        return pandas.DataFrame(self.accuracies).T

    def plot(self) -> Figure:
        """Plot the accuracy after each block.

        Returns:
            The matplotlib figure.
        """
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        self.to_pandas().plot(ax=axes, marker="o")
        axes.set(xlabel="cut off after", ylabel=f"accuracy of {self.score}")
        axes.axvline(list(self.accuracies).index(self.block), linestyle=":", color="gray")
        return figure


@checked
def best_depth(
    model: str | nn.Module | Adapter, data: Data, *,
    score: Literal["ridge", "neighbours"] = "ridge",
    folds: Annotated[int, Within(2)] = 5,
    **options: Unpack[RunOptions],
) -> Depth:  # fmt: skip
    """Find the block with the best features for labels, and cut the network off after it.

    The network is cut off after each block of its last stack (of a CNN, its last stage), like an ordinary network with
    fewer blocks: including its final norm. Its outputs are pooled to one vector per sample, and closed-form probes are
    fitted on these vectors. Block and pooling are chosen inside of each fold (nested cross-validation), so the choice
    is tested on held-out samples.

    Args:
        model: A network without a head (``hf_stitch.load(…, task="feature-extraction")``): an adapter, a module, or a
            name for :func:`hf_stitch.load`.
        data: Labelled samples, one class each; a few hundred.
        score: ``ridge``, with a penalty from leave-one-out cross-validation, or ``neighbours``, with five neighbours.
        folds: Number of folds of the data.
        **options: Options of the run: ``batch_size``, ``seed``, ``progress`` and ``accelerator``, as in
            :class:`hf_stitch.running.RunOptions`. Processes share the samples.

    Returns:
        The accuracies and the verdict; ``depth.save_pretrained(folder)`` saves the network up to the block.

    Raises:
        ValueError: If the data lack classes, the network has a head or lacks a stack of blocks, or its weights are not
            plain numbers.

    Example:
        >>> import torch, transformers, hf_stitch
        >>> config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        ...     intermediate_size=32, image_size=8, patch_size=4)
        >>> vit = hf_stitch.load(transformers.ViTModel(config, add_pooling_layer=False).eval())
        >>> images = [(torch.rand(3, 8, 8) + i % 2, i % 2) for i in range(60)]
        >>> depth = best_depth(vit, images, progress=False)
        >>> place = list(depth.accuracies).index(depth.block)
        >>> len(depth.accuracies), depth.model.model.config.num_hidden_layers == place + 1
        (3, True)
    """
    with Run.of(best_depth, options, takes=WITHOUT_STATE) as run:
        network, samples = load_on(model, run.processes.device), Samples.of(data)
        check_form(network)
        if samples.labels is None:
            raise ValueError("best_depth requires labelled samples, which decide which features are best")
        if network.task is not None:
            raise ValueError(
                f"best_depth requires features, but {type(network.model).__name__} has a head ({network.task}): load "
                "the backbone with hf_stitch.load(…, task='feature-extraction')"
            )
        if not (all_stacks := stacks(network)):
            raise ValueError(f"{type(network.model).__name__} does not contain a stack of blocks that could be cut off")
        stack, labels = all_stacks[-1], np.asarray(samples.labels)
        if len(counts := Counter(samples.labels)) < 2 or min(counts.values()) < folds + 1:
            raise ValueError(
                f"best_depth requires at least two classes, with more than {folds} samples each (folds={folds}), got "
                f"{dict(counts)}"
            )
        features = _features(network, stack.blocks, samples, run)
        make_probe = _probe(score)
        accuracies = {place: _right(make_probe, x, labels, folds, run.seed).mean() for place, x in features.items()}
        last_features = {place: x for place, x in features.items() if place[0] == stack.blocks[-1]}
        chosen, last = (_nested(make_probe, vectors, labels, folds, run.seed) for vectors in (features, last_features))
        weights = np.concatenate(list(resampled(len(labels), RESAMPLES, run.seed)))
        chosen_score, last_score, gain = (
            as_score(weights @ values / len(labels)) for values in (chosen, last, chosen - last)
        )
        block, pooling = max(accuracies, key=lambda place: accuracies[place])
        table: dict[str, dict[str, float]] = {}
        for (name, kind), value in accuracies.items():
            table.setdefault(name, {})[kind] = float(value)
        is_cut = block != stack.blocks[-1]
        short = _cut_off(network, stack, block, samples) if is_cut else network
        return Depth(
            str(network.reference),
            len(samples),
            samples.fingerprint,
            score,
            table,
            block,
            pooling,
            chosen_score,
            last_score,
            gain,
            short,
        )


def _features(
    network: Adapter, blocks: Sequence[str], samples: Samples, run: Run
) -> dict[Place, NDArray[np.float64]]:  # fmt: skip
    """Return the pooled outputs of the network cut off after each block, for each block and pooling."""
    chunks: dict[Place, list[Tensor]] = {}
    with torch.no_grad():
        for _, batch, _ in PairedSamples(samples, samples).batches(run, "reading features"):
            inputs = network.preprocess(batch.samples)
            taps = tapped(network, inputs, {}, blocks)
            for block in blocks:
                end = taps.outputs[blocks[-1]].replace(values=taps.outputs[block].values)
                values = tensor_of(network.decode(end, blocks[-1]), len(batch.samples))
                assert values is not None
                for pooling, vectors in _pooled(values, inputs.get(network.interface.mask)).items():
                    chunks.setdefault((block, pooling), []).append(vectors.double().cpu())
    gathered = run.processes.gather(chunks)
    return {place: torch.cat([chunk for part in gathered for chunk in part[place]]).numpy() for place in chunks}


def _cut_off(network: Adapter, stack: Stack, block: str, samples: Samples) -> Adapter:
    """Return the network up to a block, with the probed features as outputs."""
    inputs = network.preprocess(next(iter(samples.batches(2))).samples)
    with torch.no_grad():
        taps = tapped(network, inputs, {}, stack.blocks)
        end = taps.outputs[stack.blocks[-1]].replace(values=taps.outputs[block].values)
        expected = tensor_of(network.decode(end, stack.blocks[-1]), 2)
        for short in without(network, stack.name, stack.places(stack.blocks.index(block), len(stack.blocks) - 1)):
            outputs = tensor_of(short.forward(inputs), 2)
            assert expected is not None and outputs is not None
            if float((expected - outputs).abs().max()) <= TOLERANCE * float(expected.abs().max()):
                return short
    raise rebuild_error(network, f"up to {block}")


def _pooled(values: Tensor, mask: Any) -> dict[str, Tensor]:
    """Return one vector per sample for each pooling."""
    if values.dim() == 4:
        return {"mean": values.flatten(2).mean(2)}
    if values.dim() == 2:
        return {"output": values}
    weights = torch.ones(values.shape[:2], device=values.device) if mask is None else mask.to(values)
    last = (weights * torch.arange(1, values.shape[1] + 1, device=values.device)).argmax(1)
    mean = (values * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
    rows = torch.arange(len(values))
    return {"first": values[rows, weights.argmax(1)], "mean": mean, "last": values[rows, last]}


def _probe(score: str) -> Callable[[], Any]:
    """Return a function that creates a probe."""
    from sklearn.linear_model import RidgeClassifierCV
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if score == "neighbours":
        return lambda: KNeighborsClassifier(5, metric="cosine")
    return lambda: make_pipeline(StandardScaler(), RidgeClassifierCV(alphas=np.logspace(-1, 5, 13)))


def _right(
    make_probe: Callable[[], Any], x: NDArray[np.float64], labels: NDArray[np.int64], folds: int, seed: int
) -> NDArray[np.float64]:  # fmt: skip
    """Return which samples are predicted correctly by a probe fitted on the remaining folds."""
    from sklearn.model_selection import StratifiedKFold

    right = np.zeros(len(labels))
    for fit, test in StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, labels):
        right[test] = make_probe().fit(x[fit], labels[fit]).predict(x[test]) == labels[test]
    return right


def _nested(
    make_probe: Callable[[], Any], features: Mapping[Place, NDArray[np.float64]], labels: NDArray[np.int64], folds: int,
    seed: int,
) -> NDArray[np.float64]:  # fmt: skip
    """Return which samples are predicted correctly with the block and pooling chosen on the remaining folds."""
    from sklearn.model_selection import StratifiedKFold

    right = np.zeros(len(labels))
    for fit, test in StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels[:, None], labels):
        accuracies = {
            place: _right(make_probe, x[fit], labels[fit], INNER, seed).mean() for place, x in features.items()
        }
        best = features[max(accuracies, key=lambda place: accuracies[place])]
        right[test] = make_probe().fit(best[fit], labels[fit]).predict(best[test]) == labels[test]
    return right
