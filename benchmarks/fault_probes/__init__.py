"""The faults, in words and as programs. A probe runs a library on the case and returns whether it has the fault."""

from .casting import FAULTS as _CASTING
from .fault import Fault as Fault
from .fault import Probe as Probe
from .loops import FAULTS as _LOOPS
from .modules import FAULTS as _MODULES
from .policies import FAULTS as _POLICIES
from .scaling import FAULTS as _SCALING

FAULTS = [*_SCALING, *_LOOPS, *_CASTING, *_POLICIES, *_MODULES]
