"""Correct gradients from a scaled backward pass, under every common transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.errors import TraceContextError

import mpjax
from testing import cheap_keys
from testing.measures import half_share, relative_error
from testing.random_programs.evaluate import arrays_in_numpy, in_numpy

# Programs are evaluated in NumPy, a tenth of the time that XLA takes to compile them; those with NNX modules, in
# several devices, and `jit` of the loss are run.
HALVES = [jnp.float16, jnp.bfloat16]
_rng = np.random.default_rng(0)
PARAMS = jax.device_put({"w": _rng.normal(size=(8, 4)).astype(np.float32), "b": np.ones(4, np.float32)})
X = jax.device_put(_rng.normal(size=(16, 8)).astype(np.float32))


def state_of(scale=2.0**15):
    return mpjax.dynamic_loss_scale(optax.sgd(0.1), init_scale=scale).init(PARAMS)


def loss_fn(params, x, half=jnp.float16):
    """A float32 loss of a half-precision matmul."""
    y = x.astype(half) @ params["w"].astype(half) + params["b"].astype(half)
    return jnp.mean(jnp.tanh(y.astype(jnp.float32)) ** 2)


def tiny_loss_fn(params, x, half=jnp.float16):
    """A loss whose cotangents underflow float16 unless they are scaled."""
    return loss_fn(params, x, half) * 2.0**-20


def rounded_to(dtype):
    """The parameters in this dtype."""
    return jax.tree.map(lambda p: np.asarray(p).astype(dtype), PARAMS)


def float32_grads(x=X, loss=tiny_loss_fn, params=PARAMS):
    wide = jax.tree.map(lambda p: np.asarray(p, np.float32), params)
    return in_numpy(jax.grad(lambda p: loss(p, x, jnp.float32)))(wide)


def test_scaling_saves_gradients_that_float16_flushes_to_zero():
    assert not np.any(in_numpy(jax.grad(tiny_loss_fn))(PARAMS, X)["w"])
    scaled = mpjax.scale_loss(tiny_loss_fn, state_of(2.0**24))
    # The matmuls round to float16's 11 bits; a mean over 16 examples of such errors stays below 4 ulp.
    assert relative_error(in_numpy(jax.grad(scaled))(PARAMS, X), float32_grads()) < 4 * np.finfo(np.float16).eps


def test_overflow_in_the_backward_pass_shows_as_nonfinite():
    loss = lambda p, x: loss_fn(p, x) * 1e4
    grads = in_numpy(jax.grad(mpjax.scale_loss(loss, state_of(2.0**20))))(PARAMS, X)
    assert not np.isfinite(grads["w"]).all()


def test_has_aux_argnums_and_keyword_arguments():
    loss = lambda x, params, *, shift: (loss_fn(params, x + shift, jnp.float32), {"shift": shift, "n": 3})
    shift, state = np.float32(1), state_of()
    expected = float32_grads(X + shift, loss_fn)
    scaled = mpjax.scale_loss(loss, state, has_aux=True)
    calls = [
        lambda p: jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)(X, p, shift=shift),
        lambda p: mpjax.value_and_grad(loss, state, argnums=1, has_aux=True)(X, p, shift=shift),
        lambda p: mpjax.grad(loss, state, argnums=(-1,), has_aux=True)(X, p, shift=shift),
    ]
    ((_, aux), (_, first)), ((_, aux_too), second), ((third,), also_aux) = (in_numpy(call)(PARAMS) for call in calls)
    assert aux == aux_too == also_aux == {"shift": 1.0, "n": 3}
    for grads in (first, second, third):
        jax.tree.map(np.testing.assert_array_equal, grads, expected)


def test_missing_aux_and_bad_argnums_are_reported():
    with pytest.raises(TypeError, match=r"\(loss, aux\)"):
        jax.eval_shape(jax.grad(mpjax.scale_loss(loss_fn, state_of(), has_aux=True), has_aux=True), PARAMS, X)
    with pytest.raises(ValueError, match="argnums=5"):
        mpjax.grad(loss_fn, argnums=5)(PARAMS, X)


@pytest.mark.parametrize("half", HALVES)
def test_half_params_get_float32_gradients_through_value_and_grad_alone(half):
    params = rounded_to(half)
    loss = lambda p: tiny_loss_fn(p, X, half)
    value, grads = arrays_in_numpy(mpjax.value_and_grad(loss, state_of(2.0**20)))(params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert relative_error(grads, float32_grads(params=params)) < 4 * float(jnp.finfo(half).eps)
    assert value == in_numpy(loss)(params)
    with pytest.raises(TypeError, match=rf"0/[bw] is {jnp.dtype(half).name}.*mpjax\.value_and_grad"):
        jax.eval_shape(jax.grad(mpjax.scale_loss(tiny_loss_fn, state_of())), params, X)


def test_half_data_beside_float32_params_is_no_error():
    grads = jax.eval_shape(jax.grad(mpjax.scale_loss(loss_fn, state_of())), PARAMS, np.float16(X))
    assert grads["w"].dtype == jnp.float32


def test_function_sees_half_params_as_half():
    seen = []
    jax.eval_shape(mpjax.grad(lambda p: (seen.append(p.dtype), p.sum())[1]), np.ones(3, jnp.bfloat16))
    assert seen == [jnp.bfloat16]


def test_float64_and_complex_arguments_keep_their_dtype():
    with jax.enable_x64(True):
        grads = jax.jit(jax.grad(mpjax.scale_loss(lambda w: (w**3).sum(), state_of())))(np.ones(2))
        assert grads.dtype == jnp.float64
        np.testing.assert_array_equal(grads, 3.0)
    f = lambda z: (jnp.abs(z) ** 2).sum()
    both = jax.jit(lambda z: (jax.grad(mpjax.scale_loss(f, state_of()))(z), jax.grad(f)(z)))
    np.testing.assert_array_equal(*both(np.array([1.0 + 2.0j], np.complex64)))


# What is differentiated where derivatives are nested, on f(x, p) = p x³ at (3, 2): the function, and its value.
def cube(x, p):
    return p * x**3


NESTED = {
    "a hypergradient": (lambda grad: jax.grad(lambda p: grad(cube)(3.0, p)), 27.0),
    "of the value": (lambda grad: jax.grad(lambda p: p * grad(lambda x: cube(x, p), value=True)(3.0)[0]), 108.0),
    "of a value that does not depend on x": (
        lambda grad: jax.grad(lambda p: grad(lambda x, p: p**2, value=True)(3.0, p)[0]),
        4.0,
    ),
    "a third derivative": (lambda grad: lambda p: grad(grad(grad(cube)))(3.0, p), 12.0),
}


@pytest.mark.parametrize(("how", "jit"), [("mpjax", jax.jit), ("scale_loss", lambda fun: fun)], ids=["mpjax", "scale"])
@pytest.mark.parametrize("case", NESTED)
def test_derivatives_through_a_scaled_gradient_are_exact(case, how, jit):
    state = state_of()

    def grad(fun, value=False):
        if how == "mpjax":
            found = mpjax.value_and_grad(fun, state) if value else mpjax.grad(fun, state)
        else:
            found = (jax.value_and_grad if value else jax.grad)(jit(mpjax.scale_loss(fun, state)))
        return jit(found)

    make, expected = NESTED[case]
    np.testing.assert_array_equal(make(grad)(2.0), expected)


def test_values_that_the_function_closes_over_are_inside_of_the_boundary():
    p, x = np.float32(2), np.arange(3.0, dtype=np.float32)
    loss = lambda p, x: mpjax.scale_loss(lambda x: jnp.sum(p * x), state_of())(x * p)
    for wrap in (lambda fun: fun, jax.jit):
        for found, expected in zip(jax.grad(wrap(loss), argnums=(0, 1))(p, x), (12.0, [4.0] * 3), strict=True):
            np.testing.assert_array_equal(found, expected)
    half = lambda p: mpjax.scale_loss(lambda x: jnp.float32(p * x), state_of())(np.float16(1))
    with pytest.raises(TypeError, match=r"closes over is float16.*mpjax\.value_and_grad"):
        jax.eval_shape(jax.grad(half), jnp.float16(2))
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        jax.grad(mpjax.scale_loss(lambda x: x if x > 0 else -x, state_of()))(1.0)
    assert "jax.lax.cond" in error.value.__notes__[0]


@jax.custom_vjp
def clip_gradient(x):
    return x


clip_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))


@pytest.mark.parametrize("half", [*HALVES, jnp.float32])
def test_nonlinear_custom_derivative_is_correct_inside_true_cotangents(half):
    state = state_of(2.0**12)

    def loss(p, clip, dtype=half):
        y = X.astype(dtype) @ p["w"].astype(dtype)
        return jnp.sum(jnp.tanh(clip(y).astype(jnp.float32)) ** 2) * 1e-2

    gradient = lambda loss: in_numpy(jax.grad(loss))(PARAMS)
    expected = gradient(lambda p: loss(p, clip_gradient, jnp.float32))
    # Without it the clip sees cotangents 4096 times too large and cuts them all: the fault to avoid.
    with pytest.warns(mpjax.NonlinearRuleWarning, match=r"clip_gradient \(test_boundary.py:\d+\).*true_cotangents"):
        wrong = gradient(mpjax.scale_loss(lambda p: loss(p, clip_gradient), state))
    assert relative_error(wrong, expected) > 0.5
    right = gradient(mpjax.scale_loss(lambda p: loss(p, mpjax.true_cotangents(clip_gradient, state)), state))
    assert relative_error(right, expected) < 8 * float(jnp.finfo(half).eps)


def cut(x):
    """`clip_gradient` of a function whose cotangents at (3, 2) are above and below its limit."""
    return jnp.sin(clip_gradient(jnp.sin(x)))


def test_a_rule_that_closes_over_a_constant_inside_true_cotangents_under_autocast():
    table = jnp.eye(4)
    rotate = jax.custom_vjp(lambda x: table @ x)
    rotate.defvjp(lambda x: (table @ x, None), lambda _, cotangent: (table.T @ cotangent,))
    state = state_of()

    def loss(b):
        return mpjax.true_cotangents(lambda x: rotate(b) @ x, state)(jnp.ones(4))

    half = mpjax.autocast(loss, "mixed_bfloat16")
    np.testing.assert_array_equal(mpjax.grad(half, state)(PARAMS["b"]), np.ones(4))


@pytest.mark.parametrize("wrapper", [mpjax.true_cotangents, lambda fun, state: fun, mpjax.scale_loss])
def test_a_backward_rule_may_branch_on_a_number_of_its_residuals(wrapper):
    def backward(residuals, cotangent):
        w, (double, factor) = residuals
        return (factor * (cotangent @ w.T) if double else cotangent,)

    product = jax.custom_vjp(lambda x: 2 * x @ jnp.eye(2))
    product.defvjp(lambda x: (2 * x @ jnp.eye(2), (jnp.eye(2), (True, 2))), backward)
    state, x = state_of(1.0), jnp.ones((2, 2))
    loss = lambda x: wrapper(product, state)(x).sum()
    assert jax.jit(jax.grad(loss))(x).sum() == 8
    assert jax.jit(mpjax.grad(loss, state, policy="mixed_float16"))(x).sum() == 8


# Derivatives within the loss and around it: only those that mpjax scales have scaled cotangents. `true` is
# `true_cotangents`, `grad` is `mpjax.grad`.
NESTED_RULES = {
    "a jvp of the rule": lambda grad, true: grad(lambda x: x * jax.jvp(true(jnp.sin), (x,), (x,))[1]),
    "one by something else": lambda grad, true: grad(lambda x: x * jax.grad(true(cut))(2.0)),
    "a scaled gradient within the loss": lambda grad, true: grad(lambda x: true(cut)(x) + grad(true(cut))(x) ** 2),
    "in a scan": lambda grad, true: grad(
        lambda x: jax.lax.scan(lambda c, _: (c - jax.grad(true(cut))(c * x), c), x, None, length=2)[0]
    ),
    "in a branch": lambda grad, true: grad(lambda x: jax.lax.cond(x > 0, jax.grad(true(cut)), true(cut), x)),
    "a hypergradient": lambda grad, true: jax.grad(lambda p: grad(lambda x: true(cut)(p * x))(3.0) ** 2),
    "a hypergradient beside it": lambda grad, true: jax.grad(lambda p: grad(lambda x: x * true(cut)(p))(3.0)),
    "of the gradient's gradient": lambda grad, true: grad(grad(lambda x: x * true(cut)(x))),
    "outside": lambda grad, true: lambda x: jax.grad(true(cut))(x) + grad(jnp.sin)(x),
    "nested calls": lambda grad, true: grad(lambda x: true(lambda x: true(cut)(cut(x)))(x)),
    "a batch": lambda grad, true: jax.vmap(grad(lambda x: true(cut)(x) * jax.jvp(true(jnp.sin), (x,), (x,))[1])),
}


@pytest.mark.parametrize("case", NESTED_RULES)
def test_only_scaled_derivatives_are_unscaled_for_true_cotangents(case):
    state = state_of()
    scaled = lambda fun, state: jax.grad(mpjax.scale_loss(fun, state))
    at = np.float32([2, 3]) if case == "a batch" else np.float32(2)
    with_scale = NESTED_RULES[case](lambda fun: scaled(fun, state), lambda fun: mpjax.true_cotangents(fun, state))
    plain = NESTED_RULES[case](jax.grad, lambda fun: fun)
    np.testing.assert_allclose(in_numpy(with_scale)(at), in_numpy(plain)(at), rtol=1e-6)
    jitted = NESTED_RULES[case](
        lambda fun: scaled(jax.jit(fun), state), lambda fun: jax.jit(mpjax.true_cotangents(jax.jit(fun), state))
    )
    np.testing.assert_allclose(in_numpy(jitted)(at), in_numpy(plain)(at), rtol=1e-6)


@pytest.mark.parametrize("by", ["argument", "closure"])
def test_a_gradient_around_forward_mode_derivatives_is_true(by):
    def directional(scale_loss):
        def slope(x):
            if by == "argument":
                return jax.jvp(scale_loss(jnp.sin), (x,), (1 + x,))[1]
            return jax.jvp(lambda y: scale_loss(lambda: jnp.sin(x * y))(), (x,), (1 + x,))[1]

        return jax.grad(slope)

    state = state_of()
    expected = in_numpy(directional(lambda fun: fun))(np.float32(2))
    assert in_numpy(directional(lambda fun: mpjax.scale_loss(fun, state)))(np.float32(2)) == expected
    assert in_numpy(mpjax.grad(directional(lambda fun: fun), state))(np.float32(2)) == pytest.approx(
        in_numpy(jax.grad(directional(lambda fun: fun)))(np.float32(2))
    )


def test_the_function_of_a_vjp_takes_a_python_number():
    pull = jax.vjp(mpjax.scale_loss(jnp.sin, state_of()), jnp.float32(2))[1]
    np.testing.assert_array_equal(pull(1.0)[0], pull(np.float32(1))[0])


def test_a_jitted_loss_is_traced_again_only_if_it_has_true_cotangents():
    state, traced = state_of(), []

    @jax.jit
    def plain(x):
        return traced.append("plain") or jnp.sum(x**2)

    @jax.jit
    def clipped(x):
        return traced.append("clipped") or jnp.sum(mpjax.true_cotangents(clip_gradient, state)(x))

    for loss in (plain, plain, clipped, clipped):
        mpjax.value_and_grad(loss, state)(PARAMS["b"])
    assert traced == ["plain", "clipped", "clipped"]


def test_functions_of_jax_are_differentiated_once_for_all_their_calls():
    derived = []

    @jax.custom_jvp
    def sin(x):
        return jnp.sin(x)

    @sin.defjvp
    def _(primals, tangents):
        derived.append(1)
        return sin(*primals), jnp.cos(*primals) * tangents[0]

    layer = jax.jit(sin, inline=True)  # as those of jax.numpy are

    def loss(x):
        for _ in range(8):
            x = layer(x)
        return x

    expected = in_numpy(jax.grad(loss))(np.float32(1))
    derived.clear()
    jax.make_jaxpr(jax.grad(mpjax.scale_loss(loss, state_of())))(np.float32(1))
    assert len(derived) <= 2
    np.testing.assert_array_equal(in_numpy(jax.grad(mpjax.scale_loss(loss, state_of())))(np.float32(1)), expected)


@pytest.mark.parametrize("use", ["unscale", "update", "apply_gradients"])
def test_true_cotangents_in_a_loss_that_is_scaled_by_hand_warn(use):
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), grads_are_scaled=True)
    state = tx.init(PARAMS)

    def step(params):
        loss = lambda p: jnp.sum(mpjax.true_cotangents(clip_gradient, state)(p["b"])) * state.loss_scale
        grads = jax.grad(loss)(params)
        uses = {
            "unscale": lambda: mpjax.unscale(grads, state),
            "update": lambda: tx.update(grads, state, params),
            "apply_gradients": lambda: mpjax.apply_gradients(tx, grads, state, params),
        }
        return loss(params), uses[use]()

    with pytest.warns(mpjax.LossScaleWarning, match="multiplied by the scale by hand"):
        jax.eval_shape(step, PARAMS)


def test_true_cotangents_keep_values_and_dtypes():
    fun = mpjax.true_cotangents(lambda t, n: {"y": t["x"] * 2, "n": n}, state_of())
    out = arrays_in_numpy(fun)({"x": np.ones(2, np.float16)}, 3)
    assert out["y"].dtype == jnp.float16
    np.testing.assert_array_equal(out["y"], 2)
    assert int(out["n"]) == 3


class Dense(linen.Module):
    state: object = None

    @linen.compact
    def __call__(self, x):
        layer = linen.Dense(2)
        layer = layer if self.state is None else mpjax.true_cotangents(layer, self.state)
        return jnp.sum(layer(x) ** 2)


@pytest.mark.parametrize("kind", ["closure", "half result", "linen", "nnx"])
def test_true_cotangents_of_params_that_the_function_holds(kind):
    state, x = state_of(), np.asarray(X)[:2]
    if kind == "linen":
        params = jax.jit(Dense(state).init)(cheap_keys.key(0), x)
        loss = lambda scaled: lambda p: Dense(state if scaled else None).apply(p, x)
    elif kind == "nnx":
        graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

        def loss(scaled):
            def of_params(params):
                model = nnx.merge(graph, params, rest, copy=True)
                y = (mpjax.true_cotangents(model, state) if scaled else model)(x)
                return jnp.sum(y**2) + jnp.sum(model.norm.mean[...])  # the statistics reach the caller's model

            return of_params

    else:
        params, dtype = PARAMS["w"], jnp.float16 if kind == "half result" else jnp.float32
        layer = lambda p: lambda x: (x @ p).astype(dtype)
        loss = lambda scaled: (
            lambda p: jnp.sum((mpjax.true_cotangents(layer(p), state) if scaled else layer(p))(x).astype(jnp.float32))
        )
    found = jax.jit(mpjax.grad(loss(True), state))(params)
    expected = jax.jit(jax.grad(loss(False)))(params)
    assert relative_error(jax.tree.leaves(found), jax.tree.leaves(expected)) < 1e-5


def test_a_module_that_is_not_differentiated_may_change_its_state():
    model, x = Net(nnx.Rngs(0)), np.asarray(X)[:2]
    plain = nnx.clone(model)
    loss = lambda x, model: jnp.sum(model(x) ** 2)
    expected = nnx.jit(nnx.grad(loss))(x, plain)
    found = nnx.jit(lambda x, m: nnx.grad(mpjax.scale_loss(loss, state_of()))(x, m))(x, model)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(model.norm.mean[...], plain.norm.mean[...])
    with pytest.raises(TraceContextError) as error:
        jax.eval_shape(mpjax.scale_loss(lambda x: jnp.sum(model(x)), state_of()), x)
    assert "Give an NNX module as an argument" in error.value.__notes__[0]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.linear  # a shared submodule must not be scaled twice

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.fixture(scope="module")
def built():
    return nnx.jit(lambda: Net(nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def unscaled(built):
    """A model after the gradient without loss scaling, its loss and its gradients."""
    plain = nnx.clone(built)
    return plain, *nnx.jit(nnx.value_and_grad(nnx_loss))(plain, X)


@pytest.mark.parametrize("api", ["nnx.value_and_grad", "mpjax.value_and_grad"])
def test_nnx_module_gets_unscaled_gradients_and_keeps_its_state_changes(built, unscaled, api):
    model, (plain, expected_value, expected) = nnx.clone(built), unscaled
    state = state_of()
    if api == "nnx.value_and_grad":
        value, grads = nnx.jit(lambda m, s: nnx.value_and_grad(mpjax.scale_loss(nnx_loss, s))(m, X))(model, state)
    else:
        value, grads = nnx.jit(lambda m, s: mpjax.value_and_grad(nnx_loss, s)(m, X))(model, state)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], rtol=1e-6)
    assert model.dropout.rngs.count[...] == plain.dropout.rngs.count[...]


@pytest.mark.standard_promotion  # half weights and a float32 batch
def test_half_nnx_params_get_float32_gradients_and_stay_half(built):
    model = nnx.clone(built)
    nnx.update(model, jax.tree.map(lambda p: np.asarray(p).astype(jnp.float16), nnx.state(model, nnx.Param)))
    _, grads = nnx.jit(mpjax.value_and_grad(nnx_loss, state_of()))(model, X)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float16")}
    assert np.abs(model.norm.mean[...]).max() > 0


@pytest.mark.parametrize(("half", "params_dtype"), [("float16", jnp.float16), ("bfloat16", jnp.float32)])
def test_policy_runs_the_loss_under_autocast_also_with_half_params(half, params_dtype):
    policy = mpjax.Policy("float32", half, "float32")
    loss = lambda p, x: loss_fn(p, x, jnp.float32)
    params = rounded_to(params_dtype)
    step = lambda p: mpjax.value_and_grad(loss, state_of(2.0**10), policy=policy)(p, X)
    assert half_share(step, params) == 1.0
    value, grads = arrays_in_numpy(step)(params)
    assert {value.dtype, *(g.dtype for g in jax.tree.leaves(grads))} == {jnp.dtype("float32")}
    assert relative_error(grads, float32_grads(loss=loss_fn, params=params)) < 4 * float(jnp.finfo(half).eps)
    only_grads = in_numpy(lambda p: mpjax.grad(loss, state_of(2.0**10), policy=policy)(p, X))(params)
    jax.tree.map(np.testing.assert_array_equal, only_grads, grads)


def test_policy_runs_an_nnx_loss_under_autocast_and_keeps_its_state_changes(built, unscaled):
    model, (plain, _, expected) = nnx.clone(built), unscaled
    _, grads = nnx.jit(mpjax.value_and_grad(nnx_loss, state_of(), policy="mixed_float16"))(model, X)
    assert relative_error(jax.tree.leaves(grads), jax.tree.leaves(expected)) < 8 * np.finfo(np.float16).eps
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], rtol=4 * np.finfo(np.float16).eps, atol=1e-3)


def test_unknown_policy_is_reported_where_it_is_given():
    with pytest.raises(ValueError, match="mixed_float17"):
        mpjax.value_and_grad(loss_fn, policy="mixed_float17")
