"""Random small scripts under the launcher, each beside float32 and beside the same script with mpjax's API.

Parameters are as near to float32's as those of the API form, or they are float32's, and the report says so. What a
script computes besides (a solver, a sampler, an export) is float32's. `pytest -m exhaustive` runs 300 scripts in a row.
"""

import contextlib
import random
import textwrap

import jax
import numpy as np
import pytest

from mpjax.launcher import hooks
from mpjax.launcher.options import Options
from mpjax.launcher.session import CHECKED, NOT_UPDATED, OUTSIDE_JIT

# Each test clears JAX's caches; without this, the same small programs would be compiled again.
HEAD = """
import functools
import jax, jax.numpy as jnp, numpy as np, optax, scipy.optimize
import mpjax
from jax import export
from jax.experimental import checkify
from jax.flatten_util import ravel_pytree

rng = np.random.default_rng(SEED)
X = rng.normal(size=(STEPS, 32, 8)).astype(np.float32)
X[OVERFLOWS] *= 1e5
Y = np.sin(X[..., :2])

def new(seed):
    rng = np.random.default_rng(seed)
    return {"a": jnp.asarray(rng.normal(size=(8, 16)) / 3, jnp.float32), "b": jnp.zeros(16),
            "c": jnp.asarray(rng.normal(size=(16, 2)) / 4, jnp.float32)}

def model(p, x):
    return ACTIVATION(x @ p["a"] + p["b"]) @ p["c"]

def loss(p, x, y):
    return jnp.mean((model(p, x) - y) ** 2) * WEIGHT

p, tx = new(1), OPTIMIZER
s = tx.init(p)

def gradient(p, s, x, y):
    return jax.value_and_grad(loss)(p, x, y)
"""

# Each defines `train(p, s, x, y) → p, s`, one step.
UPDATES = {
    "optax": """
    def train(p, s, x, y):
        value, g = gradient(p, s, x, y)
        updates, s = tx.update(g, s, p)
        return optax.apply_updates(p, updates), s
    """,
    "clipped by hand": """
    def train(p, s, x, y):
        value, g = gradient(p, s, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g ** 2) for g in jax.tree.leaves(g)))
        g = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), g)
        updates, s = tx.update(g, s, p)
        return optax.apply_updates(p, updates), s
    """,
    "sgd by hand": """
    def train(p, s, x, y):
        value, g = gradient(p, s, x, y)
        return jax.tree.map(lambda p, g: p - 1e-2 * g, p, g), s
    """,
    "momentum by hand": """
    s = jax.tree.map(jnp.zeros_like, p)
    def train(p, s, x, y):
        value, g = gradient(p, s, x, y)
        s = jax.tree.map(lambda m, g: 0.9 * m + g, s, g)
        return jax.tree.map(lambda p, m: p - 1e-3 * m, p, s), s
    """,
    "langevin": """
    def train(p, s, x, y):
        value, g = gradient(p, s, x, y)
        noise = jax.random.normal(jax.random.key(3), (8, 16))
        return {"a": p["a"] - 1e-2 * g["a"] + 1e-3 * noise, "b": p["b"] - 1e-2 * g["b"], "c": p["c"] - 1e-2 * g["c"]}, s
    """,
    "half by hand": """
    s = tx.init({"a": p["a"]})
    def train(p, s, x, y):
        value, g = gradient(p, s, x, y)
        updates, s = tx.update({"a": g["a"]}, s, {"a": p["a"]})
        return {"a": p["a"] + updates["a"], "b": p["b"] - 1e-2 * g["b"], "c": p["c"] - 1e-2 * g["c"]}, s
    """,
}
BY_HAND = [name for name in UPDATES if name not in ("optax", "clipped by hand")]

# Each trains by `train` for all steps.
LOOPS = {
    "jit": """
    step = jax.jit(train)
    for x, y in zip(X, Y):
        p, s = step(p, s, x, y)
    """,
    "donated": """
    step = jax.jit(train, donate_argnums=(0, 1))
    for x, y in zip(X, Y):
        p, s = step(p, s, x, y)
    """,
    "sharded": """
    here = jax.sharding.NamedSharding(jax.make_mesh((1,), ("d",)), jax.sharding.PartitionSpec())
    step = jax.jit(train, in_shardings=(here,) * 4)
    for x, y in zip(X, Y):
        p, s = step(p, s, x, y)
    """,
    "ahead of time": """
    step = jax.jit(train).lower(p, s, X[0], Y[0]).compile()
    for x, y in zip(X, Y):
        p, s = step(p, s, x, y)
    """,
    "pmap": """
    step = jax.pmap(train)
    p, s = jax.tree.map(lambda a: jnp.asarray(a)[None], (p, s))
    for x, y in zip(X, Y):
        p, s = step(p, s, x[None], y[None])
    p = jax.tree.map(lambda a: a[0], p)
    """,
    "scan in jit": """
    run = jax.jit(lambda p, s: jax.lax.scan(lambda c, xy: (train(*c, *xy), None), (p, s), (X, Y))[0])
    p, s = run(p, s)
    """,
    "scan": """
    (p, s), _ = jax.lax.scan(lambda c, xy: (train(*c, *xy), None), (p, s), (X, Y))
    """,
    "not compiled": """
    for x, y in zip(X, Y):
        p, s = train(p, s, x, y)
    """,
    "handed out": """
    gradient = jax.jit(gradient)
    for x, y in zip(X, Y):
        p, s = train(p, s, x, y)
    """,
    "handed from jit to jit": """
    gradient = jax.jit(gradient)
    apply = jax.jit(lambda p, s, g: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, s, p)))
    for x, y in zip(X, Y):
        p, s = apply(p, s, gradient(p, s, x, y)[1])
    """,
    "checkify": """
    step = jax.jit(checkify.checkify(train, errors=checkify.float_checks))
    for x, y in zip(X, Y):
        error, (p, s) = step(p, s, x, y)
        error.throw()
    """,
    "debug_nans": """
    step = jax.jit(train)
    with jax.debug_nans(True):
        for x, y in zip(X, Y):
            p, s = step(p, s, x, y)
    """,
}

# Each computes `beside` of fixed parameters, with the compiled functions that trained where there are any.
BESIDES = {
    "nothing": "beside = 0.0",
    "a solver": """
    flat, unravel = ravel_pytree(q)
    value_and_grad = jax.jit(jax.value_and_grad(lambda q: loss(q, X[0] / np.abs(X[0]).max(), Y[0])))
    def f(z):
        value, g = value_and_grad(unravel(jnp.asarray(z, jnp.float32)))
        return float(value), np.asarray(ravel_pytree(g)[0], np.float64)
    beside = scipy.optimize.minimize(f, np.asarray(flat, np.float64), jac=True, method="L-BFGS-B",
                                     options={"maxiter": 5}).x
    """,
    "a sampler": """
    density, chain, z = jax.jit(lambda q: -loss(q, X[0], Y[0])), np.random.default_rng(5), q
    for _ in range(10):
        proposal = jax.tree.map(lambda v: v + 0.05 * chain.normal(size=v.shape).astype(np.float32), z)
        z = proposal if np.log(chain.random()) < density(proposal) - density(z) else z
    beside = z
    """,
    "an export": """
    exported = export.export(jax.jit(model))(q, X[0])
    beside = exported.call(q, X[0])
    assert "f16" not in exported.mlir_module()
    """,
    "a ridge head": """
    def head(q, x, y):
        f = ACTIVATION(x @ q["a"] + q["b"])
        return jnp.linalg.solve(f.T @ f + 1e-2 * jnp.eye(16), f.T @ y)
    beside = jax.jit(head)(q, X[0], Y[0])
    """,
    "a diagnostic": "beside = jax.tree.map(jnp.linalg.norm, jax.grad(loss)(q, X[0], Y[0]))",
    "an evaluation": "beside = jax.jit(model)(q, X[0])",
    "an attack": "beside = jax.jit(lambda q, x: x + 0.1 * jax.grad(loss, 1)(q, x, Y[0]))(q, X[0])",
    "adaptation": """
    def adapted(q, x, y):
        return loss(jax.tree.map(lambda v, g: v - 0.1 * g, q, jax.grad(loss)(q, x, y)), x, y)
    beside = jax.jit(adapted)(q, X[0], Y[0])
    """,
}


def new_script(seed):
    """A random script, and whether its gradients must be those of float32."""
    choose = random.Random(seed)
    loop, update = choose.choice(list(LOOPS)), choose.choice(list(UPDATES))
    if loop == "handed from jit to jit":
        update = "optax"
    overflow = choose.choice(["", "", "range(2, 3)", "range(0, STEPS)"])
    if loop in ("checkify", "debug_nans"):
        overflow = ""
    names = {
        "SEED": seed,
        "OVERFLOWS": f"list({overflow or 'range(0)'})",
        "STEPS": 6,
        "ACTIVATION": choose.choice(["jnp.tanh", "jax.nn.relu", "jax.nn.leaky_relu", "jax.nn.gelu"]),
        "WEIGHT": choose.choice([1.0, 1.0, 64.0]),
        "OPTIMIZER": choose.choice(
            ["optax.sgd(1e-2)", "optax.adam(1e-2)", "optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))"]
        ),
    }
    parts = [UPDATES[update], LOOPS[loop], "q = new(2)", BESIDES[choose.choice(list(BESIDES))]]
    text = HEAD + "\n".join(map(textwrap.dedent, parts))
    for name, value in names.items():
        text = text.replace(name, str(value))
    in_float32 = update in BY_HAND or loop in ("scan", "not compiled", "checkify", "debug_nans")
    return f"# seed {seed}: {update}, {loop}, overflow {overflow or 'nowhere'}\n{text}", in_float32


def by_api(text, policy):
    """The script with mpjax's API in place of the launcher."""
    text = text.replace("jax.value_and_grad(loss)", f'mpjax.value_and_grad(mpjax.autocast(loss, "{policy}"), s)')
    text = text.replace("tx = new(1), ", "tx = new(1), mpjax.dynamic_loss_scale(", 1)
    end = (", axis_name=()" if "jax.pmap" in text else "") + ")\ns = tx.init"
    return text.replace("\ns = tx.init", end, 1)


def run(text, policy=""):
    """What a script computes: its parameters, what it computes beside, and what the report says of float32."""
    with contextlib.ExitStack() as stack:
        session = None
        if policy:
            patches = hooks.patch(Options(policy=policy, quiet=True))
            stack.callback(patches.undo)
            session = patches.session
        stack.enter_context(jax.numpy_dtype_promotion("standard"))  # as users' scripts expect
        names = {"__name__": "__main__"}
        exec(compile(text, "script.py", "exec"), names)
        found = jax.device_get((names["p"], names["beside"]))
    jax.clear_caches()
    return *found, set(session.kept) if session else set()


def distance(a, b):
    """The relative distance of two trees; infinite if one is finite where the other is not."""
    x, y = (np.concatenate([np.ravel(np.float64(leaf)) for leaf in jax.tree.leaves(tree)]) for tree in (a, b))
    finite = np.isfinite(x)
    if not np.array_equal(finite, np.isfinite(y)):
        return np.inf
    return np.linalg.norm(x[finite] - y[finite]) / max(np.linalg.norm(y[finite]), 1e-30)


def check(seed):
    """Runs the script of a seed. Fails with its text."""
    text, in_float32 = new_script(seed)
    policy = ("mixed_float16", "mixed_bfloat16")[seed % 2]
    want, beside, _ = run(text)
    got, got_beside, kept = run(text, policy)
    assert distance(got_beside, beside) < 1e-4, text
    if in_float32:
        assert distance(got, want) < 1e-5, text
        assert kept & {NOT_UPDATED, OUTSIDE_JIT, CHECKED}, text
    elif all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want)):  # a step of 1e5 may diverge in float32 too
        api, _, _ = run(by_api(text, policy))
        bound = max(2 * distance(api, want), 5e-3 if policy == "mixed_float16" else 2e-2)
        assert distance(got, want) < bound, f"{distance(got, want)}, by the API {distance(api, want)}\n{text}"


@pytest.mark.parametrize("seed", range(8))
def test_a_random_script_computes_what_it_computes_in_float32(seed):
    check(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_three_hundred_scripts_in_a_row(seed):
    check(seed)
