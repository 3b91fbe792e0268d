"""`with_policy`: sets a precision policy on a Flax model, Linen or NNX."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import jmp

from mpjax.policy import Policy, get_policy

M = TypeVar("M")


def with_policy(model: M, policy: str | jmp.Policy | Policy) -> M:
    """Sets a precision policy on a Flax model. Returns a model of the same kind with the same parameters.

    Every call of the model runs under `autocast`, over the model's variables and arguments:

    1. Matmuls and convolutions run in the compute dtype, those of a module's own code too. Statistics, exponentials,
       sums and whatever no matmul reads are float32. Activations are stored in half, and float32 arithmetic between
       matmuls is recomputed from them. Matmuls that read no parameter (Fourier features) stay float32.
    2. Nothing is cast at a module's boundary, because the code of the modules is traced as that of the float32 model.
       Token ids, timesteps, masks and results keep the dtype that this code gives them. So does the carry of a loop
       that starts from inputs, parameters or constants, such as the state of a recurrent cell.
    3. A layer with an explicit `dtype` keeps it, and so do the layers in it. A single `ExplicitDtypeWarning` then lists
       the layers that stay wider than the compute dtype, with their share of the matmul FLOPs.
       `Policy(..., override_dtypes=True)` overrides explicit dtypes.
    4. A module whose path, such as `Block_0/Dense_1`, matches an override computes in the override's compute dtype,
       with everything in it.
    5. The output of the model is cast to the output dtype.

    Parameters have the names, shapes, values and dtype of the float32 model, so checkpoints are
    interchangeable. If the policy's param dtype is half (O2, O3), float32 parameters are cast to it when they are
    created. Under O2 those of normalisation layers (every class whose name ends in `Norm`) stay float32. Statistics
    (`batch_stats`) stay float32, and decoding caches have the compute dtype.

    A call is traced, as by `jax.jit`, so Python control flow can't depend on the values of arrays. `init` is not: it
    runs in float32. What changes autocast applies inside a model too: `half_function`, `float_function`,
    `autocast_disabled`, `MPJAX_AUTOCAST=0`.

    Args:
        model: A Linen or NNX module. A Linen model is configuration and is not changed, except one
            made inside another module's method, which is already part of that module and is changed
            in place. An NNX model is cloned: same arrays, new variables. The `dtype` of the model itself
            (a field or constructor argument that it passes on to its layers, often float32 by default)
            counts as explicit only if it differs from that default.
        policy: Anything that `get_policy` accepts. An override pattern that matches no module or parameter path
            causes an `UnusedOverrideWarning`: for Linen when the model is initialised or called, for NNX here.

    Returns:
        An instance of a subclass of the model's class, with the same name. The policy applies in
        `init`, `apply`, `bind` and every method of the model, and in its submodules: those of a bound
        Linen model (`model.bind(variables).encoder(x)`, `unbind`, `nn.apply`), and those that are added to an
        NNX model later. The new policy replaces an existing one of the model. Submodules keep a policy that
        was set on them. NNX modules open named scopes, so that audits and profiles show their paths.

    Raises:
        TypeError: `model` is not a Flax module, or it is a class.
        ValueError: `policy` is not a policy, or has float8 matmuls, which only `autocast` has.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax
        >>> model = mpjax.with_policy(nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(2)]), "mixed_float16")
        >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 4)))
        >>> params["params"]["layers_0"]["kernel"].dtype
        dtype('float32')
        >>> mpjax.audit(model.apply, params, jnp.ones((1, 4))).flops
        {'float16': 96}

    Source: Keras's `Layer.dtype_policy` and Haiku's `hk.mixed_precision.set_policy`, for Flax.
    """
    policy = get_policy(policy)
    if any(p.matmul_dtype is not None for p in (policy, *(other for _, other in policy.overrides))):
        raise ValueError(
            f"with_policy(..., {str(policy)!r}): layers have no float8 matmuls. mpjax.autocast(function, policy) has: "
            "apply it to the loss function instead of setting a policy on the model, or use 'mixed_bfloat16' here."
        )
    # A Flax module exists only if Flax is loaded, so other users don't pay for the import.
    if "flax" in sys.modules:
        import flax.linen
        import flax.nnx

        from mpjax.modules import linen, nnx

        if isinstance(model, flax.linen.Module):
            return linen.with_policy(model, policy)
        if isinstance(model, flax.nnx.Module):
            return nnx.with_policy(model, policy)
    raise _not_a_flax_module(model)


def _not_a_flax_module(model: Any) -> TypeError:
    if isinstance(model, type):
        return TypeError(
            f"with_policy({model.__name__}, ...): got the class; give an instance, "
            f"with_policy({model.__name__}(...), policy)."
        )
    library = type(model).__module__.partition(".")[0]
    if library == "haiku":
        way_out = "set the policy on the class, with hk.mixed_precision.set_policy(Class, mpjax.get_policy(policy))"
    elif _is_of_flax(getattr(model, "module", None)):
        way_out = "its module is: with_policy(model.module, policy), and call that with apply"
    elif callable(model):
        way_out = "for any function, mpjax.autocast(function, policy) decides by operation"
    else:
        way_out = "cast arrays with policy.cast_to_compute(tree)"
    kind = type(model).__qualname__
    return TypeError(f"with_policy({_shortened(model)}, ...): a {kind} is not a Flax Linen or NNX module; {way_out}.")


def _is_of_flax(value: Any) -> bool:
    return any(base.__name__ == "Module" and base.__module__.startswith("flax.") for base in type(value).__mro__)


def _shortened(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
