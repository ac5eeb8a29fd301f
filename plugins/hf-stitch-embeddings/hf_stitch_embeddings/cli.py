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
    float, typer.Option(min=0, max=1, help="Recall relative to re-embedding that a go requires.", show_default=True)
]
IndexSize = Annotated[
    int | None, typer.Option(min=1, help="Number of documents in the index. [default: report recall on held-out pairs]")
]

app = typer.Typer(
    help="Upgrade embeddings: use a new encoder with an old vector index, without re-embedding all documents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _read_vectors(source: str) -> Any:
    """Read vectors from a file."""
    from hf_stitch_embeddings.vectors import read_vectors

    path, _, column = source.partition(".parquet:")
    if not column and not source.endswith(".parquet"):
        if not Path(source).is_file():
            raise FileNotFoundError(f"{source} does not exist; pass {VECTORS}")
        return read_vectors(source)
    import pyarrow.parquet

    file = Path(f"{path}.parquet" if column else source)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    names = pyarrow.parquet.read_schema(file).names
    if column not in names:
        raise ValueError(f"column must be one of {', '.join(names)}, got {column!r}; pass {file}:COLUMN")
    return read_vectors(pyarrow.parquet.read_table(file, columns=[column])[column], source)


def _load_encoder(name: str) -> Any:
    """Load a sentence-transformers encoder."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(name)


def _read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _load_map(id_or_folder: str) -> EmbeddingMap:
    from hf_stitch_embeddings import EmbeddingMap

    return EmbeddingMap.from_pretrained(id_or_folder)


@app.command()
def fit(
    old: Annotated[str, typer.Argument(help=f"Old vectors: {VECTORS}. With --texts, the old encoder.")],
    new: Annotated[str, typer.Argument(help="New vectors of the same texts, or the new encoder.")],
    out: Annotated[Path, typer.Option(help="Folder for the map.")],
    map_name: Annotated[str, typer.Option("--map", help="auto, or a matcher (see hf-stitch list matchers).")] = "auto",
    direction: Annotated[
        str, typer.Option(help="Vectors to map: auto, index (old documents), query (new queries) or adjoint.")
    ] = "auto",
    metric: Annotated[str, typer.Option(help="Metric of the index: cosine, dot or l2.")] = "cosine",
    index_size: IndexSize = None,
    threshold: Threshold = 0.8,
    texts: Annotated[
        Path | None, typer.Option(help="Texts, one per line, to embed with the encoders OLD and NEW.", exists=True)
    ] = None,
    old_ids: Annotated[
        Path | None, typer.Option(help="Ids of the old rows, one per line, to check that rows correspond.", exists=True)
    ] = None,
    new_ids: Annotated[Path | None, typer.Option(help="Ids of the new rows, one per line.", exists=True)] = None,
    use_all: Annotated[bool, typer.Option(help="Refit the chosen map to all pairs, including held-out ones.")] = False,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Fit a map to pairs of old and new vectors, and decide whether it is good enough."""
    output = Output(json)
    if (old_ids is None) != (new_ids is None):
        raise typer.BadParameter("pass ids of both sides or neither", param_hint="--old-ids, --new-ids")
    from hf_stitch_embeddings import fit_embedding_map, verdict
    from hf_stitch_embeddings.deciding import FewPairsError

    read = _read_vectors if texts is None else _load_encoder
    embedding_map = fit_embedding_map(
        read(old), read(new), map=map_name, direction=direction, metric=metric, seed=seed,  # type: ignore[arg-type]
        texts=None if texts is None else _read_lines(texts), index_size=index_size, use_all=use_all,
        ids=None if old_ids is None or new_ids is None else (_read_lines(old_ids), _read_lines(new_ids)),
    )  # fmt: skip
    try:
        decision = verdict(embedding_map, threshold=threshold)
    except FewPairsError:
        embedding_map.save_pretrained(out)  # its card says so
        raise
    embedding_map.record["verdict"] = decision.to_dict()
    embedding_map.save_pretrained(out)
    output.show(decision)
    output.show(f"saved {embedding_map!r} in {out}")
    output.record(
        {"map": embedding_map.name, "saved": str(out), "verdict": decision.to_dict(), "scores": embedding_map.scores}
    )


@app.command()
def evaluate(
    map_folder: MapFolder,
    old_documents: Annotated[str, typer.Argument(help=f"Documents from the old encoder: {VECTORS}.")],
    new_documents: Annotated[str, typer.Argument(help="The same documents from the new encoder.")],
    old_queries: Annotated[str, typer.Argument(help="Queries from the old encoder.")],
    new_queries: Annotated[str, typer.Argument(help="The same queries from the new encoder.")],
    index_size: IndexSize = None,
    threshold: Threshold = 0.8,
    relevance: Annotated[
        Path | None,
        typer.Option(help="JSON file with the relevant document numbers of each query, or {number: gain}."),
    ] = None,
    kinds: Annotated[Path | None, typer.Option(help="Query kinds, one per line, to report separately.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
    report: Report = None,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Compare a map with the old model, baselines and re-embedding on separate documents and queries."""
    output = Output(json)
    from hf_stitch_embeddings import evaluate_retrieval, verdict

    embedding_map = _load_map(map_folder)
    result = evaluate_retrieval(
        embedding_map, *map(_read_vectors, (old_documents, new_documents, old_queries, new_queries)),
        relevance=None if relevance is None else _read_relevance(relevance), index_size=index_size, seed=seed,
        kinds=None if kinds is None else _read_lines(kinds),
    )  # fmt: skip
    decision = verdict(embedding_map, result=result, threshold=threshold)
    output.show(result)
    output.show(decision)
    if out is not None:
        result.save(out)
        output.show(f"saved {out}")
    output.report([result, decision], report)
    output.record({**result.to_dict(), "verdict": decision.to_dict()})


def _read_relevance(path: Path) -> list[Any]:
    import json

    return [
        {int(number): float(gain) for number, gain in row.items()} if isinstance(row, dict) else row
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]


@app.command()
def upgrade(
    map_folder: MapFolder,
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="Store of the old vectors: a file, a folder, or NAME:PLACE, e.g. qdrant:http://localhost:6333. "
            f"Stores: {', '.join(registry)}.",
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPTION=VALUE",
            help="Store options: target=new.npy (file for the new vectors), table=docs, collection=docs, ...",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 8192,
    verify: Annotated[int, typer.Option(min=0, help="Rows to read back and compare.")] = 1000,
    json: AsJson = False,
) -> None:
    """Map all vectors of an index to the new space and keep the old ones. Rerun to continue after an interruption."""
    output = Output(json)
    store_options = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals or name in store_options:
            raise typer.BadParameter(f"options must be OPTION=VALUE, each once, got {option!r}", param_hint="OPTION")
        store_options[name] = value
    from hf_stitch_embeddings import upgrade as run

    try:
        opened = open_store(store, **store_options)
    except TypeError as error:
        raise typer.BadParameter(str(error), param_hint="OPTION") from error
    with opened:
        done = run(opened, _load_map(map_folder), batch_size=batch_size, verify=verify)
    output.show(done)
    output.record(done.to_dict())


@app.command()
def export(
    map_folder: MapFolder,
    encoder: Annotated[
        Path | None, typer.Option(help="Folder of the sentence-transformers encoder to append the map to.")
    ] = None,
    old_encoder: Annotated[
        Path | None, typer.Option(help="Folder of the old encoder for documents; queries then pass through the map.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the encoder with the map.")] = None,
    onnx: Annotated[Path | None, typer.Option(help="ONNX file for the map alone.")] = None,
    json: AsJson = False,
) -> None:
    """Export a map as a sentence-transformers encoder, an ONNX model, or both."""
    output = Output(json)
    if (encoder is None) != (out is None) or (encoder is None and onnx is None):
        raise typer.BadParameter("pass --encoder and --out, or --onnx, or all three")
    embedding_map = _load_map(map_folder)
    saved = []
    if encoder is not None and out is not None:
        from hf_stitch_embeddings.export import export_query_document, export_sentence_transformer

        if old_encoder is None:
            saved.append(export_sentence_transformer(embedding_map, encoder, out))
        else:
            saved.append(export_query_document(embedding_map, encoder, old_encoder, out))
    if onnx is not None:
        from hf_stitch_embeddings.export import export_onnx

        saved.append(export_onnx(embedding_map, onnx))
    output.show("saved " + ", ".join(map(str, saved)))
    output.record({"map": embedding_map.name, "saved": [str(path) for path in saved]})


@app.command()
def monitor(
    map_folder: MapFolder,
    old: Annotated[str, typer.Argument(help=f"Old vectors of recent texts: {VECTORS}.")],
    new: Annotated[str, typer.Argument(help="New vectors of the same texts.")],
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Loss of recall that does not count as ageing.")
    ] = None,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Check on recent pairs whether a map has aged; exit with code 3 if so."""
    output = Output(json)
    from hf_stitch_embeddings import monitor as run

    options = {} if tolerance is None else {"tolerance": tolerance}
    ageing = run(_load_map(map_folder), _read_vectors(old), _read_vectors(new), seed=seed, **options)
    output.show(ageing)
    output.record(ageing.to_dict())
    if ageing.aged:
        raise typer.Exit(AGED)
