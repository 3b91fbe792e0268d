"""Programs on which autocast once failed, shrunk by the fuzzer: all its properties are checked on each."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

import mpjax
from testing.random_programs import Case, check

# The fault; the transformations under which the program failed, and the body of `program(w, x, b, s, n)`.
FOUND = {
    "jit with an unread output": """value grad outside_grad vmap
f = jax.jit(lambda h: (h @ w, (h * h).sum()))
return f(x)[0],
""",
    "fori_loop with an unread counter": """value grad outside_grad_of_remat
return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ w), x),
""",
    "switch in shard_map with unread outputs": """value outside_grad
def body(rows, w):
    branches = [lambda a: (b, a @ w), lambda a: (b + 1, a)]
    return stacked(lax.switch(n, branches, rows[0]))
return jax.shard_map(body, mesh=MESH, in_specs=(P('i'), P()), out_specs=P('i'), check_vma=False)(
    jnp.stack([x, x]), w)[0],
""",
    "custom_vjp with a static argument and an unread output": """value grad vmap_of_grad
def f(x, w):
    return x @ w, jnp.exp(x)
return halved_vjp(f, static=True)(0.5, x, w)[0],
""",
    "remat and scan with unread outputs": """value grad outside_grad
@jax.checkpoint
def f(h):
    def turn(carry, row):
        carry, count = carry
        return (jnp.tanh(carry @ w), count + row.sum()), (row, carry)
    (h, count), ys = lax.scan(turn, (h, 0.0), x, reverse=True)
    return h, count, ys
return f(x)[0],
""",
    "custom_jvp that closes over an argument": """value grad jvp outside_jvp
def f(a):
    return lax.switch(n, [lambda a: a, lambda a: 2 * a], a),
return halved_jvp(f)(x)[0],
""",
    "matmul that asks for float32": """value outside_jvp vmap
def body(carry):
    i, h = carry
    return i + 1, jnp.dot(h, w, precision='highest')
return x @ w, lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]
""",
    "matmul that asks for the default algorithm": """value grad
return jnp.dot(x, w, precision=lax.DotAlgorithmPreset.DEFAULT),
""",
    "vmap of a weight's gradient": """vmap vmap_of_grad outside_vmap_of_grad
return jnp.tanh(x @ w) @ w,
""",
    "matmul whose result nothing reads in a scan": """value grad
def turn(carry, row):
    unread = x @ carry
    return carry, ()
return lax.scan(turn, w, x)[0],
""",
    "linear solve": """value grad vmap
return lax.custom_linear_solve(lambda v: v + 0.1 * w @ v, b, solve_once, solve_once),
""",
    "function with a rule for vmap": """value jit_inside vmap
return scaled_by_vmap_rule(x @ w) @ w,
""",
    "pmax over a mapped axis by its number": """value outside_jvp
return jax.vmap(lambda r: (lax.pmax(lax.stop_gradient(r), 'q') @ w,), axis_name='q')(x)
""",
    "derivative computed from the bits of its operand": """outside_grad
return jax.scipy.special.erf(b), x @ w
""",
    "scatters of elements in the gradient of a median": """outside_grad
y = jnp.matmul(x[:, None], jnp.stack([w, w]))[:, 0]
return jnp.median(y, axis=0), y
""",
    "matmul of complex numbers": """value
return jnp.real(lax.complex(x, x) @ lax.complex(w, w)), x @ w
""",
    "convolution whose batching transposes in a reshape": """vmap_of_grad
def f(x, b):
    return b, lax.conv_general_dilated(x[None], w[None], (1,), 'SAME', dimension_numbers=CHANNELS_LAST)[0]
return lax.cond(n > 0, strong(f), strong(lambda x, b: (b, x)), x, jax.nn.relu(b))
""",
    "linear solve that is differentiated in a remat": """outside_grad_of_remat
solve = nearly_identity(lambda a: lax.cond(n > 0, lambda: a - a, lambda: a @ w), b)
return w @ lax.custom_linear_solve(solve, b, solve_once, solve_once),
""",
    "linear solve in a scan, whose operator computes what its transpose needs too": """value
def f(carry, row):
    operator = nearly_identity(lambda a: jnp.power(jnp.abs(a) + 1, a), row)
    return carry, lax.custom_linear_solve(operator, b, solve_once, solve_once)
return lax.scan(f, s, x @ w)[1].sum(0), x
""",
    "arithmetic that its author put in half": """value outside_grad
return (jnp.tanh((x @ w).astype(jnp.float16)) * 2).astype(jnp.float32),
""",
    "scan that returns a Python scalar": """value
_, y = lax.scan(lambda c, xs: (c, 0.5), w, x, length=2)
return y.sum(0),
""",
    "remat that saves everything, around a scan": """outside_grad
@partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
def f(w, x):
    return lax.scan(lambda c, xs: (c @ w, jnp.tanh(c)), x, None, length=2)[1].sum(0)
return f(w, x),
""",
    "softmax of attention under an autocast inside": """value
@mpjax.autocast
def f(a):
    return a, jax.nn.dot_product_attention(*((x @ w)[None, :, None],) * 3)[0, :, 0]
return f(b)[1],
""",
    "rule that closes over a value, under an autocast inside": """grad value
@mpjax.autocast
def f(a, c):
    def g(d, e):
        return lax.scan(lambda carry, _: ((carry[1], carry[0], carry[2] + 1), ()), (e, e, n), length=3)[0][0]
    return halved_jvp(g, static=True)(0.5, s, a), c
return f(w, x)[0],
""",
    "scatter under an autocast inside": """value
@mpjax.autocast
def f(a):
    a = lax.scan(lambda c, _: (c.at[n % 2].add(s), None), a, None, length=2)[0]
    return a.at[jnp.array([0, 0, 1])].add(0.5), jax.jit(jnp.tanh)(a)
return f(x)[0],
""",
    "rules in a shard_map that close over values around it": """grad vmap_of_grad
def f(rows, x):
    rule = halved_jvp(lambda a: (a, lax.switch(n, [lambda a: s * 1, lambda a: s], a)))
    other = halved_vjp(lambda a: (a, s * 1))
    return stacked((rule(b)[0], other(rows[0])[0]))
rows = jnp.stack([b, 0.5 * b])
along = dict(mesh=MESH, in_specs=(P('i'), P()), out_specs=P('i'))
first = jax.shard_map(f, check_vma=False, **along)(rows, x)
return *first, jax.shard_map(lambda rows, x: f(rows, x)[1], check_vma=True, **along)(rows, x)
""",
    "tangent that varies along fewer axes than what it is multiplied with": """value
def f(rows, w):
    return stacked((jax.jvp(lambda a: jnp.tanh(a @ a.T) @ a, (rows[0],), (w,))[1],))
along = dict(mesh=MESH, in_specs=(P('i'), P()), out_specs=P('i'))
return jax.shard_map(f, **along)(sharded(jnp.stack([w, 0.5 * w])), replicated(w)),
""",
    "dtypes of its author below autocast's": """value
rows = jnp.broadcast_to(b, (2, 3))
return jnp.dot(rows.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32),
""",
    "unread rule that closes over a value, in a jit with nothing to cast": """grad
@jax.jit
def f(a):
    halved_jvp(lambda _: (a, jnp.sin(a)))(a)
    return b
return f(x @ w),
""",
    "ragged matmul of a tangent": """grad
return halved_jvp(lambda a: lax.ragged_dot(a, jnp.ones((2, 3, 3)), jnp.array([1, 1])))(x),
""",
    "second derivatives in a rule, whose tangents are broadcast": """grad vmap_of_grad
def f(a):
    return jax.hessian(lambda v: jnp.tanh(v @ a).sum())(jnp.array([0.3, 0.2, 0.1])), a
return halved_jvp(f)(w)[0],
""",
    "loop in a rule, which reads a tangent at every turn": """grad vmap_of_grad
m = jnp.array([[0.8, 0.1, 0.0], [0.2, 0.9, 0.1], [0.0, 0.3, 0.7]])
def f(a):
    return lax.scan(lambda c, _: (((c @ m) * a) @ m, None), jnp.ones((2, 3)), None, length=2)[0]
return halved_jvp(f)(x),
""",
    "vmap of a rule, one of whose outputs is shared and unread": """grad
return jax.vmap(lambda a: halved_vjp(lambda c, d: (c * d, c))(b, a)[0], 0)(x),
""",
    "custom_vjp of which nothing is read, of a function that JAX can't map": """vmap_of_grad
rows, groups = jnp.array(CONSTANT[:2]), jnp.stack([jnp.array(CONSTANT), jnp.array(CONSTANT)])
def f(a):
    def turn(carry, _):
        lax.ragged_dot(rows, groups, jnp.array([1, 1]))
        return carry, ()
    solved = lax.custom_linear_solve(nearly_identity(lambda a: a, a), a, solve_once, solve_once)
    return lax.scan(turn, solved, rows[:1])[0]
halved_vjp(f, keep_vjp=True)(b)
return s,
""",
    "derivative of a bound in shard_map, by a tangent that is the same on all devices": """value
def body(rows):
    return jax.jvp(lambda a: jnp.clip(a, -9.1), (rows[0] @ rows[0],), (strong_like(w),))[0][None]
return jax.shard_map(body, mesh=MESH, in_specs=(P('i'),), out_specs=P('i'))(jnp.stack([w, w]))[0],
""",
    "gradient that is known, and nearly cancels, of a checkpoint": """outside_grad_of_remat
tangent = jax.jvp(lambda a: (jnp.tri(3) @ jnp.tri(3)) * w, (x,), (strong_like(x),))[1]
return s, tangent - b, b
""",
    "matmul of a bounded mask that is returned too": """value
mask = jnp.clip(lax.select(jnp.tril(jnp.ones((3, 3), bool)), w, jnp.full((3, 3), -1e30)), -9.1)
return x @ jnp.stack([mask, mask]), mask
""",
    "tie that the rounding of a carry decides": """grad
return lax.scan(lambda c, _: (jnp.where(c < b, 1.0, c) @ w, None), b, None, length=1)[0],
""",
}


def program(body):
    return f"\ndef program(w, x, b, s, n):\n{textwrap.indent(body, '    ')}"


@pytest.mark.parametrize("name", FOUND)
def test_found_program(name):
    first, _, body = FOUND[name].partition("\n")
    source, transforms = program(body), first.split()
    for transform in transforms:
        check(Case(source, transform, "float16"))
    # Both dtypes have one plan; the differences (bfloat16's matmuls on the CPU) show under any transformation.
    check(Case(source, transforms[0], "bfloat16"))


@pytest.mark.parametrize("level", ["half", "conservative"])
def test_linear_solve_at_other_levels(level):
    body = FOUND["linear solve"].partition("\n")[2]
    check(Case(program(body), "grad", rules=level))


def test_transpose_of_a_solve_is_listed_as_it_runs():
    """JAX derives it from the rewritten operator, whatever the traced program contains."""
    body = "return lax.custom_linear_solve(nearly_identity(lambda a: b, b), b, solve_once, solve_once),\n"
    check(Case(program(body), "outside_grad", rules="half"))


@pytest.mark.parametrize("everywhere", ["highest", "F32_F32_F32"])
def test_a_global_precision_does_not_keep_float32(everywhere):
    with jax.default_matmul_precision(everywhere):
        plan = mpjax.explain(jnp.dot, jnp.eye(4), jnp.eye(4))
        requested = mpjax.explain(lambda x, w: jnp.dot(x, w, precision="high"), jnp.eye(4), jnp.eye(4))
    assert plan.half_share == requested.half_share == 1
