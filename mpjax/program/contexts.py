"""The contexts that decide what code traces. Each is part of `jit`'s cache key.

They are made together, before the first trace: a key has the values of all contexts that exist, so one that was made
during a trace would change the key, and JAX would trace and compile the same function again at its second call.
"""

from typing import Any

import jax

from mpjax.program import compat as compat  # JAX's parts that it imports have contexts too

# Whether the code is in `autocast_disabled`.
autocast_disabled: Any = jax.make_user_context(False)
# The half dtype of the autocast that traces the code to plan it, if one does.
planning: Any = jax.make_user_context("")
# The `Trial` of an inspection around the code.
trial: Any = jax.make_user_context(None)
# The scaled losses around the code; None outside of them, empty where cotangents are true already. `IN_RULE` in the
# backward rules of a scaled loss, which receive scaled cotangents.
IN_RULE = "rule"
scaled_losses: Any = jax.make_user_context(None)
# The innermost running Linen model with a policy.
linen_call: Any = jax.make_user_context(None)
# The policy of the running model, and the dtype in which its running code computes; None outside of such models.
precision: Any = jax.make_user_context(None)
# The number of the launcher's trace around the code. JAX caches the traces of functions, such as the body of a `scan`,
# and a gradient in one reads the state of the trace around it.
launcher_trace: Any = jax.make_user_context(None)
