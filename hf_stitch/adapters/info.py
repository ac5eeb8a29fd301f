"""The properties of a layer as a cut."""

from __future__ import annotations

from dataclasses import dataclass

from hf_stitch.representation import RepresentationSpec


@dataclass(frozen=True)
class CutInfo:
    """The properties of a layer as a cut, as :meth:`Adapter.verify_cut` and :meth:`Adapter.cut_info` return them.

    Attributes:
        layer: Name of the layer.
        status: ``verified``; ``pending``: a candidate that has not been verified yet, which happens when it is used or
            by :meth:`Adapter.verify_cut`; or ``refused``.
        spec: Layout, width, grid and prefix tokens of the representation; ``None`` if :meth:`Adapter.verify_cut`
            refused the layer.
        cost: Share of the floating-point operations of the network up to the cut, in [0, 1], which decoding saves;
            ``None`` if :meth:`Adapter.verify_cut` refused the layer.
        plan: ``stubs`` if the modules before the cut are skipped, ``full`` if the code of the model requires that they
            run; ``None`` if the cut is not verified.
        reason: Why :meth:`Adapter.verify_cut` refused the layer; empty otherwise.

    Example:
        >>> from hf_stitch.representation import RepresentationSpec
        >>> print(CutInfo("blocks.0", "verified", RepresentationSpec("bnd", 192), 0.25, "stubs"))
        blocks.0: verified, bnd 192, 25% of the cost before it, plan stubs
    """

    layer: str
    status: str
    spec: RepresentationSpec | None = None
    cost: float | None = None
    plan: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        """Return the properties as one line, or the reason of a refusal."""
        if self.status == "refused":
            return self.reason
        plan = f", plan {self.plan}" if self.plan else ""
        status = "pending (verified at its first use)" if self.status == "pending" else self.status
        return f"{self.layer}: {status}, {self.spec}, {self.cost:.0%} of the cost before it{plan}"
