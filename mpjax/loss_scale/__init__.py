"""Loss scaling: an optax transformation that skips and adapts, and gradients that are true at any scale.

`transformation` decides and skips, on the `state`. `boundary` scales the cotangents of a loss, with the identities of
`cotangents`, which also know which of nested derivatives are scaled; `gradients` differentiates through the boundary.
`applying` writes the new params, `replicas` makes one decision for all devices, and `restoring` undoes what a skipped
step changed outside the optimizer.
"""

from mpjax.loss_scale.applying import apply_gradients as apply_gradients
from mpjax.loss_scale.boundary import scale_loss as scale_loss
from mpjax.loss_scale.boundary import true_cotangents as true_cotangents
from mpjax.loss_scale.boundary import unscale as unscale
from mpjax.loss_scale.gradients import grad as grad
from mpjax.loss_scale.gradients import value_and_grad as value_and_grad
from mpjax.loss_scale.restoring import keep_if_finite as keep_if_finite
from mpjax.loss_scale.restoring import restore_if_skipped as restore_if_skipped
from mpjax.loss_scale.state import LossScaleError as LossScaleError
from mpjax.loss_scale.state import LossScaleState as LossScaleState
from mpjax.loss_scale.state import LossScaleWarning as LossScaleWarning
from mpjax.loss_scale.state import check_progress as check_progress
from mpjax.loss_scale.transformation import *  # noqa: F403
