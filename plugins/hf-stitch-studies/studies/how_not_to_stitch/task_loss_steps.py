"""When does task loss stop distinguishing layers (Balogh & Jelasity 2025, table 1)?

Every layer of one Tiny-10 is stitched into every layer of another Tiny-10, and into its own layers, by direct matching
and then by task loss, with accuracies measured during training. Pairs are disjoint. Training is written in plain torch,
with BatchNorm folded into the convolutions and bfloat16 activations, because 640 stitches take hours; the stitches into
one layer are also trained in float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import study
import torch
from dr_frankenstein import networks
from filter_atoms.networks import Images, read
from how_not_to_stitch.experiment import POORLY, WELL, paired
from how_not_to_stitch.layer_identification import summary as summary_of
from numpy.typing import NDArray
from scipy.stats import binomtest, norm
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm

from hf_stitch.analysis import Identification, identify_layers

LAYERS = networks.Tiny10.cuts
Array = NDArray[np.float64]


PAIRS, TRAIN, TEST = 4, 10_000, 5000
"""Disjoint pairs of networks, with the first also stitched to itself; training and test images."""
STEPS, LAST = (0, 100, 300, 1000, 3000), (1000,) * 5 + (3000,) * 3
"""Steps of the measurements; last step for each layer of the target, ascending."""
BATCH, RATE, FITTED = 64, 1e-3, 1000
"""Images per step; learning rate of Adam; images of the direct match, the start of training."""
CHECKED = 4
"""Index of the target layer with additional training in float32."""


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "published", "cache", required=["published"]).parse_args()
    loaded, _ = networks.read_folder(arguments.published / "drfrankenstein_tiny10")
    names = sorted(loaded, key=lambda name: int(name[2:]))
    models: dict[str, Any] = {name: loaded[name].model for name in names}
    train, test = (read("cifar10", split, arguments.data_dir, n) for split, n in (("train", TRAIN), ("test", TEST)))
    cache, pairs = arguments.cache / "task_loss_steps", paired(names, PAIRS)
    parts_of: dict[tuple[str, str], list[Any]] = {}
    for a, b in pairs:
        run = partial(trained, Inside.of(models[a], train.pixels, test.pixels), train=train, test=test)
        for target in (b, a):
            make = partial(run, Inside.of(models[target], train.pixels[:FITTED], test.pixels), models[target])
            parts = [
                study.cached(cache / f"{a}-{target}-{LAYERS[j]}.json", partial(make, j))
                for j in reversed(range(len(LAYERS)))
            ]
            parts_of[a, target] = parts[::-1]
            if target == b == names[1]:
                check = partial(make, CHECKED, dtype=torch.float32)
                exact = study.cached(cache / f"float32-{LAYERS[CHECKED]}.json", check)
    rank = {a: ranks(activations(models[a], test.pixels[:500])) for a, b in parts_of}
    record = {
        "preset": {"images": TRAIN, "test": TEST, "last": LAST}, "pairs": [list(pair) for pair in parts_of],
        "float32": float32_gap(exact, next(iter(parts_of.values()))[CHECKED]),
        **summary({pair: Cells.read(parts) for pair, parts in parts_of.items()}, rank),
    }  # fmt: skip
    study.write_results("task_loss_steps", record, page, arguments.out, null=True)


class Back:
    """Frozen layers of a trained Tiny-10 after its ``j``-th BatchNorm, with BatchNorm folded into the convolutions."""

    def __init__(self, network: networks.Tiny10, j: int, dtype: torch.dtype) -> None:
        self.stages, self.fc = [], [parameter.detach().to(dtype) for parameter in (network.fc.weight, network.fc.bias)]
        for i in range(j + 2, len(LAYERS) + 1):
            convolution, norm = network.get_submodule(f"conv{i}"), network.get_submodule(f"bn{i}")
            assert isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
            assert norm.running_mean is not None and norm.running_var is not None
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
            weight, bias = convolution.weight * scale[:, None, None, None], norm.bias - norm.running_mean * scale
            bias = bias if convolution.bias is None else bias + convolution.bias * scale
            weight = weight.detach().to(dtype).contiguous(memory_format=torch.channels_last)
            self.stages.append((weight, bias.detach().to(dtype), convolution.stride))

    def __call__(self, x: Tensor) -> Tensor:
        """Map activations ``(batch, channels, height, width)`` to logits."""
        for weight, bias, stride in self.stages:
            x = functional.conv2d(functional.relu(x), weight, bias, stride)
        return functional.linear(functional.relu(x).mean((2, 3)), *self.fc)


@torch.no_grad()
def activations(network: nn.Module, pixels: Tensor) -> list[Tensor]:
    """Return the activations of all layers, float32 with channels last."""
    batches: list[list[Tensor]] = [[] for _ in LAYERS]
    for some in pixels.split(500):
        x = networks.normalised(some).contiguous(memory_format=torch.channels_last)
        for i, of_layer in enumerate(batches, 1):
            x = network.get_submodule(f"bn{i}")(network.get_submodule(f"conv{i}")(x))
            of_layer.append(x)
            x = functional.relu(x)
    return [torch.cat(of_layer).contiguous(memory_format=torch.channels_last) for of_layer in batches]


@dataclass(frozen=True)
class Inside:
    """Activations of all layers of a network, on training images and on test images."""

    train: list[Tensor]
    test: list[Tensor]

    @classmethod
    def of(cls, network: nn.Module, train: Tensor, test: Tensor) -> "Inside":
        return cls(activations(network, train), activations(network, test))


def resized(x: Tensor, grid: Sequence[int]) -> Tensor:
    """Resample activations to another grid, like hf-stitch."""
    if tuple(x.shape[2:]) == tuple(grid):
        return x
    parts = [functional.interpolate(part, size=grid, mode="bilinear", align_corners=False) for part in x.split(500)]
    return torch.cat(parts).contiguous(memory_format=torch.channels_last)


def direct(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Fit an affine map between positions of two layers by least squares, after resampling to the second grid."""
    products, sums = 0.0, 0.0
    for some, target_part in zip(x.split(50), y.split(50), strict=True):  # positions of a few images, to limit memory
        both = torch.cat([resized(some, y.shape[2:]), target_part], 1).permute(0, 2, 3, 1).flatten(0, 2).double()
        products, sums = products + both.T @ both, sums + both.sum(0)
    width, count = x.shape[1], len(y) * y[0, 0].numel()
    mean = sums / count
    scatter = products - count * torch.outer(mean, mean)
    solution = torch.linalg.pinv(scatter[:width, :width], hermitian=True) @ scatter[:width, width:]
    return solution.T[:, :, None, None].float(), (mean[width:] - mean[:width] @ solution).float()


def trained(
    source: Inside, inside: Inside, target: networks.Tiny10, j: int, train: Images, test: Images,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """Train stitches from all layers of the source into one layer of the target; ``inside`` has its activations."""
    fitted, held_out = inside.train[j][:FITTED], inside.test[j]
    grid = held_out.shape[2:]
    back = Back(target, j, torch.float32)
    figures: dict[str, Any] = {"right": {}, "error": {}, "target": digits(back, held_out, test.labels)}
    fronts = zip(LAYERS, source.train, source.test, strict=True)
    for name, x, tested in tqdm(fronts, desc=LAYERS[j], total=len(LAYERS), disable=None):
        grown = x.shape[2] < grid[0]  # map and enlargement commute: map first, with fewer positions
        small, probe = (inputs if grown else resized(inputs, grid) for inputs in (x.to(dtype), tested))
        weight, bias = direct(x[:FITTED], fitted)
        right, error = {}, {}
        for steps, (w, b) in descended(small, train.labels, weight, bias, Back(target, j, dtype), grid, LAST[j]):
            with torch.no_grad():
                mapped = torch.cat([resized(functional.conv2d(part, w, b), grid) for part in probe.split(500)])
                right[steps] = digits(back, mapped, test.labels)
                error[steps] = float((mapped - held_out).square().sum() / held_out.square().sum())
        figures["right"][name], figures["error"][name] = right, error
    return figures


def descended(
    x: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, back: Back, grid: Sequence[int], last: int
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Train a stitch on hard labels, and yield step and parameters at each measurement."""
    weight = weight.contiguous(memory_format=torch.channels_last).requires_grad_()
    bias = bias.requires_grad_()
    optimizer = torch.optim.Adam([weight, bias], lr=RATE)
    generator = torch.Generator().manual_seed(0)
    order: list[Tensor] = []
    for step in range(last + 1):
        if step in STEPS:
            yield step, (weight.detach(), bias.detach())
        order = order or list(torch.randperm(len(x), generator=generator).split(BATCH))
        some = order.pop()
        mapped = resized(functional.conv2d(x[some], weight.to(x.dtype), bias.to(x.dtype)), grid)
        study.descend(optimizer, functional.cross_entropy(back(mapped).float(), labels[some]))


def digits(back: Back, x: Tensor, labels: Tensor) -> str:
    """Return the mask of correctly classified samples as hexadecimal digits."""
    with torch.no_grad():
        classes = torch.cat([back(part).argmax(1) for part in x.split(500)])
    return np.packbits((classes == labels).numpy()).tobytes().hex()


@dataclass(frozen=True)
class Cells:
    """All stitches between the layers of a pair of networks."""

    right: Mapping[
        int, NDArray[np.bool_]
    ]  # steps -> (layers of source, layers of target, test images), correctly classified
    error: Mapping[int, Array]  # steps -> structural errors (layers, layers); NaN after the end of training
    target: NDArray[np.bool_]  # (test images,), correctly classified by the target

    @classmethod
    def read(cls, parts: Sequence[Mapping[str, Any]]) -> "Cells":
        """Read the parts of all layers of the target, in the format of :func:`trained`."""
        shape, (first, *_) = (len(LAYERS), len(LAYERS)), parts
        steps = {int(step) for part in parts for step in part["right"][LAYERS[0]]}
        right = {step: np.zeros((*shape, TEST), bool) for step in sorted(steps)}
        error = {step: np.full(shape, np.nan) for step in right}
        for j, part in enumerate(parts):
            for i, name in enumerate(LAYERS):
                for step, hexadecimal in part["right"][name].items():
                    right[int(step)][i, j] = bits(hexadecimal)
                    error[int(step)][i, j] = part["error"][name][step]
        return cls(right, error, bits(first["target"]))

    def accuracy(self, step: int, targets: Sequence[int]) -> Array:
        """Return relative accuracies, (layers of the source, layers of the target); NaN outside ``targets``."""
        relative = np.full(self.error[step].shape, np.nan)
        relative[:, targets] = self.right[step][:, targets].mean(-1) / self.target.mean()
        return relative

    def as_good(self, step: int, targets: Sequence[int]) -> NDArray[np.bool_]:
        """Return the mask of candidates that McNemar's test does not separate from the best one."""
        right = self.right[step].astype(int)
        ties = np.zeros((2, *self.error[step].shape), bool)
        for axis, (answers, of_axis) in enumerate(zip((right, right.swapaxes(0, 1)), ties, strict=True)):
            for row, some in enumerate(answers):
                if axis == 0 or row in targets:
                    rivals = np.array(targets if axis == 0 else range(len(LAYERS)))
                    of_axis[row, rivals] = tied(some[rivals])
        return ties


def bits(hexadecimal: str) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bytes.fromhex(hexadecimal), np.uint8), count=TEST).astype(bool)


def tied(right: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the mask of candidates that McNemar's exact test does not separate from the best, at 5% by Holm."""
    best = right[right.sum(1).argmax()]
    pairs = [(int(((one == 1) & (best == 0)).sum()), int(((one == 0) & (best == 1)).sum())) for one in right]
    p = np.array([binomtest(b, b + c).pvalue if b + c else 1.0 for b, c in pairs])
    order = p.argsort()
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p) - 1, -1, -1).clip(1))
    return np.isin(np.arange(len(p)), order[adjusted > 0.05])


def ranks(layers: Sequence[Tensor]) -> list[float]:
    """Return the participation ratio of the variances of each layer, its effective number of directions."""
    ratios = []
    for x in layers:
        variances = torch.linalg.eigvalsh(torch.cov(x.permute(0, 2, 3, 1).flatten(0, 2).double().T))
        ratios.append(float(variances.sum() ** 2 / variances.square().sum()))
    return ratios


def float32_gap(exact: Mapping[str, Any], rounded: Mapping[str, Any]) -> float:
    """Return the largest difference of accuracies between training in float32 and in bfloat16."""
    return max(
        abs(bits(digits_exact).mean() - bits(rounded["right"][name][step]).mean())
        for name in LAYERS
        for step, digits_exact in exact["right"][name].items()
    )


def summary(cells: Mapping[tuple[str, str], Cells], rank: Mapping[str, list[float]]) -> dict[str, Any]:
    kinds = {
        "within": {pair: one for pair, one in cells.items() if len(set(pair)) == 1},
        "between": {pair: one for pair, one in cells.items() if len(set(pair)) == 2},
    }
    groups = {last: [j for j, last_step in enumerate(LAST) if last_step >= last] for last in sorted(set(LAST))}
    whole, common = list(range(len(LAYERS))), min(LAST)
    identified: dict[str, Any] = {kind: {} for kind in kinds}
    hits: dict[tuple[str, int], Identification] = {}
    for kind, of_kind in kinds.items():
        for last, targets in groups.items():
            rows = identified[kind]["all" if len(targets) == len(LAYERS) else f"{LAYERS[targets[0]]} and later"] = {}
            for step in (step for step in STEPS if step <= last):
                identification = identify_layers(
                    {pair: one.accuracy(step, targets) for pair, one in of_kind.items()}, higher_is_better=True,
                    as_good={pair: one.as_good(step, targets) for pair, one in of_kind.items()}, layers=LAYERS,
                )  # fmt: skip
                rows[step] = summary_of(identification, ("a", "b") if targets == whole else ("b",))
                if targets == whole:
                    hits[kind, step] = identification
        error = {pair: one.error[0] for pair, one in of_kind.items()}
        identification = identify_layers(error, higher_is_better=False, layers=LAYERS)
        identified[kind]["structural"] = {0: summary_of(identification)}
    start, end = (hits["between", step] for step in (0, common))
    far = np.abs(np.subtract.outer(whole, whole))
    relative = [one.accuracy(common, whole) for one in kinds["between"].values()]
    return {
        "identified": identified, "common": common,
        "outperforms": {
            axis: study.over((start.hits[axis].mean(1) - end.hits[axis].mean(1)).tolist()) for axis in "ab"
        },
        "distant": [nearest_far(one, common) for one in kinds["within"].values()],
        "excellent": study.over([float((one[far > 1] >= ACCURATE).mean()) for one in relative]),
        "modifies": [float((one.error[common] - one.error[0]).mean()) for one in kinds["between"].values()],
        "mean": {
            kind: {
                step: np.mean([one.accuracy(step, whole) for one in of_kind.values()], 0) for step in (0, common)
            }
            for kind, of_kind in kinds.items()
        },
        "found": {
            kind: {
                step: [sum(by_target(one, step)[j] for one in of_kind.values()) if step <= LAST[j] else None
                       for j in whole]
                for step in STEPS
            }
            for kind, of_kind in kinds.items()
        },
        "predicted": predicted(cells, rank),
    }  # fmt: skip


def nearest_far(one: Cells, step: int) -> dict[str, float]:
    """Return the difference in accuracy between the best layer at half the depth or more and the target's own layer.

    The interval is paired by images, and allows for the choice of the best of all distant stitches.
    """
    right, count = one.right[step].astype(float), len(LAYERS)
    far = [(i, j) for i in range(count) for j in range(count) if 2 * abs(i - j) >= count]
    differences = [right[cell] - right[cell[1], cell[1]] for cell in far]
    best = max(differences, key=lambda difference: float(difference.mean()))
    half = float(norm.ppf(1 - 0.025 / len(far)) * best.std(ddof=1) / len(best) ** 0.5)
    return {"value": float(best.mean()), "low": float(best.mean()) - half, "high": float(best.mean()) + half}


def by_target(one: Cells, step: int) -> NDArray[np.bool_]:
    """Return the mask of target layers with the corresponding source layer as the most accurate one."""
    accuracy = one.right[step].mean(-1)
    return (accuracy == accuracy.max(0)).sum(0) * np.diag(accuracy == accuracy.max(0)) == 1


BASELINE = "steps and layer"


def predicted(cells: Mapping[tuple[str, str], Cells], rank: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Predict whether task loss still finds a layer of another network, on held-out networks.

    The logistic regression uses the logarithm of the number of steps, the layer (an indicator for each), the relative
    accuracy of the stitch of corresponding layers, and the rank of the source's layer. One fold for each pair.
    """
    rows, hits, fold = [], [], []
    for (a, b), one in cells.items():
        for step in STEPS[1:] if a != b else ():
            for j in (j for j, last in enumerate(LAST) if step <= last):
                rows.append((np.log10(step), one.accuracy(step, [j])[j, j], rank[a][j], *np.eye(len(LAYERS))[j]))
                hits.append(by_target(one, step)[j])
                fold.append(a)
    table, hit, folds = np.array(rows, float), np.array(hits), np.array(fold)
    layer = list(range(3, 3 + len(LAYERS)))
    chosen = {
        "steps": [0], "layer": layer, BASELINE: [0, *layer], "relative accuracy": [1], "rank": [2],
        "all": list(range(table.shape[1])),
    }  # fmt: skip
    by_fold = {name: scores(table[:, columns], hit, folds) for name, columns in chosen.items()}
    gain = np.subtract(by_fold["all"], by_fold[BASELINE]).tolist()
    auroc_of = {name: study.over([auroc for auroc in of if not np.isnan(auroc)]) for name, of in by_fold.items()}
    of_range = {name: {key: min(value, 1.0) for key, value in score.items()} for name, score in auroc_of.items()}
    return {**of_range, "gain": study.over([auroc for auroc in gain if not np.isnan(auroc)])}


def scores(table: Array, hit: NDArray[np.bool_], folds: NDArray[np.str_]) -> list[float]:
    """Return the AUROC of each fold, predicted from the rest; NaN for folds with a single class."""
    aurocs = []
    for name in dict.fromkeys(folds.tolist()):
        inside = folds == name
        if len(set(hit[inside])) < 2 or len(set(hit[~inside])) < 2:
            aurocs.append(float("nan"))
            continue
        model = make_pipeline(StandardScaler(), LogisticRegression()).fit(table[~inside], hit[~inside])
        aurocs.append(float(roc_auc_score(hit[inside], model.decision_function(table[inside]))))
    return aurocs


ACCURATE, MARGIN = 0.8, 0.02
"""Minimum relative accuracy of functionally similar layers (Csiszárik et al. 2021, section 8); maximum difference in
accuracy of equally similar layers."""
TRAINING, DISTANT, EXCELLENT, MODIFIES, STEPS_TELL, WITHIN, BETWEEN, OUTPERFORMED = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    identified, pairs = record["identified"], len(record["pairs"]) // 2
    structural = "; ".join(
        f"{kind} networks {study.both(groups['structural']['0'][axis]['score'] for axis in 'ab')}"
        for kind, groups in identified.items()
    )
    return study.filled(
        __file__, claims(record), "--data-dir DATA --published PUBLISHED --cache CACHE --out OUT",
        pairs=pairs, fitted=FITTED, rate=RATE, batch=BATCH,
        images=record["preset"]["images"], test=record["preset"]["test"], common=record["common"],
        checked=LAYERS[CHECKED], float32=record["float32"], structural=structural, identified=_identified(identified),
        layers=_layers(record["found"]),
        means="\n\n".join(
            f"{kind.capitalize()} networks, {_after(step)}:\n\n" + _matrix(values)
            for kind, steps in record["mean"].items() for step, values in steps.items()
        ),
        predicted=study.markdown(
            ["from", "AUROC"], [[name, study.shown(score)] for name, score in _known(record["predicted"]).items()]
        ),
    )  # fmt: skip


def _after(step: str) -> str:
    return f"{int(step):,} steps" if int(step) else "direct match"


def _identified(identified: Mapping[str, Any]) -> str:
    head = ["stitches", "into", "steps", "a", "hit/tie/miss", "b", "hit/tie/miss"]
    rows = []
    for kind, groups in identified.items():
        for group, steps in groups.items():
            for step, axes in steps.items() if group != "structural" else ():
                cells = []
                for axis in "ab":
                    counts = [str(axes[axis][name]) for name in ("hit", "tie", "miss")] if axis in axes else []
                    cells += [study.shown(axes[axis]["score"]), "/".join(counts)] if counts else ["–", "–"]
                rows.append([f"{kind} networks", group, _after(step), *cells])
    return study.markdown(head, rows)


def _layers(counts_of: Mapping[str, Any]) -> str:
    rows = [
        [f"{kind} networks", _after(step), *("–" if count is None else count for count in counts)]
        for kind, steps in counts_of.items()
        for step, counts in steps.items()
    ]
    return study.markdown(["stitches", "steps", *LAYERS], rows)


def _matrix(values: Sequence[Sequence[float]]) -> str:
    rows = [[name, *(f"{value:.2f}" for value in row)] for name, row in zip(LAYERS, values, strict=True)]
    return study.markdown(["", *LAYERS], rows)


def _known(scores: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    """Replace ``None`` in recorded scores by NaN."""
    return {name: {key: float("nan") if v is None else v for key, v in score.items()} for name, score in scores.items()}


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    common, pairs = str(record["common"]), len(record["pairs"]) // 2
    within, between = (
        f"{pairs} {unit}, {len(LAYERS)} layers, {record['common']:,} steps" for unit in ("networks", "pairs")
    )
    identified = record["identified"]
    within_rates, between_rates, start, direct = (
        [identified[kind]["all"][step][axis]["score"] for axis in "ab"]
        for kind, step in (("within", common), ("between", common), ("within", "0"), ("between", "0"))
    )
    scores = _known({**record["predicted"], "excellent": record["excellent"]})
    return [
        WITHIN.row(study.both(within_rates), within, [study.below(rate, WELL) for rate in within_rates], pairs),
        BETWEEN.row(study.both(between_rates), between, [study.below(rate, POORLY) for rate in between_rates], pairs),
        OUTPERFORMED.row(
            f"{study.both(direct)} against {study.both(between_rates)}", between,
            [study.above(one, 0) for one in record["outperforms"].values()], pairs,
        ),
        TRAINING.row(
            f"direct {study.both(start)}; task loss {study.both(within_rates)}", within,
            [one["value"] == 1 and study.below(task, 1) for one, task in zip(start, within_rates, strict=True)], pairs,
        ),
        DISTANT.row(
            study.span([one["value"] for one in record["distant"]], "+.3f"), within,
            [study.above(one, -MARGIN) for one in record["distant"]], pairs,
        ),
        EXCELLENT.row(study.shown(scores["excellent"]), between, [study.above(scores["excellent"], 0.5)], pairs),
        MODIFIES.row(f"{min(record['modifies']):+.3f} or more", between, [e > 0.1 for e in record["modifies"]], pairs),
        STEPS_TELL.row(
            f"AUROC {study.shown(scores['all'])}, of {BASELINE} {study.shown(scores[BASELINE])}: gain "
            f"{study.shown(scores['gain'])}", f"{pairs} folds", [study.above(scores["gain"], 0)], pairs,
        ),
    ]  # fmt: skip
