"""Inspection of the precision, the numeric range and the run time of a program. Tools are imported at first use."""

import typing as _typing

from mpjax._lazy import lazy as _lazily
from mpjax.inspection.tools import CLASSES as _CLASSES
from mpjax.inspection.tools import FUNCTIONS as _FUNCTIONS

if _typing.TYPE_CHECKING:
    from mpjax.inspection.auditing.audit import PrecisionReport as PrecisionReport
    from mpjax.inspection.auditing.audit import audit as audit
    from mpjax.inspection.comparison.parity import MakeTraining as MakeTraining
    from mpjax.inspection.comparison.parity import ParityReport as ParityReport
    from mpjax.inspection.comparison.parity import Training as Training
    from mpjax.inspection.comparison.parity import parity as parity
    from mpjax.inspection.explanation import Explanation as Explanation
    from mpjax.inspection.explanation import explain as explain
    from mpjax.inspection.layer_errors import LayerwiseReport as LayerwiseReport
    from mpjax.inspection.layer_errors import layerwise_error as layerwise_error
    from mpjax.inspection.nonfinite.find_nonfinite import NonFinite as NonFinite
    from mpjax.inspection.nonfinite.find_nonfinite import find_nonfinite as find_nonfinite
    from mpjax.inspection.profiling.profile import ProfileReport as ProfileReport
    from mpjax.inspection.profiling.profile import profile as profile
    from mpjax.inspection.ranges.numerics import NumericsReport as NumericsReport
    from mpjax.inspection.ranges.numerics import numerics as numerics
    from mpjax.inspection.searching import SearchReport as SearchReport
    from mpjax.inspection.searching import search as search
    from mpjax.inspection.watching import Watch as Watch
    from mpjax.inspection.watching import WatchRecord as WatchRecord
    from mpjax.inspection.watching import WatchState as WatchState
    from mpjax.inspection.watching import watch as watch
    from mpjax.planning.plan import PlanReport as PlanReport
    from mpjax.planning.plan import plan as plan
else:
    __all__ = sorted([*_FUNCTIONS, *_CLASSES])
    __getattr__, __dir__ = _lazily(__name__, _FUNCTIONS | _CLASSES)
