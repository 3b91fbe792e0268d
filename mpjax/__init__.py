"""mpjax: mixed precision training for JAX and Flax."""

from mpjax.casting import AutocastWarning as AutocastWarning
from mpjax.casting import Explanation as Explanation
from mpjax.casting import Rules as Rules
from mpjax.casting import UnusedRuleWarning as UnusedRuleWarning
from mpjax.casting import autocast as autocast
from mpjax.casting import autocast_disabled as autocast_disabled
from mpjax.casting import explain as explain
from mpjax.casting import float_function as float_function
from mpjax.casting import half_function as half_function
from mpjax.casting import promote_function as promote_function
from mpjax.policy import Policy as Policy
from mpjax.policy import UnusedOverrideWarning as UnusedOverrideWarning
from mpjax.policy import get_policy as get_policy

__version__ = "0.1.0"
