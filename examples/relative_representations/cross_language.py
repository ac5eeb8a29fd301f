"""Swap in encoders of other languages with parallel anchors (Moschella et al. 2023, section 5.2).

The task is the sentiment of tweets in six languages, with one encoder per language. Anchors are news sentences and
their translations (NTREX-128). Like the Wikipedia anchors of the paper, they are out of domain and need no labels.

    python examples/relative_representations/cross_language.py --encoders local --data-dir DATA --cache CACHE --out OUT
"""

import argparse

import diagnosis
import experiment
import swapping
import text_encoders
import texts
from encoders import Encoder
from experiment import CHECK, Preset
from swapping import ABSOLUTE, CENTRED, RELATIVE, TRUNCATED

from hf_stitch.data import check_same_order

PRESETS = {
    "small": Preset(1_839, 870, 500, 8, 64, 1e-3, 3, corpus=2_000, pretraining=3),
    "test": Preset(150, 60, 20, 1, 32, 1e-3, 2, corpus=100, pretraining=1),
    "paper": Preset(1_839, 870, 768, 5, 32, 1e-3, 5, corpus=2_000, pretraining=100),
}
TUNING = {"small": 4, "test": 1, "paper": 10}
HUB = {
    "en": "roberta-base",
    "es": "PlanTL-GOB-ES/roberta-base-bne",
    "fr": "ClassCat/roberta-base-french",
    "de": "benjamin/roberta-base-wechsel-german",
    "it": "osiria/roberta-base-italian",
    "pt": "eduagarcia/RoBERTaLexPT-base",
}
"""Language code -> pretrained RoBERTa."""
PAPER = {ABSOLUTE: ("91.5 ± 0.6", "43.7 to 54.4"), RELATIVE: ("90.5 ± 0.5", "66.3 to 78.5")}
"""Results of the paper on another task (Amazon reviews, two classes), English decoder, Wikipedia anchors."""
METHODS = (ABSOLUTE, RELATIVE, CENTRED, TRUNCATED, "ridge", "procrustes")


def main() -> None:
    """Run the experiment from the command line."""
    parser = experiment.with_encoders(experiment.parser(__doc__))
    parser.add_argument("--decoders", nargs="+", choices=tuple(texts.LANGUAGES), default=["en"])
    arguments = parser.parse_args()
    if arguments.data_dir is None:
        parser.error("the parallel sentences are not on the Hub: pass --data-dir, a folder with ntrex128/")
    preset = PRESETS[arguments.preset]
    blocks = [f"**{CHECK}**"] if arguments.encoders == "local" else []
    record, pictures = {"preset": preset, "encoders": arguments.encoders}, {}
    kinds = {"tuned to the sentiment of their language": TUNING[arguments.preset], "of words": 0}
    for kind, tuning in kinds.items() if arguments.encoders == "local" else [("pretrained", 0)]:
        sides, pools = {}, {}
        for language in texts.LANGUAGES:
            train, test = (
                texts.tweets(language, split, n, arguments.data_dir)
                for split, n in (("train", preset.train), ("test", preset.test))
            )
            pools[language] = texts.ntrex(language, arguments.data_dir)
            check_same_order(pools["en"], pools[language])
            encoder = encoder_of(language, tuning, arguments, preset)
            sides[language] = swapping.encoded(encoder, train, test, arguments.cache, pools[language])
        anchors = swapping.choices(pools["en"], sides.values(), "random", preset)
        found = swapping.exchange(sides, anchors, preset, 3, decoders=arguments.decoders)
        blocks += [f"Encoders {kind}:", swapping.table(found, PAPER), swapping.by_pair(found, METHODS)]
        blocks += [diagnosis.shapes(sides), diagnosis.likeness(sides, "en")]
        record[kind] = found.to_dict("records")
        pictures[f"cross_language_{kind.split()[0]}"] = swapping.by_method(found, METHODS, f"encoders {kind}")
    experiment.leave("cross_language", "\n\n".join(blocks), record, pictures, arguments.out)


def encoder_of(language: str, tuning: int, arguments: argparse.Namespace, preset: Preset) -> Encoder:
    """Load the encoder of a language from the Hub, or train a RoBERTa on news and tweets in the language."""
    if arguments.encoders == "hub":
        return text_encoders.hub(HUB[language])
    labelled = texts.tweets(language, "train", preset.train, arguments.data_dir)
    corpus = texts.plain(texts.ntrex(language, arguments.data_dir))[: preset.corpus] + texts.plain(labelled)
    seed = list(texts.LANGUAGES).index(language)
    recipe = text_encoders.Recipe("roberta", preset.pretraining, tuning, seed)
    return text_encoders.local(recipe, corpus, arguments.cache, labelled if tuning else None, language)


if __name__ == "__main__":
    main()
