"""Check whether the score of a stitch shows that the networks are alike: evaluate it, then audit it."""

from networks import cnn, digits, noise, vit

import hf_stitch

train, test = digits(), digits("test")
stitched = hf_stitch.stitch(cnn(), vit(), train, source_layer="layer3.0", target_layer="vit.layers.1", test_data=test)

scores = hf_stitch.evaluate(stitched, test)
print(
    "relative accuracy:",
    scores["relative_accuracy"],
    "by the mean alone:",
    scores.scores["mean_only"]["relative_accuracy"],
)

audit = hf_stitch.audit(stitched, test, train_data=train, far_data=noise(), detectors=["mahalanobis", "knn"])
print(audit)  # does the target get activations like its own?
