"""Claims of papers 1 to 3 that are not tested. Those of the fourth stand in the scripts of its folder."""

from study import claim

ROWS = (
    ("1", "figure 2", "Inception V1 on CelebA: task loss and least squares", "no such data, no public weights", ""),
    ("1", "figure 3", "widths 2 to 5", "the training of one network takes a day of a processor core", "widths"),
    ("1", "figure 2", "ResNet-20, ten pairs", "two networks are public", "matching"),
    ("1", "C.2", "ImageNet ↔ CelebA", "no such data; CIFAR-10 ↔ Fashion-MNIST stands in", "across_data_sets"),
    ("1", "A.1 to A.9", "further plots of the appendix", "their figures are not in the text", ""),
    ("2", "section 4", "training on relative representations, PubMed", "its features are not at hand", "end_to_end"),
    ("2", "section 5.2", "other architecture, text: DBpedia and Amazon", "no such data; TREC is",
     "cross_architecture_text"),
    ("2", "section 5.2", "other language: reviews (amazon_reviews_multi), pretrained RoBERTas",
     "the data are no longer public, encoders not at hand; tweets and translated labels stand in", "translated_labels"),
    ("2", "section 5.2", "other architecture, images: ViT and RexNet pretrained on ImageNet",
     "encoders not at hand; trained Tiny-10 and ResNet-20 stand in", "cross_architecture_images"),
    ("3", "figures 4d-f, 12 and 14", "dynamics of VGG11 on ImageNet", "no such data; CIFAR-10 stands in",
     "dynamics_atoms"),
)  # fmt: skip
"""Paper, place, claim, why it is not tested, and name of the page of what is."""


def other_claims() -> list[dict[str, str]]:
    """Return the rows in the form of those that scripts return."""
    return [
        {
            **claim(paper, place, claimed, "–", why, "–", "not tested"), "preset": "–",
            "page": f"[{page.replace('_', ' ')}]({page}.md)" if page else "–",
        }
        for paper, place, claimed, why, page in ROWS
    ]  # fmt: skip
