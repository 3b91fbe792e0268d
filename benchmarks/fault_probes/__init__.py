"""The faults: a description of each, and probes that run a library and return whether it has the fault."""

from .casting import FAULTS as _CASTING
from .fault import Fault as Fault
from .fault import Probe as Probe
from .policies import FAULTS as _POLICIES
from .scaling import FAULTS as _SCALING

FAULTS = [*_SCALING, *_CASTING, *_POLICIES]
