"""Propositions 2.1 and 2.4 and theorems 2.5 and 2.7 of Chen, Miao & Qiu 2023, measured on random atoms (figure 8a).

python -m filter_atoms.propositions --out OUT
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from filter_atoms.experiment import PAPER_TITLE, claim, footer, leave
from matplotlib.figure import Figure
from numpy.typing import NDArray
from study import markdown, parser, verdicts

NAME = "propositions"
Array = NDArray[np.float64]
SIDE = 3
ATOMS = (1, 2, 3, 6, 9)
EQUAL = 1e-6
"""Largest difference that counts as rounding."""
CONSTANT = 0.1
"""Largest coefficient of variation of S_CCA / S_Atom with which the relation counts as linear."""
LEAST = 0.1
"""Least S_Atom of the pairs whose ratio is looked at: below, a small denominator decides."""
NEAR = 0.8
"""S_Atom of networks that were trained from one start is above this."""


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment.

    Attributes:
        draws: Number of random pairs of sets of atoms, for each setting.
        positions: Number of rows of the features.
    """

    draws: int
    positions: int


PRESETS = {"small": Preset(2_000, 500), "paper": Preset(20_000, 2_000), "test": Preset(60, 60)}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, presets=PRESETS).parse_args()
    preset, random = PRESETS[arguments.preset], np.random.default_rng(0)
    features, bounds = changes(random, preset.draws)
    record = {
        "preset": arguments.preset,
        "sizes": preset,
        "proposition_2_1": {
            "exceeded": int((features > bounds).sum()),
            "ratio": quantiles(features / bounds, (50, 100)),
        },
        "proposition_2_4": [orthonormal(random, atoms, preset.draws) for atoms in ATOMS],
        "theorem_2_5": [
            independent(random, preset, atoms, white) for atoms in (3, 6) for white in (True, False)
        ],
        "theorem_2_7": [
            mixed(random, preset, decorrelated, white) for decorrelated in (True, False) for white in (True, False)
        ],
    }  # fmt: skip
    leave(NAME, record, page, {"propositions": picture(features, bounds)}, arguments.out)


# -- Proposition 2.1 ---------------------------------------------------------------------------------------------------


def changes(random: np.random.Generator, draws: int) -> tuple[Array, Array]:
    """Draw pairs of sets of 9 atoms for one layer of 3 × 4 channels and one image of 8×8 pixels, all normal.

    Returns:
        Changes of the features ``(draws,)`` and their bounds by proposition 2.1.
    """
    image = np.pad(random.standard_normal((3, 8, 8)), ((0, 0), (1, 1), (1, 1)))
    patches = np.lib.stride_tricks.sliding_window_view(image, (SIDE, SIDE), axis=(1, 2)).reshape(3, 64, 9)
    coefficients = random.standard_normal((4, 3, 9))
    # Steps of many lengths, for a figure over the whole range.
    steps = random.standard_normal((draws, 9, 9)) * random.uniform(0, 2, (draws, 1, 1))
    changed = np.einsum("oim,ibp,nmp->nob", coefficients, patches, steps, optimize=True)
    widest = np.sqrt((patches**2).sum((0, 2)).max())
    bound = np.linalg.norm(coefficients) * widest * np.sqrt(64) * np.linalg.norm(steps, axis=(1, 2))
    return np.linalg.norm(changed, axis=(1, 2)), bound


def picture(features: Array, bounds: Array) -> Figure:
    """Draw figure 8a: the change of the features against its bound."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(bounds, features, 3, label="random atoms")
    axes.plot([0, bounds.max()], [0, bounds.max()], "k-", linewidth=1, label="bound of proposition 2.1")
    axes.set(xlabel="bound", ylabel="change of the features", yscale="symlog")
    axes.legend(frameon=False)
    return figure


# -- Proposition 2.4 ---------------------------------------------------------------------------------------------------


def orthonormal(random: np.random.Generator, atoms: int, draws: int) -> dict[str, Any]:
    """Compare S_Gras with S_Atom for random orthonormal atoms, and for those whose product is symmetric psd."""
    one, other = (_frames(random, atoms, draws) for _ in range(2))
    left, cosines, right = np.linalg.svd(one.swapaxes(1, 2) @ other)
    grassmann, cosine = cosines.mean(1), (one * other).sum((1, 2)) / atoms
    turned = other @ (right.swapaxes(1, 2) @ left.swapaxes(1, 2))  # one'turned is symmetric psd, the span is the same
    matched = (one * turned).sum((1, 2)) / atoms
    return {
        "atoms": atoms,
        "grassmann": float(grassmann.mean()),
        "atom": float(cosine.mean()),
        "first": [float(grassmann[0]), float(cosine[0])],
        "equal": float((np.abs(grassmann - cosine) < EQUAL).mean()),
        "at_most": float((cosine <= grassmann + EQUAL).mean()),
        "equal_if_psd": float((np.abs(grassmann - matched) < EQUAL).mean()),
    }


def _frames(random: np.random.Generator, atoms: int, draws: int) -> Array:
    """Draw orthonormal atoms ``(draws, 9, atoms)`` uniformly."""
    frames, triangles = np.linalg.qr(random.standard_normal((draws, 9, atoms)))
    return frames * np.sign(np.einsum("nii->ni", triangles))[:, None, :]


# -- Theorems 2.5 and 2.7 ----------------------------------------------------------------------------------------------


def inputs(random: np.random.Generator, positions: int, white: bool) -> Array:
    """Return αX of the paper, ``(positions, 9)``: independent normal, or with the correlations of smooth images."""
    drawn = random.standard_normal((positions, 9))
    if white:
        return drawn
    places = np.stack(np.divmod(np.arange(9), SIDE), 1)
    distances = np.abs(places[:, None] - places[None]).sum(-1)
    return drawn @ np.linalg.cholesky(0.95**distances).T


def cca(one: Array, other: Array) -> Array:
    """S_CCA of the paper for features ``(draws, positions, c)``: the root mean square canonical correlation."""
    bases = (np.linalg.qr(each)[0] for each in (one, other))
    first, second = bases
    return np.linalg.norm(first.swapaxes(1, 2) @ second, axis=(1, 2)) / np.sqrt(one.shape[2])


def cosines(one: Array, other: Array) -> Array:
    """S_Atom of sets of atoms ``(draws, 9, atoms)``."""
    return (one * other).sum((1, 2)) / (np.linalg.norm(one, axis=(1, 2)) * np.linalg.norm(other, axis=(1, 2)))


def independent(random: np.random.Generator, preset: Preset, atoms: int, white: bool) -> dict[str, Any]:
    """Evaluate theorem 2.5 and inequality 27 of its proof for pairs of independent normal atoms."""
    given = inputs(random, preset.positions, white)
    one, other = random.standard_normal((2, preset.draws, 9, atoms))
    similarity, gram = cosines(one, other), given.T @ given
    spectra = [np.linalg.eigvalsh(each.swapaxes(1, 2) @ gram @ each) for each in (one, other)]
    condition = np.maximum(*(spectrum[:, -1] / spectrum[:, 0] for spectrum in spectra))
    factor = np.linalg.eigvalsh(gram)[0] / (condition * atoms**1.5 * np.trace(gram))
    low = factor * cca(given @ one, given @ other)
    product = (one * other).sum((1, 2))
    crossed = np.einsum("npa,pq,nqa->n", one, gram, other, optimize=True)
    positive = similarity > 0
    return {
        "atoms": atoms,
        "white": white,
        "draws": preset.draws,
        "negative": int((~positive).sum()),
        "failed": int((low > similarity).sum()),
        "failed_positive": int((low > similarity)[positive].sum()),
        "step_failed_positive": int((crossed > np.trace(gram) * product)[positive].sum()),
        "bound": quantiles(low, (50, 100)),
    }


def mixed(random: np.random.Generator, preset: Preset, decorrelated: bool, white: bool) -> dict[str, Any]:
    """Measure S_CCA / S_Atom for pairs of 6 atoms with S_Atom from about .1 to 1.

    Args:
        random: Random numbers.
        preset: Sizes.
        decorrelated: Whether the features of each side are uncorrelated (assumption 2.6 holds exactly).
        white: Whether inputs are uncorrelated.
    """
    given = inputs(random, preset.positions, white)
    one, noise = random.standard_normal((2, preset.draws, 9, 6))
    angle = random.uniform(0, 0.47 * np.pi, (preset.draws, 1, 1))
    other = np.cos(angle) * one + np.sin(angle) * noise
    if decorrelated:
        one, other = (_decorrelated(each, given.T @ given) for each in (one, other))
    similarity = cosines(one, other)
    kept = similarity > LEAST
    features = given @ one[kept], given @ other[kept]
    canonical, similarity = cca(*features), similarity[kept]
    ratio, near = canonical / similarity, similarity > NEAR
    return {
        "decorrelated": decorrelated,
        "white": white,
        "pairs": int(kept.sum()),
        "correlation_of_channels": _off_diagonal(features[0]),
        "ratio": quantiles(ratio, (5, 50, 95)),
        "variation": float(ratio.std() / ratio.mean()),
        "variation_near": float(ratio[near].std() / ratio[near].mean()),
        "pearson": float(np.corrcoef(canonical, similarity)[0, 1]),
        "pearson_near": float(np.corrcoef(canonical[near], similarity[near])[0, 1]),
    }


def _decorrelated(atoms: Array, gram: Array) -> Array:
    """Make the features of sets of atoms uncorrelated, with the least change (symmetric orthogonalisation)."""
    values, vectors = np.linalg.eigh(atoms.swapaxes(1, 2) @ gram @ atoms)
    return atoms @ (vectors / np.sqrt(values)[:, None, :]) @ vectors.swapaxes(1, 2)


def _off_diagonal(features: Array) -> float:
    """Return the mean absolute correlation (uncentred) of two channels."""
    products = features.swapaxes(1, 2) @ features
    scale = np.sqrt(np.einsum("nii->ni", products))
    normal = np.abs(products / (scale[:, :, None] * scale[:, None, :]))
    c = products.shape[1]
    return float((normal.sum((1, 2)) - c).mean() / (c * (c - 1)))


def quantiles(values: Array, percents: tuple[int, ...]) -> dict[str, float]:
    """Return quantiles by percent."""
    return {str(percent): float(np.percentile(values, percent)) for percent in percents}


# -- page --------------------------------------------------------------------------------------------------------------

PAGE = """# Propositions and theorems, measured

**What to do**: do not use the propositions as guarantees: the bound of 2.1 holds and is loose, 2.4 and 2.5 fail for
half of random atoms, and 2.7 depends on how far atoms are apart.

{verdicts}

{title}: section 2 and appendix A.1; figure 8a. All atoms, coefficients and inputs are random; there is no network.
{draws} pairs are drawn for each row.

**Proposition 2.1** bounds the change of the features by that of the atoms: ‖Z_u − Z_v‖ ≤ ‖α‖ λ √|B| ‖D_u − D_v‖. The
rule: confirmed if no pair exceeds the bound. **{verdict_1}**: {exceeded} of {draws} pairs exceed it; the change is at
most {largest:.3f} of the bound, {median:.3f} in the median. The bound is loose, and says nothing from below: features
can stay while atoms change.

**Proposition 2.4** says that S_Gras = S_Atom for orthonormal atoms. The rule: refuted if any pair differs by more than
{equal:g}. **{verdict_4}**. The proof takes the trace of DᵤᵀDᵥ for the sum of its singular values, which holds only
where DᵤᵀDᵥ is symmetric and positive semidefinite. What holds for all pairs is S_Atom ≤ S_Gras. With 9 atoms of 3×3 the
subspaces are the whole space, and S_Gras is 1 whatever the atoms are.

{table_4}

**Theorem 2.5** says that 𝒞 / (γ c^1.5 𝒯) · S_CCA ≤ S_Atom. Its left side is positive, so that it fails where S_Atom is
negative. The rule: refuted if any pair of atoms fails. **{verdict_5}**. Where S_Atom is positive, the left side is so
small (next to last column; S_CCA itself is at most 1) that the theorem excludes nearly nothing, although inequality 27
of its proof, Tr(DᵤᵀGDᵥ) ≤ Tr(G) Tr(DᵤᵀDᵥ), fails for some (last column).

{table_5}

**Theorem 2.7** says that S_CCA is about S_Atom times γ₁γ₂γ₃ / √c. This is a linear relation only if the γ are constant
between pairs. The rule: confirmed if the coefficient of variation of S_CCA / S_Atom is at most {constant:g} in all four
settings, in part if it is where channels are uncorrelated and inputs white, refuted otherwise. Only pairs with S_Atom
above {least:g} count, and the answer hangs on this number: a narrow range of S_Atom makes the ratio vary little. So the
claim is undecided where pairs with S_Atom above {near:g}, as of networks trained from one start, give another verdict
(added after the figures were seen; without it: {without}). **{verdict_7}**. A
correlation of S_CCA and S_Atom over a wide range of random atoms is not yet one over trained networks: see
[correlation](correlation.md).

{table_7}

"Uncorrelated": the atoms of each side are transformed so that ZᵀZ is the identity, which is assumption 2.6 at its
strongest. "Smooth": neighbouring pixels of patches have a correlation of .95.

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    said, first = decided(record), record["proposition_2_1"]
    rows_4 = [
        (row["atoms"], f"{row['grassmann']:.3f}", f"{row['atom']:.3f}", f"{row['first'][0]:.3f}, {row['first'][1]:.3f}",
         f"{row['equal']:.1%}", f"{row['at_most']:.1%}", f"{row['equal_if_psd']:.1%}")
        for row in record["proposition_2_4"]
    ]  # fmt: skip
    rows_5 = [
        (row["atoms"], "white" if row["white"] else "smooth", f"{row['negative']} of {row['draws']}", row["failed"],
         row["failed_positive"], f"{row['bound']['50']:.1e}, {row['bound']['100']:.1e}", row["step_failed_positive"])
        for row in record["theorem_2_5"]
    ]  # fmt: skip
    rows_7 = [
        ("uncorrelated" if row["decorrelated"] else "as drawn", "white" if row["white"] else "smooth",
         row["pairs"], f"{row['correlation_of_channels']:.2f}",
         " / ".join(f"{row['ratio'][key]:.2f}" for key in ("5", "50", "95")), f"{row['variation']:.2f}",
         f"{row['variation_near']:.3f}",
         f"{row['pearson']:.2f}", f"{row['pearson_near']:.2f}")
        for row in record["theorem_2_7"]
    ]  # fmt: skip
    return PAGE.format(
        verdicts=verdicts(claims(record)),
        title=PAPER_TITLE, draws=f"{record['sizes']['draws']:,}", exceeded=first["exceeded"], equal=EQUAL,
        largest=first["ratio"]["100"], median=first["ratio"]["50"], constant=CONSTANT,
        least=LEAST, near=NEAR, without=linear(record, "variation"),
        verdict_1=said["2.1"].capitalize(), verdict_4=said["2.4"].capitalize(),
        verdict_5=said["2.5"].capitalize(), verdict_7=said["2.7"].capitalize(),
        table_4=markdown(
            ("atoms", "mean S_Gras", "mean S_Atom", "first pair: S_Gras, S_Atom", "equal", "S_Atom ≤ S_Gras",
             "equal if DᵤᵀDᵥ is symmetric psd"), rows_4,
        ),
        table_5=markdown(
            ("atoms", "inputs", "S_Atom < 0", "theorem fails", "fails where S_Atom > 0", "left side: median, maximum",
             "inequality 27 fails where S_Atom > 0"), rows_5,
        ),
        table_7=markdown(
            ("channels", "inputs", "pairs", "mean absolute correlation of channels", "S_CCA / S_Atom: 5 / 50 / 95%",
             "coefficient of variation", f"of those with S_Atom > {NEAR:g}",
             "Pearson of S_CCA and S_Atom", f"Pearson where S_Atom > {NEAR:g}"), rows_7,
        ),
        footer=footer(NAME, "--out OUT"),
    )  # fmt: skip


def decided(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the verdicts by the rules of the page: proposition or theorem -> verdict."""
    wide, near = (linear(record, key) for key in ("variation", "variation_near"))
    return {
        "2.1": "refuted" if record["proposition_2_1"]["exceeded"] else "confirmed",
        "2.4": "confirmed" if all(row["equal"] == 1 for row in record["proposition_2_4"]) else "refuted",
        "2.5": "refuted" if any(row["failed"] for row in record["theorem_2_5"]) else "confirmed",
        "2.7": wide if wide == near else "undecided",
    }


def linear(record: Mapping[str, Any], variation: str) -> str:
    """Return the verdict on theorem 2.7 by one of the coefficients of variation."""
    settings = record["theorem_2_7"]
    if all(row[variation] <= CONSTANT for row in settings):
        return "confirmed"
    ideal = (row for row in settings if row["decorrelated"] and row["white"])
    return "in part" if all(row[variation] <= CONSTANT for row in ideal) else "refuted"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    said, draws = decided(record), f"{record['sizes']['draws']:,} pairs"
    first, rows_4, rows_5, rows_7 = (
        record[key] for key in ("proposition_2_1", "proposition_2_4", "theorem_2_5", "theorem_2_7")
    )
    six = next(row for row in rows_4 if row["atoms"] == 6)
    failed = next(row for row in rows_5 if row["atoms"] == 6 and row["white"])
    wide, near = ([row[key] for row in rows_7] for key in ("variation", "variation_near"))
    return [
        claim("Proposition 2.1, figure 8a", "The change of features is bounded by that of atoms.", "never exceeded",
              f"{first['exceeded']} exceed it; at most {first['ratio']['100']:.2f} of the bound", draws,
              said["2.1"]),
        claim("Proposition 2.4", "S_Gras equals S_Atom for orthonormal atoms.", "equal",
              f"6 atoms: S_Gras {six['grassmann']:.2f}, S_Atom {six['atom']:.2f}; S_Atom ≤ S_Gras in "
              f"{six['at_most']:.0%}", draws, said["2.4"]),
        claim("Theorem 2.5", "S_CCA times a constant is at most S_Atom.", "always",
              f"fails for {failed['failed']} of {failed['draws']} pairs, S_Atom < 0 in {failed['negative']}", draws,
              said["2.5"]),
        claim("Theorem 2.7", "S_CCA is about linear in S_Atom.", "–",
              f"coefficient of variation of S_CCA / S_Atom {min(wide):.2f} to {max(wide):.2f} if S_Atom > {LEAST:g}, "
              f"{min(near):.2f} to {max(near):.2f} if it is > {NEAR:g}",
              f"{min(row['pairs'] for row in rows_7):,} to {max(row['pairs'] for row in rows_7):,} pairs",
              said["2.7"]),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
