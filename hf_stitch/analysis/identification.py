"""Does a metric find the corresponding layer of another network?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_stitch.analysis.scoring import Score
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from rich.table import Table

Axis = Literal["a", "b"]
Pair = tuple[str, str]
AXES: dict[Axis, str] = {"a": "layers of a among those of b", "b": "layers of b among those of a"}

_RESAMPLES = 2000


@dataclass(frozen=True, eq=False)
class Identification(Result):
    """How often the most similar layer is the corresponding one.

    Attributes:
        pairs: The pairs of networks.
        layers: Names of the layers, in order, the same for all networks.
        hits: Axis -> (pairs, layers) bool. ``"a"``: for each layer of a, whether the most similar one of b corresponds;
            ``"b"``: for each layer of b among those of a.
        scores: Axis -> share of hits, with its interval.
        confidence: Of the intervals.
    """

    derived: ClassVar[tuple[str, ...]] = ("chance",)

    pairs: tuple[Pair, ...]
    layers: tuple[str, ...]
    hits: Mapping[Axis, NDArray[np.bool_]]
    scores: Mapping[Axis, Score]
    confidence: float

    @property
    def chance(self) -> float:
        """The share that guessing gets right."""
        return 1 / len(self.layers)

    def __getitem__(self, axis: Axis) -> Score:
        """The accuracy along an axis: ``identification["a"]``."""
        return self.scores[axis]

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each axis, pair and layer: ``axis``, ``a``, ``b``, ``layer``, ``hit``."""
        import pandas

        return pandas.DataFrame(
            [
                {"axis": axis, "a": a, "b": b, "layer": layer, "hit": bool(hit)}
                for axis, hits in self.hits.items()
                for (a, b), of_pair in zip(self.pairs, hits, strict=True)
                for layer, hit in zip(self.layers, of_pair, strict=True)
            ]
        )

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: a row for each axis."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            "axis", "accuracy", "hits", "chance",
            title=f"layer identification, {len(self.pairs)} pairs, {self.confidence:.0%} intervals",
        )  # fmt: skip
        for axis, hits in self.hits.items():
            accuracy = Text(str(self.scores[axis]))
            table.add_row(AXES[axis], accuracy, f"{hits.sum()} of {hits.size}", f"{self.chance:.3f}")
        return table


def identify_layers(
    values: ArrayLike | Mapping[Pair, ArrayLike],
    *,
    higher_is_better: bool,
    layers: Sequence[str] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Identification:
    """For each layer of one network, is the most similar one of another network the corresponding one?

    The layer identification of Kornblith et al. (2019, section 6.1; Balogh and Jelasity 2025, table 1), along both
    axes: a metric may find the layers of a among those of b and not the reverse. A tie for the most similar is a miss.

    The interval reaches, at either end, as far as the wider of two: the Bayesian bootstrap over *networks* (Rubin 1981;
    a pair weighs the product of its networks' weights), as pairs that share a network depend on each other; and
    Wilson's over all layers of all pairs, which is no point where every pair agrees.

    Args:
        values: (L, L) similarities, layers of a by layers of b, where layer i of a corresponds to layer i of b; or, for
            several pairs of networks, (name of a, name of b) -> such an array.
        higher_is_better: Whether a higher value means more similar.
        layers: Names of the layers; default: their numbers from 0.
        confidence: Between 0 and 1.
        seed: Of the bootstrap.

    Returns:
        Accuracies along both axes, with intervals and chance, 1 / L.

    Raises:
        ValueError: There are no pairs; values are not square, of different sizes, of fewer than 2 layers, or NaN;
            names of layers do not fit; or pairs of a network with itself are mixed with others, which are another
            question.

    Example:
        >>> found = identify_layers([[0.9, 0.5], [0.6, 0.6]], higher_is_better=True)
        >>> found["a"].value, found["b"].value, found.chance
        (0.5, 1.0, 0.5)
    """
    by_pair = values if isinstance(values, Mapping) else {("a", "b"): values}
    pairs = tuple(by_pair)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    stacked = np.stack(_squares(by_pair))
    names = tuple(map(str, range(stacked.shape[1]))) if layers is None else tuple(layers)
    if len(names) != stacked.shape[1]:
        raise ValueError(f"layers must name the {stacked.shape[1]} layers, got {len(names)} names")
    alike = stacked if higher_is_better else -stacked
    hits: dict[Axis, NDArray[np.bool_]] = {"a": _hits(alike), "b": _hits(alike.transpose(0, 2, 1))}
    weights = _pair_weights(pairs, np.random.default_rng(seed))
    return Identification(
        pairs, names, hits, {axis: _score(found, weights, confidence) for axis, found in hits.items()}, confidence
    )


def _squares(by_pair: Mapping[Pair, ArrayLike]) -> list[NDArray[np.float64]]:
    """The arrays, once nothing speaks against them."""
    if not by_pair:
        raise ValueError("there are no pairs of networks to identify layers in")
    if len({a == b for a, b in by_pair}) > 1:
        raise ValueError("pairs of a network with itself are another question than pairs of two: identify them apart")
    squares = [np.asarray(values, np.float64) for values in by_pair.values()]
    for pair, square in zip(by_pair, squares, strict=True):
        if square.ndim != 2 or len(square) < 2 or square.shape != (len(squares[0]),) * 2:
            raise ValueError(
                f"values of {pair} must be (L, L), layers of a by the corresponding layers of b, the same L >= 2 for "
                f"all pairs, got {square.shape}"
            )
        if np.isnan(square).any():
            raise ValueError(f"values of {pair} hold NaN: the most similar layer is unknown")
    return squares


def _hits(alike: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(pairs, L): whether the diagonal is above all else in its row."""
    rivals = alike.copy()
    own = np.einsum("pll->pl", rivals).copy()
    np.einsum("pll->pl", rivals)[:] = -np.inf
    return own > rivals.max(2)


def _pair_weights(pairs: Sequence[Pair], random: np.random.Generator) -> NDArray[np.float64]:
    """(resamples, pairs), each row summing to 1."""
    networks = {name: place for place, name in enumerate(dict.fromkeys(name for pair in pairs for name in pair))}
    drawn = random.dirichlet(np.ones(len(networks)), size=_RESAMPLES)
    weights = np.stack([drawn[:, sorted({networks[a], networks[b]})].prod(1) for a, b in pairs], 1)
    return weights / weights.sum(1, keepdims=True)


def _score(hits: NDArray[np.bool_], weights: NDArray[np.float64], confidence: float) -> Score:
    from scipy.stats import binomtest

    tail = (1 - confidence) / 2
    low, high = np.quantile(weights @ hits.mean(1), [tail, 1 - tail])
    wilson = binomtest(int(hits.sum()), hits.size).proportion_ci(confidence, method="wilson")
    return Score(float(hits.mean()), float(min(low, wilson.low)), float(max(high, wilson.high)))
