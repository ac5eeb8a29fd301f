"""Compare many networks, by activations and by weights alone, to find the most similar ones."""

from networks import cnn, digits, vit

import hf_stitch

networks = {"cnn, seed 0": cnn(0), "cnn, seed 1": cnn(1), "transformer": vit()}
atlases = hf_stitch.compare_all(networks, digits("test").take(200))
print(atlases)

# Networks of one architecture, without data: the cosine of their weights (pip install hf-stitch-versions).
print(hf_stitch.compare(cnn(0), cnn(1), metrics=["weight_cosine"]))
