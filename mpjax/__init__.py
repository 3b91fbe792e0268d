"""mpjax: mixed precision training for JAX and Flax."""

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
from mpjax.policy import Policy as Policy
from mpjax.policy import UnusedOverrideWarning as UnusedOverrideWarning
from mpjax.policy import get_policy as get_policy

__version__ = "0.1.0"
