"""mpjax: mixed precision training for JAX and Flax.

Which call to use:

    dtypes       autocast(loss_fn, "mixed_bfloat16")        any loss function, of any library; the model is not changed
                 with_policy(model, "mixed_bfloat16")       a Flax Linen or NNX model, as a model
                 Policy, get_policy, Rules                  what runs in which dtype
    float16      dynamic_loss_scale(optax.adamw(1e-3))      an optimizer with a loss scale that skips overflows
                 value_and_grad(loss_fn, opt_state)         true float32 gradients, scaled inside
                 apply_gradients(tx, grads, opt_state, params)
                 keep_if_finite(opt_state, new, old)        batch statistics and other state of a skipped step
                 check_progress(opt_state)                  on the host: has training diverged?
    memory       master_weights, kahan, stochastic_rounding (half parameters), low_bit_state (moments in 8 bits)
    questions    audit: is it on?                           explain: why this dtype?
                 numerics: does float16 lose my gradients?  find_nonfinite: which operation made the NaN?
                 layerwise_error, search: which module must stay in float32?
                 profile: why is it not faster?             parity: does it hurt my training?
                 watch: the same inside a running step
                 plan: does it fit the device, and what to change?

`python -m mpjax run train.py` needs no change of a script. Each name has an example: `help(mpjax.autocast)`.
"""

import typing as _typing

from mpjax._lazy import lazy as _lazily

if _typing.TYPE_CHECKING:
    from mpjax import inspection as inspection
    from mpjax.casting import AutocastWarning as AutocastWarning
    from mpjax.casting import Float8 as Float8
    from mpjax.casting import NonlinearRuleWarning as NonlinearRuleWarning
    from mpjax.casting import Rules as Rules
    from mpjax.casting import UnscaledGradientWarning as UnscaledGradientWarning
    from mpjax.casting import UnusedRuleWarning as UnusedRuleWarning
    from mpjax.casting import autocast_disabled as autocast_disabled
    from mpjax.casting import float_function as float_function
    from mpjax.casting import half_function as half_function
    from mpjax.casting import promote_function as promote_function
    from mpjax.casting.autocast import autocast as autocast
    from mpjax.inspection import audit as audit
    from mpjax.inspection import explain as explain
    from mpjax.inspection import find_nonfinite as find_nonfinite
    from mpjax.inspection import layerwise_error as layerwise_error
    from mpjax.inspection import numerics as numerics
    from mpjax.inspection import parity as parity
    from mpjax.inspection import plan as plan
    from mpjax.inspection import profile as profile
    from mpjax.inspection import search as search
    from mpjax.inspection import watch as watch
    from mpjax.loss_scale import LossScaleError as LossScaleError
    from mpjax.loss_scale import LossScaleState as LossScaleState
    from mpjax.loss_scale import LossScaleWarning as LossScaleWarning
    from mpjax.loss_scale import apply_gradients as apply_gradients
    from mpjax.loss_scale import check_progress as check_progress
    from mpjax.loss_scale import dynamic_loss_scale as dynamic_loss_scale
    from mpjax.loss_scale import grad as grad
    from mpjax.loss_scale import keep_if_finite as keep_if_finite
    from mpjax.loss_scale import loss_scale_for as loss_scale_for
    from mpjax.loss_scale import restore_if_skipped as restore_if_skipped
    from mpjax.loss_scale import scale_loss as scale_loss
    from mpjax.loss_scale import static_loss_scale as static_loss_scale
    from mpjax.loss_scale import true_cotangents as true_cotangents
    from mpjax.loss_scale import unscale as unscale
    from mpjax.loss_scale import value_and_grad as value_and_grad
    from mpjax.modules import with_policy as with_policy
    from mpjax.optimizer_state import KahanState as KahanState
    from mpjax.optimizer_state import LowBitState as LowBitState
    from mpjax.optimizer_state import MasterWeightsState as MasterWeightsState
    from mpjax.optimizer_state import StochasticRoundingState as StochasticRoundingState
    from mpjax.optimizer_state import kahan as kahan
    from mpjax.optimizer_state import low_bit_state as low_bit_state
    from mpjax.optimizer_state import master_weights as master_weights
    from mpjax.optimizer_state import stochastic_rounding as stochastic_rounding
    from mpjax.policy import ExplicitDtypeWarning as ExplicitDtypeWarning
    from mpjax.policy import Policy as Policy
    from mpjax.policy import UnusedOverrideWarning as UnusedOverrideWarning
    from mpjax.policy import get_policy as get_policy
else:
    import sys as _sys

    # Before the first trace; the launcher imports it with JAX.
    if "jax" in _sys.modules:
        from mpjax.program import contexts as _contexts  # noqa: F401 - the import makes them

    # Names are imported at first use: `python -m mpjax run` must not import JAX before the script does, and a
    # training run that inspects nothing should not import the inspection tools.
    from mpjax.inspection.tools import FUNCTIONS as _INSPECTION

    _MODULES = {
        "casting": """
            AutocastWarning Float8 NonlinearRuleWarning Rules UnscaledGradientWarning UnusedRuleWarning
            autocast_disabled float_function half_function promote_function""",
        "loss_scale": """
            LossScaleError LossScaleState LossScaleWarning apply_gradients check_progress
            dynamic_loss_scale grad keep_if_finite loss_scale_for restore_if_skipped scale_loss
            static_loss_scale true_cotangents unscale value_and_grad""",
        "modules": "with_policy",
        "optimizer_state": """
            KahanState LowBitState MasterWeightsState StochasticRoundingState
            kahan low_bit_state master_weights stochastic_rounding""",
        "policy": "ExplicitDtypeWarning Policy UnusedOverrideWarning get_policy",
    }
    _HOMES = {name: f"mpjax.{module}" for module, names in _MODULES.items() for name in names.split()}
    _HOMES["autocast"] = "mpjax.casting.autocast"
    __all__ = sorted([*_HOMES, *_INSPECTION])
    _HOMES = {name: f"mpjax.{name}" for name in (*_MODULES, "inspection")} | _HOMES
    __getattr__, __dir__ = _lazily(__name__, _HOMES | _INSPECTION)

__version__ = "0.1.0"
