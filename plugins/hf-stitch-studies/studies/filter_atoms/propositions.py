"""Propositions 2.1 and 2.4 and theorems 2.5 and 2.7 of Chen, Miao & Qiu 2023, measured on random atoms (figure 8a).

python -m filter_atoms.propositions --out OUT
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import study
from filter_atoms.experiment import Claim, filled, leave
from matplotlib.figure import Figure
from numpy.typing import NDArray
from study import parser, table

NAME = "propositions"
Array = NDArray[np.float64]
SIDE = 3
ATOMS = (1, 2, 3, 6, 9)
EQUAL = 1e-6  # largest difference that counts as rounding
CONSTANT = 0.1  # largest coefficient of variation of S_CCA / S_Atom with which the relation counts as linear
LEAST = 0.1  # least S_Atom of the pairs whose ratio is looked at: below, a small denominator decides
NEAR = 0.8  # S_Atom of networks that were trained from one start is above this


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment."""

    draws: int  # number of random pairs of sets of atoms, for each setting
    positions: int  # number of rows of the features


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


def changes(random: np.random.Generator, draws: int) -> tuple[Array, Array]:
    """Draw pairs of sets of 9 atoms for one layer of 3 × 4 channels and one image of 8×8 pixels, all normal."""
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
    """Measure S_CCA / S_Atom for pairs of 6 atoms with S_Atom from about .1 to 1."""
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


THEORY = partial(Claim, stand_in=False)
BOUNDED = THEORY(
    "Proposition 2.1, figure 8a", "The change of features is bounded by that of atoms.", "never exceeded",
    "no pair exceeds the bound",
)  # fmt: skip
EQUALS = THEORY(
    "Proposition 2.4", "S_Gras equals S_Atom for orthonormal atoms.", "equal", f"no pair differs by more than {EQUAL:g}"
)
AT_MOST = THEORY("Theorem 2.5", "S_CCA times a constant is at most S_Atom.", "always", "it is, for every pair of atoms")
LINEAR = THEORY(
    "Theorem 2.7", "S_CCA is about linear in S_Atom.", "–",
    f"the coefficient of variation of S_CCA / S_Atom is at most {CONSTANT:g} in all four settings, for pairs with "
    f"S_Atom above {LEAST:g}; in part: where channels are uncorrelated and inputs white; not known where pairs above "
    f"{NEAR:g} give another verdict",
)  # fmt: skip


def linear(record: Mapping[str, Any], variation: str) -> list[bool]:
    """Return whether S_CCA / S_Atom is about constant where channels are uncorrelated and inputs white, and always."""
    settings = record["theorem_2_7"]
    ideal = [row for row in settings if row["decorrelated"] and row["white"]]
    return [all(row[variation] <= CONSTANT for row in some) for some in (ideal, settings)]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    draws, n = record["sizes"]["draws"], f"{record['sizes']['draws']:,} pairs"
    first, rows_4, rows_5, rows_7 = (
        record[key] for key in ("proposition_2_1", "proposition_2_4", "theorem_2_5", "theorem_2_7")
    )
    six = next(row for row in rows_4 if row["atoms"] == 6)
    failed = next(row for row in rows_5 if row["atoms"] == 6 and row["white"])
    wide, near = ([row[key] for row in rows_7] for key in ("variation", "variation_near"))
    pairs = [row["pairs"] for row in rows_7]
    same = linear(record, "variation") == linear(record, "variation_near")
    return [
        BOUNDED.row(f"{first['exceeded']} exceed it; at most {first['ratio']['100']:.2f} of the bound", n,
                    [first["exceeded"] == 0], draws),
        EQUALS.row(f"6 atoms: S_Gras {six['grassmann']:.2f}, S_Atom {six['atom']:.2f}; S_Atom ≤ S_Gras in "
                   f"{six['at_most']:.0%}", n, [all(row["equal"] == 1 for row in rows_4)], draws),
        AT_MOST.row(f"fails for {failed['failed']} of {failed['draws']} pairs, S_Atom < 0 in {failed['negative']}", n,
                    [not any(row["failed"] for row in rows_5)], draws),
        LINEAR.row(f"coefficient of variation of S_CCA / S_Atom {min(wide):.2f} to {max(wide):.2f} if S_Atom > "
                   f"{LEAST:g}, {min(near):.2f} to {max(near):.2f} if it is > {NEAR:g}",
                   f"{min(pairs):,} to {max(pairs):,} pairs", linear(record, "variation") if same else [None], draws),
    ]  # fmt: skip


PAGE = """# Propositions and theorems, measured

**What to do**: do not use the propositions as guarantees: the bound of 2.1 holds and is loose, 2.4 and 2.5 fail for
half of random atoms, and 2.7 depends on how far atoms are apart.

{verdicts}

{title}: section 2 and appendix A.1; figure 8a. All atoms, coefficients and inputs are random; there is no network.
Each row has {draws} random pairs. The last condition on theorem 2.7 was added when the figures were known; without it,
the theorem is {without}.

**Proposition 2.1** bounds the change of the features by that of the atoms: ‖Z_u − Z_v‖ ≤ ‖α‖ λ √|B| ‖D_u − D_v‖. The
change is at most {largest:.3f} of the bound, and {median:.3f} in the median. The bound is loose. It does not say that
features change when atoms do.

**Proposition 2.4** says that S_Gras = S_Atom for orthonormal atoms. The proof takes the trace of DᵤᵀDᵥ for the sum of
its singular values. The two are equal only if DᵤᵀDᵥ is symmetric and positive semidefinite. What holds for all pairs is
S_Atom ≤ S_Gras. Nine atoms of 3×3 span the whole space, so that their S_Gras is always 1.

{table_4}

**Theorem 2.5** says that 𝒞 / (γ c^1.5 𝒯) · S_CCA ≤ S_Atom. Its left side is positive, so that it fails wherever S_Atom
is negative. Where S_Atom is positive, the theorem excludes nearly nothing: S_CCA is at most 1, and its factor is tiny
(next to last column). Inequality 27 of the proof, Tr(DᵤᵀGDᵥ) ≤ Tr(G) Tr(DᵤᵀDᵥ), fails for some pairs (last column).

{table_5}

**Theorem 2.7** says that S_CCA is about S_Atom times γ₁γ₂γ₃ / √c. This is a linear relation only if the γ are the same
for all pairs. The answer depends on the least S_Atom of the pairs that count: where S_Atom varies little, so does the
ratio. Networks that were trained from one start have an S_Atom above {near:g}. That random atoms correlate over a wide
range does not show that trained networks do: see [correlation](correlation.md).

{table_7}

"Uncorrelated": the atoms of each side are transformed so that ZᵀZ is the identity, the strongest form of assumption
2.6. "Smooth": neighbouring pixels of patches have a correlation of .95.

{footer}"""
INPUTS = {True: "white", False: "smooth"}


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    ratio = record["proposition_2_1"]["ratio"]
    return filled(
        PAGE, NAME, claims(record), "--out OUT", draws=f"{record['sizes']['draws']:,}", largest=ratio["100"],
        median=ratio["50"], near=NEAR, without=study.decided(linear(record, "variation")),
        table_4=table(record["proposition_2_4"], {
            "atoms": "{atoms}", "mean S_Gras": "{grassmann:.3f}", "mean S_Atom": "{atom:.3f}",
            "first pair: S_Gras, S_Atom": "{first[0]:.3f}, {first[1]:.3f}", "equal": "{equal:.1%}",
            "S_Atom ≤ S_Gras": "{at_most:.1%}", "equal if DᵤᵀDᵥ is symmetric psd": "{equal_if_psd:.1%}",
        }),
        table_5=table(record["theorem_2_5"], {
            "atoms": "{atoms}", "inputs": lambda row: INPUTS[row["white"]], "S_Atom < 0": "{negative} of {draws}",
            "theorem fails": "{failed}", "fails where S_Atom > 0": "{failed_positive}",
            "left side: median, maximum": lambda row: f"{row['bound']['50']:.1e}, {row['bound']['100']:.1e}",
            "inequality 27 fails where S_Atom > 0": "{step_failed_positive}",
        }),
        table_7=table(record["theorem_2_7"], {
            "channels": lambda row: "uncorrelated" if row["decorrelated"] else "as drawn",
            "inputs": lambda row: INPUTS[row["white"]], "pairs": "{pairs}",
            "mean absolute correlation of channels": "{correlation_of_channels:.2f}",
            "S_CCA / S_Atom: 5 / 50 / 95%": lambda row: " / ".join(f"{row['ratio'][k]:.2f}" for k in ("5", "50", "95")),
            "coefficient of variation": "{variation:.2f}", f"of those with S_Atom > {NEAR:g}": "{variation_near:.3f}",
            "Pearson of S_CCA and S_Atom": "{pearson:.2f}", f"Pearson where S_Atom > {NEAR:g}": "{pearson_near:.2f}",
        }),
    )  # fmt: skip


if __name__ == "__main__":
    main()
