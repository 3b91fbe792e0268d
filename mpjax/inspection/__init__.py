"""What ran in which precision, where numbers leave the range, where the time goes. Imported at first use."""

import typing as _typing

from mpjax._lazy import lazy as _lazy

if _typing.TYPE_CHECKING:
    from mpjax.casting.explaining import Explanation as Explanation
    from mpjax.casting.explaining import explain as explain
    from mpjax.inspection.auditing import PrecisionReport as PrecisionReport
    from mpjax.inspection.auditing import audit as audit
    from mpjax.inspection.nonfinite import NonFinite as NonFinite
    from mpjax.inspection.nonfinite import find_nonfinite as find_nonfinite
    from mpjax.inspection.profiling import ProfileReport as ProfileReport
    from mpjax.inspection.profiling import profile as profile
    from mpjax.inspection.ranges import NumericsReport as NumericsReport
    from mpjax.inspection.ranges import numerics as numerics
else:
    # No module here may have the name of a function: the first import of it would take the function's place.
    _HOMES = {
        "Explanation": "mpjax.casting.explaining",
        "explain": "mpjax.casting.explaining",
        "PrecisionReport": "mpjax.inspection.auditing",
        "audit": "mpjax.inspection.auditing",
        "NonFinite": "mpjax.inspection.nonfinite",
        "find_nonfinite": "mpjax.inspection.nonfinite",
        "ProfileReport": "mpjax.inspection.profiling",
        "profile": "mpjax.inspection.profiling",
        "NumericsReport": "mpjax.inspection.ranges",
        "numerics": "mpjax.inspection.ranges",
    }
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
