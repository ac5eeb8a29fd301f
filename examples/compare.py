"""Find the most similar layers of two networks: compare every pair of layers in one pass over the images."""

from networks import cnn, digits, vit

import hf_stitch

images = digits("test")
atlas = hf_stitch.compare(cnn(), vit(), images, metrics=["linear_cka", "procrustes"], permutations=100)
print(atlas)  # the best match of each layer, with p-values adjusted for the search

a, b = atlas.best_pair()
print(f"most alike: {a} and {b}")
atlas.to_html("compare.html")
