"""Tasks that score and train stitched models, with the logits and losses of their heads."""
