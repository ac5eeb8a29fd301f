"""Texts for the experiments."""

from hf_stitch import Samples
from hf_stitch.data import read_data

TREC = "CogComp/trec"
TWEETS = "cardiffnlp/tweet_sentiment_multilingual/english"
TATOEBA = "tatoeba_en_es_fr_ja"
NTREX = "ntrex128"


def read(source: str, split: str, count: int, data_dir: str | None, **columns: str) -> Samples:
    """Read the first ``count`` texts of a dataset, or all of a smaller dataset."""
    samples = Samples.of(read_data(source, data_dir=data_dir, split=split), **columns)
    return samples.take(min(count, len(samples)))


def trec(split: str, count: int, data_dir: str | None) -> Samples:
    return read(TREC, split, count, data_dir, text="text", label="coarse_label")


def ntrex(language: str, data_dir: str | None) -> Samples:
    """Read 1,997 news sentences, with the same ids in every language."""
    return read(NTREX, "test", 10_000, data_dir, text=language, id="id")


def plain(samples: Samples) -> list[str]:
    return [text for batch in samples.batches(1000) for text in batch.samples]


def english(count: int, data_dir: str | None) -> list[str]:
    """Read the training corpus of encoders: at most ``count`` questions, news, everyday sentences and tweets each."""
    parts = (
        trec("train", count, data_dir), ntrex("en", data_dir),
        read(TATOEBA, "train", count, data_dir, text="en", id="id"), read(TWEETS, "train", count, data_dir),
    )  # fmt: skip
    return [text for part in parts for text in plain(part)[:count]]
