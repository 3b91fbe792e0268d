"""The form of rematerialisation regions on TPUs, where XLA recomputes cheap values by itself."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import Rules
from mpjax.inspection.profiling.hlo import HloModule
from mpjax.kernels.lookup import element
from mpjax.kernels.softmax import unfused
from mpjax.planning.target import TARGETS, placed
from mpjax.program import compat
from testing import measures
from testing.platforms import gpu, tpu

X = jnp.ones((4, 8))


def loss(w, x):
    return jnp.mean(jax.nn.softmax(x @ w) @ w.T)


def barriers(residuals):
    """Whether the backward pass of a softmax has barriers."""
    rules = Rules(residuals=residuals)
    gradient = jax.make_jaxpr(lambda w: jax.grad(mpjax.autocast(loss, "mixed_bfloat16", rules=rules))(w, X))
    found = [e.eqn.params for e in measures.equations(gradient(X.T)) if "prevent_cse" in e.eqn.params]
    return bool(found) and any(np.any(params["prevent_cse"]) for params in found if params["differentiated"])


@pytest.mark.parametrize(
    ("residuals", "here", "there"), [("auto", True, False), ("half", True, True), ("full", False, False)]
)
def test_regions_have_no_barriers_on_a_tpu_unless_requested(residuals, here, there):
    assert barriers(residuals) == here
    with tpu():
        assert barriers(residuals) == there


def test_the_last_region_has_no_barrier_and_the_others_have_one():
    """Its backward pass begins at once: behind a barrier, XLA would keep a second copy of the logits."""

    def loss(w, x):
        logits = jax.nn.softmax(x @ w) @ w.T
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, jnp.zeros((4, 1), int), -1)[:, 0])

    program = jax.make_jaxpr(jax.grad(mpjax.autocast(loss, "mixed_bfloat16")))(X.T, X)
    found = [e.eqn.params for e in measures.equations(program) if "prevent_cse" in e.eqn.params]
    assert [bool(np.any(params["prevent_cse"])) for params in found if params["differentiated"]] == [False, True]


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu, jax.jit(jnp.sin)])
def test_parameters_have_no_barriers(activation):
    """XLA would copy those that are updated in place: 159 small kernels of a ResNet-50, whose regions call `relu`."""

    def loss(scale, w):
        return jnp.mean(activation(X @ w * scale) @ w.T)

    program = jax.make_jaxpr(jax.grad(mpjax.autocast(loss, "mixed_bfloat16"), (0, 1)))(jnp.ones(8), X.T @ X)
    (region,) = (e for e in program.eqns if e.params.get("differentiated"))
    flags = dict(zip(region.invars, region.params["prevent_cse"], strict=True))
    assert any(flags.values())
    assert flags[program.jaxpr.invars[0]] is False


@pytest.mark.parametrize(("here", "longest"), [(gpu, 128), (tpu, 1024), (contextlib.nullcontext, 1024)])
def test_the_statistics_of_long_rows_are_kept(here, longest):
    """On GPUs, XLA keeps whole rows in registers, and spills where a backward pass computes their statistics again."""

    def loss(w, x):
        return jnp.mean(jax.nn.softmax(x @ w) ** 2 @ w.T)

    gradient = jax.grad(mpjax.autocast(loss, "mixed_bfloat16"))

    def maxima(length):
        with here():
            program = jax.make_jaxpr(gradient)(jnp.ones((8, length)), X)
        return [e.eqn.primitive.name for e in measures.equations(program)].count("reduce_max")

    assert (maxima(longest), maxima(longest + 1)) == (2, 1)


def test_the_platform_is_that_of_the_mesh_else_of_the_default_device():
    assert compat.platform() == "cpu"
    with tpu():
        assert compat.platform() == "tpu"
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert compat.platform() == "cpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert compat.platform() == "cpu"


@pytest.mark.parametrize(("platform", "count"), [("tpu", 1), ("cpu", 0)])
def test_the_maximum_of_a_softmax_is_a_result_of_its_own_on_a_tpu(platform, count):
    fun = mpjax.autocast(lambda w: jax.nn.softmax(X @ w) @ w.T, "mixed_bfloat16")
    text = jax.jit(fun).trace(X.T).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("optimization_barrier") == count


def test_a_tpu_computes_the_gradient_of_a_pointwise_kernel_as_a_convolution():
    def conv(w, x):
        return jnp.sum(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    def wide():
        gradient = jax.grad(mpjax.autocast(conv, "mixed_bfloat16"))
        program = jax.make_jaxpr(gradient)(jnp.ones((1, 1, 4, 8)), jnp.ones((2, 4, 4, 4)))
        names = ("dot_general", "conv_general_dilated")
        found = [e.eqn for e in measures.equations(program) if e.eqn.primitive.name in names]
        return [eqn.primitive.name for eqn in found if eqn.outvars[0].aval.dtype == jnp.float32]

    assert wide() == ["dot_general"]
    with tpu():
        assert wide() == ["conv_general_dilated"]


def test_unfused_is_the_identity_under_every_transformation():
    identity = functools.partial(unfused.bind, long=True)

    def fun(x, wrap=identity):
        return jnp.sum(jnp.sin(wrap(x)) ** 2)

    plain = lambda x: fun(x, lambda x: x)
    for transform in (jax.grad, jax.hessian, jax.vmap, jax.jit):
        np.testing.assert_array_equal(transform(fun)(X), transform(plain)(X))
    np.testing.assert_array_equal(jax.linear_transpose(identity, X)(X)[0], X)


@pytest.mark.parametrize("there", [gpu, tpu])
@pytest.mark.parametrize(("axis", "mode"), [(0, "fill"), (1, "clip"), (2, "fill"), (2, "clip")])
def test_an_accelerator_selects_elements_of_activations_by_comparison(axis, mode, there):
    shape, places = (2, 3, 4), np.delete((2, 3, 4), axis)
    indices = np.expand_dims(np.linspace(-9, 9, places.prod()).astype(np.int32).reshape(places), axis)

    def fun(w, x):
        table, activations = w[:2].reshape(shape), jnp.exp(x @ w).reshape(shape)
        return [jnp.take_along_axis(values, indices, axis, mode=mode) for values in (table, activations)]

    def results(fun):
        args = jnp.linspace(-1, 1, 96).reshape(8, 12), X[:2]
        out, pull = jax.vjp(fun, *args)
        pulled = lambda *args: jax.vjp(fun, *args)[1](out)
        names = [e.eqn.primitive.name for e in measures.equations(jax.make_jaxpr(pulled)(*args))]
        return names.count("scatter-add"), (out, pull(jax.tree.map(jnp.nan_to_num, out)))

    scattered, here = results(cast := mpjax.autocast(fun, "mixed_bfloat16"))
    with there():
        scattered_there, elsewhere = results(cast)
    assert (scattered, scattered_there) == (2, 1)
    jax.tree.map(np.testing.assert_array_equal, here, elsewhere)


@pytest.mark.parametrize("axis", [-1, -2])
def test_an_element_of_each_row_is_that_of_a_gather_under_every_transformation(axis):
    x = jnp.linspace(-1, 1, 60).reshape(3, 4, 5)
    at = jnp.expand_dims(jnp.argmax(jnp.sin(40 * x), axis), axis).astype(np.int32)

    def results(take):
        loss = lambda x, at: jnp.sum(jnp.sin(take(x, at)) ** 2)
        return (
            [jax.vmap(jax.value_and_grad(loss), axes)(*args) for axes, args in (((0, 0), (x, at)), ((-3, 0), (x, at)))],
            jax.vmap(loss, (0, None))(x, at[0]),
            jax.vmap(loss, (None, 0))(x[0], at),
            jax.jvp(lambda x: take(x, at), [x], [x * x]),
            jax.jit(jax.hessian(loss))(x[0], at[0]),
            jax.linearize(lambda x: take(x, at), x)[1](x * x),
            jax.grad(jax.checkpoint(loss))(x, at),
        )

    ours = results(lambda x, at: element.bind(x, at, axis=axis))
    theirs = results(lambda x, at: jnp.take_along_axis(x, at, axis))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_float16_on_a_tpu_is_warned_about():
    with tpu(), pytest.warns(UserWarning, match="float16 is no faster than bfloat16 on a TPU"):
        jax.eval_shape(mpjax.autocast(lambda w: X @ w, "mixed_float16"), X.T)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_libtpu_multiplies_half_operands_without_casting_them(half):
    target = TARGETS["v5e"]
    devices = target.devices()
    if devices is None:
        pytest.skip(target.missing)
    shape = placed(jax.ShapeDtypeStruct((256, 256), half), jax.sharding.SingleDeviceSharding(devices[0]))
    text = jax.jit(jnp.matmul).trace(shape, shape).lower(lowering_platforms=("tpu",)).compile().as_text()
    name = {"float16": "f16", "bfloat16": "bf16"}[half]
    program = HloModule(text)
    lines = [(line, lines) for lines in program.computations.values() for line in lines.values()]
    ((matmul, beside),) = [(line, lines) for line, lines in lines if line.opcode == "convolution"]
    assert {beside[operand].type.partition("[")[0] for operand in matmul.operands} == {name}
    # The matrix unit writes bfloat16 itself; float16 is a cast of its float32 result, in the same kernel.
    assert matmul.type.startswith("f32[" if half == "float16" else "bf16[")
    entry = program.computations[program.entry].values()
    assert not [line for line in entry if line.opcode == "convert" or "f32[" in line.type]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("choice", ["cudnn", "unfused"])
def test_cudnn_keeps_batches_and_heads_split_over_eight_gpus(choice):
    devices = TARGETS["h200"].devices(8)
    if devices is None:
        pytest.skip(TARGETS["h200"].missing)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    split = jax.NamedSharding(mesh, jax.P("data", None, "model"))
    q, seen = jax.ShapeDtypeStruct((8, 256, 4, 64), jnp.float32, sharding=split), jnp.tril(jnp.ones((256, 256), bool))

    def loss(q, k, v):
        scores = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, k) / 8, -1e9)
        return jnp.mean(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v) ** 2)

    gradient = jax.grad(mpjax.autocast(loss, "mixed_bfloat16", rules=Rules(attention=choice)), (0, 1, 2))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(gradient, out_shardings=split).trace(q, q, q)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text.count('custom_call_target="__cudnn$fmha') == 2 * (choice == "cudnn")
    assert "f32[2,256,2,64]" in text  # the part of one device
    assert "all-gather" not in text
