#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.15.0): from_pretrained in several threads leaves networks with random, untied output
# layers, and so does every later from_pretrained of the process, in any thread. The loading replaces
# PreTrainedModel.tie_weights by an empty function for its time (initialization.no_tie_weights), without a lock: a
# second load that begins meanwhile stores the empty function as the original, and "restores" it.
#
# Output seen:
#   3 threads: 45 of 45 networks are not tied (43 to 45, in five runs)
#   afterwards, in one thread: not tied
#
# Exits with 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR="$work"  # so that nothing is left behind
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "transformers==5.24.0" "torch==2.15.0" "numpy==2.4.6"
cat > "$work/check.py" <<'PYTHON'
import sys
import tempfile
import threading

import transformers

config = transformers.BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
)
transformers.logging.set_verbosity_error()
tied = []


def load(folder, times):
    for _ in range(times):
        network = transformers.BertForMaskedLM.from_pretrained(folder)
        tied.append(network.cls.predictions.decoder.weight is network.bert.embeddings.word_embeddings.weight)


with tempfile.TemporaryDirectory() as folder:
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    load(folder, 1)
    assert all(tied)
    tied.clear()
    threads = [threading.Thread(target=load, args=(folder, 15)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"3 threads: {len(tied) - sum(tied)} of {len(tied)} networks are not tied")
    tied.clear()
    load(folder, 1)
    print("afterwards, in one thread:", "tied" if tied[0] else "not tied")
    sys.exit(tied[0])
PYTHON
"$work/venv/bin/python" "$work/check.py" 2> /dev/null
