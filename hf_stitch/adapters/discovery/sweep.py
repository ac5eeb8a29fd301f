"""Verification of all cuts of a network together.

Cuts lie in a row. If the output depends on the content only through the last cut, and the values at each cut only
through those at the cut before it, then the output depends on the content only through each of them. So the part after
the last cut and the part before the first one run, and between them each part from a cut to the next one, instead of
the parts before and after every cut: the work of two forwards per probe, whatever the number of cuts.

The same holds for the modules that are replaced. Code that runs before a cut is tried without the modules after it in
the part that contains this code, where even more modules are replaced, and code that runs after a cut likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tqdm.auto import tqdm

from hf_stitch.adapters.cutting.cut import Cut
from hf_stitch.adapters.cutting.plan import CutPlan
from hf_stitch.adapters.discovery.verify import Observed, Verifier


def sweep(verifier: Verifier, cuts: Sequence[Cut], propose: Callable[[Cut], CutPlan]) -> dict[str, CutPlan]:
    """Verify cuts together."""
    try:
        observed = verifier.observe(cuts)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return {}
    everywhere = [cut for cut in cuts if all(cut.layer in one.values for one in observed)]
    while True:  # modules that turn out to be read are kept by all plans
        read = set(verifier.read)
        plans = _verified(verifier, everywhere, propose, observed)
        if verifier.read == read:
            return plans


def _verified(
    verifier: Verifier, cuts: Sequence[Cut], propose: Callable[[Cut], CutPlan], observed: Sequence[Observed]
) -> dict[str, CutPlan]:
    """Return the plans of the cuts that hold, or any if the code of the model reads another module."""
    read = set(verifier.read)
    verified: list[tuple[Cut, CutPlan]] = []  # from the last to the first
    for cut in tqdm(cuts[::-1], desc="verifying", unit="cut", delay=3, leave=False, disable=None):
        plan = propose(cut)
        holds = verifier.back_holds((cut, plan), observed, verified[-1] if verified else None)
        if verifier.read != read:
            return {}
        if holds:
            verified.append((cut, plan))
    while verified and not verifier.front_holds(*verified[-1], observed):
        if verifier.read != read:
            return {}
        verified.pop()
    return {cut.layer: plan for cut, plan in reversed(verified)}
