"""Graph networks trained on relative and on absolute representations, and stitched (Moschella et al. 2023, section 4).

GCN, GAT, GraphSAGE and GCN2 classify the nodes of Cora and CiteSeer. Every network is taken at the epoch of its best F1
on validation nodes. Then encoders and heads of different seeds and architectures are combined: on relative
representations, on absolute representations, and with closed-form maps of absolute representations. Networks are also
cut and stitched between their convolutions.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from hf_stitch_graphs import Graph, NodeNetwork, create, read_planetoid
from relative_representations import swapping
from relative_representations.encoders import digest
from relative_representations.exchange import Array, Estimate, Exchange, Pairs, filled, median, spread
from relative_representations.swapping import ABSOLUTE, CHANCE, RELATIVE, TRANSLATIONS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import hf_stitch
from hf_stitch import Moments
from hf_stitch.storage.files import write_whole

SEEDS, STEPS, ANCHORS, WIDTH, DEEP = 4, 150, 300, 64, 8
"""Networks per architecture, steps on the whole graph, anchors, width, and convolutions of GCN2."""
SIZES = {"seeds": SEEDS, "steps": STEPS, "anchors": ANCHORS, "width": WIDTH, "deep": DEEP}
DATA = {"cora": "Cora", "citeseer": "CiteSeer"}
ARCHITECTURES = {"GCN": "gcn", "GAT": "gat", "GraphSAGE": "sage", "GCN2": "gcn2"}
"""Name -> convolution."""
STITCHED = ("GCN", "GAT", "GraphSAGE")
"""Architectures without a residual around their convolutions, which can be stitched between them."""
CUTS = {"first convolution": "net.acts.0", "second convolution": "net.acts.1"}
MATCHERS = ("identity", "lstsq", "procrustes")
METHODS = (ABSOLUTE, RELATIVE, *TRANSLATIONS)
MARGIN = 1.0
"""Maximum cost of relative training, in points of F1."""
FAR = 10.0
"""Minimum gap of a relative network far below the absolute network, in points of F1."""
PAPER = {"cora": ("90 ± 1", "89 ± 2"), "citeseer": ("78 ± 3", "77 ± 3")}
"""Results of the paper, absolute and relative, F1 in percent."""


@dataclass(frozen=True)
class Task:
    """Graph with features that sum to 1, and its training, validation and test nodes; anchors are training nodes."""

    graph: Graph
    train: Tensor
    valid: Tensor
    test: Tensor
    anchors: Tensor

    @property
    def labels(self) -> Tensor:
        assert self.graph.y is not None
        return self.graph.y

    def f1(self, answers: Tensor, nodes: Tensor) -> float:
        """Return the weighted F1 on ``nodes`` in percent, from the predicted classes of all nodes."""
        return round(swapping.scored(self.labels[nodes], answers[nodes]), 1)


def task_of(name: str, data_dir: str) -> Task:
    """Read a graph; a random tenth of the labelled nodes are test nodes, and another tenth are validation nodes."""
    graph = read_planetoid(Path(data_dir, "planetoid"), name).normalized()
    assert graph.y is not None
    graph = graph.induced(graph.y >= 0)
    order = torch.randperm(len(graph), generator=torch.Generator().manual_seed(0))
    tenth = round(len(graph) / 10)
    test, valid, train = order.tensor_split([tenth, 2 * tenth])
    return Task(graph, train, valid, test, train[:ANCHORS])


def network_of(architecture: str, seed: int, task: Task) -> nn.Module:
    """Create an untrained network: a linear layer, convolutions of one width with tanh, and a linear classifier."""
    torch.manual_seed(seed)
    return create(
        "DeepGNN", conv=ARCHITECTURES[architecture], in_channels=task.graph.x.shape[1], hidden_channels=WIDTH,
        num_layers=DEEP if architecture == "GCN2" else 2, out_channels=int(task.labels.max()) + 1, dropout=0.5,
        act="tanh", conv_act="tanh",
    )  # fmt: skip


class Sparse(nn.Module):
    """Linear layer with dropout on the sparse features of a graph, ten times as fast as a dense layer."""

    def __init__(self, linear: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.linear, self._x = linear, x.to_sparse().coalesce()

    def forward(self, _: Tensor) -> Tensor:
        """Return the outputs of all nodes; the argument is ignored."""
        values = functional.dropout(self._x.values(), 0.5, self.training)
        x = torch.sparse_coo_tensor(self._x.indices(), values, self._x.shape, is_coalesced=True, check_invariants=False)
        weight, bias = self.linear.weight, self.linear.bias
        return torch.sparse.mm(x, weight.T) + bias  # type: ignore[operator,union-attr]


class Whole(nn.Module):
    """Encoder with its own linear head on absolute representations, or a new head on relative representations."""

    def __init__(self, network: nn.Module, anchors: Tensor | None, classes: int) -> None:
        super().__init__()
        self.network, self._anchors = network, anchors
        self.head: Any = network.last if anchors is None else nn.Linear(len(anchors), classes)
        self.history: list[list[float]] = []  # F1 of validation and of test nodes after every step

    def codes(self, graph: Graph) -> Tensor:
        return self.network.embed(graph.x, graph.edge_index)  # type: ignore[operator,no-any-return]

    def input_of(self, codes: Tensor) -> Tensor:
        """Return the input of the head: the codes of all nodes, or their cosines to the codes of the anchors."""
        if self._anchors is None:
            return codes
        return functional.normalize(codes) @ functional.normalize(codes[self._anchors].detach()).T

    def forward(self, graph: Graph) -> Tensor:
        """Return the logits of all nodes. Anchors are embedded at every step, without gradients."""
        return self.head(functional.dropout(self.input_of(self.codes(graph)), 0.5, self.training))

    @property
    def best(self) -> int:
        """Number of the first step with the best validation F1."""
        return max(range(len(self.history)), key=lambda step: self.history[step][0]) + 1


def best_of(whole: Whole, seed: int, task: Task) -> dict[str, Tensor]:
    """Train a network on all training nodes at once; return its weights at the step with the best validation F1."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=5e-4)
    first, graph, weights = whole.network.first, replace(task.graph, x=torch.ones(len(task.graph), 1)), {}
    fast = Sparse(first, task.graph.x)
    for step in range(1, STEPS + 1):
        whole.network.first = fast.train()
        loss = functional.cross_entropy(whole.train()(graph)[task.train], task.labels[task.train])
        study.descend(optimizer, loss)
        with torch.no_grad():
            answers = whole.eval()(graph).argmax(1)
        whole.history.append([task.f1(answers, nodes) for nodes in (task.valid, task.test)])
        whole.network.first = first
        if whole.best == step:
            weights = {key: value.clone() for key, value in whole.state_dict().items()}
    return weights


def trained(name: str, architecture: str, method: str, seed: int, task: Task, cache: Path) -> Whole:
    """Train a network and select its best step, or read it from the cache."""
    anchors = task.anchors if method == RELATIVE else None
    whole = Whole(network_of(architecture, seed, task), anchors, int(task.labels.max()) + 1)
    path = cache / "graph_stitching" / f"{digest(name, architecture, method, seed, SIZES)}.safetensors"
    if not path.is_file():
        weights = best_of(whole, seed, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda path: save_file({**weights, "history": torch.tensor(whole.history)}, path))
    state = load_file(path)
    whole.history = state.pop("history").tolist()
    whole.load_state_dict(state)
    return whole.eval()


@torch.no_grad()
def exchanged(networks: Mapping[str, Sequence[Whole]], task: Task) -> dict[str, list[list[float]]]:
    """Combine the encoder of every network with the head of every other network, by every method."""
    codes = {method: [member.codes(task.graph) for member in some] for method, some in networks.items()}
    count = len(networks[ABSOLUTE])
    f1 = {method: [[0.0] * count for _ in range(count)] for method in METHODS}
    for row, column in product(range(count), repeat=2):
        source, target = codes[ABSOLUTE][column], codes[ABSOLUTE][row]
        received = {ABSOLUTE: source, RELATIVE: codes[RELATIVE][column]}
        moments = Moments(source.shape[1], target.shape[1]).update(source[task.anchors], target[task.anchors])
        for method, matcher in TRANSLATIONS.items():  # a network's own encoder needs no map
            received[method] = source if row == column else matcher.fit(moments)(source)
        for method, values in received.items():
            whole = networks[RELATIVE if method == RELATIVE else ABSOLUTE][row]
            f1[method][row][column] = task.f1(whole.head(whole.input_of(values)).argmax(1), task.test)
    frequency, random = torch.bincount(task.labels[task.train]).double(), torch.Generator().manual_seed(0)
    draws = [frequency.multinomial(len(task.labels), True, generator=random) for _ in range(count)]
    return {**f1, CHANCE: [[task.f1(draw, task.test)] for draw in draws]}


def cut(networks: Mapping[str, Sequence[Whole]], task: Task) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Cut absolute networks at their convolutions, and stitch networks without a residual there."""
    adapters = {
        name: [hf_stitch.load(NodeNetwork(member.network, task.graph).eval()) for member in some[:2]]
        for name, some in networks.items()
    }
    cuts, rows = {}, []
    for name, (first, _) in adapters.items():
        inner = ("net.convs.", "net.acts.")
        names = [layer for layer, _ in first.model.named_modules()]
        layers = [layer for layer in names if layer.startswith(inner) and layer.count(".") == 2]
        statuses = {layer: first.verify_cut(layer).status for layer in ["net.first", "net.act", *layers]}
        verified = [layer for layer, status in statuses.items() if status == "verified"]
        cuts[name] = {"cuts": verified, "refused": [*statuses.values()].count("refused")}
    everything, nodes = task.graph.samples(), len(task.graph)
    for source, target in product(STITCHED, repeat=2):
        pair = adapters[source][0], adapters[target][1]
        with torch.no_grad():
            alone = task.f1(pair[1].forward(task.graph.x).argmax(1), task.test)
        for title, layer in CUTS.items():
            row: dict[str, Any] = {"source": source, "target": target, "cut": title, "alone": alone}
            for matcher in MATCHERS:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="the stitching layer was fitted to 100")
                    stitched = hf_stitch.stitch(
                        *pair, everything, source_layer=layer, target_layer=layer, matcher=matcher,
                        test_data=everything, batch_size=nodes, progress=False,
                    )  # fmt: skip
                with torch.no_grad():
                    row[matcher] = task.f1(stitched(x=task.graph.x).logits.argmax(1), task.test)
            rows.append(row)
    return cuts, rows


def results_of(name: str, arguments: Any) -> dict[str, Any]:
    """Train all networks of a dataset and combine their parts."""
    task = task_of(name, arguments.data_dir)
    groups = [architecture for architecture in ARCHITECTURES for _ in range(SEEDS)]
    networks = {
        method: [
            trained(name, architecture, method, number % SEEDS, task, arguments.cache)
            for number, architecture in enumerate(tqdm(groups, desc=f"{name}, {method}"))
        ]
        for method in (ABSOLUTE, RELATIVE)
    }
    of = {name: networks[ABSOLUTE][place * SEEDS :][:2] for place, name in enumerate(ARCHITECTURES)}
    cuts, stitched = cut(of, task)
    return {
        "data": name, "train": len(task.train), "valid": len(task.valid), "test": len(task.test), "networks": groups,
        "best step": {method: [whole.best for whole in some] for method, some in networks.items()},
        "last": {method: [whole.history[-1][1] for whole in some] for method, some in networks.items()},
        "f1": exchanged(networks, task), "cuts": cuts, "stitched": stitched,
    }  # fmt: skip


def main() -> None:
    arguments = study.parser(__doc__, "data-dir", "cache", required={"data-dir"}).parse_args()
    results = [
        study.cached(
            arguments.cache / "graph_stitching" / f"{digest(name, SIZES)}.json", partial(results_of, name, arguments)
        )
        for name in DATA
    ]
    study.write_results("graph_stitching", {"sizes": SIZES, "results": results}, page, arguments.out)


class Compared:
    """Results of one dataset: scores within and between architectures, and costs of training."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.title, self.networks, self._last = DATA[result["data"]], np.array(result["networks"]), result["last"]
        f1 = {method: np.array(rows, dtype=float) for method, rows in result["f1"].items()}
        pairs = {"other seed": Pairs(result["networks"]), "other architecture": Pairs(result["networks"], between=True)}
        self.kinds = {kind: Exchange(f1, some) for kind, some in pairs.items()}
        self.own = {method: np.diag(f1[method]) for method in (ABSOLUTE, RELATIVE)}
        self.gaps = self.own[RELATIVE] - self.own[ABSOLUTE]

    @property
    def difference(self) -> Estimate:
        """Median of relative minus absolute F1 with own halves, robust to single networks."""
        return median(self.gaps)

    @property
    def last(self) -> Array:
        """Relative minus absolute F1 of all networks, at the last step."""
        return np.subtract(self._last[RELATIVE], self._last[ABSOLUTE])


TRAINING, EXCHANGED, TRANSLATED = study.stated(__file__)


def page(record: dict[str, Any]) -> str:
    comparisons = [Compared(result) for result in record["results"]]
    sizes, cuts = record["sizes"], record["results"][0]["cuts"]
    return filled(
        __file__, claims(record), **{name: sizes[name] for name in SIZES}, margin=MARGIN, pairs=len(STITCHED) ** 2,
        trained=_trained(record["results"]), outliers=" ".join(map(_outliers, comparisons)),
        exchanged=_exchanged(comparisons),
        cuts=study.markdown(
            ("network", "cuts", "layers refused"),
            [(name, ", ".join(result["cuts"]), result["refused"]) for name, result in cuts.items()],
        ),
        stitched=_stitched(record["results"]),
    )  # fmt: skip


def _trained(results: Sequence[Mapping[str, Any]]) -> str:
    """Tabulate the training of all networks of a dataset, and of each architecture."""
    rows = []
    for result, group in product(results, (None, *ARCHITECTURES)):
        compared = Compared(result)
        chosen = np.ones(len(compared.gaps), bool) if group is None else compared.networks == group
        gaps, steps = np.sort(compared.gaps[chosen]), np.array(result["best step"][RELATIVE])[chosen]
        middle = f"{np.median(gaps):.1f}" if group else compared.difference.shown()
        rows.append(
            (
                "" if group else compared.title, group or "all", len(gaps),
                *(spread(values[chosen].tolist()) for values in compared.own.values()), middle, f"{gaps.mean():.1f}",
                f"{gaps[0]:.1f}, {gaps[-1]:.1f}", f"{np.median(steps):.0f}",
                *(("", "") if group else PAPER[result["data"]]),
            )
        )  # fmt: skip
    header = (
        "data", "networks", "n", "absolute", "relative", "difference: median", "mean", "least, greatest",
        "best step of relative networks, median", "paper: absolute", "relative",
    )  # fmt: skip
    return study.markdown(header, rows)


def _outliers(compared: Compared) -> str:
    """Report the number of networks of a dataset that are far below, at the best step and at the last step."""
    counts = [int((gaps < -FAR).sum()) for gaps in (compared.gaps, compared.last)]
    return (
        f"{compared.title}: {counts[0]} of {len(compared.gaps)} relative networks are more than {FAR:g} points below, "
        f"and {counts[1]} at the last step, with a median difference of {median(compared.last).shown()}."
    )


def _exchanged(comparisons: Sequence[Compared]) -> str:
    rows: list[Sequence[object]] = []
    for compared in comparisons:
        for kind, scores in compared.kinds.items():
            for method in METHODS:
                where = (compared.title, kind, int(scores.pairs.mask.sum())) if method == ABSOLUTE else ("", "", "")
                rows.append((*where, method, *scores.row(method)))
            rows.append(("", "", "", CHANCE, "–", f"{scores.chance:.1f}", "0"))
    return study.markdown(("data", "encoder of", "pairs", "method", "own", "stitched", "kept"), rows)


def _stitched(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result, title in product(results, CUTS):
        rows_of = [row for row in result["stitched"] if row["cut"] == title]
        values = {name: [row[name] for row in rows_of] for name in ("alone", *MATCHERS)}
        cells = [f"{np.mean(some):.1f} [{min(some):.1f}, {max(some):.1f}]" for some in values.values()]
        rows.append((DATA[result["data"]], title, len(rows_of), cells[0].partition(" ")[0], *cells[1:]))
    return study.markdown(("data", "cut", "stitched networks", "target alone", *MATCHERS), rows)


def claims(record: dict[str, Any]) -> list[dict[str, str]]:
    comparisons = [Compared(compared) for compared in record["results"]]
    units = len(comparisons[0].networks)
    kinds = [scores for compared in comparisons for scores in compared.kinds.values()]
    n = f"{units} networks on each"
    ours = "; ".join(f"{compared.title} {compared.difference.shown()}" for compared in comparisons)
    costs = [compared.difference.above(-MARGIN) for compared in comparisons]
    rows = [TRAINING.row(f"median, points of F1: {ours}", n, costs, units)]
    for claim, methods in ((EXCHANGED, (RELATIVE, ABSOLUTE)), (TRANSLATED, ("ridge", RELATIVE))):
        means = {method: [scores.kept(method).value for scores in kinds] for method in methods}
        ours = "; ".join(f"{method} keeps {min(some):.2f} to {max(some):.2f}" for method, some in means.items())
        rows.append(claim.row(ours, n, [scores.kept_more(*methods).above(0) for scores in kinds], units))
    return rows
