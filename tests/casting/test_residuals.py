"""The backward pass never stores more than the float32 program, even at the smallest batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax import autocast
from testing import measures
from testing.models.zoo import REGISTRY, harness

# One for each way to hold weights; the rest of the zoo repeats these.
NAMES = """
    linen_mlp linen_cnn_batchnorm linen_transformer linen_transformer_scan_remat linen_lstm linen_gru_ctc
    haiku_attention equinox_recurrent scan_lstm scan_accumulator nnx_scanned_attention embedding_tied moe_einsum
    moe_ragged conv_pooling custom_vjp_linear cond_branches jit_nested checkpoint_policies
""".split()


def of_one_example(batch):
    """A batch of abstract arrays with one example."""
    size = next(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim)
    return jax.tree.map(lambda x: x.update(shape=(1, *x.shape[1:])) if x.ndim and x.shape[0] == size else x, batch)


@pytest.mark.parametrize("name", NAMES)
def test_backward_pass_of_one_example_stores_no_more_than_in_float32(name):
    # With one example, the weights are most of what is stored.
    program, (loss_fn, params, batch) = REGISTRY[name], harness.abstract(name)
    args = params, of_one_example(batch)
    with program.context():
        kept, in_float32 = (
            measures.residual_bytes(fun, *args, has_aux=program.has_aux)
            for fun in (autocast(loss_fn, "mixed_float16"), loss_fn)
        )
    # A backward loop reads the half copies of its kernels, which were made before the forward loop.
    copies = sum(p.size * 2 for p in jax.tree.leaves(params) if p.ndim == 2) if name == "scan_lstm" else 0
    assert kept <= in_float32 + copies


def test_backward_pass_of_a_norm_reads_the_sum_that_it_normalises():
    """Not the two terms, of which the matmul before stores one anyway: the bytes are the same, and one is read."""

    def loss(p, x):
        h = x @ p["in"]
        total = h + jax.nn.relu(h @ p["inner"]) @ p["outer"]
        centred = total - total.mean(-1, keepdims=True)
        normal = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return jnp.mean((normal @ p["out"]) ** 2)

    p = {name: jnp.eye(16) for name in ("in", "inner", "outer", "out")}
    _, backward = jax.vjp(autocast(loss, "mixed_bfloat16"), p, jnp.ones((8, 16)))
    program = jax.make_jaxpr(backward)(jnp.float32(1))
    added = [each.eqn for each in measures.equations(program) if each.eqn.primitive.name == "add"]
    assert not [eqn for eqn in added if eqn.outvars[0].aval.shape == (8, 16)]


@pytest.mark.parametrize("residuals", ["half", "int8"])
def test_transposed_weights_do_not_end_a_region(residuals):
    """`silu(x @ a.T) * (x @ b.T)` kept the results of its SiLU too: `b.T` came between."""

    def loss(w, x, move):
        for _ in range(2):
            gate, up, down = map(move, w)
            x = x + (jax.nn.silu(x @ gate) * (x @ up)) @ down
        return jnp.mean((x @ move(w[0])) ** 2)

    rules = mpjax.Rules(residuals=residuals)
    x, kept = jnp.ones((16, 32)), []
    for move in (lambda w: w, jnp.transpose):
        w = [move(jnp.ones(shape)) for shape in ((32, 96), (32, 96), (96, 32))]
        fun = autocast(lambda w, x, move=move: loss(w, x, move), "mixed_bfloat16", rules=rules)
        _, pullback = jax.vjp(fun, w, x)
        kept.append(sorted(str(v.aval) for v in jax.tree.leaves(pullback) if v.shape[:1] == (16,)))
    assert kept[0] == kept[1]


def normalised(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


# Layers, and the arrays that their derivative reads apart from those that matmuls multiply and the gradient.
LAYERS = {
    "gelu": (jax.nn.gelu, 1),
    "norm": (normalised, 1),
    "norm of a gelu": (lambda h: normalised(jax.nn.gelu(h)), 1),
    "gated": (lambda h: h * jnp.tanh(jax.nn.softplus(h)), 1),
    "relu": (jax.nn.relu, 0),  # only a mask
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_backward_pass_in_the_program_computes_again_what_costs_little(name):
    """`autocast(jax.grad(loss))` read up to four arrays for a GELU, and one of them in float32 for a norm."""
    layer, arrays = LAYERS[name]
    loss = lambda p, x: jnp.mean((layer(x @ p["in"]) @ p["out"]) ** 2)
    p, x = {"in": jnp.eye(64), "out": jnp.eye(64)}, jnp.ones((128, 64))
    program = jax.make_jaxpr(autocast(jax.grad(loss), "mixed_bfloat16"))(p, x).jaxpr
    made = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    slope = next(eqn for eqn in program.eqns[::-1] if eqn.primitive.name == "remat2" and eqn.outvars[0].aval.size > 64)
    sources = {id(made[v]): made[v] for v in slope.invars if v in made}.values()
    held = [v for eqn in sources if eqn.primitive.name == "optimization_barrier" for v in eqn.invars]
    whole = [v for v in held or slope.invars if v.aval.shape == x.shape and v.aval.dtype != bool]
    assert [v.aval.dtype for v in whole] == [jnp.bfloat16] * (arrays + 1)
