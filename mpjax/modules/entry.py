"""`with_policy`: a precision policy set on a Flax model, Linen or NNX."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import jmp

from mpjax.policy import Policy, get_policy

M = TypeVar("M")


def with_policy(model: M, policy: str | jmp.Policy | Policy) -> M:
    """A Flax model of the same kind, with the same parameters, that runs under a precision policy.

    The rules, for every layer at its path `Block_0/Dense_1`:

    1. It computes in the compute dtype of `policy.for_path(path)`, unless its author gave it an explicit `dtype`.
       An explicit dtype wins, and an `ExplicitDtypeWarning` names once the layers that stay wider than the policy says,
       with their share of the matmul FLOPs. `Policy(..., override_dtypes=True)` takes them over.
    2. Its inputs and parameters are cast to that dtype; matmuls and convolutions run in it, also those that a module's
       own code does with its own parameters, or with another module's (tied weights).
    3. Normalisation layers (every class whose name ends in `Norm`) and embedding lookups compute in float32, with
       float32 parameters and statistics, and their output is cast.
    4. The state of a recurrent cell keeps the dtype in which it came: float32, as Flax makes it. Its gates are float32;
       Flax's own cells recompute them in the backward pass from the half matmuls, so that they are not stored.
    5. The output of an overridden module is cast to its override's output dtype, and the output of the model to the
       policy's.

    Parameters are stored as the float32 model stores them: names, shapes, values and dtype. So checkpoints are
    interchangeable. Where the policy's param dtype is half (O2, O3), float32 parameters are cast to it when they are
    made; under O2 those of normalisation layers stay float32. Statistics (`batch_stats`) stay float32.

    A float32 array that a module's own code makes (`jnp.zeros(...)` as the first carry of a `lax.scan`) promotes what
    it meets, as in any JAX program. Give it the input's dtype, `jnp.zeros(shape, x.dtype)`, or use `mpjax.autocast`.

    Args:
        model: a Linen or NNX module. A Linen model is configuration and is left as it is, except one
            made inside another module's method, which is part of that module already and is changed
            in place. An NNX model is cloned: same arrays, new variables. The `dtype` of the model itself
            (a field or constructor argument that it hands on to its layers, often float32 by default)
            counts as explicit only if it differs from that default. An NNX method must not assign to
            parameters (it sees cast copies); other variables it may.
        policy: anything that `get_policy` reads. A pattern of its overrides that no module or parameter path
            matches is reported with an `UnusedOverrideWarning`: by Linen when the model is
            initialised or called, by NNX here.

    Returns:
        An instance of a subclass of the model's class, of the same name. The policy goes with
        `init`, `apply`, `bind` and every method of the model, and with its submodules: those of a bound
        Linen model (`model.bind(variables).encoder(x)`, `unbind`, `nn.apply`), and those that are added to an
        NNX model later. A model that has a policy gets the new one in its place; a submodule that was given a
        policy of its own keeps it. NNX modules open named scopes, so that audits and profiles show their paths.

    Raises:
        TypeError: `model` is no Flax module, or it is a class.
        ValueError: `policy` is no policy; when called, an NNX method assigned to a parameter of which
            it sees a cast copy.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> model = with_policy(nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(2)]), "mixed_float16")
        >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 4)))
        >>> params["params"]["layers_0"]["kernel"].dtype
        dtype('float32')
        >>> "f16[1,4]" in str(jax.make_jaxpr(model.apply)(params, jnp.ones((1, 4))))
        True

    Source: Keras's `Layer.dtype_policy` and Haiku's `hk.mixed_precision.set_policy`, for Flax.
    """
    policy = get_policy(policy)
    # A Flax module can only come from a Flax that is loaded, so nobody else pays for importing it.
    if "flax" in sys.modules:
        import flax.linen
        import flax.nnx

        if isinstance(model, flax.linen.Module):
            from mpjax.modules import linen

            return linen.with_policy(model, policy)
        if isinstance(model, flax.nnx.Module):
            from mpjax.modules import nnx

            return nnx.with_policy(model, policy)
    raise _not_a_flax_module(model)


def _not_a_flax_module(model: Any) -> TypeError:
    if isinstance(model, type):
        return TypeError(
            f"with_policy({model.__name__}, ...): got the class; give an instance, "
            f"with_policy({model.__name__}(...), policy)."
        )
    library = type(model).__module__.partition(".")[0]
    ways_out = {
        "haiku": "set the policy on the class, with hk.mixed_precision.set_policy(Class, mpjax.get_policy(policy)).",
        "equinox": "cast the model and its inputs where you call it: "
        "policy.cast_to_compute(model)(policy.cast_to_compute(x)).",
    }
    return TypeError(
        f"with_policy({_shortened(model)}, ...): a {type(model).__qualname__} is not a Flax Linen or "
        "NNX module; "
        + ways_out.get(
            library,
            "for a plain JAX function cast its parameters and inputs with policy.cast_to_compute; "
            "for Haiku use hk.mixed_precision.set_policy.",
        )
    )


def _shortened(value: Any, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
