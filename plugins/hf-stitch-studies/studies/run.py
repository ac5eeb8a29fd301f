"""Run a study, or write every page and the table of all from the records.

    python run.py dr_frankenstein.matching --published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT
    python run.py pages

Pages and table contain only what the records do.
"""

import importlib
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from study import OWN, VERDICTS, Record, claim, markdown

from hf_stitch.storage.files import write_whole

HERE = Path(__file__).resolve().parent
PAGES = HERE / "results"
PAPERS = {
    "1": "Similarity and matching (Csiszárik et al., NeurIPS 2021)",
    "2": "Relative representations (Moschella et al., ICLR 2023)",
    "3": "Filter-subspace similarity (Chen, Miao & Qiu, NeurIPS 2023)",
    "4": "How not to stitch (Balogh & Jelasity, AAAI 2025)",
    OWN: "Questions of our own",
}
"""Number of a paper, or :data:`study.OWN` -> title of its table."""


@dataclass(frozen=True)
class Study:
    """A study, whose script writes a record and a page."""

    script: str  # module of the script
    named: str = ""  # name of the record and of the page, if it is not that of the script

    @property
    def name(self) -> str:
        """Name of the record and of the page."""
        return self.named or self.script.rpartition(".")[2]

    def module(self) -> ModuleType:
        """Import the script."""
        return importlib.import_module(self.script)

    def record(self) -> Record | None:
        """Read the record, or return ``None`` if there is none."""
        path = PAGES / f"{self.name}.json"
        return json.loads(path.read_text()) if path.is_file() else None


SCRIPTS = {
    "dr_frankenstein": (
        "direct_matching", "matching", "widths", "low_cka", "initialisations", "sparsity", "low_rank",
        "several_stitches",
    ),
    "relative_representations": (
        "cross_seed", "angles", "cross_architecture_images", "anchor_study", "translated_labels", "graph_stitching",
        "word_vectors",
    ),
}  # fmt: skip
STUDIES: tuple[Study, ...] = (
    *(Study(f"{folder}.{name}") for folder, names in SCRIPTS.items() for name in names),
    Study("dr_frankenstein.swaps", "swapping"),
    Study("dynamics.dynamics", "training_dynamics"),
    *(Study(f"filter_atoms.{name}") for name in ("correlation", "blindness", "federated")),
    *(
        Study(f"how_not_to_stitch.{name}")
        for name in (
            "which_rows", "layer_identification", "layer_grids", "strange_activations", "cause", "bench", "text_audit",
            "detector_gate", "task_loss_steps",
        )
    ),
    Study("embedding_upgrade.upgrade_table", "embedding_upgrade"),
    Study("embedding_upgrade.latency", "embedding_latency"),
    Study("embedding_upgrade.lazy_upgrade", "embedding_lazy"),
    Study("language_models.two_tokenizers"),
    *(Study(f"{name}.{name}") for name in ("few_pairs", "beyond_affine", "transfer")),
)  # fmt: skip
"""In the order of their rows in the table of all."""
UNTESTED = (
    ("1", "figure 2", "Inception V1 on CelebA: task loss and least squares", "no such data, no public weights", ""),
    ("1", "figure 3", "widths 2 to 5", "the training of one network takes a day of a processor core", "widths"),
    ("1", "figure 2", "ResNet-20, ten pairs", "two networks are public", "matching"),
    ("1", "C.2", "ImageNet ↔ CelebA", "no such data", ""),
    ("1", "A.1 to A.9", "further plots of the appendix", "their figures are not in the text", ""),
    ("2", "section 4", "training on relative representations, PubMed", "its features are not at hand", ""),
    ("2", "section 5.2", "other architecture, text: DBpedia and Amazon", "no such data", ""),
    ("2", "section 5.2", "other language: reviews (amazon_reviews_multi), pretrained RoBERTas",
     "the data are no longer public, encoders not at hand; translated labels stand in", "translated_labels"),
    ("2", "section 5.2", "other architecture, images: ViT and RexNet pretrained on ImageNet",
     "encoders not at hand; trained Tiny-10 and ResNet-20 stand in", "cross_architecture_images"),
    ("3", "figures 4d-f, 12 and 14", "dynamics of VGG11 on ImageNet", "no such data", ""),
)  # fmt: skip
"""Paper, place, claim, why it is not tested, and name of the page of what is. Scripts have those of paper 4."""


# -- pages -------------------------------------------------------------------------------------------------------------


def write_pages() -> None:
    """Write every page that has a record, its figures that need no more, and the table of all studies."""
    for study in STUDIES:
        if (record := study.record()) is not None:
            module = study.module()
            _write(PAGES / f"{study.name}.md", module.page(record))
            for name, figure in module.pictures(record).items() if hasattr(module, "pictures") else ():
                write_whole(PAGES / f"{name}.png", partial(figure.savefig, dpi=120, format="png"))
    _write(PAGES / "index.md", index())


COLUMNS = {"place": "place", "claim": "claim", "published": "paper's figure"} | {
    name: name for name in ("ours", "n", "verdict", "page")
}
"""Key of a row -> its header in the table."""
BEYOND = {
    "embedding_upgrade": "a new encoder for an old index, without embedding the texts again",
    "two_tokenizers": "decoders with different tokenizers",
    "few_pairs": "maps from few pairs, or none",
    "beyond_affine": "stitches that are not affine, and final features first",
    "transfer": "probes, directions and an autoencoder, carried through a stitch",
}
"""Studies of what no paper has: page -> what it is about."""
INDEX = """# All experiments

**What to do**: look up the claim that you rely on, and read the rule of its verdict on the page. Build on *confirmed*
alone. *Undecided* is no evidence against a claim: the figures here do not tell.

Experiments, tables and figures of the four papers that hf-stitch builds on, and what came out here. A verdict
follows a rule that its page states, with a word on what was known when it was written. *Stand-in*: networks or data
differ in kind from the paper's. *In part*: at some layers, networks or settings only. *Undecided*: figures do not tell,
or they rest on one pair of networks, as all of the two published ResNet-20 do. *Not tested*: what a test takes, or why
there is none, stands in the place of a figure. [Which verdicts changed](../changed_verdicts.md), and why.

{counts}

{tables}

## Beyond the papers

{beyond}

The pages and this table are written from the records by `make results`. Figures are those of the preset `small`.
Experiments that no document rests on, 22 of 58, are not kept, whatever their verdict: across data sets (networks and
atoms), continual learning, cross-architecture text, cross-language heads, decorrelation, dynamics of atoms, end-to-end
training, federated ensembles and table, low-rank layers, mode connectivity, performance proxy, pretrained encoders,
probing data, propositions, reconstruction, similarity in training, similarity as a signal, toy regression, training
variants and unequal widths.
"""


def index() -> str:
    """Return the table of all studies, by paper."""
    rows = list(claims())
    tables = []
    for paper, title in PAPERS.items():
        cells = [[row[key] for key in COLUMNS] for row in rows if row["paper"] == paper]
        tables.append(f"## {title}\n\n{markdown([*COLUMNS.values()], cells)}")
    counts = {word: sum(row["verdict"].removeprefix("stand-in ") == word for row in rows) for word in VERDICTS}
    times = json.loads((PAGES / "times.json").read_text())
    hours = sum(each["processor_seconds"] for each in times.values()) / 3600
    verdicts = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    counted = (
        f"{len(rows)} rows: {verdicts}. Processor time of the experiments, as far as it was recorded, and without "
        "the training of networks that were there: "
        f"{hours:.1f} hours."
    )
    return INDEX.format(
        counts=textwrap.fill(counted, 120),
        tables="\n\n".join(tables),
        beyond="\n".join(
            f"- [{about}]({page}.md)" for page, about in BEYOND.items() if (PAGES / f"{page}.md").is_file()
        ),
    )


def claims() -> Iterator[dict[str, str]]:
    """Yield the rows of the table: those of every record, and those that are not tested."""
    for study in STUDIES:
        claimed, record = getattr(study.module(), "claims", None), study.record()
        if claimed is not None and record is not None:
            yield from ({**row, "page": _link(study.name)} for row in claimed(record))
    for paper, place, claimed, why, page in UNTESTED:
        row = claim(paper, place, claimed, "–", why, "–", "not tested")
        yield {**row, "page": _link(page) if page else "–"}


def _link(name: str) -> str:
    return f"[{name.replace('_', ' ')}]({name}.md)"


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda whole: whole.write_text(text))


if __name__ == "__main__":
    if sys.argv[1:] == ["pages"]:
        write_pages()
    else:
        script = importlib.import_module(sys.argv.pop(1))
        script.main()
