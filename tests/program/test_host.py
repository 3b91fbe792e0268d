"""NumPy's results of common primitives are those of XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpjax.program import host
from mpjax.program.evaluator import bind

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4)).astype(np.float32)
SPECIAL = np.array([0, -0.0, 1, -1, 11, 300, -300, 6e4, 1e-6, np.inf, -np.inf, np.nan], np.float32)
FLOATS = (X, SPECIAL, SPECIAL.astype(np.float16), X.astype(jnp.bfloat16))
UNARY = "sign floor ceil neg abs is_finite sqrt rsqrt exp exp2 expm1 log log1p sin cos tanh logistic erf square".split()
BINARY = "pow add sub mul div max min eq ne lt le gt ge".split()
MOVES = {
    "sum": lambda x: jnp.sum(x, 0),
    "max": lambda x: jnp.max(x, -1),
    "min": lambda x: jnp.min(x),
    "reshape": lambda x: jnp.reshape(x, (2, 6)),
    "cumulative": lambda x: (lax.cumsum(x, 0), lax.cumprod(x, 1, reverse=True)),
    "ranges": lambda x: lax.broadcasted_iota(np.float32, (3, 4), 1),
    "tiles": lambda x: jnp.stack([jnp.tile(x, (2, 3))] * 2, 1),
    "hyperbolic": lambda x: (lax.sinh(x), lax.cosh(x)),
    "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
    "transpose": lambda x: x.T,
    "flip": lambda x: lax.rev(x, (1,)),
    "slice": lambda x: lax.slice(x, (0, 1), (3, 4), (2, 1)),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "split": lambda x: lax.split(x, (1, 3), 1),
    "broadcast": lambda x: lax.broadcast_in_dim(x, (2, 3, 5, 4), (1, 3)),
    "clamp": lambda x: lax.clamp(x.dtype.type(-0.5), x, x.dtype.type(0.5)),
    "select": lambda x: lax.select_n(x > 0, x, -x),
    "select of three": lambda x: lax.select_n(lax.iota(np.int32, 12).reshape(3, 4) % 3, x, -x, x + 1),
    "power": lambda x: lax.integer_pow(x, -3),
    "casts": lambda x: (x.astype(jnp.float16), (x > 0).astype(np.float32), x.astype(bool)),
    "logic": lambda x: (x > 0) & (x < 1) | jnp.any(x > 3) | jnp.all(x < 9),
    "of integers": lambda x: lax.reduce_or((lax.iota(np.int32, 4) * 5), (0,)),
}


def compared(fun, *args):
    """Compares each equation's results with XLA's, and returns the number of those that NumPy evaluated."""
    program, found = jax.make_jaxpr(fun)(*args), 0
    env = dict(zip(program.jaxpr.invars, args, strict=True))
    for eqn in program.jaxpr.eqns:
        ins = [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]
        outs, expected = host.bind_on_host(eqn, ins, wide=False), bind(eqn, map(jnp.asarray, ins))
        env.update(zip(eqn.outvars, expected, strict=True))
        for x, y in zip(outs or (), expected, strict=bool(outs)):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            half = x.dtype in (np.float16, jnp.bfloat16)
            x, y = (np.asarray(z).astype(np.float32) for z in (x, y))
            np.testing.assert_allclose(x, y, rtol=1e-2 if half else 2e-6, atol=1e-3 if half else 1e-6)
        found += outs is not None
    return found


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_array(name):
    for x in FLOATS:
        assert compared(getattr(lax, name), x) == 1


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_arrays(name):
    for x in FLOATS:
        assert compared(getattr(lax, name), x, x[::-1].copy()) == 1


@pytest.mark.parametrize("name", MOVES)
def test_moves_and_reductions(name):
    assert compared(MOVES[name], X) > 0


def test_half_sums_and_arrays_on_a_mesh_stay_with_xla():
    assert compared(lambda x: lax.reduce_sum(x, (0,)), X.astype(np.float16)) == 0
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    on_mesh = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    assert compared(lambda x: lax.exp(x), on_mesh) == 0
