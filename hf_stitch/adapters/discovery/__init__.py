"""Finding the cuts of a network by what a forward shows, and verifying them."""
