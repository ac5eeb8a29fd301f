"""Save a stitched model, and the map alone, to load them from a folder or from the Hub."""

import tempfile
from pathlib import Path

import torch
from networks import cnn, digits, images, vit

import hf_stitch

source, target = cnn(), vit()
stitched = hf_stitch.stitch(source, target, digits(), source_layer="layer3.0", target_layer="vit.layers.2")
inputs = stitched.preprocess(images(4))
with tempfile.TemporaryDirectory() as folder:
    model, stitcher = Path(folder, "model"), Path(folder, "stitcher")
    stitched.save_pretrained(model)  # or stitched.push_to_hub("you/name")
    stitched.stitcher.save_pretrained(stitcher)  # the map, without the networks
    for path in (model, stitcher):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"{path.name}: {size // 1024} kB in {', '.join(sorted(file.name for file in path.iterdir()))}")

    again = hf_stitch.StitchedModel.from_pretrained(model)
    attached = hf_stitch.Stitcher.from_pretrained(stitcher).attach(source, target)
    with torch.no_grad():
        logits = [network(**inputs).logits for network in (stitched, again, attached)]
    print("same logits:", all(torch.equal(row, logits[0]) for row in logits))
