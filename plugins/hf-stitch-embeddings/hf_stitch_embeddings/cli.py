"""``hf-stitch embeddings``: fit, evaluate, upgrade, export and monitor embedding maps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli.options import AsJson, Report, Seed
from hf_stitch.cli.output import Output
from hf_stitch_embeddings.stores import open_store, registry

if TYPE_CHECKING:
    from hf_stitch_embeddings.embedding_map import EmbeddingMap

AGED = 3
"""Exit code of ``monitor`` if the map has aged."""

VECTORS = "an .npy file, or FILE.parquet:COLUMN"
MapFolder = Annotated[str, typer.Argument(metavar="MAP", help="Folder or Hub id of the map.")]
Threshold = Annotated[
    float, typer.Option(min=0, max=1, help="Share of what re-embedding finds that a go needs.", show_default=True)
]
IndexSize = Annotated[
    int | None, typer.Option(min=1, help="Documents of the index. [default: recall is that of held-out pairs]")
]

app = typer.Typer(
    help="Upgrade embeddings: a new encoder on an old vector index, without embedding everything again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _vectors(given: str) -> Any:
    """Read vectors from a file."""
    from hf_stitch_embeddings.vectors import read_vectors

    path, _, column = given.partition(".parquet:")
    if not column and not given.endswith(".parquet"):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{given} does not exist; pass {VECTORS}")
        return read_vectors(given)
    import pyarrow.parquet

    file = Path(f"{path}.parquet" if column else given)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    names = pyarrow.parquet.read_schema(file).names
    if column not in names:
        raise ValueError(f"name the column of vectors, as {file}:COLUMN, one of {', '.join(names)}; got {column!r}")
    return read_vectors(pyarrow.parquet.read_table(file, columns=[column])[column], given)


def _encoder(given: str) -> Any:
    """Load an encoder of sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(given)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _load(given: str) -> EmbeddingMap:
    from hf_stitch_embeddings import EmbeddingMap

    return EmbeddingMap.from_pretrained(given)


@app.command()
def fit(
    old: Annotated[str, typer.Argument(help=f"Old vectors: {VECTORS}. With --texts, the old encoder.")],
    new: Annotated[str, typer.Argument(help="New vectors of the same texts, or the new encoder.")],
    out: Annotated[Path, typer.Option(help="Folder for the map.")],
    map_name: Annotated[str, typer.Option("--map", help="auto, or a matcher: see hf-stitch list matchers.")] = "auto",
    direction: Annotated[
        str, typer.Option(help="What is mapped: auto, index (old documents), query (new queries) or adjoint.")
    ] = "auto",
    metric: Annotated[str, typer.Option(help="How the index ranks: cosine, dot or l2.")] = "cosine",
    index_size: IndexSize = None,
    threshold: Threshold = 0.8,
    texts: Annotated[
        Path | None, typer.Option(help="Texts, one a line, to embed by the encoders OLD and NEW.", exists=True)
    ] = None,
    old_ids: Annotated[
        Path | None, typer.Option(help="Ids of the old rows, one a line, to check that rows correspond.", exists=True)
    ] = None,
    new_ids: Annotated[Path | None, typer.Option(help="Ids of the new rows, one a line.", exists=True)] = None,
    use_all: Annotated[bool, typer.Option(help="At last fit the chosen map to all pairs, the held-out ones, too.")] = (
        False
    ),
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Fit a map to pairs of old and new vectors, and decide whether it is good enough."""
    output = Output(json)
    if (old_ids is None) != (new_ids is None):
        raise typer.BadParameter("give the ids of both sides, or of none", param_hint="--old-ids, --new-ids")
    from hf_stitch_embeddings import fit_embedding_map, verdict

    read = _vectors if texts is None else _encoder
    made = fit_embedding_map(
        read(old), read(new), map=map_name, direction=direction, metric=metric, seed=seed,  # type: ignore[arg-type]
        texts=None if texts is None else _lines(texts), index_size=index_size, use_all=use_all,
        ids=None if old_ids is None or new_ids is None else (_lines(old_ids), _lines(new_ids)),
    )  # fmt: skip
    found = verdict(made, threshold=threshold)
    made.record["verdict"] = found.to_dict()
    made.save_pretrained(out)
    output.show(found)
    output.show(f"saved {made!r} in {out}")
    output.record({"map": made.name, "saved": str(out), "verdict": found.to_dict(), "scores": made.scores})


@app.command()
def evaluate(
    map_folder: MapFolder,
    old_documents: Annotated[str, typer.Argument(help=f"Documents by the old encoder: {VECTORS}.")],
    new_documents: Annotated[str, typer.Argument(help="The same documents by the new encoder.")],
    old_queries: Annotated[str, typer.Argument(help="Queries by the old encoder.")],
    new_queries: Annotated[str, typer.Argument(help="The same queries by the new encoder.")],
    index_size: IndexSize = None,
    threshold: Threshold = 0.8,
    relevance: Annotated[
        Path | None,
        typer.Option(help="JSON file: for each query the numbers of its relevant documents, or {number: gain}."),
    ] = None,
    kinds: Annotated[Path | None, typer.Option(help="Kinds of the queries, one a line, to report apart.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the result as JSON.")] = None,
    report: Report = None,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Compare a map with the old model, with baselines and with re-embedding, on documents and queries of its own."""
    output = Output(json)
    from hf_stitch_embeddings import evaluate_retrieval, verdict

    made = _load(map_folder)
    result = evaluate_retrieval(
        made, *map(_vectors, (old_documents, new_documents, old_queries, new_queries)),
        relevance=None if relevance is None else _relevance(relevance), index_size=index_size, seed=seed,
        kinds=None if kinds is None else _lines(kinds),
    )  # fmt: skip
    found = verdict(made, result=result, threshold=threshold)
    output.show(result)
    output.show(found)
    if out is not None:
        result.save(out)
        output.show(f"saved {out}")
    output.report([result, found], report)
    output.record({**result.to_dict(), "verdict": found.to_dict()})


def _relevance(path: Path) -> list[Any]:
    import json

    return [
        {int(number): float(gain) for number, gain in each.items()} if isinstance(each, dict) else each
        for each in json.loads(path.read_text(encoding="utf-8"))
    ]


@app.command()
def upgrade(
    map_folder: MapFolder,
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="The old vectors: a file, a folder, or NAME:PLACE, e.g. qdrant:http://localhost:6333. "
            f"Stores: {', '.join(registry)}.",
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPTION=VALUE",
            help="Options of the store: where new vectors go (target=new.npy), table=docs, collection=docs, ...",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that are mapped at once.")] = 8192,
    verify: Annotated[int, typer.Option(min=0, help="Rows that are read back and compared.")] = 1000,
    json: AsJson = False,
) -> None:
    """Map all vectors of an index to the new space; the old ones stay. After an interruption, run it again."""
    output = Output(json)
    given = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals or name in given:
            raise typer.BadParameter(f"write each option once, as OPTION=VALUE; got {option!r}", param_hint="OPTION")
        given[name] = value
    from hf_stitch_embeddings import upgrade as run

    try:
        opened = open_store(store, **given)
    except TypeError as error:
        raise typer.BadParameter(str(error), param_hint="OPTION") from error
    with opened:
        done = run(opened, _load(map_folder), batch_size=batch_size, verify=verify)
    output.show(done)
    output.record(done.to_dict())


@app.command()
def export(
    map_folder: MapFolder,
    encoder: Annotated[
        Path | None, typer.Option(help="Folder of a sentence-transformers encoder that the map is put behind.")
    ] = None,
    old_encoder: Annotated[
        Path | None, typer.Option(help="Folder of the old encoder, for documents; queries then go through the map.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the encoder with the map behind it.")] = None,
    onnx: Annotated[Path | None, typer.Option(help="File for the map alone as an ONNX model.")] = None,
    json: AsJson = False,
) -> None:
    """Write a map as an encoder of sentence-transformers, as an ONNX model, or both."""
    output = Output(json)
    if (encoder is None) != (out is None) or (encoder is None and onnx is None):
        raise typer.BadParameter("give --encoder and --out, or --onnx, or all three")
    made = _load(map_folder)
    saved = []
    if encoder is not None and out is not None:
        from hf_stitch_embeddings.export import export_query_document, export_sentence_transformer

        if old_encoder is None:
            saved.append(export_sentence_transformer(made, encoder, out))
        else:
            saved.append(export_query_document(made, encoder, old_encoder, out))
    if onnx is not None:
        from hf_stitch_embeddings.export import export_onnx

        saved.append(export_onnx(made, onnx))
    output.show("saved " + ", ".join(map(str, saved)))
    output.record({"map": made.name, "saved": [str(each) for each in saved]})


@app.command()
def monitor(
    map_folder: MapFolder,
    old: Annotated[str, typer.Argument(help=f"Old vectors of recent texts: {VECTORS}.")],
    new: Annotated[str, typer.Argument(help="Their new vectors.")],
    tolerance: Annotated[float | None, typer.Option(min=0, help="Loss of recall that counts as no ageing.")] = None,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Tell from recent pairs whether a map has aged; the exit code is then 3."""
    output = Output(json)
    from hf_stitch_embeddings import monitor as run

    options = {} if tolerance is None else {"tolerance": tolerance}
    found = run(_load(map_folder), _vectors(old), _vectors(new), seed=seed, **options)
    output.show(found)
    output.record(found.to_dict())
    if found.aged:
        raise typer.Exit(AGED)
