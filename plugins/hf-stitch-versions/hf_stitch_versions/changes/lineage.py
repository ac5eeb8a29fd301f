from dataclasses import dataclass


@dataclass(frozen=True)
class Lineage:
    verdict: str = ""
    sentence: str = ""


def lineage(a, b, blocks):
    return Lineage()
