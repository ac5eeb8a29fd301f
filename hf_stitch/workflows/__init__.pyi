from ._audit import audit as audit
from ._compare import compare as compare, compare_all as compare_all
from ._evaluate import evaluate as evaluate
from ._grid import stitch_grid as stitch_grid
from ._plan import plan as plan
from ._relative_model import relative_model as relative_model
from ._stitch import stitch as stitch
from ._swap import swap as swap
