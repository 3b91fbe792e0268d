"""Compiled functions and optimizer steps of a script under the launcher."""

import copy
import functools
import gc
import pickle
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax import export
from jax.experimental import checkify

from mpjax.launcher import programs
from mpjax.launcher.casts import running_sites
from mpjax.launcher.session import CALLS, CHECKED, NONFINITE, RERUNS

# Each test clears JAX's caches; without this, the same small programs would be compiled again.
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def params():
    return {"w": jax.device_put(np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32) / 4)}


def model(p, x):
    return jnp.tanh(x @ p["w"])


def loss_fn(p, x):
    return jnp.mean(jnp.sum(model(p, x) ** 2, -1))


def half(fun, *args):
    return "f16[" in str(jax.make_jaxpr(lambda *args: fun(*args))(*args))  # not cached by `fun`


def bitwise_equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


BAD = np.where(np.arange(16) == 3, np.inf, X)  # the forward pass overflows: no scale helps


def by_optax(tx):
    @jax.jit
    def step(p, s, x):
        updates, s = tx.update(jax.grad(loss_fn)(p, x), s, p)
        return optax.apply_updates(p, updates), s

    return step, params(), tx.init(params())


def by_a_tuple(tx):
    init, update = tx

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(p, s, x):
        updates, s = update(jax.grad(loss_fn)(p, x), s, p)
        return optax.apply_updates(p, updates), s

    return step, params(), init(params())


def in_a_scan(tx):
    @jax.jit
    def steps(p, s, x):
        def step(carry, x):
            p, s = carry
            updates, s = tx.update(jax.grad(loss_fn)(p, x), s, p)
            return (optax.apply_updates(p, updates), s), None

        return jax.lax.scan(step, (p, s), x[None])[0]

    return steps, params(), tx.init(params())


def in_two_jits(tx):
    gradient = jax.jit(jax.grad(loss_fn))

    @jax.jit
    def update(grads, p, s):
        updates, s = tx.update(grads, s, p)
        return optax.apply_updates(p, updates), s

    return lambda p, s, x: update(gradient(p, x), p, s), params(), tx.init(params())


def in_a_pmap(tx):
    @functools.partial(jax.pmap, axis_name="devices")
    def step(p, s, x):
        updates, s = tx.update(jax.lax.pmean(jax.grad(loss_fn)(p, x), "devices"), s, p)
        return optax.apply_updates(p, updates), s

    replicated = jax.tree.map(lambda x: x[None], (params(), tx.init(params())))
    return lambda p, s, x: step(p, s, x[None]), *replicated


def clipped(tx):
    return by_optax(optax.chain(optax.clip_by_global_norm(1.0), tx))


def of_several_steps(tx):
    multi = optax.MultiSteps(tx, 2)
    return by_optax(multi)


LOOPS = [by_optax, by_a_tuple, in_a_scan, in_two_jits, in_a_pmap, clipped, of_several_steps]


@pytest.fixture
def standard_promotion():
    """What optax's MultiSteps needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("loop", LOOPS)
def test_an_overflow_reaches_neither_parameters_nor_moments_nor_counts(launched, loop):
    launched()
    step, p, s = loop(optax.adam(optax.linear_schedule(1e-2, 0.0, 10)))
    p, s = step(p, s, X)
    before = jax.tree.map(np.array, (p, s))
    p, s = step(p, s, BAD)
    assert bitwise_equal((p, s), before)
    p, s = step(p, s, X)
    assert not bitwise_equal(s, before[1])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((p, s)))


def test_a_train_state_and_an_nnx_optimizer_skip_too(launched):
    launched()
    state = train_state.TrainState.create(apply_fn=model, params=params(), tx=optax.adam(1e-2))
    step = jax.jit(lambda state, x: state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x)))
    assert bitwise_equal(step(state, BAD).params, state.params)

    linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(linear, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(linear, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(linear)
        optimizer.update(linear, grads)
        return loss

    before = np.array(linear.kernel[...])
    train(linear, optimizer, BAD)
    assert np.array_equal(linear.kernel[...], before)
    assert float(train(linear, optimizer, X)) > float(train(linear, optimizer, X))
    assert not np.array_equal(linear.kernel[...], before)


def test_a_transformation_has_one_update_function(launched):
    launched()
    tx = optax.adam(1e-2)
    init, update = tx
    assert tx.update is update is tx[1]
    assert tx._replace(init=init).update is not tx._replace(init=init, update=lambda g, s, p=None: (g, s)).update
    step = jax.jit(lambda update, p, s: update(p, s, p), static_argnums=0)
    for _ in range(2):
        step(tx.update, params(), tx.init(params()))
    assert step._cache_size() == 1


def test_the_state_of_the_optimizer_has_the_structure_of_a_plain_run(launched):
    plain = optax.adam(1e-2).init(params())
    launched()
    step, p, s = by_optax(optax.adam(1e-2))
    assert jax.tree.structure(step(p, s, X)[1]) == jax.tree.structure(plain) == jax.tree.structure(s)
    step(p, plain, X)  # continues from a checkpoint of a float32 run


def train_once(*args):
    """Differentiates with respect to the parameters, as a training step does."""
    jax.jit(jax.grad(loss_fn))(*(args or (params(), X)))


def test_evaluation_is_in_half_and_other_programs_are_not(launched):
    launched(wherever=True, evaluations=True)
    early = jax.jit(model)
    assert not half(early, params(), X)
    train_once()
    evaluate = jax.jit(model)
    for fun in (early, evaluate, jax.jit(lambda p, x: jax.jit(model)(p, x))):
        assert half(fun, params(), X)
    assert evaluate(params(), X).dtype == jnp.float32
    assert half(jax.jit(lambda state, x: model(state["ema"], x)), {"ema": params(), "step": jnp.ones(())}, X)
    assert not half(jax.jit(jnp.exp), X)
    # Other matmuls are not the model's: they read no parameters.
    assert not half(jax.jit(lambda x: x.T @ x), X)
    assert not half(jax.jit(lambda w, x: x @ w), params()["w"], X)
    assert not half(jax.jit(lambda p, x: x @ p["w"]), {"w": X.T}, X)
    # Nor is a product of parameters a forward pass.
    for gram in (lambda w: w.T @ w, jax.jit(lambda w: w.T @ (w - w.mean()))):
        assert not half(jax.jit(lambda p, gram=gram: jnp.linalg.cholesky(gram(p["w"]) + jnp.eye(16))), params())
        assert not half(jax.jit(lambda p, x, gram=gram: (gram(p["w"]), jnp.tanh(x))), params(), X)
    power = lambda p: jax.lax.fori_loop(0, 3, lambda i, u: p["w"] @ u, p["w"][0])
    assert not half(jax.jit(power), params())
    assert half(jax.jit(lambda p, x: jax.lax.fori_loop(0, 3, lambda i, x: x @ p["w"], x)), params(), X)
    # Nor are an optimizer's own.
    tx = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: ({"w": g["w"] @ g["w"].T}, s))
    assert not half(jax.jit(lambda g: tx.update(g, ())), params())
    mapped = jax.pmap(model, in_axes=(None, 0))
    assert half(mapped, params(), X[None])
    assert not half(model, params(), X)  # not compiled by the script
    assert programs.name_of(model).startswith("model (test_programs.py:")
    assert programs.name_of(optax.sgd) == "sgd"  # a library's line tells nothing


def test_an_evaluation_before_the_first_gradient_is_in_half_after_it(launched):
    launched(wherever=True, evaluations=True)
    evaluate, traces = jax.jit(lambda p, x: traces.append(None) or model(p, x)), []
    before = evaluate(params(), X)
    jax.jit(jax.grad(loss_fn))(params(), X)
    after = [evaluate(params(), X) for _ in range(2)]
    assert not np.array_equal(before, after[0])
    assert len(traces) == 2  # the function itself runs once for each trace


@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_an_evaluation_of_a_module_is_in_half(launched, kind):
    launched(wherever=True, evaluations=True)
    if kind == "nnx":
        model, jit, grad, call = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.jit, nnx.grad, lambda m, x: m(x)
    else:
        model, jit, grad = eqx.nn.Linear(16, 16, key=jax.random.key(0)), eqx.filter_jit, eqx.filter_grad
        call = lambda m, x: jax.vmap(m)(x)
    want = np.array(call(model, X))
    jit(lambda m, x: grad(lambda m: jnp.mean(call(m, x) ** 2))(m))(model, X)
    got = jit(call)(model, X)
    assert not np.array_equal(got, want)
    np.testing.assert_allclose(got, want, atol=0.01)
    np.testing.assert_allclose(jit(lambda x: x @ x.T)(X), X @ X.T, atol=1e-5)


# The limits that docs/launcher.md states.
IN_FLOAT32 = {
    "jacrev": lambda p, x: jax.jacrev(loss_fn)(p, x),
    "jacfwd": lambda p, x: jax.jacfwd(loss_fn)(p, x),
    "hessian": lambda p, x: jax.hessian(loss_fn)(p, x),
    "jvp": lambda p, x: jax.jvp(lambda p: jnp.mean(x * p["w"][:8] @ p["w"]), (p,), (p,))[1],
    "allow_int": lambda p, x: jax.grad(loss_fn, allow_int=True)(p, x),
    "holomorphic": lambda p, x: jax.grad(lambda w: jnp.sum(w @ w), holomorphic=True)(p["w"].astype(jnp.complex64)),
    "a forward pass in a scan over steps": lambda p, x: jax.lax.scan(
        lambda p, x: (jax.tree.map(jnp.add, p, jax.grad(lambda p: jnp.sum(p["w"] ** 2))(p)), model(p, x)), p, x[None]
    ),
    "parameters closed over": lambda p, x: model(jax.tree.map(jnp.asarray, PARAMS), x),
}
PARAMS = jax.device_get(params())


@pytest.mark.parametrize("limit", IN_FLOAT32)
def test_what_the_limits_name_is_not_in_half(launched, limit):
    launched()
    assert not half(jax.jit(IN_FLOAT32[limit]), params(), X)


def test_compiled_functions_keep_their_interface(launched):
    launched()

    @functools.partial(jax.jit, static_argnames="power", donate_argnums=0)
    def step(x, power, *, shift=0.0):
        """Says what it does."""
        return x**power + shift

    assert (step.__name__, step.__doc__) == ("step", "Says what it does.")
    assert float(step(jnp.float32(3.0), 2, shift=1.0)) == 10.0
    assert float(step(jnp.float32(3.0), power=2)) == 9.0
    assert float(step.lower(jnp.float32(3.0), 3).compile()(jnp.float32(3.0))) == 27.0
    assert step.eval_shape(jnp.float32(3.0), 2).shape == ()
    assert export.export(jax.jit(jnp.sin))(jnp.float32(3.0)).call(jnp.float32(0.0)) == 0.0

    class Model:
        @functools.partial(jax.jit, static_argnums=0)
        def double(self, x):
            return 2 * x

    assert float(Model().double(jnp.float32(3.0))) == 6.0
    mesh = jax.make_mesh((1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert float(jax.jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding)(jnp.float32(1))) == 2.0
    assert float(jax.jit(lambda x: x + 1, out_shardings=sharding)(jnp.float32(1))) == 2.0
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        step(jnp.float32(3.0))


@pytest.mark.parametrize("check", ["transfer_guard", "checking_leaks", "checkify"])
def test_jax_checks_of_a_step_pass(launched, check):
    launched()
    step, p, s = by_optax(optax.sgd(1e-2))
    x = jax.device_put(X)
    if check == "checkify":
        error, _ = checkify.checkify(step)(p, s, x)
        error.throw()
    else:
        with jax.transfer_guard("disallow") if check == "transfer_guard" else jax.checking_leaks():
            step(p, s, x)


def test_a_step_may_train_a_model_on_each_device(launched):
    launched()
    step, p, s = by_optax(optax.sgd(1e-2))
    for device in (jax.devices() * 2)[:5]:
        assert step(*jax.device_put((p, s, X), device))[0]["w"].devices() == {device}
    assert not step(p, s, X)[0]["w"].committed


def test_a_step_that_the_script_drops_keeps_no_data(launched):
    launched()
    (step, p, s), data = by_optax(optax.sgd(1e-2)), jax.device_put(X)
    alive = weakref.ref(data)
    jax.jit(functools.partial(lambda x, p, s: step(p, s, x), data))(p, s)
    del data
    gc.collect()
    assert alive() is None


def test_two_optimizers_have_a_scale_each(launched):
    launched()
    txs = optax.adam(1e-3), optax.sgd(1e-3)

    @jax.jit
    def step(ps, ss, x):
        new = [tx.update(jax.grad(loss_fn)(p, x), s, p) for tx, p, s in zip(txs, ps, ss, strict=True)]
        return [optax.apply_updates(p, u) for p, (u, _) in zip(ps, new, strict=True)], [s for _, s in new]

    both = [params(), jax.tree.map(lambda w: w * jnp.nan, params())]
    ps, _ = step(both, [tx.init(params()) for tx in txs], X)
    assert bitwise_equal([jnp.isfinite(p["w"]).all() for p in ps], [True, False])
    assert step.clock.counts[:3, CALLS].tolist() == [1, 1, 0]
    assert step.clock.counts[:3, NONFINITE].tolist() == [0, 1, 0]


# ---- Forward passes that overflow float16 ----

LARGE = jax.device_put(X * np.float32(1e5))  # overflows float16 in the forward pass, but not float32


def with_batch_norm():
    linear, norm = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.BatchNorm(16, momentum=0.9, rngs=nnx.Rngs(0))
    model = nnx.Dict(linear=linear, norm=norm)
    return model, lambda model, x: jnp.mean(model["norm"](model["linear"](x)) ** 2)


def statistics_after(loss, model, *batches):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    losses = [float(train(model, optimizer, x)) for x in batches]
    return losses, [np.array(v) for v in (model["norm"].mean[...], model["norm"].var[...])]


def test_batch_statistics_of_a_forward_pass_that_overflows_are_those_of_float32(launched):
    model, loss = with_batch_norm()
    _, want = statistics_after(loss, model, LARGE)
    launched()
    model, loss = with_batch_norm()
    losses, got = statistics_after(loss, model, LARGE)
    assert np.isfinite(losses).all()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def overflowing(p, x):
    hidden = x @ p["w"]
    return jnp.mean(hidden @ p["w"]) / 1e9, {"hidden": hidden, "class": jnp.argmax(hidden, -1), "text": "as it is"}


def in_jit(f):
    return jax.jit(f)


def in_scan(f):
    def steps(p, x):
        return jax.tree.map(lambda y: y[0], jax.lax.scan(lambda _, x: (None, f(p, x)), None, x[None])[1])

    return jax.jit(steps)


def in_vmap(f):
    return jax.jit(lambda p, x: jax.tree.map(lambda y: y[0], jax.vmap(f, (None, 0))(p, x[None])))


def in_a_pmap_of_one(f):
    devices = jax.pmap(f, axis_name="devices", in_axes=(None, 0))
    return lambda p, x: jax.tree.map(lambda y: y[0], devices(p, x[None]))


def in_shard_map(f):
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    replica = lambda p, x: jax.tree.map(lambda y: y[None], f(p, x))
    mapped = jax.jit(jax.shard_map(replica, mesh=mesh, in_specs=(spec(), spec()), out_specs=spec("devices")))
    return lambda p, x: jax.tree.map(lambda y: y[0], mapped(p, x))


@pytest.mark.parametrize("context", [in_jit, in_scan, in_vmap, in_a_pmap_of_one, in_shard_map])
def test_a_forward_pass_that_overflows_gives_the_values_of_float32(launched, context):
    def numbers(p, x):
        (loss, aux), grads = jax.value_and_grad(overflowing, has_aux=True)(p, x)
        assert aux.pop("text") == "as it is"
        return loss, aux, grads

    want = numbers(params(), LARGE)
    launched(wherever=True)
    step = context(numbers)
    loss, aux, _ = step(params(), LARGE)
    assert float(loss) == pytest.approx(float(want[0]), rel=1e-5)
    np.testing.assert_allclose(aux["hidden"], want[1]["hidden"], rtol=1e-4, atol=1e-2)
    assert np.array_equal(aux["class"], want[1]["class"])
    _, aux, grads = step(params(), X)
    assert np.isfinite(grads["w"]).all()
    assert not np.array_equal(aux["hidden"], X @ params()["w"])  # a good step stays in half


def test_an_evaluation_that_overflows_gives_the_values_of_float32(launched):
    want = np.array(jax.jit(lambda p, x: x @ p["w"])(params(), LARGE))
    launched(wherever=True, evaluations=True)
    train_once()
    evaluate = jax.jit(lambda p, x: x @ p["w"])
    np.testing.assert_allclose(evaluate(params(), LARGE), want, rtol=1e-5)
    assert half(evaluate, params(), X)


def test_values_nonfinite_in_float32_too_stay_nonfinite(launched):
    launched()
    loss, _ = jax.jit(lambda p, x: jax.value_and_grad(loss_fn)(p, x))(params(), BAD * np.nan)
    assert np.isnan(loss)


def test_reruns_are_counted(launched):
    launched(wherever=True)
    step = jax.jit(lambda p, x: jax.value_and_grad(overflowing, has_aux=True)(p, x)[0][0])
    for x in (X, LARGE, LARGE):
        step(params(), x)
    assert step.clock.counts[0, [CALLS, RERUNS, NONFINITE]].tolist() == [3, 2, 2]


def test_rules_that_match_nothing_are_recorded(launched):
    session = launched(
        wherever=True,
        evaluations=True,
        deny=("*/head", "tanh", "*/haed"),
        overrides=(("*/boddy", "float32"),),
        packages=("tests", "no_such_package"),
    )

    def with_a_head(p, x):
        with jax.named_scope("net/head"):
            return jnp.mean(x @ p["w"])

    assert len(session.unused) == 6
    jax.jit(jax.grad(with_a_head))(params(), X)
    assert session.unused == ["deny '*/haed'", "deny '*/boddy'", "deny 'tanh'", "packages 'no_such_package'"]
    jax.jit(model)(params(), X)  # another function has it
    assert "deny 'tanh'" not in session.unused
    assert launched(policy="O3", deny=("*/head",)).rules.level == "half"  # beside the rules


# ---- Forward passes outside the differentiated function ----


def half_matmuls(step, *args):
    """The operand dtypes of a step's matmuls, without forward passes after an overflow."""
    jaxpr = jax.make_jaxpr(step)(*args)
    return [site.eqn.invars[0].aval.dtype.name for site in running_sites(jaxpr) if site.flops]


@pytest.mark.parametrize("use", ["a loss alone", "returned", "an accept test"])
def test_a_forward_pass_that_only_feeds_a_loss_is_in_half(launched, use):
    launched()
    tx = optax.sgd(0.1)

    @jax.jit
    def step(p, s, x):
        target = model(p, x)  # a generator's sample, a target network
        if use == "an accept test":
            x = jnp.where(jnp.sum(target) > 0, x, -x)
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model(p, x) - target - 1) ** 2))(p)
        updates, s = tx.update(grads, s, p)
        return optax.apply_updates(p, updates), s, loss, target if use == "returned" else None

    found = half_matmuls(step, params(), tx.init(params()), X)
    assert set(found) == ({"float16"} if use == "a loss alone" else {"float16", "float32"})
    for x in (X, LARGE):  # one that overflows runs in float32
        loss = step(params(), tx.init(params()), x)[2]
        sign = -1 if use == "an accept test" and jnp.sum(model(params(), x)) <= 0 else 1
        want = jnp.mean((model(params(), sign * x) - model(params(), x) - 1) ** 2)
        assert float(loss) == pytest.approx(float(want), rel=1e-2)


def test_matmuls_of_gradients_and_of_optimizers_stay_in_float32(launched):
    launched()
    by_matmul = lambda g, s, p=None: ({"w": -s @ g["w"]}, s @ s)
    tx = optax.GradientTransformation(lambda p: jnp.eye(16), by_matmul)

    @jax.jit
    def step(p, s, x):
        grads = jax.grad(lambda p: jnp.mean(x * p["w"][:8]))(p)
        projected = {"w": grads["w"] @ grads["w"].T}
        updates, s = tx.update(projected, s, p)
        return optax.apply_updates(p, updates), s

    assert set(half_matmuls(step, params(), tx.init(params()), X)) == {"float32"}


# ---- Skipped steps are counted wherever they run, and said while the script runs ----


def overflowing_loss(p, x):
    return jnp.mean((x @ p["w"] @ p["w"]) ** 2) / 1e3


# Functions `(step, p, s, x) → the step as it is compiled for these arguments`.
def in_a_jit_with_shardings(step, *args):
    place = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec())
    return jax.jit(step, in_shardings=(place, place, place))


def compiled_ahead(step, *args):
    return jax.jit(step).lower(*args).compile()


def over_devices(step, *args):
    mapped = jax.pmap(step)
    return lambda *args: jax.tree.map(lambda a: a[0], mapped(*jax.tree.map(lambda a: np.asarray(a)[None], args)))


def in_a_compiled_shard_map(step, *args):
    spec = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))


def under_a_vmap(step, *args):
    batched = jax.jit(jax.vmap(step, (None, None, 0)))
    return lambda p, s, x: jax.tree.map(lambda a: a[0], batched(p, s, x[None]))


PLACES = [in_a_jit_with_shardings, compiled_ahead, over_devices, in_a_compiled_shard_map, under_a_vmap]


@pytest.mark.parametrize("place", PLACES)
def test_skipped_steps_are_counted_wherever_they_run(launched, place, capsys):
    session = launched()
    tx = optax.sgd(1e-2)

    def step(p, s, x):
        updates, s = tx.update(jax.grad(overflowing_loss)(p, x), s, p)
        return optax.apply_updates(p, updates), s

    p, s = params(), tx.init(params())
    compiled = place(step, p, s, X)
    for x in (X, LARGE, LARGE, LARGE, LARGE):
        new, s = compiled(p, s, x)
        assert bitwise_equal(new, p) == (x is LARGE)
    jax.effects_barrier()
    ((name, counts),) = session.counts.items()
    assert name.startswith("step (test_programs.py:")
    assert counts[[0, NONFINITE - CALLS]].tolist() == [5, 4]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mpjax run: {name}: 3 of 4 gradients so far were inf or NaN at any loss scale")
    assert "find_nonfinite" in line, "names causes that it did not look for"


def test_a_compiled_step_that_skips_most_says_so_while_it_runs(launched, capsys):
    launched()
    tx = optax.sgd(1e-2)
    step = jax.jit(lambda p, s, x: tx.update(jax.grad(overflowing_loss)(p, x), s, p))
    for calls in range(1, 9):
        step(params(), tx.init(params()), LARGE)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (calls == 4)
    assert not lines


# ---- Checkers, copies and exports ----


def at_a_first_scale_that_overflows(p, x):
    return jnp.mean(jnp.sum(model(p, x) ** 2, -1)) * 64


@pytest.mark.parametrize("check", ["checkify", "jit of checkify", "debug_nans", "debug_infs"])
def test_a_checker_sees_the_values_of_float32(launched, check):
    session = launched()
    tx = optax.sgd(1e-2)

    @jax.jit
    def step(p, s, x):
        updates, s = tx.update(jax.grad(at_a_first_scale_that_overflows)(p, x), s, p)
        return optax.apply_updates(p, updates), s

    step(params(), tx.init(params()), X)  # in half

    def fails(x):
        if "checkify" not in check:
            with jax.debug_nans(check == "debug_nans"), jax.debug_infs(check == "debug_infs"):
                try:
                    step(params(), tx.init(params()), x)
                except FloatingPointError:
                    return True
            return False
        checked = checkify.checkify(step, errors=checkify.float_checks)
        error, _ = (jax.jit(checked) if check == "jit of checkify" else checked)(params(), tx.init(params()), x)
        return error.get() is not None

    assert not fails(X)
    assert fails(np.where(np.arange(16) == 3, np.nan, X)) == (check != "debug_infs")
    assert CHECKED in session.kept


def test_a_script_that_asks_for_float32_matmuls_gets_them(launched):
    session = launched(wherever=True)
    step = jax.jit(jax.grad(loss_fn))
    with jax.default_matmul_precision("highest"):
        assert not half(step, params(), X)
        want = step(params(), X)
    assert list(session.kept) == [CHECKED]
    assert not bitwise_equal(step(params(), X), want)


def test_compiled_functions_are_copied_and_pickled(launched):
    session = launched(wherever=True)
    step = jax.jit(jax.grad(loss_fn))
    agent = {"step": step, "tx": optax.adam(1e-2)}
    copies = copy.deepcopy(agent)["step"], copy.copy(step), pickle.loads(pickle.dumps(jax.jit(loss_fn)))
    for each, want in zip(copies, (step, step, jax.jit(loss_fn)), strict=True):
        assert bitwise_equal(each(params(), X), want(params(), X))
        assert each.__name__ == want.__name__
    assert half(copies[0], params(), X)
    assert not session.kept


def test_an_exported_function_is_float32(launched):
    launched(wherever=True, evaluations=True)
    train_once()
    evaluate = jax.jit(model)
    assert half(evaluate, params(), X)
    assert "f16" not in export.export(evaluate)(params(), X).mlir_module()
    ridge = jax.jit(lambda p, x: jnp.linalg.solve(model(p, x).T @ model(p, x) + jnp.eye(16), model(p, x).T @ x))
    assert not half(ridge, params(), X)


def test_evaluations_are_float32_unless_they_are_asked_for(launched):
    launched(wherever=True)
    train_once()
    assert not half(jax.jit(model), params(), X)
    assert not half(jax.pmap(model, in_axes=(None, 0)), params(), X[None])
