"""mpjax: mixed precision training for JAX and Flax."""

import typing as _typing

from mpjax._lazy import lazy as _lazy
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
from mpjax.lean_state import kahan as kahan
from mpjax.lean_state import low_bit_state as low_bit_state
from mpjax.lean_state import stochastic_rounding as stochastic_rounding
from mpjax.loss_scale import LossScaleError as LossScaleError
from mpjax.loss_scale import LossScaleState as LossScaleState
from mpjax.loss_scale import apply_gradients as apply_gradients
from mpjax.loss_scale import check_progress as check_progress
from mpjax.loss_scale import dynamic_loss_scale as dynamic_loss_scale
from mpjax.loss_scale import grad as grad
from mpjax.loss_scale import keep_if_finite as keep_if_finite
from mpjax.loss_scale import loss_scale_for as loss_scale_for
from mpjax.loss_scale import scale_loss as scale_loss
from mpjax.loss_scale import static_loss_scale as static_loss_scale
from mpjax.loss_scale import unscale as unscale
from mpjax.loss_scale import unscaled as unscaled
from mpjax.loss_scale import value_and_grad as value_and_grad
from mpjax.master_weights import MasterWeightsState as MasterWeightsState
from mpjax.master_weights import master_weights as master_weights
from mpjax.modules import with_policy as with_policy
from mpjax.policy import Policy as Policy
from mpjax.policy import UnusedOverrideWarning as UnusedOverrideWarning
from mpjax.policy import get_policy as get_policy

if _typing.TYPE_CHECKING:
    from mpjax import inspection as inspection
    from mpjax.inspection import *  # noqa: F403
else:
    # A training run that inspects nothing pays for none of it.
    from mpjax.inspection.tools import HOMES as _HOMES

    __getattr__, __dir__ = _lazy(__name__, {"inspection": "mpjax.inspection"} | _HOMES)

__version__ = "0.1.0"
