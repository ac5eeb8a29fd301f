"""Do ensembles of the clients with the most similar filter atoms gain? Chen, Miao & Qiu (2023), table 1.

python -m filter_atoms.federated_ensembles --data-dir DATA --networks NETWORKS --out OUT
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from filter_atoms import ensembles, federated, networks
from filter_atoms.experiment import DEMONSTRATION, OPTIONS, PAPER_TITLE, claim, footer, leave
from filter_atoms.federated import CLASSES, Array, Client, local, stand_in
from filter_atoms.federated_methods import METHODS, Plan, State, federate, personal, personalised, snapshot
from filter_atoms.networks import Images, Recipe
from study import markdown, parser, verdicts
from torch import Tensor, nn

NAME = "federated_ensembles"
MEMBERS = 3
ABOUT = 1.0
"""Two selections gain about the same if the interval of their difference is within this many points."""
PUBLIC = "pretrain"
BASES = {
    **{name: METHODS[name].title for name in ("fedavg", "ditto", "fedrep", "fedprox", "fedper")},
    PUBLIC: "Pretrain",
}
"""Base -> its name in table 1."""
PUBLISHED = {
    "fedavg": (83.78, 2.04, 1.87, 1.51), "ditto": (82.98, 2.51, 2.56, 2.39), "fedrep": (76.44, 1.91, 1.74, 1.29),
    "fedprox": (80.60, 2.35, 1.95, 2.26), "fedper": (83.57, 1.64, 1.34, 1.33), PUBLIC: (81.77, 3.64, 3.47, 4.56),
}  # fmt: skip
"""Base -> accuracy, and gains with S_Atom, CCA and CKA in table 1."""
OWN = "own"
CHOICES = {
    "atom": "S_Atom",
    "cca": "CCA",
    "cka": "CKA",
    "weights": "cosine of the weights",
    "random": "random clients",
    "least": "least similar (S_Atom)",
    "oracle": "same subtask (oracle)",
    "seeds": "own seeds",
}
WITH_SEEDS = "fedavg"
"""The base with ensembles of each client's own networks."""


@dataclass(frozen=True)
class Preset:
    """Sizes of the experiment.

    Attributes:
        clients: Sizes of the clients.
        plan: Federated training of the bases.
        personal: Training of atoms and head of each client.
        head: Fine-tuning of the heads.
        resamples: Number of bootstrap resamples.
    """

    clients: federated.Preset
    plan: Plan
    personal: Recipe
    head: Recipe
    resamples: int


HEAD = Recipe(100, lr=0.01, batch=20, schedule="constant")
PRESETS = {
    "small": Preset(
        replace(federated.PRESETS["small"], subtasks=10, probes=500), Plan(10, 0.1, local(4)), local(6),
        replace(HEAD, epochs=50), 2000,
    ),
    "paper": Preset(federated.PRESETS["paper"], Plan(100, 0.1, local(15)), local(15), HEAD, 2000),
    "test": Preset(federated.PRESETS["test"], Plan(2, 0.3, local(1)), local(1), replace(HEAD, epochs=2), 20),
}  # fmt: skip


def main() -> None:
    """Run the experiment from the command line."""
    arguments = parser(__doc__, *OPTIONS).parse_args()
    preset = PRESETS[arguments.preset]
    clients = federated.subtask_clients(preset.clients, arguments.data_dir, torch.Generator().manual_seed(0))
    public = networks.read("cifar100", "train", arguments.data_dir)
    places = torch.randperm(len(public), generator=torch.Generator().manual_seed(1))[: preset.clients.probes]
    probes = public.select(places).inputs()
    shared: dict[str, tuple[State, list[State]]] = {}
    bases = {}
    for base in BASES:
        # Ditto shares the network of FedAvg.
        trained = "fedavg" if base == "ditto" else base
        if trained not in shared:
            shared[trained] = _trained(trained, preset, clients, arguments)
        bases[base] = measured(base, *shared[trained], preset, clients, probes)
    record = {
        "preset": arguments.preset, "sizes": preset, "plan": str(preset.plan), "personal": str(preset.personal),
        "head": str(preset.head), "groups": [client.group for client in clients], "bases": bases,
    }  # fmt: skip
    leave(NAME, record, page, {}, arguments.out)


# -- networks ----------------------------------------------------------------------------------------------------------


def _trained(
    base: str, preset: Preset, clients: Sequence[Client], arguments: argparse.Namespace
) -> tuple[State, list[State]]:
    """Train the shared network of a base, and return it with what clients own: their heads, if heads are not shared."""
    if base == PUBLIC:
        return snapshot(federated.pretrained(preset.clients, arguments, CLASSES)), [{} for _ in clients]
    network = federated.initial(preset.clients.width, CLASSES)
    return federate(network, [client.train for client in clients], METHODS[base], preset.plan, seed=3)


def personal_networks(
    base: str, shared: State, own: Sequence[State], preset: Preset, clients: Mapping[int, Images], seed: int
) -> tuple[nn.Module, list[State]]:
    """Fix the coefficients of a shared network, and train atoms and head of each client as the method of the base does.

    Returns:
        A network of the shapes, and the parameters of each client's network.
    """
    network = federated.initial(preset.clients.width, CLASSES)
    network.load_state_dict(shared)
    network = federated.atomic(network)
    method = METHODS["fixed" if base == PUBLIC else base]
    found = personalised(network, clients, method, snapshot(network), own, preset.personal, seed, only=personal)
    return network, list(found.values())


def measured(
    base: str, shared: State, own: Sequence[State], preset: Preset, clients: Sequence[Client], probes: Tensor
) -> dict[str, Any]:
    """Train the personal networks on a base, and measure all ensembles.

    Returns:
        Accuracies of each choice of members, one per client; the share of the members that have the client's subtask;
        and the mean S_Atom.
    """
    images = {number: client.train for number, client in enumerate(clients)}
    network, states = personal_networks(base, shared, own, preset, images, seed=4)
    similarities, _ = ensembles.measured(network, states, probes)
    similarities["weights"] = ensembles.cosines(ensembles.filters(states))
    mean = similarities["atom"].fill_diagonal_(0).sum() / len(states) / (len(states) - 1)
    if base == WITH_SEEDS:
        for number in range(MEMBERS):
            states += personal_networks(base, shared, own, preset, images, seed=5 + number)[1]
    random = np.random.default_rng(0)
    accuracies: dict[str, list[float]] = {}
    same: dict[str, list[float]] = {}
    for number, client in enumerate(clients):
        chosen = members(number, clients, similarities, random)
        if base == WITH_SEEDS:
            chosen["seeds"] = [number + (extra + 1) * len(clients) for extra in range(MEMBERS)]
        for name, others in chosen.items():
            hits = [clients[other % len(clients)].group == client.group for other in others]
            same.setdefault(name, []).append(float(np.mean(hits)))
        choices = {OWN: [number], **{name: [number, *others] for name, others in chosen.items()}}
        found = ensembles.ensemble_accuracies(
            network, states, client.train, client.test, choices, preset.head, seed=number
        )  # fmt: skip
        for name, accuracy in found.items():
            accuracies.setdefault(name, []).append(accuracy)
    return {
        "accuracies": accuracies,
        "same_subtask": {name: float(np.mean(values)) for name, values in same.items()},
        "atom": float(mean),
    }


def members(
    number: int, clients: Sequence[Client], similarities: Mapping[str, Tensor], random: np.random.Generator
) -> dict[str, list[int]]:
    """Choose the members that join a client's own network: choice -> clients."""
    others = [other for other in range(len(clients)) if other != number]
    peers = [other for other in others if clients[other].group == clients[number].group]
    chosen = {
        name: ensembles.most_similar(similarities[name], number, MEMBERS) for name in ("atom", "cca", "cka", "weights")
    }
    chosen["random"] = random.choice(others, MEMBERS, replace=False).tolist()
    chosen["least"] = ensembles.most_similar(similarities["atom"], number, MEMBERS, least=True)
    chosen["oracle"] = random.choice(peers, min(MEMBERS, len(peers)), replace=False).tolist()
    return chosen


# -- page --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """A difference of accuracies in points, with its 95% interval.

    Attributes:
        value: Mean over clients.
        low: 2.5% quantile of the bootstrap over subtasks.
        high: 97.5% quantile.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def gain(differences: Array, groups: Sequence[int], resamples: int) -> Gain:
    """Average paired differences ``(clients,)``, with a bootstrap over groups of clients.

    The clients of a subtask share their classes, and so are not independent.
    """
    names = sorted(set(groups))
    of_group = np.array([np.mean(differences[np.equal(groups, name)]) for name in names])
    random = np.random.default_rng(0)
    drawn = of_group[random.integers(0, len(names), (resamples, len(names)))].mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Gain(float(of_group.mean()), float(low), float(high))


class Accuracies:
    """Accuracies of the record, in points, and their differences."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.bases = {
            base: {name: 100 * np.array(values) for name, values in found["accuracies"].items()}
            for base, found in record["bases"].items()
        }
        self._groups, self._resamples = record["groups"], record["sizes"]["resamples"]

    def of_base(self, base: str, choice: str, against: str) -> Gain | None:
        """Return how much better a choice is than another one on a base; ``None`` if it was not measured."""
        found = self.bases[base]
        if choice not in found or against not in found:
            return None
        return gain(found[choice] - found[against], self._groups, self._resamples)

    def overall(self, choice: str, against: str) -> Gain | None:
        """Return the same for the mean over all bases; ``None`` unless both are measured on each."""
        if not all(choice in found and against in found for found in self.bases.values()):
            return None
        differences = [found[choice] - found[against] for found in self.bases.values()]
        return gain(np.mean(differences, axis=0), self._groups, self._resamples)


SECURED = "with an interval above 0"
NOT_SECURED = "with an interval that is not above 0: similarity itself is not shown to be the cause"
PAGE = """# Federated learning: ensembles of similar clients

**What to do**: do not expect more than a point from an ensemble of similar clients; own seeds are the baseline to beat.

{verdicts}

After {title}, section 3.3 and table 1: the network of each client is joined by those of the 3 most similar clients,
whose linear layers are fine-tuned on the client's images. The paper's claim: with S_Atom the ensemble gains 1.64 to
3.64 points on six bases, about as with CCA and CKA. It has no control: an ensemble of any members may gain.

{demonstration} {clients} clients: {subtasks} subtasks of 5 classes × {shared_by} clients, each with {train} training
and {test} test images of its own. AlexNet with 3 convolutions and {width:g} of its width. A base is a network that
federated training shares ({plan}), or one trained on {public:,} images of CIFAR-10 ("Pretrain"); Ditto's is that of
FedAvg. Its coefficients are fixed, and each client trains atoms and linear layer ({personal}) in the way of the base:
FedRep first the linear layer; Ditto with a pull to the shared network; FedPer and FedRep from the client's own linear
layer, or, for clients that no round of federated training drew (some 18 of 50), from the shared initial one: members
that never took part are rarer among those of S_Atom, which is a cause of its own. "Base" is the client's own network,
its linear layer fine-tuned like those of the members: {head}, only the rows of the client's classes. Ensembles
average probabilities. CKA and CCA use {probes} training images of CIFAR-100 as probes.

Gains over the base in points, with 95% intervals from a bootstrap over subtasks (paired by client):

{gains}

Own seeds: the client's own network, trained 3 more times with other orders of the images. The paper's table 1:

{published}

Differences between selections, in points:

{differences}

Share of the selected members that have the client's subtask (at random: {chance:.3f}), and mean S_Atom of all
clients:

{same}

The rule, fixed before any figure was seen: the claim is confirmed if, on average over the bases, both the gain of
S_Atom over the base and its gain over random clients have intervals above 0; in part if only the first has; refuted
if the interval of the first is below 0; else undecided. Since the random clients are the same draw for all bases, whose
chance these intervals leave out, the gain over the 3 least similar clients must have an interval above 0, too (added
after the figures were seen). It is **{verdict}**. Selection by S_Atom gains about as much
as another one if the interval of the difference is within ±{about:g} point: CCA **{cca}**, CKA **{cka}**.

Over the 3 *least* similar clients, S_Atom gains {least} points,
{secured}. By base, the gain over the base has an interval above 0 for {above_base} of {bases}, and the gain over
random clients for {above_random} of {bases}.

{footer}"""


def page(record: dict[str, Any]) -> str:
    """Return the page of the results from the record, as it is read from JSON."""
    sizes, found = record["sizes"], Accuracies(record)
    clients = sizes["clients"]
    rows = [
        (BASES[base], f"{accuracies[OWN].mean():.2f}", *(found.of_base(base, choice, OWN) or "–" for choice in CHOICES))
        for base, accuracies in found.bases.items()
    ]
    average = np.mean([accuracies[OWN].mean() for accuracies in found.bases.values()])
    rows.append(("mean", f"{average:.2f}", *(found.overall(choice, OWN) or "–" for choice in CHOICES)))
    compared = {
        f"{CHOICES[choice]} − {CHOICES[against]}": (choice, against)
        for choice, against in (
            ("atom", "random"), ("cca", "random"), ("cka", "random"), ("weights", "random"), ("oracle", "random"),
            ("atom", "cca"), ("atom", "cka"), ("atom", "weights"), ("atom", "least"), ("atom", "oracle"),
            ("atom", "seeds"),
        )
    }  # fmt: skip
    differences = [
        (title, found.overall(*pair) or "–", *(found.of_base(base, *pair) or "–" for base in found.bases))
        for title, pair in compared.items()
    ]
    names = [name for name in CHOICES if name not in ("oracle", "seeds")]
    same = [
        (BASES[base], *(f"{one['same_subtask'][name]:.2f}" for name in names), f"{one['atom']:.4f}")
        for base, one in record["bases"].items()
    ]
    total = clients["subtasks"] * clients["shared_by"]
    return PAGE.format(
        verdicts=verdicts(claims(record)),
        title=PAPER_TITLE, demonstration=DEMONSTRATION, clients=total, subtasks=clients["subtasks"],
        shared_by=clients["shared_by"], train=clients["train"], test=clients["test"], width=clients["width"],
        plan=record["plan"], public=clients["public"][0], personal=record["personal"], head=record["head"],
        probes=clients["probes"], gains=markdown(("", "base", *CHOICES.values()), rows),
        published=markdown(
            ("", "base", "S_Atom", "CCA", "CKA"),
            [(BASES[base], own, *(f"{value:+.2f}" for value in more)) for base, (own, *more) in PUBLISHED.items()],
        ),
        differences=markdown(("", "mean of the bases", *(BASES[base] for base in found.bases)), differences),
        chance=(clients["shared_by"] - 1) / (total - 1),
        same=markdown(("", *(CHOICES[name] for name in names), "mean S_Atom"), same), verdict=verdict(found),
        about=ABOUT, cca="yes" if about(found, "cca") else "no", cka="yes" if about(found, "cka") else "no",
        least=found.overall("atom", "least"),
        secured=SECURED if _above(found.overall("atom", "least")) else NOT_SECURED,
        above_base=sum(_above(found.of_base(base, "atom", OWN)) for base in found.bases),
        above_random=sum(_above(found.of_base(base, "atom", "random")) for base in found.bases),
        bases=len(found.bases),
        footer=footer(NAME, "--networks NETWORKS --data-dir DATA --out OUT"),
    )  # fmt: skip


def _above(difference: Gain | None) -> bool:
    return difference is not None and difference.low > 0


def about(found: Accuracies, other: str) -> bool:
    """Return whether selection by S_Atom gains about as much as another one."""
    difference = found.overall("atom", other)
    return difference is not None and difference.low >= -ABOUT and difference.high <= ABOUT


def verdict(found: Accuracies) -> str:
    """Return the verdict by the rule of the page."""
    over_base, over_random = (found.overall("atom", against) for against in (OWN, "random"))
    assert over_base is not None and over_random is not None
    if over_base.low > 0:
        return "confirmed" if over_random.low > 0 and _above(found.overall("atom", "least")) else "in part"
    return "refuted" if over_base.high < 0 else "undecided"


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of this experiment in the table of all experiments."""
    found = Accuracies(record)
    ours = (
        f"S_Atom {found.overall('atom', OWN)} points; over random clients {found.overall('atom', 'random')}, "
        f"over the least similar {found.overall('atom', 'least')}; "
        f"random clients {found.overall('random', OWN)}; CKA {found.overall('cka', OWN)}; "
        f"CCA {found.overall('cca', OWN)}"
    )
    return [
        claim("3.3, table 1", "Ensembles of the clients with the most similar atoms gain, as with CCA and CKA.",
              "+1.64 to +3.64 points", ours, f"{len(record['groups'])} clients, {len(record['bases'])} bases",
              stand_in(verdict(found))),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
