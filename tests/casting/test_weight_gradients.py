"""Gradients of float32 parameters leave their matmul in float32; those of activations in half."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax import autocast
from mpjax.program.graph import walk
from testing import measures
from testing.random_programs.evaluate import in_numpy

_rng = np.random.default_rng(0)
W, X, KERNEL, IMAGES = (
    jnp.asarray(_rng.normal(size=shape) / size, jnp.float32)
    for shape, size in (((8, 8), 3), ((3, 4, 8), 1), ((3, 3, 8, 8), 9), ((3, 2, 6, 6, 8), 1))
)


def dense(w, x):
    return jnp.tanh(x @ w) @ w.T


def convolution(kernel, images):
    return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def scanned(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0]


PROGRAMS = {
    "dense": (dense, W, X),
    "convolution": (convolution, KERNEL, IMAGES),
    "pointwise convolution": (convolution, KERNEL[:1, :1], IMAGES),
    "scan": (scanned, W, X),
    "remat": (jax.checkpoint(dense), W, X),
    "jit": (jax.jit(dense), W, X),
    "concatenate": (lambda w, x: x @ jnp.concatenate([w[:4], w[4:] * 2]), W, X),
    "concatenate in scanned layers": (
        lambda w, x: lax.scan(lambda h, w: (h @ jnp.concatenate([w[:4], w[4:] * 2]), None), x, w[None])[0],
        W,
        X,
    ),
    "pad": (lambda w, x: x @ jnp.pad(w[:5], ((0, 3), (0, 0))), W, X),
    "stack": (lambda w, x: jnp.einsum("...i,kij->...kj", x, jnp.stack([w[:, :4], w[:, 4:]])), W, X),
    "update of a slice": (lambda w, x: x @ lax.dynamic_update_slice(w, w[:2, :2], (3, 3)), W, X),
    "heads": (lambda w, x: jnp.einsum("...i,hij->...hj", x, w.reshape(2, 8, 4)), W.reshape(8, 8), X),
}


# Those whose gradient has its own rule for vmap.
VMAPPED = ("dense", "convolution", "scan", "heads")
# Second derivatives, forward over reverse and reverse over reverse.
SECOND = (
    lambda f: lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (w,))[1],
    lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2)),
)


def loss_of(fun, vmapped):
    mapped = jax.vmap(fun, (None, 0)) if vmapped else fun
    return lambda w, x: jnp.mean(mapped(w, x if vmapped else x[0]) ** 2)


def results(fun, w, x):
    """The dtypes of the matmuls of a gradient whose result has the parameter's size."""
    found = measures.matmuls(jax.grad(fun), w, x)
    return {e.eqn.outvars[0].aval.dtype for e in found if e.eqn.outvars[0].aval.size == w.size}


@pytest.mark.parametrize(
    ("name", "vmapped"), [*((name, False) for name in PROGRAMS), *((name, True) for name in VMAPPED)]
)
def test_weight_gradients_are_written_in_float32(name, vmapped):
    fun, w, x = PROGRAMS[name]
    # A 3×3 convolution only on request: cuDNN has no kernel for it.
    rules = mpjax.Rules(weight_gradients="everywhere" if name == "convolution" else "float32")
    loss, plain = loss_of(mpjax.autocast(fun, rules=rules), vmapped), loss_of(fun, vmapped)
    assert np.dtype(np.float32) in results(loss, w, x)
    for derivative in (
        jax.grad,
        *(SECOND if name in ("dense", "convolution", "pointwise convolution", "scan") else ()),
    ):
        tolerance = 1e-2 if derivative is jax.grad else 3e-2
        found, expected = (in_numpy(derivative(f))(w, x) for f in (loss, plain))
        np.testing.assert_allclose(found, expected, atol=tolerance * np.max(np.abs(expected)))


def test_small_gradients_do_not_underflow():
    # Each product is 1e-8, below float16's smallest number; their sum is not.
    fun = lambda w, x: jnp.sum(x @ w) * 1e-4
    gradient = in_numpy(jax.grad(mpjax.autocast(fun)))(W, np.full((4096, 8), 1e-4, np.float32))
    np.testing.assert_allclose(gradient, 4096 * 1e-8, rtol=1e-2)


def test_a_rules_field_turns_float32_weight_gradients_off():
    cast = mpjax.autocast(dense, rules=mpjax.Rules(weight_gradients="half"))
    assert results(loss_of(cast, False), W, X) == {np.dtype(np.float16)}
    assert results(loss_of(mpjax.autocast(convolution), False), KERNEL, IMAGES) == {np.dtype(np.float16)}


def test_the_gradient_of_a_pointwise_kernel_reads_stored_images():
    fun, kernel, images = PROGRAMS["pointwise convolution"]
    found = measures.equations(jax.make_jaxpr(jax.grad(loss_of(mpjax.autocast(fun), False)))(kernel, images).jaxpr)
    equations = [e.eqn for e in found]
    (matmul,) = [e for e in equations if e.primitive.name == "dot_general"]
    (stored,) = [e for e in equations if e.outvars[0] is matmul.invars[0]]
    assert stored.primitive.name == "optimization_barrier"


def test_parameters_that_a_loop_joins_are_cast_before_it():
    def lstm(kernels, x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ jnp.concatenate(kernels)), None), x, length=3)[0]

    equations = measures.equations(jax.make_jaxpr(mpjax.autocast(lstm))((W[:4], W[4:]), X).jaxpr)
    in_loop = [e.eqn for e in equations if "scan" in e.path]
    assert [e.outvars[0].aval.dtype for e in in_loop if e.primitive.name == "concatenate"] == [jnp.float16]
    casts = [e for e in in_loop if e.primitive.name == "convert_element_type"]
    assert all(e.outvars[0].aval.ndim > 2 for e in casts)  # of activations only
    gradient = jax.grad(lambda w: loss_of(lambda w, x: mpjax.autocast(lstm)((w[:4], w[4:]), x), False)(w, X))(W)
    assert not np.array_equal(gradient, gradient.astype(jnp.float16))  # summed over the iterations in float32


def test_no_half_copy_of_a_weight_is_stored():
    loss = lambda w, x: jnp.mean(dense(w, x) ** 2)
    one = X[:1, :1]  # a small batch: the weights are most of what is stored
    kept = measures.residual_bytes(mpjax.autocast(loss), W, one)
    assert kept <= measures.residual_bytes(loss, W, one)


@pytest.mark.parametrize(
    ("matmul", "shape"),
    [
        (lambda w, x: x @ w, (32, 64)),
        (lambda w, x: w @ jnp.swapaxes(x, 1, 2), (64, 32)),
        (lambda w, x: jnp.einsum("oi,bsi->obs", w, x), (64, 32)),
        (lambda w, x: w @ jnp.swapaxes(x, 1, 2), (4, 64, 32)),
        (lambda w, x: x @ w, (4, 32, 64)),
    ],
    ids=["right", "left", "left, one dot", "left, batched", "right, batched"],
)
def test_transposed_gradient_of_a_3d_bfloat16_matmul_runs_on_a_cpu(matmul, shape):
    # XLA's CPU compiler turned a matmul whose float32 result is transposed into one that it can't run: "Unsupported
    # element type for DotThunk::Execute: BF16 x BF16 = F32". Small ones did run.
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=each), jnp.float32) for each in (shape, (4, 16, 32)))

    def loss(w, x):
        return jnp.sum(jnp.sin(matmul(w, x)))

    def transposed(loss):
        return np.asarray(jax.jit(lambda: jnp.swapaxes(jax.grad(loss)(w, x), -1, -2))())

    expected = transposed(loss)
    found = transposed(mpjax.autocast(loss, "mixed_bfloat16"))
    np.testing.assert_allclose(found, expected, atol=0.03 * np.abs(expected).max())


def looked_up(table, w, index):
    return jnp.mean((table[index] @ w) ** 2)


@pytest.mark.parametrize(("rows", "dtype"), [(64, "bfloat16"), (8, "float32")])
def test_rows_looked_up_often_come_from_a_half_table(rows, dtype):
    # A half copy of the table pays if each row is read at least three times.
    index = jnp.arange(rows) % 8
    gradient = jax.make_jaxpr(jax.grad(mpjax.autocast(looked_up, "mixed_bfloat16"), (0, 1)))(W, W, index)
    eqns = [each.eqn for each in measures.equations(gradient)]
    found = {(eqn.primitive.name, eqn.outvars[0].aval.dtype.name) for eqn in eqns if eqn.outvars}
    assert {("gather", dtype), ("scatter-add", "float32")} <= found
    assert ("scatter-add", "bfloat16") not in found


@pytest.mark.parametrize(("shape", "wide"), [((4, 2), 2), ((8,), 3)])
def test_embeddings_are_activations_and_permuted_weights_are_not(shape, wide):
    # Each position of a batch has a gradient of its own, which is half like that of any activation.
    def loss(table, w, index):
        rows = table[index]
        return jnp.mean((rows / jnp.std(rows, axis=-1, keepdims=True) @ w) ** 2)

    index = jnp.arange(8).reshape(shape)
    cast = jax.grad(mpjax.autocast(loss, "mixed_bfloat16"), (0, 1))
    table = W + jnp.arange(8.0)
    eqns = [each.eqn for each in measures.equations(jax.make_jaxpr(cast)(table, W, index))]
    matmuls = [eqn.outvars[0].aval.dtype for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert [matmuls.count(dtype) for dtype in (jnp.bfloat16, jnp.float32)] == [4 - wide, wide - 1]
    assert {eqn.outvars[0].aval.dtype.name for eqn in eqns if eqn.primitive.name == "scatter-add"} == {"float32"}
    found, expected = (in_numpy(gradient)(table, W, index) for gradient in (cast, jax.grad(loss, (0, 1))))
    assert measures.relative_error(found, expected) < 0.02


def test_positions_looked_up_in_a_half_activation_are_read_in_half():
    # The derivative is a sum in float32 of what is then a cotangent in half.
    def loss(w, x, index):
        return jnp.mean(jnp.take_along_axis(jnp.tanh(x @ w), index[..., None], axis=1) @ w)

    x, index = jnp.ones((4, 16, 8)), jnp.zeros((4, 3), int)
    cast = mpjax.autocast(loss, "mixed_bfloat16")
    eqns = [each.eqn for each in measures.equations(jax.make_jaxpr(jax.grad(cast))(W, x, index))]
    assert {v.aval.dtype.name for eqn in eqns if eqn.primitive.name == "gather" for v in eqn.outvars} == {"bfloat16"}
    assert {v.aval.dtype.name for eqn in eqns if eqn.primitive.name == "scatter-add" for v in eqn.outvars} == {
        "float32"
    }
    found, expected = (in_numpy(jax.grad(f))(W, x, index) for f in (cast, loss))
    assert measures.relative_error(found, expected) < 0.02


@pytest.mark.parametrize(("half", "vmapped"), [("float16", True), ("bfloat16", False)])
def test_a_lookup_in_half_has_the_right_derivatives(half, vmapped):
    """Many small gradients of a row would vanish in a half sum."""
    index = jnp.repeat(jnp.arange(8), 512)

    def loss(fun):
        if not vmapped:
            return lambda table: fun(table, W, index)
        return lambda table: jnp.mean(jax.vmap(fun, (None, None, 0))(table, W, index.reshape(4, -1)))

    cast = loss(mpjax.autocast(looked_up, f"mixed_{half}"))
    exact = loss(looked_up)
    bound = 4 * float(jnp.finfo(half).eps)
    for derivative in (jax.grad, jax.jacfwd, lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (w,))[1]):
        found, expected = (in_numpy(derivative(f))(W) for f in (cast, exact))
        assert measures.relative_error(found, expected) < bound


@pytest.mark.parametrize("derivative", ["members", "last", "jacrev", "hessian"])
def test_gradients_of_mapped_parameters_run_compiled(derivative):
    # XLA's CPU compiler can't run most bfloat16 matmuls with a float32 result, and `vmap` changes their dimensions.
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 4, 4), (8, 4)))
    members = {
        "members": lambda loss: jax.vmap(jax.grad(loss), (0, None)),
        "last": lambda loss: lambda w, x: jax.vmap(jax.grad(loss), (2, None))(jnp.moveaxis(w, 0, 2), x),
        "jacrev": lambda loss: jax.vmap(jax.jacrev(lambda w, x: loss(w, x, jnp.mean)), (0, None)),
        "hessian": lambda loss: jax.vmap(jax.hessian(loss), (0, None)),
    }[derivative]

    def loss(w, x, reduce=lambda y, axis: jnp.mean(y)):
        return reduce(jnp.tanh(x @ w) ** 2, axis=0)

    found = jax.jit(members(mpjax.autocast(loss, "mixed_bfloat16")))(w, x)
    assert found.dtype == jnp.float32
    expected = in_numpy(members(loss))(w, x)
    tolerance = 8 * float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(found, expected, atol=tolerance * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("layout", [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("NCHW", "HWIO", "NHWC")])
def test_gradients_of_pointwise_convolutions_run_compiled_in_every_layout(layout):
    rng = np.random.default_rng(0)
    sizes = {"N": 2, "C": 8, "H": 5, "W": 5}
    x = jnp.asarray(rng.normal(size=[sizes[d] for d in layout[0]]), jnp.float32)
    w = jnp.asarray(rng.normal(size=(4, 8, 1, 1) if layout[1] == "OIHW" else (1, 1, 8, 4)), jnp.float32)

    def loss(w, x):
        return jnp.mean(jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=layout)) ** 2)

    found = jax.jit(jax.grad(mpjax.autocast(loss, "mixed_bfloat16")))(w, x)
    expected = jax.grad(loss)(w, x)
    np.testing.assert_allclose(found, expected, atol=2.0**-5 * float(jnp.max(jnp.abs(expected))))


def _recurrent(w, x):
    def step(h, x):
        return jnp.tanh(h @ w + x), None

    return jnp.sum(jax.lax.scan(step, x[0], x)[0] ** 2)


def test_backward_loop_reads_the_half_kernel_of_the_forward_loop():
    w, x = jnp.eye(8) / 2, jnp.ones((5, 4, 8))
    sites = walk(jax.make_jaxpr(jax.grad(autocast(_recurrent)))(w, x))
    casts = [s.inside for s in sites if s.name == "convert_element_type" and s.invars[0].aval.shape == w.shape]
    assert casts == [()]


def biased(b, x):
    return jnp.mean((jax.nn.gelu(x @ W + b) @ W) ** 2)


DERIVATIVES = {
    "grad": jax.grad,
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "vmap of grad": lambda f: lambda b, x: jax.vmap(jax.grad(f), (None, 0))(b, x),
    "grad of vmap": lambda f: jax.grad(lambda b, x: jax.vmap(f, (0, None))(jnp.stack([b, 2 * b]), x).sum()),
    "scan": lambda f: jax.grad(lambda b, x: lax.scan(lambda c, x: (c + f(b, x), None), 0.0, x)[0]),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_bias_that_is_added_in_float32_has_the_right_gradient(name):
    transform, b = DERIVATIVES[name], jnp.linspace(-3, 1, 8)
    found = jax.jit(transform(autocast(biased, "mixed_bfloat16")))(b, X)
    np.testing.assert_allclose(found, jax.jit(transform(biased))(b, X), atol=0.02 * float(jnp.abs(found).max()))


def test_a_bias_and_its_activation_have_one_cotangent():
    """A GPU's kernel that writes the half cotangent sums it up. XLA reads a float32 one twice, once it was written."""
    jaxpr = jax.make_jaxpr(jax.grad(autocast(biased, "mixed_bfloat16")))(jnp.zeros(8), X)
    eqns = [site.eqn for site in walk(jaxpr)]
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    (sum_,) = (
        e
        for e in eqns
        if e.primitive.name == "reduce_sum" and e.invars[0].aval.shape == X.shape and e.outvars[0].aval.ndim
    )
    chain = [sum_]
    for _ in range(4):
        chain.append(makers[chain[-1].invars[0]])
    assert [eqn.primitive.name for eqn in chain[1:]] == ["neg", "convert_element_type", "neg", "convert_element_type"]
    assert chain[3].outvars[0].aval.dtype == jnp.bfloat16
