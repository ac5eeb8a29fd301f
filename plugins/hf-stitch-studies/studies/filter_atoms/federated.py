"""Do similar filter atoms tell which clients have similar data? Chen, Miao & Qiu (2023), figures 5 and 7.

python -m filter_atoms.federated --data-dir DATA --networks NETWORKS --out OUT
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from filter_atoms import ensembles, networks
from filter_atoms.experiment import DEMONSTRATION, OPTIONS, PAPER_TITLE, claim, footer, leave
from filter_atoms.federated_methods import METHODS, Plan, State, federate, snapshot
from filter_atoms.networks import TITLES, AlexNet, Images, Recipe
from filter_atoms.pairwise import Pairs, bootstrap, shown, upper
from hf_stitch_filter_atoms import atomize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import rankdata
from study import markdown, parser, verdicts
from torch import Tensor, nn

NAME = "federated"
Array = NDArray[np.float64]
CLASSES, DIGITS = 100, 10
CLEAR = 0.9
"""A cluster is distinct if the lower end of the interval of its AUROC is at least this, and visible if above .5."""
ARMS = {
    "random": "random coefficients (the paper's figures)",
    "public": f"public pretraining on {TITLES['cifar10']}",
    "global": "global network of FedAvg",
    "evolving": "evolving: averaged after each round",
}
MAIN = "random"
SIMILARITIES = {
    "atom": "S_Atom",
    "atom moved": "S_Atom of the changes since round 0",
    "weights": "cosine of the weights",
    "cka": "CKA",
    "cca": "CCA",
}
KINDS = {"subtask": "same subtask", "digits": "digits"}

# -- sizes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment.

    Attributes:
        width: Multiplier of the channels of AlexNet.
        subtasks: Number of subtasks of CIFAR-100, of 5 classes each.
        shared_by: Clients of each subtask.
        digits: Clients with coloured digits.
        train: Training images of a client.
        test: Test images of a client.
        rounds: Rounds in which atoms are trained, of one epoch each, with random coefficients.
        others: The same with the other coefficients.
        shown: Rounds after which similarities are read.
        plan: FedAvg of the global network.
        public: Number of images of CIFAR-10 for public pretraining, and its epochs.
        probes: Number of probing images for CKA and CCA.
        resamples: Number of bootstrap resamples.
    """

    width: float
    subtasks: int
    shared_by: int
    digits: int
    train: int
    test: int
    rounds: int
    others: int
    shown: tuple[int, ...]
    plan: Plan
    public: tuple[int, int]
    probes: int
    resamples: int


def local(epochs: int) -> Recipe:
    """Return the paper's local training: SGD with momentum .9 and learning rate .01, here with batches of 10."""
    return Recipe(epochs, lr=0.01, batch=10, schedule="constant")


PRESETS = {
    "small": Preset(
        0.25, 20, 5, 20, 60, 40, 16, 6, (1, 4, 8, 16), Plan(10, 0.1, local(4)), (8_000, 4), 500, 300,
    ),
    "paper": Preset(
        1, 20, 5, 20, 500, 100, 100, 100, (1, 3, 10, 30, 100), Plan(100, 0.1, local(15)), (50_000, 30), 1000, 2000,
    ),
    "test": Preset(0.0625, 3, 3, 3, 10, 8, 2, 2, (1, 2), Plan(2, 0.3, local(1)), (40, 1), 20, 20),
}  # fmt: skip

# -- clients -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Client:
    """The data of a client.

    Attributes:
        train: Training images.
        test: Test images.
        group: Number of its subtask; the clients with digits have the last one.
    """

    train: Images
    test: Images
    group: int


def clients_of(preset: Preset, data_dir: str | None) -> list[Client]:
    """Return the clients of the subtasks, then those with digits."""
    random = torch.Generator().manual_seed(0)
    return [*subtask_clients(preset, data_dir, random), *digit_clients(preset, data_dir, random)]


def subtask_clients(preset: Preset, data_dir: str | None, random: torch.Generator) -> list[Client]:
    """Deal the images of each subtask of CIFAR-100 to its clients."""
    parts = [networks.read("cifar100", split, data_dir) for split in ("train", "test")]
    order = torch.randperm(CLASSES, generator=random)
    made = []
    for subtask in range(preset.subtasks):
        classes = order[5 * subtask : 5 * subtask + 5]
        dealt = [dealt_out(part, classes, preset.shared_by, random) for part in parts]
        made += [
            Client(train.take(preset.train), test.take(preset.test), subtask)
            for train, test in zip(*dealt, strict=True)
        ]
    return made


def digit_clients(preset: Preset, data_dir: str | None, random: torch.Generator) -> list[Client]:
    """Deal coloured digits to clients."""
    digits = networks.read("mnist", "test", data_dir)
    digits = Images(coloured(digits.pixels, random), digits.labels + CLASSES)
    made = []
    for number in range(preset.digits):
        own = digits.select(torch.arange(number, len(digits), preset.digits))
        rest = own.select(torch.arange(preset.train, len(own)))
        made.append(Client(own.take(preset.train), rest.take(preset.test), preset.subtasks))
    return made


def dealt_out(images: Images, classes: Tensor, hands: int, random: torch.Generator) -> list[Images]:
    """Deal the images of some classes to several clients, evenly by class and in random order."""
    found = []
    for hand in range(hands):
        places = torch.cat([torch.nonzero(images.labels == label).flatten()[hand::hands] for label in classes])
        found.append(images.select(places[torch.randperm(len(places), generator=random)]))
    return found


def coloured(pixels: Tensor, random: torch.Generator) -> Tensor:
    """Give each grey image ``(n, 3, 32, 32)`` a random colour of the digit and one of the ground."""
    ink, ground = 255 * torch.rand(2, len(pixels), 3, 1, 1, generator=random)
    share = pixels / 255
    return (share * ink + (1 - share) * ground).to(torch.uint8)


# -- networks ----------------------------------------------------------------------------------------------------------


def initial(width: float, classes: int = CLASSES + DIGITS) -> nn.Module:
    """Create the network from which all clients start."""
    return networks.seeded(lambda: AlexNet(3, classes, width), 0)


def pretrained(preset: Any, arguments: argparse.Namespace, classes: int = CLASSES + DIGITS) -> nn.Module:
    """Train a network on CIFAR-10, or load it, and give it the initial linear layer."""
    count, epochs = preset.public
    path = arguments.networks / "federated" / f"public_w{preset.width:g}_n{count}_e{epochs}.safetensors"
    made = networks.seeded(lambda: AlexNet(3, 10, preset.width), 0)

    def fit(network: nn.Module) -> None:
        data = networks.read("cifar10", "train", arguments.data_dir, count)
        networks.train(network, data, Recipe(epochs, lr=0.005), 0)

    networks.kept(path, made, fit)
    made.add_module("fc", initial(preset.width, classes).get_submodule("fc"))
    return made


def atomic(network: nn.Module) -> nn.Module:
    """Decompose the convolutions of a network, and return it."""
    atomize(network)
    return network


def start(arm: str, preset: Preset, clients: Sequence[Client], arguments: argparse.Namespace) -> nn.Module:
    """Return the network with atoms from which the clients of an arm start."""
    if arm == "public":
        return atomic(pretrained(preset, arguments))
    made = initial(preset.width)
    if arm == "global":
        shared, _ = federate(made, [client.train for client in clients], METHODS["fedavg"], preset.plan, seed=1)
        made.load_state_dict(shared)
    return atomic(made)


# -- figures -----------------------------------------------------------------------------------------------------------


def auroc(pairs: Pairs) -> float:
    """Return the AUROC of ``similarity`` for pairs ``inside`` a cluster against others that are ``counted``."""
    counted = pairs("counted") > 0
    inside = pairs("inside")[counted] > 0
    hits = int(inside.sum())
    if hits in (0, len(inside)):
        return float("nan")
    ranks = rankdata(pairs("similarity")[counted])
    return float((ranks[inside].sum() - hits * (hits + 1) / 2) / (hits * (len(inside) - hits)))


def clusters(groups: Array, digits: int) -> dict[str, dict[str, Array]]:
    """Return which pairs of clients are inside a cluster and which are counted, as matrices: kind -> both.

    Args:
        groups: Number of each client's group ``(clients,)``.
        digits: The group of the clients with digits.
    """
    same = np.equal.outer(groups, groups)
    digit = groups == digits
    either = np.logical_or.outer(digit, digit)
    return {
        "subtask": {"inside": same.astype(float), "counted": (~either).astype(float)},
        "digits": {"inside": same.astype(float), "counted": either.astype(float)},
    }


def pairs_of(matrix: Array, kind: Mapping[str, Array]) -> Pairs:
    """Return the values of all pairs of clients that :func:`auroc` reads."""
    return lambda name: upper({"similarity": matrix, **kind}[name])


def means(matrix: Array, kinds: Mapping[str, Mapping[str, Array]]) -> dict[str, float]:
    """Return mean similarities of the kinds of pairs."""
    found = {}
    for name, kind in kinds.items():
        pairs = pairs_of(matrix, kind)
        counted, inside = pairs("counted") > 0, pairs("inside") > 0
        found[name] = float(pairs("similarity")[counted & inside].mean())
        found[f"not {name}"] = float(pairs("similarity")[counted & ~inside].mean())
    return found


def shuffled(matrix: Array, groups: Array, digits: int, draws: int) -> dict[str, list[float]]:
    """Return the mean and the 97.5% quantile of the AUROC when the groups of clients are permuted."""
    random = np.random.default_rng(0)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(draws):
        for kind, masks in clusters(random.permutation(groups), digits).items():
            found[kind].append(auroc(pairs_of(matrix, masks)))
    return {kind: [float(np.mean(values)), float(np.quantile(values, 0.975))] for kind, values in found.items()}


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, *OPTIONS).parse_args()
    preset = PRESETS[arguments.preset]
    clients = clients_of(preset, arguments.data_dir)
    public = networks.read("cifar100", "train", arguments.data_dir)
    places = torch.randperm(len(public), generator=torch.Generator().manual_seed(1))[: preset.probes]
    arms, matrices = {}, {}
    for arm in ARMS:
        network = start(arm, preset, clients, arguments)
        arms[arm], matrices[arm] = related(arm, network, clients, preset, public.select(places).inputs())
    record = {
        "preset": arguments.preset, "sizes": preset, "plan": str(preset.plan), "arms": arms,
        "classes_of_subtasks": [client.train.labels.unique() for client in clients if client.group < preset.subtasks]
        [:: preset.shared_by],
    }  # fmt: skip
    leave(NAME, record, page, {NAME: picture(matrices, preset)}, arguments.out)


def related(
    arm: str, network: nn.Module, clients: Sequence[Client], preset: Preset, probes: Tensor
) -> tuple[dict[str, Any], dict[int, Array]]:
    """Train the atoms of all clients, and measure whether those of a cluster are similar.

    Returns:
        What the page needs, and S_Atom after each round that is shown.
    """
    groups = np.array([client.group for client in clients], dtype=float)
    kinds = clusters(groups, preset.subtasks)
    first = [snapshot(network)]
    matrices: dict[int, Array] = {}

    def read(number: int, shared: State, own: Sequence[State]) -> None:
        if number in preset.shown:
            states = [{**shared, **each} for each in own]
            matrices[number] = ensembles.cosines(ensembles.atoms(states)).numpy()

    method = METHODS["evolving" if arm == "evolving" else "fixed"]
    plan = Plan(preset.rounds if arm == MAIN else preset.others, 1.0, local(1))
    shared, own = federate(network, [client.train for client in clients], method, plan, seed=2, after_round=read)
    states = [{**shared, **each} for each in own]
    found, costs = ensembles.measured(network, states, probes)
    atoms = ensembles.atoms(states)
    found["atom moved"] = ensembles.cosines(ensembles.moved(atoms, ensembles.atoms(first)))
    found["weights"] = ensembles.cosines(ensembles.filters(states))
    scores = {}
    for name in SIMILARITIES:
        scores[name] = {
            kind: bootstrap([{"similarity": found[name].numpy(), **masks}], auroc, preset.resamples)
            for kind, masks in kinds.items()
        }
    return {
        "accuracy": accuracies(network, states, clients, preset.subtasks),
        "auroc": scores,
        "shuffled": shuffled(found["atom"].numpy(), groups, preset.subtasks, preset.resamples),
        "through": {
            number: {
                "mean": means(matrix, kinds),
                **{kind: auroc(pairs_of(matrix, masks)) for kind, masks in kinds.items()},
            }
            for number, matrix in {0: np.ones((len(clients),) * 2), **matrices}.items()
        },
        "costs": costs,
    }, matrices


def accuracies(network: nn.Module, states: Sequence[State], clients: Sequence[Client], digits: int) -> dict[str, float]:
    """Return the mean accuracy on their own test images of the clients of subtasks and of those with digits."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for state, client in zip(states, clients, strict=True):
        network.load_state_dict(state)
        found["digits" if client.group == digits else "subtask"].append(networks.accuracy(network, client.test))
    return {kind: float(np.mean(values)) for kind, values in found.items()}


def picture(matrices: Mapping[str, Mapping[int, Array]], preset: Preset) -> Figure:
    """Draw S_Atom of all clients through the rounds (figure 7), and of the last clients in all arms (figure 5)."""
    rounds = matrices[MAIN]
    columns = max(len(rounds), len(ARMS))
    figure = Figure(figsize=(3.2 * columns, 6.8), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False)
    for axis, (number, matrix) in zip(axes[0], rounds.items(), strict=False):
        _draw(axis, figure, matrix, f"round {number}")
    last = 2 * preset.digits + preset.digits
    for axis, (arm, through) in zip(axes[1], matrices.items(), strict=False):
        _draw(axis, figure, through[max(through)][-last:, -last:], f"{arm}: last {last} clients")
    for axis in axes.flat:
        axis.set_axis_off()
    return figure


def _draw(axis: Any, figure: Figure, matrix: Array, title: str) -> None:
    low, high = np.quantile(matrix[np.triu_indices(len(matrix), 1)], [0.02, 0.98])
    figure.colorbar(axis.imshow(matrix, vmin=low, vmax=high), ax=axis, shrink=0.8)
    axis.set_title(title, fontsize="small")


# -- page --------------------------------------------------------------------------------------------------------------

PAGE = """# Federated learning: which clients are similar

**What to do**: use S_Atom to tell kinds of clients apart; take the coefficients of a network that was trained on all
clients, with which it finds subtasks, too. The cosine of the weights does as well, and costs more to send.

{verdicts}

After {title}, section 3.3, figures 5 and 7: 120 clients share coefficients and train their own filter atoms. The
paper's claim: S_Atom shows a distinct cluster of the 20 clients with SVHN, and each group of 5 clients with the same
subtask of CIFAR-100 is similar among itself.

{demonstration} SVHN is not at hand: MNIST digits in random colours on random grounds stand in for it. {clients}
clients: {subtasks} subtasks of 5 classes × {shared_by} clients, with {train} training and {test} test images each,
and {digits} clients with as many digits, so that the number of steps does not tell the kinds apart (in the paper,
SVHN clients have more images). AlexNet with 3 convolutions and {width:g} of its width; {rounds} rounds of one epoch
({others} in the arms other than "{main}"), SGD with learning rate .01 and momentum .9 as in the paper (100 rounds
there), batches of 10. All clients start from the same network; atoms and the linear layer (one of {classes} outputs
for all) are trained, without communication. Coefficients are:

{arms}

The gauge is that which training left, from orthonormal atoms at round 0. "Distinct" means: the similarity of pairs of
clients tells those inside a cluster from others. Same subtask: pairs of CIFAR-100 clients, with the same or different
subtasks. Digits: two clients with digits, or one of each kind. AUROC after the last round, with 95% intervals from a
bootstrap over clients:

{table}

At round 0 all atoms are equal: every AUROC is .5. With permuted groups of clients, the AUROC of S_Atom in the arm
"{main}" is {null_subtask} (same subtask) and {null_digits} (digits; mean, 97.5% quantile).

S_Atom through the rounds, arm "{main}" (figure 7):

{through}

![S_Atom of all clients through the rounds, and of the last clients in all arms]({name}.png)

The lower row shows the clients that the paper shows: the last of CIFAR-100 and those with digits, in the arm "{main}"
after round {last_main}, in the others after round {last_others}.

Accuracy of the clients on their own test images after the last round (all outputs compete):

{accuracy}

Cost of the similarities of all {pairs} pairs ({probes} probes from the training images of CIFAR-100; activations
averaged over {grid}×{grid} regions, all pairs from one product; one run of each network; CPU time):

{costs}

The rule of costs: the claim of table 1 is confirmed if CCA and CKA both take more than 10³ times the operations of
S_Atom.

In the paper, for 10,000 probes: 0.019 GFLOP and 0.016 s for S_Atom, 258,610 GFLOP and 1930 s for CCA, 2,225 GFLOP and
92.6 s for CKA. The formula of its section 2.3 for CCA, n h′w′ k² c c′ + n² h w c against m k², gives {formula:.2g}
times as many operations for its network with 10,000 probes (its figure: 1.14×10⁷).

The rule, fixed before any figure was seen: a cluster is distinct if the lower end of the interval of the AUROC of
S_Atom in the arm "{main}" is at least {clear:g}, and visible if it is above .5. The claim is confirmed if both kinds
are distinct, in part if at least one is visible, and refuted otherwise. Same subtask: **{subtask}**. Digits:
**{digit}**. The claim: **{verdict}**. The other arms, by the same rule: {others_visible}. S_Atom and the cosine of
the weights differ by at most {like_weights:.2f} in AUROC in all arms.

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sizes, arms = record["sizes"], record["arms"]
    main = arms[MAIN]
    count = sizes["subtasks"] * sizes["shared_by"] + sizes["digits"]
    header = ("coefficients", "pairs", *SIMILARITIES.values())
    rows = [
        (name, title, *(shown(arm["auroc"][similarity][kind]) for similarity in SIMILARITIES))
        for name, arm in arms.items()
        for kind, title in KINDS.items()
    ]
    through = [
        (number, *(f"{one[kind]:.3f}" for kind in KINDS), *(f"{value:.4f}" for value in one["mean"].values()))
        for number, one in main["through"].items()
    ]
    costs = [
        (SIMILARITIES[name], f"{cost['operations'] / 1e9:.4g}", f"{cost['seconds']:.3g}",
         f"{cost['operations'] / main['costs']['atom']['operations']:.2g}",
         f"{cost['seconds'] / main['costs']['atom']['seconds']:.2g}")
        for name, cost in main["costs"].items()
    ]  # fmt: skip
    null = {kind: f"{mean:.2f}, {high:.2f}" for kind, (mean, high) in main["shuffled"].items()}
    states = visible(record)
    return PAGE.format(
        verdicts=verdicts(claims(record)),
        title=PAPER_TITLE, demonstration=DEMONSTRATION, clients=count, subtasks=sizes["subtasks"],
        shared_by=sizes["shared_by"], train=sizes["train"], test=sizes["test"], digits=sizes["digits"],
        width=sizes["width"], rounds=sizes["rounds"], others=sizes["others"], classes=CLASSES + DIGITS,
        arms=_arms(record), main=MAIN,
        table=markdown(header, rows), null_subtask=null["subtask"], null_digits=null["digits"],
        through=markdown(
            ("round", "AUROC, same subtask", "AUROC, digits", "mean: same subtask", "mean: other subtask",
             "mean: two with digits", "mean: digits and CIFAR-100"), through,
        ),
        name=NAME, last_main=_last_shown(sizes, "rounds"), last_others=_last_shown(sizes, "others"), accuracy=markdown(
            ("coefficients", "CIFAR-100", "digits"),
            [(name, *(f"{arm['accuracy'][kind]:.3f}" for kind in KINDS)) for name, arm in arms.items()],
        ),
        pairs=count * (count - 1) // 2, probes=sizes["probes"], grid=ensembles.GRID,
        costs=markdown(("", "GFLOP", "CPU seconds", "operations / S_Atom", "time / S_Atom"), costs),
        formula=formula(), clear=CLEAR, subtask=states["subtask"], digit=states["digits"], verdict=verdict(record),
        others_visible=_others(record), like_weights=_like_weights(record),
        footer=footer(NAME, "--networks NETWORKS --data-dir DATA --out OUT"),
    )  # fmt: skip


def _arms(record: Mapping[str, Any]) -> str:
    count, epochs = record["sizes"]["public"]
    details = {
        "random": "those of the random start",
        "public": f"those of a network trained on {count:,} images of CIFAR-10 for {epochs} epochs "
        "(again, at a lower rate, after a "
        "first run of this experiment, in which that network had collapsed to constant outputs)",
        "global": f"those of a network trained by FedAvg on all clients: {record['plan']}",
        "evolving": "random at first; all parameters are trained, and coefficients are averaged over clients",
    }
    return "\n".join(f"- {arm}: {details[arm]}" for arm in record["arms"])


def _last_shown(sizes: Mapping[str, Any], rounds: str) -> int:
    return max(number for number in sizes["shown"] if number <= sizes[rounds])


def _others(record: Mapping[str, Any]) -> str:
    found = []
    for arm in record["arms"]:
        if arm != MAIN:
            states = visible(record, arm)
            found.append(f"{arm}: " + ", ".join(f"{title} {states[kind]}" for kind, title in KINDS.items()))
    return "; ".join(found)


def _like_weights(record: Mapping[str, Any]) -> float:
    """Return the largest difference of the AUROC of S_Atom and of the cosine of the weights."""
    scores = [arm["auroc"] for arm in record["arms"].values()]
    return max(abs(one["atom"][kind]["value"] - one["weights"][kind]["value"]) for one in scores for kind in KINDS)


def formula(probes: int = 10_000) -> float:
    """Return the paper's ratio of operations, CCA to S_Atom, for AlexNet with 3 convolutions at full width."""
    layers = [(3, 64, 32), (64, 128, 16), (128, 256, 8)]
    spent = sum(probes * side**2 * 9 * before * after + probes**2 * side**2 * after for before, after, side in layers)
    return spent / (len(layers) * 9 * 9)


def visible(record: Mapping[str, Any], arm: str = MAIN) -> dict[str, str]:
    """Return whether clusters are distinct, visible or not: kind -> word."""
    scores = record["arms"][arm]["auroc"]["atom"]
    lows = {kind: scores[kind]["low"] or 0.0 for kind in KINDS}
    return {
        kind: "distinct" if low >= CLEAR else "visible" if low > 0.5 else "not visible" for kind, low in lows.items()
    }


def verdict(record: Mapping[str, Any]) -> str:
    """Return the verdict by the rule of the page."""
    states = list(visible(record).values())
    found = "refuted" if set(states) == {"not visible"} else "in part"
    return "confirmed" if set(states) == {"distinct"} else found


def stand_in(found: str) -> str:
    """Return a verdict on networks and data that differ in kind from the paper's."""
    return found if found == "undecided" else f"stand-in {found}"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of this experiment in the table of all experiments."""
    scores, costs = record["arms"][MAIN]["auroc"], record["arms"][MAIN]["costs"]
    sizes = record["sizes"]
    count = sizes["subtasks"] * sizes["shared_by"] + sizes["digits"]
    ours = "; ".join(
        f"{title}: AUROC {shown(scores['atom'][kind])}, cosine of the weights {scores['weights'][kind]['value']:.2f}, "
        f"CKA {scores['cka'][kind]['value']:.2f} (coefficients of a global network: S_Atom "
        f"{record['arms']['global']['auroc']['atom'][kind]['value']:.2f})" for kind, title in KINDS.items()
    )  # fmt: skip
    ratios = ", ".join(
        f"{SIMILARITIES[name]} {costs[name]['operations'] / costs['atom']['operations']:.1e} (operations), "
        f"{costs[name]['seconds'] / costs['atom']['seconds']:.1e} (time)" for name in ("cca", "cka")
    )  # fmt: skip
    cheap = all(costs[name]["operations"] > 1e3 * costs["atom"]["operations"] for name in ("cca", "cka"))
    return [
        claim("3.3, figures 5 and 7", "S_Atom shows clusters of clients with similar data.", "clusters visible", ours,
              f"{count} clients", stand_in(verdict(record))),
        claim("table 1, cost", "S_Atom takes a tiny part of the operations of CCA and CKA.",
              "1.4×10⁷ (CCA), 1.2×10⁵ (CKA)", ratios, f"{count * (count - 1) // 2} pairs, {sizes['probes']} probes",
              "stand-in confirmed" if cheap else "stand-in refuted"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
