"""What ran in which precision, where numbers leave the range, where the time goes. Imported at first use."""

import typing as _typing

from mpjax._lazy import lazy as _lazy

if _typing.TYPE_CHECKING:
    from mpjax.casting.explaining import Explanation as Explanation
    from mpjax.casting.explaining import explain as explain
    from mpjax.inspection.audit.audit import PrecisionReport as PrecisionReport
    from mpjax.inspection.audit.audit import audit as audit
    from mpjax.inspection.nonfinite.find_nonfinite import NonFinite as NonFinite
    from mpjax.inspection.nonfinite.find_nonfinite import find_nonfinite as find_nonfinite
    from mpjax.inspection.numerics.numerics import NumericsReport as NumericsReport
    from mpjax.inspection.numerics.numerics import numerics as numerics
    from mpjax.inspection.profile.profile import ProfileReport as ProfileReport
    from mpjax.inspection.profile.profile import profile as profile
else:
    _HOMES = {
        "Explanation": "mpjax.casting.explaining",
        "explain": "mpjax.casting.explaining",
        "PrecisionReport": "mpjax.inspection.audit.audit",
        "audit": "mpjax.inspection.audit.audit",
        "NonFinite": "mpjax.inspection.nonfinite.find_nonfinite",
        "find_nonfinite": "mpjax.inspection.nonfinite.find_nonfinite",
        "ProfileReport": "mpjax.inspection.profile.profile",
        "profile": "mpjax.inspection.profile.profile",
        "NumericsReport": "mpjax.inspection.numerics.numerics",
        "numerics": "mpjax.inspection.numerics.numerics",
    }
    __getattr__, __dir__ = _lazy(__name__, _HOMES)
