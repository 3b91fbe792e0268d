"""Optax transformations for half-precision parameters, and for optimizer state in fewer bytes."""

from mpjax.optimizer_state.low_bit import LowBitState as LowBitState
from mpjax.optimizer_state.low_bit import low_bit_state as low_bit_state
from mpjax.optimizer_state.masters import MasterWeightsState as MasterWeightsState
from mpjax.optimizer_state.masters import master_weights as master_weights
from mpjax.optimizer_state.rounding import KahanState as KahanState
from mpjax.optimizer_state.rounding import StochasticRoundingState as StochasticRoundingState
from mpjax.optimizer_state.rounding import kahan as kahan
from mpjax.optimizer_state.rounding import stochastic_rounding as stochastic_rounding
