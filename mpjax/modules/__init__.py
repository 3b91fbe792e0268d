"""`with_policy`: sets a precision policy on a Flax model, Linen or NNX."""

from mpjax.modules.entry import with_policy as with_policy
