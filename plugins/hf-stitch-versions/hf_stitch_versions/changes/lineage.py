"""Test whether one network was derived from another, from their weights alone.

The null hypothesis is that B was trained independently of A. The order of the units of a hidden layer, and of the
channels of a residual stream, is then independent of A: B with permuted units is as likely as B. Three tests use this,
with the exact mean and variance over all permutations:

* *by place*: units of A against units of B at the same positions, by the cosines of their weights;
* *by place, in any basis*: the same, by quantities of each unit that rotations of the residual stream preserve: the
  norms of its weights, the cosines between them and its bias;
* *matched*: units are matched by half of their channels, and the second half of the channels is compared by place. This
  works for reordered units. The compared channels do not influence the matching.

If the units do not match, they are matched again after aligning the channels of B with the channels of A. This fourth
test is exact for untrained networks only: trained networks may agree in a common basis without a common ancestor. It
counts only if the cosine of matched weights reaches :data:`COSINE`.

The null does not hold for units that training puts in an order: nested widths, or "Matryoshka" representations.

A small p-value shows that A and B have a common ancestor, which may be the same initial weights; it does not show which
network came first. A large p-value proves nothing.

Unit matching is from Zhu et al., "Independence tests for language models" (ICML 2025, `arXiv:2502.12292
<https://arxiv.org/abs/2502.12292>`_), which compares a second matching with the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hf_stitch_versions.changes.units import Layer, layers

LEVEL = 1e-6
"""A verdict other than "no evidence" requires a p-value below this."""

COSINE = 0.5
"""Minimum matched cosine in an aligned basis: between the values of independent and of related networks."""

UNITS = 1024
"""Maximum number of compared units of A per layer."""

CHANNELS = 256
"""Maximum number of channels for matching, and for comparing."""

NO_LAYERS = "The lineage cannot be tested: A and B do not have a layer of hidden units of the same shape."
REASONS = {"derived": "units agree place by place", "derived, reordered": "units agree in another order"}
ROTATED = "; the channels between blocks were rotated or permuted"


@dataclass(frozen=True)
class BlockLineage:
    """Test of one block: number of hidden units, logarithms of p-values as in :class:`Lineage`, and cosine."""

    block: str
    units: int
    log10_p_place: float
    log10_p_matched: float
    cosine: float


@dataclass(frozen=True)
class Lineage:
    """Whether B was derived from A.

    Attributes:
        verdict: "derived" if ``p_place`` is below :data:`LEVEL`, "derived, reordered" if only ``p_matched`` is,
            otherwise "no evidence".
        p_place: probability of at least this agreement of units by place if B was trained independently.
        p_matched: the same after matching units; works for reordered units and a rotated residual stream.
        log10_p_place: decimal logarithm of ``p_place``, which may be too small for a float.
        log10_p_matched: decimal logarithm of ``p_matched``.
        cosine: cosine of the weights of matched units, on channels not used for matching; 0 without such channels.
        cosine_null: the same with shifted channels of B, as a baseline of ``cosine``.
        rotated: whether the residual stream was rotated or permuted.
        blocks: the values of blocks with hidden units.
        sentence: the result in plain English.
    """

    verdict: str
    p_place: float
    p_matched: float
    log10_p_place: float
    log10_p_matched: float
    cosine: float
    cosine_null: float
    rotated: bool
    blocks: tuple[BlockLineage, ...]
    sentence: str


# -- tests by place ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Evidence:
    """Statistic that is standard normal under the null, and decimal logarithm of its smallest possible p-value."""

    z: float
    least: float

    @property
    def log10_p(self) -> float:
        """Decimal logarithm of the one-sided p-value."""
        return max(float(stats.norm.logsf(self.z)) / math.log(10), self.least)


def combine(parts: Sequence[Evidence]) -> Evidence:
    """Combine independent evidence (Stouffer)."""
    return Evidence(sum(part.z for part in parts) / math.sqrt(max(len(parts), 1)), sum(part.least for part in parts))


def standard(s: Tensor) -> Tensor:
    """Scale a square matrix so that its trace has mean 0 and variance 1 over all orders of its columns."""
    s = s.double()
    s = s - s.mean(0) - s.mean(1, keepdim=True) + s.mean()
    norm = float(s.norm())
    return s * (math.sqrt(len(s) - 1) / norm) if norm > 1e-12 else torch.zeros_like(s)


def by_place(s: Tensor) -> Evidence:
    """Test whether the diagonal of a similarity matrix is larger than for randomly permuted columns.

    >>> round(by_place(torch.eye(5)).z, 6)  # five fixed points, where one is the mean and the variance
    4.0
    """
    return Evidence(float(standard(s).trace()), -math.lgamma(len(s) + 1) / math.log(10))


def by_cosines(one: Sequence[Tensor], two: Sequence[Tensor]) -> Evidence:
    """Test units by place, with the mean cosine of their incoming and outgoing weights."""
    cosines = [_unit(x[:UNITS]) @ _unit(y[:UNITS]).T for x, y in zip(one, two, strict=True)]
    return by_place(torch.stack(cosines).sum(0))


def by_invariants(layer: Layer, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Evidence:
    """Test units by place, with quantities that rotations preserve: norms of weights, cosines between them, biases."""
    biases = [name for name in (f"{x.removesuffix('weight')}bias" for x in layer.before) if name in a and name in b]
    tables = []
    for of in (a, b):
        unit_weights = [x[:UNITS] for x in layer.own(of)]
        pairs = [(x, y) for i, x in enumerate(unit_weights) for y in unit_weights[:i] if x.shape == y.shape]
        columns = [x.flatten(1).norm(dim=1) for x in unit_weights] + [(_unit(x) * _unit(y)).sum(1) for x, y in pairs]
        columns += [part[:UNITS] for x in biases for part in of[x].detach().cpu().float().split(layer.units)]
        tables.append(_unit(torch.stack([x - x.mean() for x in columns])))
    return by_place(tables[0].T @ tables[1])


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x.flatten(1), dim=1)


# -- matched units -----------------------------------------------------------------------------------------------------
@dataclass
class Match:
    """Matched units of A and B, and the agreement of the channels not used for matching."""

    order: Tensor
    channels: dict[int, Tensor]  # number of channels -> their standard similarity
    products: Tensor  # of the compared weights: A with B, A with A, B with B, A with shifted B


def match(
    one: Sequence[Tensor], two: Sequence[Tensor], names: Sequence[str], bases: Mapping[str, Tensor] | None = None
) -> Match:
    """Match units by half of their channels, and compare the second half.

    Only named channels (:class:`Layer`) are divided: unnamed ones have the same order in all networks, so all of them
    match units.
    """
    similarity, compared = torch.zeros(()), []
    for x, y, name in zip(one, two, names, strict=True):
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(x.shape[1]))
        matched, rest = (half[:CHANNELS] for half in order.tensor_split(2)) if name else (order, order[:0])
        compared.append(rest)
        similarity = similarity + _unit(x[:UNITS, matched]) @ _unit(_in_basis(y, matched, name, bases)).T
    matching = Match(_assignment(similarity), {}, torch.zeros(4, dtype=torch.float64))
    for x, y, name, rest in zip(one, two, names, compared, strict=True):
        if name:
            x, y = x[:UNITS, rest].double(), _in_basis(y[matching.order], rest, name, bases).double()
            s, count = torch.einsum("ucp,udp->cd", x, y), x.shape[1]
            matching.channels[count] = matching.channels.get(count, 0) + standard(s)
            matching.products += torch.stack([s.trace(), x.square().sum(), y.square().sum(), s.roll(1, 0).trace()])
    return matching


def _in_basis(x: Tensor, channels: Tensor, name: str, bases: Mapping[str, Tensor] | None) -> Tensor:
    """Return some channels of weights (units, channels, places), in the basis for their name if ``bases`` has one."""
    return torch.einsum("ucp,cd->udp", x, bases[name][:, channels]) if bases and name in bases else x[:, channels]


def match_all(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    hidden_layers: Sequence[Layer],
    bases: dict[str, Tensor] | None = None,
) -> list[Match]:
    """Match the units of all layers, with the channels of B aligned with A if bases are passed.

    Args:
        a: weights of A.
        b: weights of B.
        hidden_layers: layers of hidden units.
        bases: name of channels -> matrix that maps them from B to A. Missing bases are added during matching, as the
            order of the units that write these channels.
    """
    matches = []
    for layer in hidden_layers:
        one, two = layer.weights(a), layer.weights(b)
        names = [layer.reads] * (len(one) - 1) + [layer.writes]
        missing = bases is not None and layer.writes != "" and layer.writes not in bases
        usable = slice(-1 if missing else None)  # without a basis, the last weight cannot be compared
        matches.append(match(one[usable], two[usable], names[usable], bases))
        order = matches[-1].order
        if bases is not None and len(order) == layer.units:
            bases[f"units before {layer.after}"] = _permutation(order)
            if missing and layer.writes.startswith("stream"):
                x, y = one[-1].transpose(0, 1), two[-1][order].transpose(0, 1)
                bases[layer.writes] = _permutation(_assignment(_unit(x) @ _unit(y).T))
    return matches


def _assignment(similarity: Tensor) -> Tensor:
    """Return the column assigned to each row, so that the sum of similarities is largest."""
    return torch.as_tensor(linear_sum_assignment(similarity.numpy(), maximize=True)[1])


def _permutation(order: Tensor) -> Tensor:
    return torch.eye(len(order))[order].T


def summary(matches: Sequence[Match]) -> tuple[float, float, float]:
    """Return log10 of the p-value of all layers, their cosine, and the cosine with shifted channels.

    Layers with equal numbers of channels are tested together, because they may share a residual stream.
    """
    counts = sorted({count for matching in matches for count in matching.channels})
    sums = [sum((x.channels[count] for x in matches if count in x.channels), torch.zeros(())) for count in counts]
    both, one, two, shifted = sum((x.products for x in matches), torch.zeros(4)).tolist()
    norms = math.sqrt(one * two) or 1.0
    return combine([by_place(x) for x in sums]).log10_p, both / norms, shifted / norms


# -- another basis -----------------------------------------------------------------------------------------------------
def first_bases(a: Mapping[str, Tensor], b: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    """Find the basis of the first layer's residual stream, from the first weight that writes it: embedding or stem."""
    name = next(name for name, x in a.items() if name in b and x.dim() in (2, 4))
    one, two, width = *(x[name].detach().cpu().float() for x in (a, b)), a[layer.before[0]].shape[1]
    if not layer.reads.startswith("stream") or one.shape[1:] != two.shape[1:] or width not in one.shape[:2]:
        return {}
    one, two = (x if x.shape[1] == width else x.flatten(1).T for x in (one, two))
    rows = min(len(one), len(two))
    # few rows do not determine a rotation, so the channels are only permuted
    return {layer.reads: nearest_map(one[:rows], two[:rows], permuted=rows < 2 * width)}


def nearest_map(x: Tensor, y: Tensor, permuted: bool) -> Tensor:
    """Find the permutation or the rotation (orthogonal Procrustes) of the columns of y that is nearest to x."""
    if permuted:
        return _permutation(_assignment(_unit(x.T) @ _unit(y.T).T))
    left, _, right = torch.linalg.svd(y.T @ x)
    return left @ right


# -- the verdict -------------------------------------------------------------------------------------------------------
def lineage(a: Mapping[str, Tensor], b: Mapping[str, Tensor], blocks: Sequence[str]) -> Lineage:
    """Test whether network B was derived from network A: fine-tuned, quantized, pruned, merged, reordered or rotated.

    Args:
        a: name of parameter -> weight of A, floating, outputs first; embeddings are (vocabulary, width).
        b: weights of B under the names of A; weights of only one network are ignored.
        blocks: names of the blocks of A, in order.

    Raises:
        ValueError: if a common weight contains values that are not finite.

    >>> network = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    >>> a = dict(network.named_parameters())
    >>> lineage(a, {name: weight.bfloat16() for name, weight in a.items()}, []).verdict
    'derived'
    """
    for name, weights in ((name, weights) for name in a if name in b for weights in (a, b)):
        if not weights[name].isfinite().all():
            side = "A" if weights is a else "B"
            raise ValueError(f"{name} of {side} contains values that are not finite: repair or omit the network.")
    hidden_layers = layers(a, b, blocks)
    tests_by_place = [
        [by_cosines(layer.own(a), layer.own(b)) for layer in hidden_layers],
        [by_invariants(layer, a, b) for layer in hidden_layers],
    ]
    log_place = _corrected_minimum([combine(parts).log10_p for parts in tests_by_place])
    better = min(tests_by_place, key=lambda parts: combine(parts).log10_p)
    matches, rotated = match_all(a, b, hidden_layers), False
    log_matched = summary(matches)[0]
    if hidden_layers and log_matched >= math.log10(LEVEL):
        aligned = match_all(a, b, hidden_layers, first_bases(a, b, hidden_layers[0]))
        log_aligned, cosine, _ = summary(aligned)
        agree = log_aligned < math.log10(LEVEL) and cosine >= COSINE
        rotated = agree and hidden_layers[0].reads != ""
        log_matched = _corrected_minimum([log_matched, log_aligned if agree else 0.0])
        matches = aligned if cosine > summary(matches)[1] else matches
    _, cosine, null = summary(matches)
    rows = []
    for block in dict.fromkeys(layer.block for layer in hidden_layers):
        inside = [i for i, layer in enumerate(hidden_layers) if layer.block == block]
        log_p, agreement, _ = summary([matches[i] for i in inside])
        units = sum(hidden_layers[i].units for i in inside)
        rows.append(BlockLineage(block, units, combine([better[i] for i in inside]).log10_p, log_p, agreement))
    derived, reordered = (x < math.log10(LEVEL) for x in (log_place, log_matched))
    verdict = "derived" if derived else "derived, reordered" if reordered else "no evidence"
    sentence = _sentence(verdict, rotated, log_place, log_matched, cosine) if hidden_layers else NO_LAYERS
    return Lineage(
        verdict, 10**log_place, 10**log_matched, log_place, log_matched, cosine, null, rotated, tuple(rows), sentence
    )


def _sentence(verdict: str, rotated: bool, log_place: float, log_matched: float, cosine: float) -> str:
    """Return the result in plain English."""
    if verdict == "no evidence":
        return (
            "The weights do not show that the second network is derived from the first, or both from a common ancestor "
            f"(p = {10**log_place:.2g} by place, {10**log_matched:.2g} matched). "
            "This does not prove that they were trained independently."
        )
    how = f"{REASONS[verdict]} (p = 1e{min(log_place, log_matched):.0f}, matched weights have a cosine of {cosine:.2f})"
    basis_note = ROTATED if rotated else ""
    return f"The second network is derived from the first, or both from a common ancestor: {how}{basis_note}."


def _corrected_minimum(logs: Sequence[float]) -> float:
    """Return the logarithm of the smallest p-value, corrected for the number of tests."""
    return min(0.0, min(logs) + math.log10(len(logs)))
