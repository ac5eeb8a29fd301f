"""Stitch two networks: a CNN runs up to a layer, a fitted map converts its activations, a transformer continues."""

from networks import cnn, digits, images, vit

import hf_stitch

source, target = cnn(), vit()
stitched = hf_stitch.stitch(
    source, target, digits(), source_layer="layer3.0", target_layer="vit.layers.2", test_data=digits("test"),
    matcher="ridge", ridge="gcv",  # hf-stitch list matchers
)  # fmt: skip
print(stitched.evaluation)  # with baselines: no map, the mean activations, both networks alone, and chance

inputs = stitched.preprocess(images(4))
print("predictions:", stitched(**inputs).logits.argmax(-1).tolist(), "labels:", digits("test").labels[:4])
