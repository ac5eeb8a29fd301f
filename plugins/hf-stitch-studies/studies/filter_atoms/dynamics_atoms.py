"""Training dynamics from weights alone (Chen, Miao & Qiu 2023, section 3.2 and A.4, figures 4 and 11-14).

AlexNet and VGG11 are trained with their coefficients fixed at the start, and their atoms are recorded after each epoch.
Each epoch is compared with each other, layer by layer: do lower layers settle first? Then one network is trained from
one start on two tasks: in which layers do they differ?

    python -m filter_atoms.dynamics_atoms --networks NETWORKS --data-dir DATA --out OUT
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filter_atoms import networks
from filter_atoms.experiment import OPTIONS, TRAINED, Claim, filled, leave
from filter_atoms.networks import Images, Recipe, Schedule, alexnet, vgg11
from filter_atoms.pairwise import spearman
from hf_stitch_filter_atoms import FilterAtoms, atomize, train_atoms_only
from matplotlib.figure import Figure
from numpy.typing import NDArray
from study import parser, table
from torch import nn

import hf_stitch
from hf_stitch.metrics import WeightMetric
from hf_stitch.statistics import load_weights
from hf_stitch.training import DynamicsRecorder
from hf_stitch.training.dynamics import Dynamics

Array = NDArray[np.float64]
NAME = "dynamics_atoms"
THRESHOLDS = (0.99, 0.999)
ATOM, COSINE, CKA = "S_Atom", "cosine of the weights", "CKA"
METRICS: dict[str, WeightMetric] = {ATOM: FilterAtoms(), COSINE: FilterAtoms(gauge="orthonormal")}
"""What is computed from recorded atoms. With orthonormal coefficients, S_Atom is the cosine of the weights."""
TITLES = {"alexnet": "AlexNet", "vgg11": "VGG11"}
RATES = {"cosine": "decaying", "constant": "constant"}
TASKS, ORDERS = "two tasks", "one task in two orders"
LEARNT = 0.9
"""Accuracy on the training images from which on a network is near its final state, which the claims are about."""


@dataclass(frozen=True)
class Sizes:
    """An architecture, its data and its training."""

    architecture: str  # ``alexnet`` or ``vgg11``
    width: float  # multiplier of its channels
    data: str  # name of the data set
    classes: int  # number of its classes. Half of them are a task
    images: int  # number of training images
    recipe: Recipe  # how the network is trained. The learning rate decays in one arm and is constant in the other
    task_epochs: int  # epochs of training on each of two tasks

    def build(self, classes: int, seed: int) -> nn.Module:
        """Create the network with random weights."""
        made = {"alexnet": lambda: alexnet(5, classes, self.width), "vgg11": lambda: vgg11(classes, self.width)}
        return networks.seeded(made[self.architecture], seed)


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment."""

    networks: tuple[Sizes, ...]  # the architectures
    seeds: int  # number of starts of each
    walks: int  # number of random walks for each training
    test: int  # number of test images
    probe: int  # number of test images for CKA


Pair = tuple[int, int]


def _networks(width: float, images: Pair, epochs: Pair, tasks: Pair) -> tuple[Sizes, ...]:
    """Return the sizes of AlexNet and VGG11."""
    kinds = (("alexnet", "cifar100", 100), ("vgg11", "cifar10", 10))
    return tuple(
        Sizes(name, width, data, classes, images[i], Recipe(epochs[i], lr=0.01, augment=True), tasks[i])
        for i, (name, data, classes) in enumerate(kinds)
    )


PRESETS = {
    "small": Preset(_networks(0.25, (6_000, 1_500), (20, 12), (8, 8)), seeds=3, walks=1_000, test=2_000, probe=300),
    "paper": Preset(
        _networks(1, (50_000, 50_000), (150, 20), (150, 20)), seeds=5, walks=1_000, test=10_000, probe=1_000
    ),
    "test": Preset(_networks(0.1, (60, 60), (2, 2), (2, 2)), seeds=2, walks=20, test=60, probe=40),
}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, *OPTIONS).parse_args()
    preset = PRESETS[arguments.preset]
    folder = arguments.networks / NAME / arguments.preset
    record: dict[str, Any] = {"preset": arguments.preset, "sizes": preset, "arms": [], "tasks": []}
    pictures: dict[str, Figure] = {}
    for sizes in preset.networks:
        train = networks.read(sizes.data, "train", arguments.data_dir, sizes.images)
        test = networks.read(sizes.data, "test", arguments.data_dir, preset.test)
        place = folder / sizes.architecture
        record["arms"] += arms(sizes, preset, train, test, place)
        found, values = tasks(sizes, preset, train, test, place)
        record["tasks"].append(found)
        dynamics = Dynamics.of(place / "cosine-0" / "recordings", "filter_atoms")
        pictures[f"{NAME}_{sizes.architecture}"] = dynamics.plot()
        pictures[f"{NAME}_{sizes.architecture}_tasks"] = between(values, TITLES[sizes.architecture])
    leave(NAME, record, page, pictures, arguments.out)


# -- training ----------------------------------------------------------------------------------------------------------


def trained(network: nn.Module, data: Images, recipe: Recipe, seed: int, folder: Path) -> nn.Module:
    """Train a network and record its atoms at each epoch, or load it if that is done."""

    def fit(model: nn.Module) -> None:
        shutil.rmtree(folder / "recordings", ignore_errors=True)  # of a training that was interrupted
        recorder = DynamicsRecorder(folder / "recordings", metric="filter_atoms")

        def record(epoch: int) -> None:
            recorder.measure(model, step=epoch, epoch=float(epoch))

        record(0)
        networks.train(model, data, recipe, seed, after_epoch=record, name=f"{folder.parent.name} {folder.name}")

    return networks.kept(folder / "network.safetensors", network, fit)


def atomic(network: nn.Module) -> nn.Module:
    """Decompose a network into orthonormal atoms and coefficients; only its atoms and its head are to be trained."""
    atomize(network)
    train_atoms_only(network, also=("fc",))
    return network


def recorded(folder: Path) -> dict[str, Array]:
    """Read the recorded atoms of a network: layer -> ``(moments, numbers)``."""
    moments = [load_weights(path, "filter_atoms") for path in sorted((folder / "recordings").glob("step-*"))]
    return {
        layer: np.stack([each[layer].tensors["atoms"].double().flatten().numpy() for each in moments])
        for layer in moments[0]
    }


# -- settling ----------------------------------------------------------------------------------------------------------


def settling(curves: Array, threshold: float) -> Array:
    """Return the epochs from which on curves stay at or above a threshold, interpolated linearly between epochs."""
    below = curves < threshold
    count = curves.shape[-1]
    last = np.where(below.any(-1), count - 1 - below[..., ::-1].argmax(-1), 0)
    low, high = (np.take_along_axis(curves, (last + i)[..., None], -1)[..., 0] for i in (0, 1))
    inside = (threshold - low) / np.where(high > low, high - low, 1.0)
    return np.where(below.any(-1), last + inside, 0.0)


def order(epochs: Array) -> float:
    """Return the rank correlation of depth and settling epoch ``(layers,)``, 0 if all layers settle at once."""
    found = spearman(np.arange(len(epochs), dtype=np.float64), epochs)
    return found if np.isfinite(found) else 0.0


def walks(states: Array, count: int, random: np.random.Generator) -> Array:
    """Draw random walks from the same start with the same lengths of steps, in random directions.

    Only inner products matter, so that vectors are drawn in the coordinates of their own Gram-Schmidt basis, where a
    normal vector has a triangle of normal entries with a diagonal of χ variables.
    """
    steps, entries = np.linalg.norm(np.diff(states, axis=0), axis=1), states.shape[1]
    k = min(len(states), entries)
    rows = np.arange(1, len(states))
    directions = random.standard_normal((count, len(steps), k)) * (np.arange(k) <= rows[:, None])
    diagonal = rows[rows < k]
    directions[:, diagonal - 1, diagonal] = np.sqrt(random.chisquare(entries - diagonal, (count, len(diagonal))))
    directions *= (steps / np.linalg.norm(directions, axis=2))[..., None]
    start = np.zeros((count, 1, k))
    start[:, :, 0] = np.linalg.norm(states[0])
    paths = np.concatenate([start, directions], 1).cumsum(1)
    paths /= np.linalg.norm(paths, axis=2, keepdims=True)
    cosines: Array = (paths * paths[:, -1:]).sum(2)
    return cosines


def arms(sizes: Sizes, preset: Preset, train: Images, test: Images, folder: Path) -> Iterator[dict[str, Any]]:
    """Train a network from all starts at both rates, and yield when its layers settle, by rate and metric."""
    schedules: tuple[Schedule, ...] = ("cosine", "constant")
    for schedule in schedules:
        curves: dict[str, list[Mapping[str, Array]]] = {metric: [] for metric in METRICS}
        accuracies, drawn, size = [], [], 0
        for seed in range(preset.seeds):
            place, recipe = folder / f"{schedule}-{seed}", replace(sizes.recipe, schedule=schedule)
            network = trained(atomic(sizes.build(sizes.classes, seed)), train, recipe, seed, place)
            accuracies.append({"test": networks.accuracy(network, test), "train": networks.accuracy(network, train)})
            for metric, built in METRICS.items():
                pairs = Dynamics.of(place / "recordings", built).values
                curves[metric].append({layer: matrix[:, -1] for layer, matrix in pairs.items()})
            random = np.random.default_rng(seed)
            drawn.append(np.stack([walks(each, preset.walks, random) for each in recorded(place).values()], 1))
            size = next((place / "recordings").glob("step-*")).stat().st_size
        for metric, found in curves.items():
            yield {
                "architecture": sizes.architecture, "schedule": schedule, "metric": metric, "bytes": size,
                "accuracy": accuracies, "seeds": [settled(each) for each in found],
                "walks": settled_walks(drawn) if metric == ATOM else None,
                "curves": {layer: np.mean([each[layer] for each in found], 0) for layer in found[0]},
            }  # fmt: skip


def settled(curves: Mapping[str, Array]) -> dict[str, Any]:
    """Return settling epochs by threshold and layer, and their rank correlation with depth."""
    found = {
        threshold: {layer: float(settling(curve, threshold)) for layer, curve in curves.items()}
        for threshold in THRESHOLDS
    }
    return {
        "settled": found,
        "order": {threshold: order(np.array(list(layers.values()))) for threshold, layers in found.items()},
    }


def settled_walks(drawn: Sequence[Array]) -> dict[float, dict[str, Any]]:
    """Return by threshold when random walks settle, and quantiles of their mean correlation with depth."""
    found = {}
    for threshold in THRESHOLDS:
        epochs = np.stack([settling(each, threshold) for each in drawn])
        orders = np.array([[order(walk) for walk in seed] for seed in epochs]).mean(0)
        low, middle, high = np.percentile(orders, [2.5, 50, 97.5])
        found[threshold] = {"settled": np.median(epochs, (0, 1)), "low": low, "median": middle, "high": high}
    return found


# -- two tasks ---------------------------------------------------------------------------------------------------------


def tasks(
    sizes: Sizes, preset: Preset, train: Images, test: Images, folder: Path
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Train a network from each start on two tasks, and on the first one in another order."""
    recipe, classes = replace(sizes.recipe, epochs=sizes.task_epochs), sizes.classes // 2
    runs: list[dict[str, Any]] = []
    for seed in range(preset.seeds):
        shuffled = np.random.default_rng(seed).permutation(sizes.classes).tolist()
        parts = {"a": shuffled[:classes], "b": shuffled[classes:]}
        made, places = {}, {name: folder / f"task-{name}-{seed}" for name in ("a", "b", "again")}
        for name, task, number in (("a", "a", seed), ("b", "b", seed), ("again", "a", 1_000 + seed)):
            network = atomic(sizes.build(classes, seed))
            made[name] = trained(network, train.of_classes(parts[task]), recipe, number, places[name])
        similarities = {}
        for pair, other in ((TASKS, "b"), (ORDERS, "again")):
            similarities[pair] = ends(places["a"], places[other])
            layers = list(similarities[pair][ATOM])
            similarities[pair][CKA] = activations(made["a"], made[other], test.take(preset.probe), layers)
        accuracy = {name: networks.accuracy(made[name], test.of_classes(parts[name])) for name in parts}
        runs.append({"accuracy": accuracy, "similarity": similarities})
        if seed == 0:
            crossed = cross(places["a"], places["b"])
    return {"architecture": sizes.architecture, "runs": runs}, crossed


def ends(one: Path, other: Path) -> dict[str, dict[str, float]]:
    """Compare the atoms of two trained networks: metric -> layer -> value."""
    last = [load_weights(max((folder / "recordings").glob("step-*")), "filter_atoms") for folder in (one, other)]
    return {
        metric: {layer: score.value(last[0][layer], last[1][layer]) for layer in last[0]}
        for metric, score in METRICS.items()
    }


def cross(one: Path, other: Path) -> dict[str, Array]:
    """Return the S_Atom of each epoch of a network with each of another: layer -> ``(epochs, epochs)``."""
    units = [
        {layer: x / np.linalg.norm(x, axis=1, keepdims=True) for layer, x in recorded(folder).items()}
        for folder in (one, other)
    ]
    return {layer: units[0][layer] @ units[1][layer].T for layer in units[0]}


def activations(one: nn.Module, other: nn.Module, probe: Images, layers: Sequence[str]) -> dict[str, float]:
    """Compare the activations of two networks by layer, with debiased linear CKA of the flattened activations."""
    example = torch.zeros(2, 3, 32, 32)
    a, b = (hf_stitch.load(network, example_inputs=example) for network in (one, other))
    atlas = hf_stitch.compare(
        a, b, probe.samples(), layers_a=layers, layers_b=layers, metrics=["linear_cka:debiased=True"],
        rows="flat", progress=False,
    )  # fmt: skip
    (values,) = atlas.values.values()
    return dict(zip(layers, np.diag(values).tolist(), strict=True))


def between(values: Mapping[str, Array], title: str) -> Figure:
    """Draw figures 13 and 14: each epoch on one task against each on the other, for each layer."""
    figure = Figure(figsize=(2.2 * len(values), 3.2), layout="constrained")
    low = min(float(matrix.min()) for matrix in values.values())
    figure.suptitle(f"S_Atom of {title} on two tasks")
    for place, (layer, matrix) in enumerate(values.items(), 1):
        axes = figure.add_subplot(1, len(values), place)
        image = axes.imshow(matrix, origin="lower", vmin=low, vmax=1, cmap="viridis")
        axes.set(title=layer, xlabel="epoch, task B", ylabel="epoch, task A" if place == 1 else "")
    figure.colorbar(image, ax=figure.axes)
    return figure


# -- claims ------------------------------------------------------------------------------------------------------------

SETTLE = {
    name: Claim(
        place, f"{TITLES[name]}: layers near the input settle first", published,
        "with the decaying and with the constant rate, the rank correlation of depth and settling epoch is positive in "
        "all starts, and its mean above the walks; not known where it is inside the interval of the walks, or where "
        f"networks have not learnt their training images (accuracy below {LEARNT:g})",
    )
    for name, place, published in (
        ("alexnet", "section 3.2, figures 4a-c, 11", "first layer at .99 at epoch 36 of 150"),
        ("vgg11", "figures 4d-f, 12", "–"),
    )
}  # fmt: skip
MIDDLE = {
    name: Claim(
        place, f"{TITLES[name]}: two tasks differ most in the middle layers", "–",
        "in every start, S_Atom of the middle layers is below those of the first and of the last ones, and by more "
        "than with one task in two orders; not known where networks have not learnt their training images (below "
        f"{LEARNT:g})",
    )
    for name, place in (("alexnet", "figure 13"), ("vgg11", "figure 14"))
}  # fmt: skip


def _of_atoms(record: Mapping[str, Any], architecture: str) -> list[Mapping[str, Any]]:
    """Return the arms of an architecture, one for each rate, as S_Atom sees them."""
    return [arm for arm in record["arms"] if (arm["architecture"], arm["metric"]) == (architecture, ATOM)]


def _correlations(arm: Mapping[str, Any], threshold: float = THRESHOLDS[0]) -> list[float]:
    """Return the rank correlation of depth and settling epoch of each start."""
    return [seed["order"][f"{threshold}"] for seed in arm["seeds"]]


def conditions(record: Mapping[str, Any], architecture: str) -> dict[str, bool | None]:
    """Return which of the four conditions of the rule hold; ``None`` where the walks explain the order."""
    found: dict[str, bool | None] = {}
    for arm in _of_atoms(record, architecture):
        orders, rate, null = _correlations(arm), RATES[arm["schedule"]], arm["walks"]["0.99"]
        found[f"positive in all starts, {rate} rate"] = min(orders) > 0
        inside = null["low"] <= np.mean(orders) <= null["high"]
        found[f"above the walks, {rate} rate"] = None if inside else bool(np.mean(orders) > null["high"])
    return found


def learnt(record: Mapping[str, Any], architecture: str) -> list[float]:
    """Return the accuracies on the training images of all networks that were trained to the end."""
    return [each["train"] for arm in _of_atoms(record, architecture) for each in arm["accuracy"]]


def parts(record: Mapping[str, Any], architecture: str) -> list[bool | None]:
    """Return which conditions hold; none is known where networks have not learnt."""
    known = min(learnt(record, architecture)) >= LEARNT
    return list(conditions(record, architecture).values()) if known else [None]


def groups(layers: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Return the first, the middle and the last layers; a quarter, rounded down, is first and a quarter last."""
    end = max(1, len(layers) // 4)
    return layers[:end], layers[end:-end], layers[-end:]


def gaps(found: Mapping[str, Any], pair: str) -> list[tuple[float, float]]:
    """Return by how much the mean S_Atom of the middle layers is below those of the first and of the last layers."""
    result = []
    for run in found["runs"]:
        values = run["similarity"][pair][ATOM]
        first, middle, last = (float(np.mean([values[layer] for layer in group])) for group in groups(list(values)))
        result.append((first - middle, last - middle))
    return result


def task_parts(found: Mapping[str, Any]) -> list[bool]:
    """Return whether the middle layers differ more than the first, than the last, and than with one task."""
    differ, control = gaps(found, TASKS), gaps(found, ORDERS)
    more = all(min(gap) > min(other) for gap, other in zip(differ, control, strict=True))
    first, last = (all(gap[side] > 0 for gap in differ) for side in (0, 1))
    return [first, first and last, first and last and more]


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table of all experiments."""
    rows = []
    for found in record["tasks"]:
        name, count = found["architecture"], len(found["runs"])
        shown = "; ".join(
            f"{np.mean(_correlations(arm)):.2f}, walks {arm['walks']['0.99']['low']:.2f} to "
            f"{arm['walks']['0.99']['high']:.2f} ({RATES[arm['schedule']]} rate)"
            for arm in _of_atoms(record, name)
        )
        ours = f"rank correlation of depth and epoch {shown}"
        rows.append(SETTLE[name].row(ours, f"{count} starts", parts(record, name), count))
        (first, last), again = np.mean(gaps(found, TASKS), 0), np.mean(gaps(found, ORDERS), 0)
        ours = (
            f"S_Atom of first minus middle layers {first:+.4f}, last minus middle {last:+.4f}; one task in two orders "
            f"{again[0]:+.4f}, {again[1]:+.4f}"
        )
        known = min(learnt(record, name)) >= LEARNT
        rows.append(MIDDLE[name].row(ours, f"{count} starts", task_parts(found) if known else [None], count))
    return rows


# -- page --------------------------------------------------------------------------------------------------------------

PAGE = """# Training dynamics from filter atoms

**What to do**: do not read an order of layers off settling epochs without the random walks: here, the lengths of steps
alone explain it. Whether the paper's order holds is open: these networks are far from trained.

{verdicts}

{title}: section 3.2 and appendix A.4; figures 4 and 11 to 14. The paper: in AlexNet on CIFAR-100 (150 epochs) and in
VGG11 on ImageNet (20 epochs of fine-tuning), layers near the input reach their final atoms first (the first layer of
AlexNet reaches a similarity of .99 with the last epoch at epoch 36); and networks trained from one start on two tasks
differ less in the first layers, more in the middle ones.

{demonstration} ImageNet is out of reach: VGG11 is trained on CIFAR-10, from random weights, which is a stand-in.

Setting: {setting}. SGD with momentum .9, learning rate .01, batches of 64, random flips and crops, {seeds} starts.
Atoms can be compared only if the coefficients are equal, and the paper leaves open whether its coefficients stay. Here
the random start is decomposed into orthonormal atoms and coefficients (9 atoms of 3×3, exact). The coefficients stay as
they are; the atoms and the last linear layer are trained. S_Atom is in the gauge of that start; in the gauge of
orthonormal coefficients it is the cosine of the weights, which is given beside it. Each start is trained with a
learning rate that decays to 0 (cosine), and with a constant one: a rate that decays lets every layer settle. A layer
settles at the epoch from which on its similarity to the last epoch stays at or above .99 (or .999), interpolated
between epochs. The null: {walks:,} random walks for each run, which start where a layer starts, and take steps of the
lengths that this layer took in each epoch, in random directions. The recording of an epoch takes {bytes}.

The rules were written before the figures (one short training of each network, from another start, was known). Until
this version, they refuted all four claims. But networks reach {learnt} of their training images, so that their last
epoch is no final state, and the walks explain the order in most cases. What a decision takes: training to the end, on a
GPU.

{conditions}

{walked}

{orders}

Settling epochs, as the mean over the starts (least to greatest), and the median of the walks:

{layers}

![Similarity of all pairs of epochs, AlexNet](dynamics_atoms_alexnet.png)

![Similarity of all pairs of epochs, VGG11](dynamics_atoms_vgg11.png)

The figures show the first start with the decaying rate; white lines mark the epochs of .99 and .999.

## Two tasks

The same start is trained on two tasks (random halves of the classes; {task_epochs}), atoms and a head for each. The
control: the first task, trained again with the images in another order.
{groups}. CKA is debiased and compares the flattened outputs of the convolutions for {probe} test images of all
classes.

{task_verdicts}

{most}

{task_table}

![S_Atom of AlexNet on two tasks](dynamics_atoms_alexnet_tasks.png)

![S_Atom of VGG11 on two tasks](dynamics_atoms_vgg11_tasks.png)

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sizes = {each["architecture"]: each for each in record["sizes"]["networks"]}
    arms, tasks = record["arms"], record["tasks"]
    middle = {each["architecture"]: groups(list(each["runs"][0]["similarity"][TASKS][ATOM]))[1] for each in tasks}
    reached = [learnt(record, name) for name in sizes]
    return filled(
        PAGE, NAME, claims(record), TRAINED,
        setting="; ".join(
            f"{TITLES[name]} of {each['width']:g} of its width, {each['images']:,} images of "
            f"{networks.TITLES[each['data']]}, {each['recipe']['epochs']} epochs"
            for name, each in sizes.items()
        ),
        **{key: record["sizes"][key] for key in ("seeds", "walks", "probe")},
        bytes=" or ".join(f"{_of_atoms(record, name)[0]['bytes']:,} bytes ({TITLES[name]})" for name in sizes),
        conditions="\n\n".join(
            f"{TITLES[name]}, the conditions: "
            + "; ".join(f"{about}: {'yes' if held else 'no'}" for about, held in conditions(record, name).items()) + "."
            for name in sizes
        ),
        learnt=" and ".join(f"{min(each):.0%} to {max(each):.0%}" for each in reached),
        walked=_walked(arms), orders=_orders(arms),
        layers="\n\n".join(_layers([arm for arm in arms if arm["architecture"] == name]) for name in sizes),
        task_epochs=", ".join(f"{TITLES[name]} for {each['task_epochs']} epochs" for name, each in sizes.items()),
        groups="; ".join(f"{TITLES[name]}: {each[0]} to {each[-1]} are the middle" for name, each in middle.items()),
        task_verdicts="\n\n".join(map(_task_sentence, tasks)),
        most="\n".join(map(_most, tasks)), task_table="\n\n".join(map(_task_table, tasks)),
    )  # fmt: skip


def _walked(arms: Iterable[Mapping[str, Any]]) -> str:
    """Say how often the mean correlation is inside, above and below the interval of the walks."""
    cases = [
        (float(np.mean(_correlations(arm, threshold))), arm["walks"][f"{threshold}"])
        for arm in arms if arm["walks"] for threshold in THRESHOLDS
    ]  # fmt: skip
    above, below = (sum(mean > null["high"] for mean, null in cases), sum(mean < null["low"] for mean, null in cases))
    return (
        "Counted when the figures were known: over both networks, rates and thresholds, the mean correlation is "
        f"negative (layers near the input settle last) in {sum(mean < 0 for mean, _ in cases)} of {len(cases)} cases. "
        f"It is inside the 95% interval of the walks in {len(cases) - above - below}, above it in {above} and below it "
        f"in {below}: where it is inside, the lengths of the steps are enough to explain the order. These networks are "
        "narrow, trained for few epochs, and their coefficients stay random; longer training of all weights can differ."
    )


def _orders(arms: Iterable[Mapping[str, Any]]) -> str:
    columns: dict[str, Callable[..., str]] = {
        "network": lambda arm: TITLES[arm["architecture"]], "rate": lambda arm: RATES[arm["schedule"]],
        "compared by": lambda arm: arm["metric"],
    }  # fmt: skip
    for at, threshold in zip((".99", ".999"), THRESHOLDS, strict=True):
        columns |= {
            f"at {at}: each start": lambda arm, t=threshold: ", ".join(f"{r:.2f}" for r in _correlations(arm, t)),
            f"at {at}: mean": lambda arm, t=threshold: f"{np.mean(_correlations(arm, t)):.2f}",
            f"at {at}: walks: median, 95%": lambda arm, t=threshold: (
                "{median:.2f} [{low:.2f}, {high:.2f}]".format(**arm["walks"][f"{t}"]) if arm["walks"] else "–"
            ),
        }
    columns["accuracy: test, train"] = lambda arm: ", ".join(
        f"{np.mean([each[split] for each in arm['accuracy']]):.3f}" for split in ("test", "train")
    )
    return "Rank correlation of depth and settling epoch:\n\n" + table(arms, columns)


def _layers(arms: Sequence[Mapping[str, Any]]) -> str:
    def cell(arm: Mapping[str, Any], threshold: str, place: int, layer: str) -> str:
        values = [seed["settled"][threshold][layer] for seed in arm["seeds"]]
        shown = f"{np.mean(values):.1f} ({min(values):.1f}–{max(values):.1f})"
        return f"{shown}; walks {arm['walks'][threshold]['settled'][place]:.1f}" if arm["walks"] else shown

    return table(
        [(arm, f"{threshold}") for arm, threshold in product(arms, THRESHOLDS)],
        {
            f"{TITLES[arms[0]['architecture']]}: rate": lambda arm, _: RATES[arm["schedule"]],
            "compared by": lambda arm, _: arm["metric"], "at": lambda _, threshold: threshold.lstrip("0"),
        } | {layer: partial(cell, place=place, layer=layer) for place, layer in enumerate(arms[0]["curves"])},
    )  # fmt: skip


def _task_sentence(found: Mapping[str, Any]) -> str:
    shown = []
    for pair in (TASKS, ORDERS):
        first, last = np.mean(gaps(found, pair), 0)
        shown.append(f"{pair}: first layers minus middle {first:+.4f}, last minus middle {last:+.4f}")
    accuracy = [np.mean([run["accuracy"][name] for run in found["runs"]]) for name in ("a", "b")]
    title = TITLES[found["architecture"]]
    reached = f"Test accuracy on the two tasks: {accuracy[0]:.3f} and {accuracy[1]:.3f}."
    return f"{title}: S_Atom, mean over starts, {'; '.join(shown)}. {reached}"


def _values(found: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return the similarities of all starts by metric and pair, and by layer."""
    runs = [run["similarity"] for run in found["runs"]]
    return {
        (metric, pair): {layer: [run[pair][metric][layer] for run in runs] for layer in runs[0][pair][metric]}
        for metric, pair in product((ATOM, COSINE, CKA), (TASKS, ORDERS))
    }


def _most(found: Mapping[str, Any]) -> str:
    """Name the layers that differ most and least, by metric and pair."""
    shown = []
    for (metric, pair), layers in _values(found).items():
        means = {layer: float(np.mean(values)) for layer, values in layers.items()}
        shown.append(f"{metric}, {pair}: {min(means, key=means.__getitem__)}, {max(means, key=means.__getitem__)}")
    return f"- {TITLES[found['architecture']]}: layers that differ most and least by {'; '.join(shown)}."


def _task_table(found: Mapping[str, Any]) -> str:
    values = _values(found)
    return table(values.items(), {
        TITLES[found["architecture"]]: lambda key, _: key[0], "": lambda key, _: key[1],
    } | {
        layer: lambda _, of, n=layer: f"{np.mean(of[n]):.4f} ({min(of[n]):.4f}–{max(of[n]):.4f})"
        for layer in values[ATOM, TASKS]
    })  # fmt: skip


if __name__ == "__main__":
    main()
