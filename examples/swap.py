"""Give a trained network another encoder without training, by a map fitted on a few anchors."""

from networks import cnn, digits, vit

import hf_stitch
from hf_stitch.relative import select_anchors

anchors = select_anchors(digits(), 200, "stratified")
swapped = hf_stitch.swap(
    vit(), cnn(), anchors, target_layer="vit.layers.2", encoder_layer="layer3.0", data=digits("test")
)
print(swapped.evaluation)
print("map:", swapped.config.recipe["matcher"])  # chosen by the outputs of the head on held-out anchors
