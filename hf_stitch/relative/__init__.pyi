from .anchors import AnchorSet as AnchorSet, EncodedAnchors as EncodedAnchors
from .neighbours import nearest as nearest
from .projection import RelativeProjection as RelativeProjection
from .selection import Selection as Selection, select_anchors as select_anchors
from .similarities import Similarity as Similarity
