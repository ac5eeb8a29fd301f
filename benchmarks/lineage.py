"""Which networks ``lineage`` finds to be derived from another, and how often it errs on networks trained apart.

Usage: python -m benchmarks.lineage FOLDER

The folder has a folder for each family (architecture) of ``AXES`` in ``kin.py``, the corpus of the tests of
``plugins/hf-stitch-versions``. In it are saved dictionaries of weights with outputs first, in the order of the modules:
``x.pt`` is a network that was trained apart from the others, ``untrained*.pt`` one that was not trained, ``x+y.pt`` a
tuning of x. Other relatives are made here: rounded, pruned, noisy, reordered, rotated and mixed networks. Families
without a folder are named and left out.

What is to be beaten are the cosine of all weights by place, and linear CKA of the weights with units as rows. A
threshold of the cosine of matched weights is set halfway between the two groups on every other family, in alphabetical
order, and tested on the rest.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from hf_stitch_versions.changes.lineage import lineage
from rich.console import Console
from scipy import stats
from sklearn.metrics import roc_auc_score

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "plugins" / "hf-stitch-versions" / "tests")]

import kin  # noqa: E402

APART, UNTRAINED, DERIVED, REORDERED = "trained apart", "untrained", "derived", "derived, reordered"
RELATIVES = 3
"""Networks of a family of which relatives are made."""


@dataclass(frozen=True)
class Pair:
    """Two networks, how the second came about, and the right verdict."""

    family: str
    kind: str
    right: str
    a: kin.Weights
    b: kin.Weights


def pairs(family: str, folder: Path) -> Iterator[Pair]:
    """Yield all pairs of a family."""
    found = {path.stem: only_floating(torch.load(path, weights_only=True)) for path in sorted(folder.glob("*.pt"))}
    untrained = [x for name, x in found.items() if name.startswith("untrained")]
    trained = {name: x for name, x in found.items() if "+" not in name and not name.startswith("untrained")}
    for a, b in itertools.combinations(trained.values(), 2):
        yield Pair(family, APART, "no evidence", a, b)
    for a, b in itertools.combinations(untrained, 2):
        yield Pair(family, UNTRAINED, "no evidence", a, b)
    for i, (name, a) in enumerate(list(trained.items())[:RELATIVES]):
        tuned = [x for other, x in found.items() if other.startswith(f"{name}+")]
        g = torch.Generator().manual_seed(i)
        for kind, right, b in relatives(family, a, tuned, g):
            yield Pair(family, kind, right, a, b)


def relatives(
    family: str, a: kin.Weights, tuned: list[kin.Weights], g: torch.Generator
) -> Iterator[tuple[str, str, kin.Weights]]:
    """Yield networks that are derived from one network and its tunings."""
    hidden, channels = ("c", "") if family in kin.CHAINS else ("h", "d" if family != "resnet20" else "s")
    yield "int8", DERIVED, kin.rounded(a, 8)
    yield "int4", DERIVED, kin.rounded(a, 4)
    yield "pruned 30 %", DERIVED, kin.pruned(a, 0.3)
    yield "pruned 50 %", DERIVED, kin.pruned(a, 0.5)
    yield "noise 10 %", DERIVED, kin.noisy(a, 0.1, g)
    yield "noise 30 %", DERIVED, kin.noisy(a, 0.3, g)
    last = [("", a), ("noise 30 %, ", kin.noisy(a, 0.3, g)), *(("tuned, ", x) for x in tuned)]
    for how, x in last:
        yield f"{how}hidden units reordered", REORDERED, kin.turned(x, family, hidden, kin.permutation(g))
    if channels:
        for how, x in last:
            yield f"{how}channels reordered", DERIVED, kin.turned(x, family, channels, kin.permutation(g))
            yield f"{how}both reordered", REORDERED, kin.turned(x, family, hidden + channels, kin.permutation(g))
    if family in kin.HEADS:
        yield "heads reordered", DERIVED, kin.turned(a, family, "a", kin.heads(g, kin.HEADS[family]))
    if family in kin.ROTATED:
        for how, x in last:
            b = kin.rotated(x, family, g)
            yield f"{how}rotated", DERIVED, b
            yield f"{how}rotated and reordered", REORDERED, kin.turned(b, family, "h", kin.permutation(g))
    for x in tuned:
        yield "tuned", DERIVED, x
        yield "tuned, int4", DERIVED, kin.rounded(x, 4)
    if len(tuned) > 1:
        yield "merged", DERIVED, kin.mixed(tuned[:2], (0.5, 0.5))
        yield "task arithmetic", DERIVED, kin.mixed([a, *tuned[:2]], (-0.4, 0.7, 0.7))


def only_floating(weights: kin.Weights) -> kin.Weights:
    """Leave out counters."""
    return {name: x.float() for name, x in weights.items() if x.is_floating_point()}


def plain_cosine(a: kin.Weights, b: kin.Weights) -> float:
    """Return the cosine of all common matrices."""
    names = [name for name in a if name in b and a[name].dim() > 1]
    one, two = (torch.cat([x[name].flatten() for name in names]) for x in (a, b))
    return float(torch.nn.functional.cosine_similarity(one, two, dim=0))


def weight_cka(a: kin.Weights, b: kin.Weights) -> float:
    """Return the mean linear CKA of the common matrices, with units as rows."""
    found = []
    for name in a:
        if name in b and a[name].dim() > 1 and len(a[name]) > 1:
            x, y = (w[name].flatten(1) - w[name].flatten(1).mean(0) for w in (a, b))
            one, two = x @ x.T, y @ y.T
            found.append(float((one * two).sum() / (one.norm() * two.norm()).clamp_min(1e-12)))
    return sum(found) / len(found)


def measured(pair: Pair) -> dict[str, object]:
    """Return the figures of a pair."""
    start = time.process_time()
    found = lineage(pair.a, pair.b, kin.blocks(pair.a))
    return {
        "family": pair.family, "kind": pair.kind, "right": pair.right, "verdict": found.verdict,
        "place": found.log10_p_place, "matched": found.log10_p_matched, "cosine": found.cosine,
        "null": found.cosine_null, "rotated": found.rotated,
        "by place": plain_cosine(pair.a, pair.b), "CKA": weight_cka(pair.a, pair.b),
        "seconds": time.process_time() - start,
    }  # fmt: skip


def separation(table: pd.DataFrame, score: str) -> tuple[float, float, float]:
    """Return the area under the curve of trained relatives against trained apart, and the two nearest values."""
    one, two = table[table.right != "no evidence"][score], table[table.kind == APART][score]
    labels = [1] * len(one) + [0] * len(two)
    return float(roc_auc_score(labels, [*one, *two])), float(one.min()), float(two.max())


def report(table: pd.DataFrame, console: Console) -> None:
    """Print all figures."""
    table["correct"] = table.verdict == table.right
    groups = table.groupby(["right", "kind"])
    summary = groups.agg(
        pairs=("correct", "size"), correct=("correct", "sum"), rotated=("rotated", "sum"), place=("place", "max"),
        matched=("matched", "max"), least=("cosine", "min"), most=("cosine", "max"), null=("null", "max"),
    )  # fmt: skip
    console.print(summary.round(3).to_string())
    wrong = table[~table.correct]
    console.print(wrong.drop(columns=["right", "seconds"]).round(3).to_string())
    for score in ("cosine", "by place", "CKA"):
        console.print(score, *(round(x, 4) for x in separation(table, score)))
    for score in ("place", "matched"):
        console.print(score, *(round(x, 4) for x in separation(table.assign(**{score: -table[score]}), score)))
    families = sorted(set(table.family))
    for half in (families[::2], families[1::2]):
        chosen, rest = table[table.family.isin(half)], table[~table.family.isin(half)]
        _, low, high = separation(chosen, "cosine")
        known = rest[(rest.right != "no evidence") | (rest.kind == APART)]
        right = ((known.cosine >= (low + high) / 2) == (known.right != "no evidence")).sum()
        console.print(f"threshold {(low + high) / 2:.3f} from {', '.join(half)}: {right} of {len(known)} others right")
    for kind, score in itertools.product((APART, UNTRAINED), ("place", "matched")):
        p = (
            10 ** table[table.kind == kind][score]
        )  # corrected for two looks, and so at most 1: only small ones are told
        small = stats.kstest(p, "uniform", alternative="greater").pvalue
        console.print(f"{kind}, {score}: {len(p)} pairs, least {p.min():.2g}, as small under the null {small:.2g}")


def main() -> None:
    """Compare all pairs of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", type=Path, help="a CSV file for the figures of all pairs")
    options = parser.parse_args()
    console = Console(width=160)
    rows = []
    for family in sorted(kin.AXES):
        if not (options.folder / family).is_dir():
            console.print(f"{family} is left out: {options.folder / family} is missing")
            continue
        rows += [measured(pair) for pair in pairs(family, options.folder / family)]
    table = pd.DataFrame(rows)
    if options.table:
        table.to_csv(options.table, index=False)
    report(table, console)


if __name__ == "__main__":
    main()
