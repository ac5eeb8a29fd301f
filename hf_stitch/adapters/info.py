"""What is known of a layer as a cut."""

from __future__ import annotations

from dataclasses import dataclass

from hf_stitch.representation import RepresentationSpec


@dataclass(frozen=True)
class CutInfo:
    """What is known of a layer as a cut.

    Attributes:
        layer: Its name.
        status: ``verified``, ``pending`` (listed, to be verified at first use) or ``refused``.
        spec: Layout, width, grid and prefix tokens there; ``None`` if refused.
        cost: Share of the network's floating-point operations up to the cut: what decoding from it saves.
        plan: ``stubs`` (what precedes is left out) or ``full`` (the model's code insists on running it); ``None`` if
            not verified.
        reason: Why it is no cut; empty otherwise.
    """

    layer: str
    status: str
    spec: RepresentationSpec | None = None
    cost: float | None = None
    plan: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        """One line."""
        if self.status == "refused":
            return self.reason
        plan = f", plan {self.plan}" if self.plan else ""
        return f"{self.layer}: {self.status}, {self.spec}, {self.cost:.0%} of the cost before it{plan}"
