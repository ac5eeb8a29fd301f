"""Tasks by which stitched models are scored and trained, and the logits and the loss of their heads."""
