"""Changes between two versions of a network: weights, outputs, and the blocks that carry the change."""
