"""Random models under a policy: nothing outside of matmuls, convolutions and lookups is narrower than in float32."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys
from testing.measures import matmuls_of, relative_error
from testing.models.random_flax import KEPT, LinenModel, NnxModel, inputs, random_steps
from testing.random_programs.evaluate import arrays_in_numpy, as_typed, evaluate, exact
from tests.modules.flax_models import of_nnx

KEY = cheap_keys.key(0)


def functions(library, steps, policy):
    """The functions (parameters, values) → (h, aux) of a model under a policy and in float32, and the parameters."""
    values = inputs()
    if library == "linen":
        model = LinenModel(steps)
        params = arrays_in_numpy(model.init)(KEY, values["h"], values)
        apply = lambda m: lambda params, v: m.apply(params, v["h"], v)
        return apply(mpjax.with_policy(model, policy)), apply(model), params
    model = of_nnx(lambda: NnxModel(steps, nnx.Rngs(KEY)))
    split = lambda m: nnx.split(m, nnx.Param, ...)
    _, params, rest = split(model)

    def apply(m):
        graphdef = split(m)[0]
        return lambda params, v: nnx.merge(graphdef, params, rest, copy=True)(v["h"], v)

    mixed = mpjax.with_policy(model, policy)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(mixed, nnx.Param), params)
    return apply(mixed), apply(model), params


def loss_of(fun):
    def loss(params, v):
        h, aux = fun(params, v)
        return jnp.mean(h * h) + 0.001 * aux["logdet"], (h, aux)

    return jax.value_and_grad(loss, has_aux=True)


def has_float32_part(steps):
    return any(step.kind == "float32" or has_float32_part(step.part) for step in steps)


def check(library, seed, policy):
    steps, values = random_steps(seed), inputs()
    override = ";*float32_*=>float32" if has_float32_part(steps) else ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpjax.UnusedOverrideWarning)
        mixed, plain, params = functions(library, steps, policy + override)
        if not jax.tree.leaves(params):
            return
        traced = [jax.make_jaxpr(loss_of(fun))(params, values) for fun in (mixed, plain)]
    leaves = jax.tree.leaves((params, values))
    found, reference, single = (
        evaluate(jaxpr, leaves, store)
        for jaxpr, store in ((traced[0], as_typed), (traced[1], exact), (traced[1], as_typed))
    )
    assert [aval.dtype for aval in traced[0].out_avals] == [aval.dtype for aval in traced[1].out_avals]
    # (loss, (h, aux)), gradients: what no matmul reads is that of float32, bitwise.
    for name, a, b in zip(sorted(KEPT), found[2:5], single[2:5], strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    count = 1 + len(matmuls_of(traced[1].jaxpr))
    eps = float(jnp.finfo(mpjax.get_policy(policy).compute_dtype).eps)
    assert relative_error([found[1]], [reference[1]]) <= eps * count
    assert relative_error(found[5:], reference[5:]) <= 4 * eps * count
    if not override:
        wide = [e for e in matmuls_of(traced[0].jaxpr) if jnp.float32 in e.in_dtypes[:2]]
        assert not wide, [(e.name, e.in_dtypes, str(e.eqn.source_info.name_stack)) for e in wide]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_random_models(library, seed):
    check(library, seed, ("mixed_float16", "mixed_bfloat16")[seed % 2])


def test_parameters_of_a_random_linen_model_are_those_of_float32():
    steps, values = random_steps(0), inputs()  # with a scan, a recurrent layer, a remat and parameters of its own
    models = LinenModel(steps), mpjax.with_policy(LinenModel(steps), "mixed_float16")
    plain, mixed = (arrays_in_numpy(model.init)(KEY, values["h"], values) for model in models)
    jax.tree.map(np.testing.assert_array_equal, mixed, plain)
