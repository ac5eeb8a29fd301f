"""Statistics: what metrics and matchers need collected, streamed over batches, merged and reduced across processes."""

from hf_stitch.statistics.moments import Moments

__all__ = ["Moments"]
