"""Optax transformations that store optimizer state and parameters in fewer bytes."""

from mpjax.lean_state.half_params import KahanState as KahanState
from mpjax.lean_state.half_params import StochasticRoundingState as StochasticRoundingState
from mpjax.lean_state.half_params import kahan as kahan
from mpjax.lean_state.half_params import stochastic_rounding as stochastic_rounding
from mpjax.lean_state.low_bit import LowBitState as LowBitState
from mpjax.lean_state.low_bit import low_bit_state as low_bit_state
