"""Layer identification: how often a metric or a matcher finds the corresponding layer of another network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_stitch.options import Natural, Within, checked
from hf_stitch.results import Result
from hf_stitch.scoring.measured import Score

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Axis = Literal["a", "b"]
Pair = tuple[str, str]  # names of network a and of network b
AXES: dict[Axis, str] = {"a": "layers of a among layers of b", "b": "layers of b among layers of a"}

_RESAMPLES = 2000  # number of bootstrap resamples


@dataclass(frozen=True, eq=False)
class Identification(Result):
    """Layer identification, returned by :func:`identify_layers`.

    For axis ``"a"``, the *candidates* of each layer of a are the layers of b; for axis ``"b"``, a and b are exchanged.
    A layer is a *hit* if the corresponding layer is more similar than all other candidates; a *tie* if another
    candidate is at least as similar, but the samples do not distinguish the two; and a *miss* otherwise.

    Attributes:
        pairs: The pairs of networks.
        layers: Names of the layers, in order, the same for all networks.
        hits: Axis -> (pairs, layers) bool.
        ties: Axis -> (pairs, layers) bool.
        candidates: Axis -> (pairs, layers) int64, number of candidates with a defined similarity. 0 if it is undefined
            for the corresponding layer: then the layer is neither hit, tie nor miss.
        winners: Axis -> (layers, layers) float64, the confusion matrix: how often each candidate (columns) was the most
            similar to each layer (rows). Equal candidates share.
        scores: Axis -> share of hits, with its interval.
        confidence: Confidence level of the intervals.
        tested: Whether differences from the most similar candidate were tested. If not, only equal values are ties.

    Example:
        >>> identification = identify_layers([[0.9, 0.5], [0.6, 0.6]], higher_is_better=True)
        >>> identification.verdicts("a").tolist()
        [['hit', 'tie']]
        >>> identification.chance
        0.5
    """

    derived: ClassVar[tuple[str, ...]] = ("chance",)

    pairs: tuple[Pair, ...]
    layers: tuple[str, ...]
    hits: Mapping[Axis, Flags]
    ties: Mapping[Axis, Flags]
    candidates: Mapping[Axis, NDArray[np.int64]]
    winners: Mapping[Axis, Array]
    scores: Mapping[Axis, Score]
    confidence: float
    tested: bool

    @property
    def chance(self) -> float:
        """Expected accuracy of guessing: ``1 / len(layers)`` if the similarity is defined for all candidates."""
        counts = np.concatenate([count[count > 0] for count in self.candidates.values()])
        return float(np.mean(1 / counts)) if len(counts) else np.nan

    def __getitem__(self, axis: Axis) -> Score:
        """Return the accuracy along an axis, e.g. ``identification["a"]``."""
        return self.scores[axis]

    @checked
    def verdicts(self, axis: Axis) -> NDArray[np.str_]:
        """Return the verdict on each layer, ``(pairs, layers)``: ``hit``, ``tie``, ``miss`` or ``undefined``."""
        without_match = np.where(self.candidates[axis] > 0, "miss", "undefined")
        return np.where(self.hits[axis], "hit", np.where(self.ties[axis], "tie", without_match))

    @checked
    def favourite(self, axis: Axis) -> tuple[str, float]:
        """Return the candidate that is most often the most similar one.

        Returns:
            Name of the layer, and its share of all layers. If it is always the same layer (a share of 1), the accuracy
            is exactly 1 / (number of layers) for any networks.
        """
        wins = self.winners[axis].sum(0)
        index = int(wins.argmax())
        return self.layers[index], float(wins[index] / wins.sum()) if wins.any() else np.nan

    def to_pandas(self) -> pandas.DataFrame:
        """Return the verdicts in long format.

        Returns one row per axis, pair and layer, with the columns ``axis``, ``a``, ``b``, ``layer``, ``verdict`` and
        ``hit``.
        """
        import pandas

        return pandas.DataFrame(
            [
                {"axis": axis, "a": a, "b": b, "layer": layer, "verdict": str(verdict), "hit": bool(verdict == "hit")}
                for axis in self.hits
                for (a, b), verdicts in zip(self.pairs, self.verdicts(axis), strict=True)
                for layer, verdict in zip(self.layers, verdicts, strict=True)
            ]
        )

    def plot(self) -> Figure:
        """Plot the confusion matrices of both axes: how often each candidate was the most similar one."""
        from hf_stitch.plots import heatmaps

        with np.errstate(invalid="ignore"):  # layers without a winner
            shares = {axis: self.winners[axis] / self.winners[axis].sum(1, keepdims=True) for axis in AXES}
        return heatmaps(
            [
                {
                    "values": shares[axis], "row_labels": self.layers, "column_labels": self.layers,
                    "low": 0, "high": 1, "title": f"{title}: {self.scores[axis]}", "row_title": "layer",
                    "column_title": "most similar layer", "label": "share of the pairs of networks",
                    "marked": np.eye(len(self.layers)),
                }
                for axis, title in AXES.items()
            ]
        )  # fmt: skip

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one row per axis."""
        from rich.table import Table
        from rich.text import Text

        pairs = "1 pair" if len(self.pairs) == 1 else f"{len(self.pairs)} pairs"
        table = Table(
            "axis", "accuracy", "hits", "ties", "misses", "chance", "found most often",
            title=f"layer identification, {pairs}, {self.confidence:.0%} intervals",
        )  # fmt: skip
        for axis in self.hits:
            verdicts, (layer, share) = self.verdicts(axis), self.favourite(axis)
            counts = {name: int((verdicts == name).sum()) for name in ("hit", "tie", "miss", "undefined")}
            table.add_row(
                AXES[axis], Text(str(self.scores[axis])),
                f"{counts['hit']} of {verdicts.size - counts['undefined']}", str(counts["tie"]), str(counts["miss"]),
                f"{self.chance:.3f}", Text(f"{layer}, always" if share == 1 else f"{layer}, {share:.0%}"),
            )  # fmt: skip
            if counts["undefined"]:
                table.caption = "without layers that have an undefined similarity to the corresponding layer"
        return table


@checked
def identify_layers(
    values: ArrayLike | Mapping[Pair, ArrayLike],
    *,
    higher_is_better: bool,
    as_good: ArrayLike | Mapping[Pair, ArrayLike] | None = None,
    layers: Sequence[str] | None = None,
    confidence: Annotated[float, Within(0, 1, above=True, below=True)] = 0.95,
    seed: Natural = 0,
) -> Identification:
    """Measure how often the most similar layer of another network is the corresponding layer.

    This is the layer identification test of Kornblith et al. (2019, section 6.1; Balogh and Jelasity 2025, table 1). It
    runs along both axes, because a metric may find the layers of a among the layers of b but not the reverse. The
    values may come from a metric, from the stitches of a matcher, or from distances in depth. Only hits count as
    accurate; a tie is a layer that the samples do not distinguish from the best one.

    Each end of the interval is the more extreme one of two intervals. The first is the Bayesian bootstrap over
    *networks* (Rubin 1981), where the weight of a pair is the product of the weights of its networks: pairs that share
    a network are dependent. The second is the Wilson interval over all layers of all pairs, which has a positive width
    even if all pairs agree.

    Args:
        values: (L, L) similarities, layers of a by layers of b, where layer i of a corresponds to layer i of b. NaN
            where undefined: such candidates are left out. For several pairs of networks, a mapping (name of a, name of
            b) -> such an array.
        higher_is_better: Whether a higher value means more similar.
        as_good: (2, L, L) bool. First, which layers of b the samples do not distinguish from the most similar one for
            each layer of a; second, the same with a and b exchanged (``StitchGrid.as_good``). For several pairs, a
            mapping. ``None``: differences were not tested.
        layers: Names of the layers; ``None`` uses their indices from 0.
        confidence: Confidence level of the intervals, between 0 and 1.
        seed: Seed of the bootstrap.

    Example:
        >>> found = identify_layers([[0.9, 0.5], [0.6, 0.7]], higher_is_better=True)
        >>> found["a"].value, found["b"].value, found.chance
        (1.0, 1.0, 0.5)
    """
    by_pair = values if isinstance(values, Mapping) else {("a", "b"): values}
    pairs = tuple(by_pair)
    similarities = np.stack(_squares(by_pair))
    count = similarities.shape[1]
    names = tuple(map(str, range(count))) if layers is None else tuple(layers)
    if len(names) != count:
        raise ValueError(f"layers must name the {count} layers, got {len(names)} names")
    alike = np.zeros((len(pairs), 2, count), bool) if as_good is None else _alike(as_good, pairs, count)
    better = np.where(np.isnan(similarities), -np.inf, similarities if higher_is_better else -similarities)
    better_by_axis: dict[Axis, Array] = {"a": better, "b": better.transpose(0, 2, 1)}
    outcomes = {axis: _outcomes(values, alike[:, i]) for i, (axis, values) in enumerate(better_by_axis.items())}
    hits, ties, candidates, winners = ({axis: outcome[i] for axis, outcome in outcomes.items()} for i in range(4))
    weights = _pair_weights(pairs, np.random.default_rng(seed))
    scores = {axis: _score(hits[axis], candidates[axis] > 0, weights, confidence) for axis in outcomes}
    return Identification(pairs, names, hits, ties, candidates, winners, scores, confidence, as_good is not None)


def _outcomes(better: Array, alike: Flags) -> tuple[Any, ...]:
    """Compare the candidates along one axis: return hits, ties, numbers of candidates, and winners."""
    corresponding = np.einsum("pll->pl", better)
    defined = corresponding > -np.inf
    best = better.max(2)
    winning = (better == best[..., None]) & defined[..., None]
    winner_count = winning.sum(2)
    hits = defined & (corresponding == best) & (winner_count == 1)
    ties = defined & ~hits & ((corresponding == best) | alike)
    candidates = np.where(defined, (better > -np.inf).sum(2), 0)
    return hits, ties, candidates, (winning / np.maximum(winner_count, 1)[..., None]).sum(0)


def _squares(by_pair: Mapping[Pair, ArrayLike]) -> list[Array]:
    """Return the arrays as float64 after validating them."""
    if not by_pair:
        raise ValueError("values must contain at least one pair of networks, got none")
    if len({a == b for a, b in by_pair}) > 1:
        raise ValueError(
            "values mixes pairs of one network with itself and pairs of two networks; pass them separately"
        )
    squares = [np.asarray(values, np.float64) for values in by_pair.values()]
    for pair, square in zip(by_pair, squares, strict=True):
        if square.ndim != 2 or len(square) < 2 or square.shape != (len(squares[0]),) * 2:
            raise ValueError(
                f"values of {pair} must be (L, L), layers of a by the corresponding layers of b, the same L >= 2 for "
                f"all pairs, got {square.shape}"
            )
        if np.isnan(square).all():
            raise ValueError(f"values of {pair} are all NaN; leave the pair out")
    return squares


def _alike(as_good: ArrayLike | Mapping[Pair, ArrayLike], pairs: Sequence[Pair], count: int) -> Flags:
    """Return whether the corresponding layer is as good as the best one, (pairs, 2, layers)."""
    by_pair = as_good if isinstance(as_good, Mapping) else {("a", "b"): as_good}
    if by_pair.keys() != set(pairs):
        raise ValueError(f"as_good must have the same pairs as values, {list(pairs)}, got {list(by_pair)}")
    stacks = [np.asarray(by_pair[pair]) for pair in pairs]
    for pair, flags in zip(pairs, stacks, strict=True):
        if flags.shape != (2, count, count) or flags.dtype != np.bool_:
            raise ValueError(
                f"as_good of {pair} must be bool of the shape {(2, count, count)}, got {flags.dtype} of the shape "
                f"{flags.shape}"
            )
    return np.einsum("pxll->pxl", np.stack(stacks))


def _pair_weights(pairs: Sequence[Pair], random: np.random.Generator) -> Array:
    """Draw Bayesian bootstrap weights of the pairs, (resamples, pairs), each row summing to 1."""
    networks = {name: index for index, name in enumerate(dict.fromkeys(name for pair in pairs for name in pair))}
    network_weights = random.dirichlet(np.ones(len(networks)), size=_RESAMPLES)
    weights = np.stack([network_weights[:, sorted({networks[a], networks[b]})].prod(1) for a, b in pairs], 1)
    return weights / weights.sum(1, keepdims=True)


def _score(hits: Flags, is_defined: Flags, weights: Array, confidence: float) -> Score:
    from scipy.stats import binomtest

    if not is_defined.any():
        return Score(np.nan, np.nan, np.nan)
    tail, used_pairs = (1 - confidence) / 2, is_defined.any(1)
    shares = weights[:, used_pairs] @ hits[used_pairs].sum(1) / (weights[:, used_pairs] @ is_defined[used_pairs].sum(1))
    low, high = np.quantile(shares, [tail, 1 - tail])
    wilson = binomtest(int(hits.sum()), int(is_defined.sum())).proportion_ci(confidence, method="wilson")
    return Score(float(hits.sum() / is_defined.sum()), float(min(low, wilson.low)), float(max(high, wilson.high)))
