from .adapter import ImageTextAdapter as ImageTextAdapter
from .inputs import ImageAndTextProcessor as ImageAndTextProcessor
from .library import ImageText as ImageText
from .model import StitchedModelForImageTextToText as StitchedModelForImageTextToText
from .result import Exchanged as Exchanged
from .task import ImageTextToText as ImageTextToText

__all__ = [
    "Exchanged",
    "ImageAndTextProcessor",
    "ImageText",
    "ImageTextAdapter",
    "ImageTextToText",
    "StitchedModelForImageTextToText",
]
