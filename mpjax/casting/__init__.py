"""Automatic mixed precision for any JAX function: rules, planning, rewriting."""

from mpjax.casting import custom_rules as custom_rules
from mpjax.casting import deciding as deciding
from mpjax.casting import entering as entering
from mpjax.casting import reissuing as reissuing
from mpjax.casting.explaining import Explanation as Explanation
from mpjax.casting.explaining import explain as explain
from mpjax.casting.misuse import AutocastWarning as AutocastWarning
from mpjax.casting.regions import autocast_disabled as autocast_disabled
from mpjax.casting.regions import float_function as float_function
from mpjax.casting.regions import half_function as half_function
from mpjax.casting.regions import promote_function as promote_function
from mpjax.casting.rules import Rules as Rules
from mpjax.casting.rules import UnusedRuleWarning as UnusedRuleWarning
from mpjax.casting.transform import autocast as autocast
