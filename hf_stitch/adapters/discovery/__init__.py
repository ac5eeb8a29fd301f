"""Finding the cuts of a network from a traced forward, and verifying them."""
