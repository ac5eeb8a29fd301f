from .adapter import ImageTextAdapter as ImageTextAdapter
from .inputs import ImageAndTextProcessor as ImageAndTextProcessor
from .library import ImageText as ImageText
from .model import StitchedModelForImageTextToText as StitchedModelForImageTextToText
from .result import Caption as Caption, Exchanged as Exchanged
from .task import ImageTextToText as ImageTextToText

__all__ = [
    "Caption",
    "Exchanged",
    "ImageAndTextProcessor",
    "ImageText",
    "ImageTextAdapter",
    "ImageTextToText",
    "StitchedModelForImageTextToText",
]
