"""Automatic mixed precision for any JAX function: rules, planning, rewriting."""

from mpjax.casting import custom_rules as custom_rules
from mpjax.casting import entering as entering
from mpjax.casting import reissuing as reissuing
from mpjax.casting.rules import Rules as Rules
from mpjax.casting.rules import UnusedRuleWarning as UnusedRuleWarning
from mpjax.casting.transform import autocast as autocast
