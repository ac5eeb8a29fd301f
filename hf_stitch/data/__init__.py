"""Raw samples for both networks: :class:`Samples`, and :func:`read_data` to load datasets."""

from hf_stitch.data.paired import PairedSamples
from hf_stitch.data.samples import Batch, Data, Samples, check_same_order
from hf_stitch.data.sources import DataSource, read_data
from hf_stitch.data.tables import Id

__all__ = ["Batch", "Data", "DataSource", "Id", "PairedSamples", "Samples", "check_same_order", "read_data"]
