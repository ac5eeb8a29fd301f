"""Monitor a network during training: the similarity of each layer to its start, and to another network."""

import tempfile

from networks import cnn, digits, untrained_vit
from transformers import Trainer, TrainingArguments

from hf_stitch.training import DynamicsRecorder, SimilarityCallback

network, train, probe = untrained_vit(), digits(), digits("test").take(60)
rows = [
    {"pixel_values": pixels, "labels": label}
    for batch in train.batches(256)
    for pixels, label in zip(network.preprocess(batch.samples)["pixel_values"], batch.labels, strict=True)
]
with tempfile.TemporaryDirectory() as folder:
    options = {"num_train_epochs": 2, "learning_rate": 3e-3, "per_device_train_batch_size": 64, "report_to": []}
    trainer = Trainer(
        network.model, TrainingArguments(folder, **options, disable_tqdm=True, save_strategy="no"), train_dataset=rows
    )
    start = SimilarityCallback("start", probe).attach(trainer, network)
    other = SimilarityCallback(cnn(), probe, name="cnn").attach(trainer, network)
    recorder = DynamicsRecorder(f"{folder}/recordings", probe).attach(trainer, network)
    trainer.train()
    dynamics = recorder.result()
print(start.to_pandas().tail(4))
print("settled at epoch:", dynamics.settled(0.9))
