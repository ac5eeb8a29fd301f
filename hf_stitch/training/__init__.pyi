from .anchors import AnchorRefresh as AnchorRefresh
from .callback import ProbingCallback as ProbingCallback
from .dynamics import Dynamics as Dynamics, DynamicsRecorder as DynamicsRecorder
from .history import History as History, Measurement as Measurement
from .loop import DivergedError as DivergedError
from .similarity import SimilarityCallback as SimilarityCallback
from .stitchability import StitchabilityCallback as StitchabilityCallback
from .task_loss import TaskLoss as TaskLoss
