"""mpjax: mixed precision training for JAX and Flax."""

from mpjax.modules import with_policy as with_policy
from mpjax.policy import Policy as Policy
from mpjax.policy import UnusedOverrideWarning as UnusedOverrideWarning
from mpjax.policy import get_policy as get_policy

__version__ = "0.1.0"
