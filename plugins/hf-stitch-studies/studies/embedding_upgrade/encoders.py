"""Real texts and encoders for the upgrade of an index: all-MiniLM-L6-v2, its relatives, and TF-IDF.

All vectors are cached in a folder, so that an interrupted run resumes. ``TEXTS`` contains plain text, one passage per
line (``relative_representations/debian_texts.py`` writes such files).
"""

import argparse
import ast
import copy
import hashlib
import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import study
import torch
from rich.console import Console
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from hf_stitch.storage.files import write_whole

Vectors = npt.NDArray[np.float32]
LAYERS, SHARED = 6, 4  # layers of all-MiniLM-L6-v2, and number of layers shared by all fine-tuned copies
TUNED = {"tuned_12": (12, 1e-5), "tuned_40": (40, 5e-5)}  # fine-tuned copy -> steps and learning rate
STUDENTS = {"student_128": (128, "training"), "student_256": (256, "pairs")}
"""Student -> width, and texts of its distillation. Maps are also fitted to the texts of ``pairs``."""
ENCODERS = ("hidden_0", "hidden_3", "hidden_5", "final", *TUNED, *STUDENTS, "tfidf_256")
TOKENS = 64
DOCSTRINGS = ("numpy", "scipy", "pandas", "sklearn", "torch", "transformers", "datasets", "matplotlib")


SIZES = {"queries": 500, "pairs": 5000, "training": 1500, "index": 6000}
"""Queries, texts for maps, texts for the training of encoders, and documents of the index."""
TRANSLATED, STEPS = 3000, 200
"""Documents of the index of Tatoeba sentences; steps of a distillation."""


@dataclass(frozen=True)
class Corpus:
    """Texts in disjoint parts."""

    parts: dict[str, list[str]]  # part (``index``, ``pairs``, ``queries``, ``training``) -> texts
    kinds: dict[str, list[str]]  # part -> origin of each text
    documents: list[str]  # English Tatoeba sentences
    questions: list[str]  # further Tatoeba sentences
    relevant: list[list[int]]  # for each question, the indices of documents that share a translation

    @property
    def sections(self) -> dict[str, list[str]]:
        return {**self.parts, "documents": self.documents, "questions": self.questions}


def corpus(data: Path, texts: Path | None) -> Corpus:
    """Read the texts, remove near-duplicates, and divide them into parts."""
    random = np.random.default_rng(0)
    quotas = {"docstring": 3000, "debian": 5000}
    sources = {
        "news": pd.read_parquet(data / "ntrex128" / "test.parquet")["en"].tolist(),
        "question": [
            text
            for split in ("train", "test")
            for text in pd.read_parquet(data / "trec" / f"{split}.parquet")["text"].tolist()
        ],
        "docstring": docstrings(DOCSTRINGS),
        "debian": [line for file in sorted(texts.glob("*.txt")) for line in passages(file, random)] if texts else [],
    }
    seen: set[str] = set()
    pool: list[tuple[str, str]] = []
    for kind, candidates in sources.items():
        unique = []
        for text in candidates:
            if (key := " ".join(re.findall(r"[a-z]+", text.lower()))[:60]) not in seen and len(key) > 8:
                seen.add(key)
                unique.append(text)
        pool += [(kind, unique[row]) for row in random.permutation(len(unique))[: quotas.get(kind)]]
    pool = [pool[row] for row in random.permutation(len(pool))]
    share = min(1.0, len(pool) / sum(SIZES.values()))
    parts, kinds, start = {}, {}, 0
    for name, count in SIZES.items():
        rows = pool[start : start + int(share * count)]
        kinds[name], parts[name] = [kind for kind, _ in rows], [text for _, text in rows]
        start += len(rows)
    return Corpus(parts, kinds, *translated(data, TRANSLATED))


def passages(file: Path, random: np.random.Generator) -> list[str]:
    """Return up to 2,500 passages of 30 to 600 characters."""
    lines = [line for line in file.read_text().splitlines() if 30 <= len(line) <= 600 and "00-database" not in line]
    return [lines[row] for row in random.permutation(len(lines))[:2500]]


def docstrings(packages: Sequence[str]) -> list[str]:
    """Return the first paragraphs of the docstrings of installed packages."""
    paragraphs = []
    for package in packages:
        if (spec := importlib.util.find_spec(package)) is None or spec.origin is None:
            continue
        for file in sorted(Path(spec.origin).parent.rglob("*.py"))[:600]:
            if "tests" in file.parts:
                continue
            try:
                tree = ast.parse(file.read_text())
            except (SyntaxError, UnicodeDecodeError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    first = " ".join(text.split("\n\n")[0].split())
                    if 30 <= len(first) <= 600:
                        paragraphs.append(first)
    return paragraphs


def translated(data: Path, count: int) -> tuple[list[str], list[str], list[list[int]]]:
    """Return English Tatoeba sentences, questions, and for each question the sentences that share a translation.

    In each group of sentences with a shared translation, the first is a question and the rest are documents.
    """
    table = pd.concat(
        [pd.read_parquet(data / "tatoeba_en_es_fr_ja" / f"{split}.parquet") for split in ("train", "test")]
    ).drop_duplicates("en")
    sentences = table["en"].tolist()
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for language in ("es", "fr", "ja"):
        for row, text in enumerate(table[language]):
            groups[language, text].append(row)
    documents: dict[int, int] = {}
    questions: list[int] = []
    relevant: list[list[int]] = []
    used: set[int] = set()
    for rows in groups.values():
        if len(rows) > 1 and not used & set(rows) and len(documents) + len(rows) <= count:
            used |= set(rows)
            questions.append(rows[0])
            relevant.append([documents.setdefault(row, len(documents)) for row in rows[1:]])
    rest = [row for row in range(len(sentences)) if row not in used]
    rows_kept = [*documents, *rest[: max(0, count - len(documents))]]
    return [sentences[row] for row in rows_kept], [sentences[row] for row in questions], relevant


class Teacher:
    """all-MiniLM-L6-v2 with its hidden states, and copies with the last two layers fine-tuned."""

    def __init__(self) -> None:
        folder = study.minilm()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.body: BertModel = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        self.heads: dict[str, nn.ModuleList] = {"final": self.body.encoder.layer[SHARED:]}

    def tokens(self, texts: Sequence[str], limit: int = TOKENS) -> dict[str, Tensor]:
        """Tokenize texts, truncated to ``limit`` tokens."""
        return dict(self.tokenizer(list(texts), padding=True, truncation=True, max_length=limit, return_tensors="pt"))

    def states(self, tokens: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Run the shared layers; return pooled hidden states, the last state ``(n, t, 384)``, and the mask."""
        weights = tokens["attention_mask"]
        mask = (1.0 - weights[:, None, None, :].float()) * torch.finfo(torch.float32).min
        state = self.body.embeddings(input_ids=tokens["input_ids"])
        by_name = {"hidden_0": pooled(state, weights)}
        for number, layer in enumerate(self.body.encoder.layer[:SHARED], 1):
            state = applied(layer, state, mask)
            by_name[f"hidden_{number}"] = pooled(state, weights)
        return by_name, state, mask

    def encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return the vectors of a batch of texts from all copies, and the hidden states."""
        tokens = self.tokens(texts)
        by_name, shared, mask = self.states(tokens)
        for name, layers in self.heads.items():
            state = shared
            for number, layer in enumerate(layers, SHARED + 1):
                state = applied(layer, state, mask)
                if name == "final" and number < LAYERS:
                    by_name[f"hidden_{number}"] = pooled(state, tokens["attention_mask"])
            by_name[name] = functional.normalize(pooled(state, tokens["attention_mask"]), dim=-1)
        return by_name

    def fine_tune(self, name: str, texts: Sequence[str], steps: int, rate: float) -> None:
        """Fine-tune a copy of the last two layers with a contrastive loss on the two halves of each text."""
        halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
        layers = copy.deepcopy(self.heads["final"]).requires_grad_(True)
        optimizer = torch.optim.AdamW(layers.parameters(), rate)
        random = np.random.default_rng(0)
        for _ in range(steps):
            rows = random.choice(len(halves), min(16, len(halves)), replace=False)
            tokens = self.tokens([halves[row][side] for side in (0, 1) for row in rows], 32)
            with torch.no_grad():
                _, state, mask = self.states(tokens)
            for layer in layers:
                state = applied(layer, state, mask)
            left, right = functional.normalize(pooled(state, tokens["attention_mask"]), dim=-1).chunk(2)
            study.descend(optimizer, functional.cross_entropy(left @ right.T / 0.05, torch.arange(len(rows))))
        self.heads[name] = layers.requires_grad_(False)


def applied(layer: nn.Module, state: Tensor, mask: Tensor) -> Tensor:
    out = layer(state, mask)
    return out[0] if isinstance(out, tuple) else out


def pooled(state: Tensor, weights: Tensor) -> Tensor:
    return (state * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def student(width: int, teacher: Teacher, texts: Sequence[str], targets: Vectors) -> Callable[[Sequence[str]], Tensor]:
    """Distil a one-layer transformer of a given width on the teacher's cosines within a batch."""
    torch.manual_seed(width)
    words = teacher.body.embeddings.word_embeddings.weight.detach()
    config = BertConfig(
        vocab_size=len(words), hidden_size=width, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=2 * width, max_position_embeddings=TOKENS,
    )  # fmt: skip
    body = BertModel(config, add_pooling_layer=False)
    centred = words - words.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    body.embeddings.word_embeddings.weight = nn.Parameter(centred @ vectors[:, -width:], requires_grad=False)
    optimizer = torch.optim.AdamW([parameter for parameter in body.parameters() if parameter.requires_grad], 1e-3)
    random = np.random.default_rng(width)

    def run(batch: Sequence[str], limit: int = TOKENS) -> Tensor:
        tokens = teacher.tokens(batch, limit)
        state = body(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
        return functional.normalize(pooled(state, tokens["attention_mask"]), dim=-1)

    for _ in range(STEPS):
        rows = random.choice(len(texts), min(64, len(texts)), replace=False)
        outputs, goals = run([texts[row] for row in rows], 32), torch.from_numpy(targets[rows])
        study.descend(optimizer, (outputs @ outputs.T - goals @ goals.T).square().mean())
    body.eval()
    return run


def encoded(run: Callable[[Sequence[str]], dict[str, Tensor]], texts: Sequence[str]) -> dict[str, Vectors]:
    """Encode texts in batches of similar lengths, and return the vectors in the order of the texts."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    by_name: dict[str, list[Tensor]] = defaultdict(list)
    with torch.inference_mode():
        for start in range(0, len(order), 64):
            for name, vectors in run([texts[row] for row in order[start : start + 64]]).items():
                by_name[name].append(vectors)
    places = np.argsort(order)
    return {name: torch.cat(parts).numpy()[places] for name, parts in by_name.items()}


def tfidf(fitted: Sequence[str], texts: Sequence[str], width: int = 256) -> Vectors:
    """Compute TF-IDF vectors reduced by SVD, fitted to some texts. Texts without known words get the mean vector."""
    terms = TfidfVectorizer(sublinear_tf=True, min_df=2, stop_words="english")
    counts = terms.fit_transform(fitted)
    reduced = TruncatedSVD(min(width, min(counts.shape) - 1), random_state=0).fit(counts)
    vectors = reduced.transform(terms.transform(texts)).astype(np.float32)
    empty = np.linalg.norm(vectors, axis=1) < 1e-6
    vectors[empty] = vectors[~empty].mean(0)
    return vectors


def embed(texts: Corpus, cache: Path) -> dict[str, dict[str, Vectors]]:
    """Return the vectors of all sections from all encoders, computing vectors that the cache lacks."""
    sections = texts.sections
    joined = [text for part in sections.values() for text in part]
    key = hashlib.sha256(json.dumps([joined, STEPS, TUNED, STUDENTS]).encode()).hexdigest()[:12]
    folder, console = cache / f"vectors_{key}", Console(stderr=True)
    stops = np.cumsum([len(part) for part in sections.values()])

    def divided(vectors: Vectors) -> dict[str, Vectors]:
        return dict(zip(sections, np.split(vectors, stops[:-1]), strict=True))

    missing = [name for name in ENCODERS if not (folder / f"{name}.npy").is_file()]
    if missing:
        teacher = Teacher()
    if set(missing) - {*STUDENTS, "tfidf_256"}:
        for name, (steps, rate) in TUNED.items():
            teacher.fine_tune(name, texts.parts["training"], steps, rate)
            console.print(f"{name}: {steps} steps")
        whole = encoded(teacher.encode, joined)
        for name in whole.keys() & set(ENCODERS):
            save(folder / f"{name}.npy", whole[name])
        console.print(f"{len(joined):,} texts embedded")
    if "tfidf_256" in missing:
        save(folder / "tfidf_256.npy", tfidf([*texts.parts["index"], *texts.parts["training"]], joined))
    for name in set(STUDENTS) & set(missing):
        width, part = STUDENTS[name]
        run = student(width, teacher, sections[part], divided(np.load(folder / "final.npy"))[part])
        save(folder / f"{name}.npy", encoded(lambda some, name=name, run=run: {name: run(some)}, joined)[name])
        console.print(f"{name}: distilled")
    return {name: divided(np.load(folder / f"{name}.npy")) for name in ENCODERS}


def save(path: Path, vectors: Vectors) -> None:

    def write(to: Path) -> None:
        with open(to, "wb") as file:
            np.save(file, np.ascontiguousarray(vectors, dtype=np.float32))

    write_whole(path, write)


def counts(texts: Corpus) -> dict[str, dict[str, int]]:
    return {part: {kind: kinds.count(kind) for kind in sorted(set(kinds))} for part, kinds in texts.kinds.items()}


def parser(description: str | None) -> argparse.ArgumentParser:
    return study.parser(description, "data-dir", "texts", "cache", required={"data-dir"})


def prepared(arguments: argparse.Namespace) -> tuple[Corpus, dict[str, dict[str, Vectors]]]:
    texts = corpus(Path(arguments.data_dir), arguments.texts)
    return texts, embed(texts, arguments.cache)
