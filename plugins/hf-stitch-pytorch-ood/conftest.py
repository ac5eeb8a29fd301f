"""Without pytorch-ood there is nothing to test."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("pytorch_ood") else ["*"]
