"""Layer identification: how often a metric finds the corresponding layer of another network."""

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
    """Layer identification accuracy, returned by :func:`identify_layers`.

    Attributes:
        pairs: The pairs of networks.
        layers: Names of the layers, in order, the same for all networks.
        hits: Axis -> (pairs, layers) bool. For axis ``"a"``, whether the most similar layer of b is the one that
            corresponds to each layer of a; for axis ``"b"``, the same with a and b exchanged.
        scores: Axis -> share of hits, with its interval.
        confidence: Confidence level of the intervals.

    Example:
        >>> identification = identify_layers([[0.9, 0.5], [0.6, 0.6]], higher_is_better=True)
        >>> identification.hits["a"].tolist()
        [[True, False]]
        >>> identification.chance
        0.5
    """

    derived: ClassVar[tuple[str, ...]] = ("chance",)

    pairs: tuple[Pair, ...]
    layers: tuple[str, ...]
    hits: Mapping[Axis, NDArray[np.bool_]]
    scores: Mapping[Axis, Score]
    confidence: float

    @property
    def chance(self) -> float:
        """Expected accuracy of guessing, ``1 / len(layers)``."""
        return 1 / len(self.layers)

    def __getitem__(self, axis: Axis) -> Score:
        """Return the accuracy along an axis, e.g. ``identification["a"]``."""
        return self.scores[axis]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the hits in long format.

        Returns:
            One row per axis, pair and layer, with the columns ``axis``, ``a``, ``b``, ``layer`` and ``hit``.
        """
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
        """Return the table that ``rich`` prints, one row per axis."""
        from rich.table import Table
        from rich.text import Text

        pairs = "1 pair" if len(self.pairs) == 1 else f"{len(self.pairs)} pairs"
        table = Table(
            "axis", "accuracy", "hits", "chance",
            title=f"layer identification, {pairs}, {self.confidence:.0%} intervals",
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
    """Measure how often the most similar layer of another network is the corresponding layer.

    This is the layer identification test of Kornblith et al. (2019, section 6.1; Balogh and Jelasity 2025, table 1). It
    is run along both axes, because a metric may find the layers of a among the layers of b but not the reverse. A tie
    for the most similar layer counts as a miss.

    Each end of the interval is the more extreme one of two intervals. The first is the Bayesian bootstrap over
    *networks* (Rubin 1981), where the weight of a pair is the product of the weights of its networks: pairs that share
    a network are dependent. The second is the Wilson interval over all layers of all pairs, which has a positive width
    even if all pairs agree.

    Args:
        values: (L, L) similarities, layers of a by layers of b, where layer i of a corresponds to layer i of b. For
            several pairs of networks, a mapping (name of a, name of b) -> such an array.
        higher_is_better: Whether a higher value means more similar.
        layers: Names of the layers; ``None`` uses their indices from 0.
        confidence: Confidence level of the intervals, between 0 and 1.
        seed: Seed of the bootstrap.

    Returns:
        The accuracies along both axes with their intervals, and the chance level, 1 / L.

    Raises:
        ValueError: If there are no pairs; ``confidence`` is out of range; values are not square, differ in size, have
            fewer than 2 layers or contain NaN; the number of layer names is wrong; or pairs of a network with itself
            are mixed with pairs of two networks.

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
    similarities = stacked if higher_is_better else -stacked
    hits: dict[Axis, NDArray[np.bool_]] = {"a": _hits(similarities), "b": _hits(similarities.transpose(0, 2, 1))}
    weights = _pair_weights(pairs, np.random.default_rng(seed))
    return Identification(
        pairs, names, hits, {axis: _score(found, weights, confidence) for axis, found in hits.items()}, confidence
    )


def _squares(by_pair: Mapping[Pair, ArrayLike]) -> list[NDArray[np.float64]]:
    """Return the arrays as float64 after validating them."""
    if not by_pair:
        raise ValueError("there are no pairs of networks in values; pass at least one")
    if len({a == b for a, b in by_pair}) > 1:
        raise ValueError(
            "pairs of a network with itself cannot be mixed with pairs of two networks; pass them separately"
        )
    squares = [np.asarray(values, np.float64) for values in by_pair.values()]
    for pair, square in zip(by_pair, squares, strict=True):
        if square.ndim != 2 or len(square) < 2 or square.shape != (len(squares[0]),) * 2:
            raise ValueError(
                f"values of {pair} must be (L, L), layers of a by the corresponding layers of b, the same L >= 2 for "
                f"all pairs, got {square.shape}"
            )
        if np.isnan(square).any():
            raise ValueError(f"values of {pair} contain NaN, so that the most similar layer is undefined; leave it out")
    return squares


def _hits(similarities: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(pairs, L) bool: whether the diagonal entry is strictly the greatest of its row."""
    rivals = similarities.copy()
    own = np.einsum("pll->pl", rivals).copy()
    np.einsum("pll->pl", rivals)[:] = -np.inf
    return own > rivals.max(2)


def _pair_weights(pairs: Sequence[Pair], random: np.random.Generator) -> NDArray[np.float64]:
    """Draw Bayesian bootstrap weights of the pairs, (resamples, pairs), each row summing to 1."""
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
