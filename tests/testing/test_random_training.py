"""The oracle of random training programs catches each wrong way to scale, to skip and to cast."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from testing.mutations import MUTATIONS, first_catch
from testing.random_programs.reduction import shrink
from testing.random_training import Case, Failure, Rejected, check, numbered_case
from testing.random_training.models import Model
from testing.random_training.properties import _close

TREE = Model(
    "tree",
    """PARAMS = {"w": array(3, 3), "b": array(3), "s": array()}
STATS = {"mean": array()}
def model_loss(p, x, stats, ids):
    h = jnp.tanh(x @ p["w"] + p["b"]) * p["s"]
    return h.mean(), ({"mean": 0.9 * stats["mean"] + 0.1 * h.mean()}, ids)
""",
)
LINEN = Model(
    "linen",
    """class Net(nn.Module):
    @nn.compact
    def __call__(self, x, ids):
        return nn.Dense(3)(x), ids.sum() * 997
NET = with_policy(Net())
PARAMS, STATS = initialised(lambda key: NET.init(key, X, IDS))
def model_loss(p, x, stats, ids):
    h, aux = NET.apply({"params": p}, x, ids)
    return jnp.sum(h * h), (stats, aux)
""",
)
ADAM = "mpjax.dynamic_loss_scale(optax.adam(1e-2), growth_interval=2<options>)"
STEPS = ("", "spike", "loss", "")


def wrong_penalty(fun, opt_state=None, *, argnums=0, has_aux=False):
    """Scales all arguments, of which only one is differentiated."""
    scale = optax.tree_utils.tree_get(opt_state, "loss_scale") if opt_state is not None else 1.0
    return jax.grad(lambda *args: fun(*args) * scale, argnums)


def unscaled_after_growth(fun, opt_state=None, **kwargs):
    call = jax.value_and_grad(fun, **kwargs)
    return lambda *args: jax.tree.map(lambda x: x * (1 + 2.0**-20), call(*args))


def never_skips(inner, **kwargs):
    tx = mpjax.static_loss_scale(inner, 1.0)

    def update(grads, state, params=None, **extra):
        updates, new = inner.update(grads, state.inner_state, params)
        return updates, state._replace(inner_state=new)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def forgets_the_counters(tx, grads, state, params, **extra):
    params, new = APPLY(tx, grads, state, params, **extra)
    return params, new._replace(skipped_steps=state.skipped_steps)


APPLY = mpjax.apply_gradients


@pytest.mark.parametrize(
    ("name", "wrong", "case"),
    [
        ("grad", wrong_penalty, Case(TREE, loss="penalty by argnums")),
        ("value_and_grad", unscaled_after_growth, Case(TREE)),
        ("dynamic_loss_scale", never_skips, Case(TREE, optimizer=ADAM, events=STEPS)),
        ("apply_gradients", forgets_the_counters, Case(TREE, optimizer=ADAM, events=STEPS)),
        ("true_cotangents", lambda fun, state: fun, Case(TREE, loss="clipped params")),
        ("keep_if_finite", lambda state, new, old: new, Case(TREE, gradient="has_aux", events=("input",))),
    ],
)
def test_each_wrong_implementation_is_caught(monkeypatch, name, wrong, case):
    assert check(case) == "bitwise"
    monkeypatch.setattr(mpjax, name, wrong)
    with pytest.raises(Failure):
        check(case)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("Kahan summation loses its compensation", "kahan(optax.adam(1e-2))"),
        ("stochastic rounding rounds up too often", "stochastic_rounding(optax.adam(1e-2))"),
        ("moments in bfloat16 are rounded up too often", "low_bit_state(optax.adam(1e-2), 'bfloat16', min_size=1)"),
        ("second moments are stored as if they had signs", "low_bit_state(optax.adam(1e-2), 'int8', min_size=1)"),
        ("second moments are stored as if they had signs", "low_bit_state(optax.adam(1e-2), 'float8', min_size=1)"),
    ],
)
def test_a_wrong_rounding_of_params_and_moments_is_caught(name, optimizer):
    half = "low_bit" not in optimizer
    scaled = f"mpjax.dynamic_loss_scale(mpjax.{optimizer}<options>)"
    case = Case(TREE, optimizer=scaled, half_params=half, events=("", "spike", ""))
    assert check(case) == "bitwise"
    wrong = MUTATIONS[name]
    jax.clear_caches()  # of the right encoding
    with mock.patch(wrong.target, wrong.wrong), pytest.raises(Failure):
        check(case)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8"])
def test_a_state_that_leaves_the_range_is_that_of_the_reference(dtype):
    # A second moment of 2**236: its block has the scale NaN.
    stored = f"mpjax.low_bit_state(optax.adam(1e-2), {dtype!r}, min_size=1, block_size=4)"
    case = Case(TREE, optimizer=f"mpjax.loss_scale_for({stored}, 'mixed_bfloat16'<options>)", events=("spike", ""))
    assert check(case) == "bitwise"


def test_a_program_that_jax_leaves_with_a_tracer_is_rejected():
    # JAX loses what a custom_vjp in a jitted loss closes over, such as the ids.
    reads_ids = Model("tree", TREE.source.replace('p["b"]', 'p["b"] + ids[0]'))
    for policy in ("float32", "mixed_float16"):
        with pytest.raises(Rejected):
            check(Case(reads_ids, loss="custom_vjp", gradient="of a jitted loss", policy=policy))


def rounded_ids(model, policy):
    class Wrong(type(model)):
        def __call__(self, x, ids):
            y, aux = super().__call__(x, ids)
            return y, aux.astype(jnp.bfloat16).astype(jnp.float32)

    return Wrong()


def test_a_float32_result_of_user_code_that_is_rounded_is_caught(monkeypatch):
    case = Case(LINEN, gradient="has_aux", policy="mixed_bfloat16")
    assert check(case, compiled=True) == "half"
    monkeypatch.setattr(mpjax, "with_policy", rounded_ids)
    with pytest.raises(Failure, match="above rounding in aux"):
        check(case)


def test_a_rounding_error_beside_a_nan_is_no_failure():
    exact, typed = np.array([np.nan, 1 / 3, np.inf]), np.array([np.nan, np.float32(1 / 3), np.inf])
    assert _close(exact, typed, typed + 2.0**-30, 2.0**-20)
    assert not _close(exact, typed, typed + 2.0**-10, 2.0**-20)
    assert not _close(exact, typed, typed[[1, 0, 2]], 2.0**-20)


def test_random_keys_in_the_state_of_a_compiled_step():
    optimizer = "mpjax.static_loss_scale(optax.noisy_sgd(0.1, 0.01, 0.55, key=KEY), 8.0<options>)"
    assert check(Case(TREE, optimizer=optimizer), compiled=True) == "bitwise"


def test_no_illegal_optimizer_is_drawn_or_left_by_shrinking():
    for number in range(1000):
        case = numbered_case(number)
        source = case.source.rpartition("tx = ")[2].partition("\n")[0]
        assert ("grads_are_scaled" in source) == (case.gradient == "by hand")
        outside, inside = source.partition("mpjax.")[::2]
        if case.half_params:  # the updates of half params lead to exactly representable values
            assert not outside
            assert "optax.scale(0.5)" not in inside
        if case.gradient == "by hand":  # a clip would see scaled gradients
            assert "clip" not in outside
    by_hand = Case(TREE, gradient="by hand", loss="remat")
    assert all(("grads_are_scaled" in c.source) == (c.gradient == "by hand") for c in by_hand.simpler())


def test_shrinking_keeps_the_failure(monkeypatch):
    monkeypatch.setattr(mpjax, "apply_gradients", forgets_the_counters)

    def fails(case):
        try:
            check(case)
        except Rejected:
            return False
        except Failure:
            return True
        return False

    case = Case(TREE, loss="remat", gradient="has_aux", optimizer=ADAM, loop="jit", events=STEPS)
    smallest = shrink(case, fails, Case.simpler)
    assert (smallest.loss, smallest.gradient, smallest.loop) == ("plain", "mpjax.value_and_grad", "python")
    assert smallest.events == ("spike",)


@pytest.mark.exhaustive
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_tests_of_random_training_catch_each_wrong_implementation(name):
    jax.clear_caches()  # of programs that were traced with another one
    assert first_catch(MUTATIONS[name], range(200)) is not None
