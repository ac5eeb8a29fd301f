"""Train the map through the frozen target, where least squares falls short."""

from networks import cnn, digits, vit

import hf_stitch
from hf_stitch.training import TaskLoss

train, test = digits().take(800), digits("test")
layers = {"source_layer": "layer1.0", "target_layer": "vit.layers.2"}
for matcher in ("lstsq", TaskLoss(epochs=3, lr=1e-2, labels="hard", batch_size=32)):
    stitched = hf_stitch.stitch(cnn(), vit(), train, matcher=matcher, test_data=test, **layers)
    print(f"{stitched.config.recipe['matcher']['name']}: {stitched.evaluation['accuracy']}")
