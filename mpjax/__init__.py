"""mpjax: mixed precision training for JAX and Flax."""

from mpjax.casting import Rules as Rules
from mpjax.casting import UnusedRuleWarning as UnusedRuleWarning
from mpjax.casting import autocast as autocast
from mpjax.policy import Policy as Policy
from mpjax.policy import UnusedOverrideWarning as UnusedOverrideWarning
from mpjax.policy import get_policy as get_policy

__version__ = "0.1.0"
