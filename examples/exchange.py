"""Put another vision encoder under a network that describes images: no labels, no training, an ordinary checkpoint."""

import copy
import tempfile

from networks import NUMBERS, captioner, digits, pixels, taught, vit
from transformers import VisionEncoderDecoderModel

import hf_stitch

old = captioner()  # "this is a three"
other = vit(seed=1)  # trained apart from the encoder of old
images = digits().take(600).unlabelled()

encoder = hf_stitch.load(other.model.vit, processor=other.processor)
found = hf_stitch.swap(old, encoder, images, part="vision", progress=False)
print(found)

with tempfile.TemporaryDirectory() as folder:
    found.save_pretrained(folder)
    plain = VisionEncoderDecoderModel.from_pretrained(folder)  # an ordinary model, with the other encoder
print("class:", type(plain).__name__)

labelled = digits().take(600)  # a ceiling: what reads the new encoder, trained on captions of the same images
ceiling = copy.deepcopy(plain)
readers = [value for name, value in ceiling.decoder.named_parameters() if "crossattention.c_attn" in name]
taught(ceiling, pixels(other, labelled), labelled.labels, readers)

tokenizer, test = old.processor.tokenizer, digits("test")
for name, model, network in (("before", old.model, vit()), ("after", plain, other), ("retrained", ceiling, other)):
    right, example = 0, ""
    for batch in test.batches(100):
        ids = model.generate(pixel_values=network.preprocess(batch.samples)["pixel_values"], max_new_tokens=6)
        captions = tokenizer.batch_decode(ids, skip_special_tokens=True)
        right += sum(NUMBERS[label] in caption for label, caption in zip(batch.labels, captions, strict=True))
        example = captions[0]
    print(f"{name}: {right / len(test):.3f} of captions name the digit, e.g. {example!r}")
