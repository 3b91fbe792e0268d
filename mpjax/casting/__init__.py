"""Automatic mixed precision for any JAX function: rules, planning, rewriting."""

from mpjax.casting.checks import AutocastWarning as AutocastWarning
from mpjax.casting.regions import autocast_disabled as autocast_disabled
from mpjax.casting.regions import float_function as float_function
from mpjax.casting.regions import half_function as half_function
from mpjax.casting.regions import promote_function as promote_function
from mpjax.casting.rules import Rules as Rules
from mpjax.casting.rules import UnusedRuleWarning as UnusedRuleWarning
from mpjax.casting.scaled import Float8 as Float8
from mpjax.kernels.unscaled import UnscaledGradientWarning as UnscaledGradientWarning
from mpjax.program.linearity import NonlinearRuleWarning as NonlinearRuleWarning
