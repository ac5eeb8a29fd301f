"""Rows of the table of all experiments that no record of their own stands behind."""

from study import claim

ROWS = (
    ("1", "figure 2", "Inception V1 on CelebA: task loss and least squares", "no such data, no public weights",
     "out of reach", ""),
    ("1", "figure 3", "widths 2 to 5", "the training of one network takes a day of a processor core", "out of reach",
     "widths"),
    ("1", "figure 2", "ResNet-20, ten pairs", "two networks are public", "out of reach", "matching"),
    ("1", "C.2", "ImageNet ↔ CelebA", "no such data; CIFAR-10 ↔ Fashion-MNIST stands in", "out of reach",
     "across_data_sets"),
    ("1", "A.1 to A.9", "further plots of the appendix", "their figures are not in the text", "out of reach", ""),
    ("2", "section 4", "training on relative representations, PubMed", "its features are not at hand", "out of reach",
     "end_to_end"),
    ("2", "section 5.2", "other architecture, text: DBpedia and Amazon", "no such data; TREC is", "out of reach",
     "cross_architecture_text"),
    ("2", "section 5.2", "other language: reviews (amazon_reviews_multi), pretrained RoBERTas",
     "the data are no longer public, encoders not at hand; tweets and translated labels stand in", "out of reach",
     "translated_labels"),
    ("2", "section 5.2", "other architecture, images: ViT and RexNet pretrained on ImageNet",
     "encoders not at hand; trained Tiny-10 and ResNet-20 stand in", "out of reach", "cross_architecture_images"),
    ("3", "figures 4d-f, 12 and 14", "dynamics of VGG11 on ImageNet", "no such data; CIFAR-10 stands in",
     "out of reach", "dynamics_atoms"),
    ("4", "table 1, figure 2", "direct matching identifies layers", "by accuracy; by its error along one axis",
     "stand-in in part", "layer_grids"),
    ("4", "figure 1", "task loss yields strange activations, accurate direct matching does not",
     "no detector reproduces both", "stand-in refuted", "strange_activations"),
    ("4", "tables 2 and 3", "structural similarity is most sensitive and specific", "not above depth and rank alone",
     "stand-in refuted", "bench"),
    ("4", "5.1, 3, 4.2", "low rank, cutting out layers, lack of similarity", "two of three claims",
     "stand-in in part", "low_rank_layers"),
    ("4", "beyond", "is strangeness why task loss succeeds?", "no", "refuted", "cause"),
    ("4", "beyond", "the claims carry over to text", "two small BERTs", "stand-in confirmed", "text_audit"),
    ("4", "tables 1 to 3", "ViT-Ti, ResNet-18, SVHN, ImageNet at full length",
     "what stands in for them is on the page", "out of reach", "how_not_to_stitch"),
)  # fmt: skip
"""Paper, place, claim, what is here, verdict, and name of the page."""


def other_claims() -> list[dict[str, str]]:
    """Return the rows in the form of those that scripts return."""
    return [
        {
            **claim(paper, place, claimed, "–", ours, "–", verdict), "preset": "–",
            "page": f"[{page.replace('_', ' ')}]({page}.md)" if page else "–",
        }
        for paper, place, claimed, ours, verdict, page in ROWS
    ]  # fmt: skip
