"""`audit` names values that are rounded to half and then amplified, with the line that rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.inspection.auditing.constants import in_float32
from mpjax.inspection.auditing.risks import risks_of
from mpjax.program.inlining import flow_of
from testing.models.zoo import REGISTRY, harness
from testing.sensitive import KINDS

F32, I32 = jnp.float32, jnp.int32
X = jax.ShapeDtypeStruct((16, 16), F32)
SMALL, IDS = jax.ShapeDtypeStruct((16,), F32), jax.ShapeDtypeStruct((16,), I32)


def matmul(x, half):
    """A matmul of careful casts by hand, whose result is rounded to half."""
    return jax.lax.dot(x.astype(half), x.astype(half)).astype(F32)


def accumulated(x, half):
    return jax.lax.dot(x.astype(half), x.astype(half), preferred_element_type=F32)


def stored(x, half):
    return x.astype(half).astype(F32)


def rotary(angles):
    return jnp.sum(jnp.cos(angles) + jnp.sin(angles))


def distances(x, half):
    """Squared distances from a code, each rounded before the difference."""
    return stored(jnp.sum(x**2, -1)[:, None] + jnp.sum(x**2, -1), half) - stored(2 * x @ x.T, half)


INVERSE = 1e-4 ** (np.arange(8, dtype=np.float32) / 8)
# By kind of amplifier: each stores a value in half, and computes in float32.
PROGRAMS = {
    "log of a squashed action": (lambda x, h: jnp.sum(jnp.log(1 - stored(jnp.tanh(x), h) ** 2 + 1e-6)), X, "log"),
    "log of a complement": (lambda x, h: jnp.sum(jnp.log(1 - stored(jax.nn.softmax(x), h))), X, "log"),
    "log of a probability": (lambda x, h: -jnp.sum(jnp.log(stored(jax.nn.sigmoid(x), h) + 1e-6)), X, "log"),
    "log1p": (lambda x, h: jnp.sum(jnp.log1p(-stored(jax.nn.sigmoid(x), h))), X, "log1p"),
    "quotient": (lambda x, h: jnp.sum(x / (1 - stored(jnp.tanh(x), h) ** 2)), X, "div"),
    "variance": (lambda x, h: jnp.sum(jax.lax.rsqrt(stored(jnp.mean(x**2, -1), h) + 1e-6)), X, "rsqrt"),
    "difference of moments": (
        lambda x, h: jnp.sum(jax.lax.rsqrt(stored(jnp.mean(x**2, -1), h) - stored(jnp.mean(x, -1), h) ** 2)),
        X,
        "rsqrt",
    ),
    "standard deviation": (
        lambda x, h: jnp.sum(jnp.sqrt(stored(jnp.mean(x**2, -1), h) - stored(jnp.mean(x, -1), h) ** 2)),
        X,
        "sqrt",
    ),
    "signal to noise": (lambda x, h: jnp.sum(x / jnp.sqrt(1 - stored(jnp.tanh(x) ** 2, h))), X, "sqrt"),
    "nearest": (lambda x, h: jnp.argmin(distances(x, h), -1), X, "argmin"),
    "nearest two": (lambda x, h: jax.lax.top_k(-distances(x, h), 2)[1], X, "top_k"),
    "arccos": (lambda x, h: jnp.sum(jnp.arccos(stored(jnp.clip(x, -1, 1), h))), X, "acos"),
    "arctanh": (lambda x, h: jnp.sum(jnp.arctanh(stored(jnp.tanh(x), h))), X, "atanh"),
    "angle": (lambda x, h: rotary(stored(300 * x, h)), X, "cos"),
    "angle of a scaled value": (lambda x, h: rotary(30 * stored(x, h)), X, "cos"),
    "timesteps": (lambda i, h: rotary(i.astype(h)[:, None].astype(F32) * INVERSE), IDS, "cos"),
    "rotary outer product": (
        lambda i, h: rotary(jnp.einsum("i,j->ij", i.astype(h), INVERSE.astype(h)).astype(F32)),
        IDS,
        "cos",
    ),
    "rotary matmul": (
        lambda i, h: rotary(
            jax.lax.dot(
                jnp.stack([i, i], -1).astype(h), np.stack([INVERSE, INVERSE]).astype(h), preferred_element_type=F32
            )
        ),
        IDS,
        "cos",
    ),
    "index": (lambda x, h: jnp.arange(64)[jnp.floor(x + stored(x, h)).astype(I32)], X, "convert_element_type"),
    "index of a matmul": (lambda x, h: jnp.arange(64)[accumulated(x, h).astype(I32)], X, "convert_element_type"),
    "slots": (
        lambda i, h: (jnp.tril(jnp.ones((600, 600), h)) @ jnp.ones((600, 4), h)).astype(I32) - 1 + i[0],
        IDS,
        "convert_element_type",
    ),
    "labels by a permutation": (
        lambda i, h: (jax.nn.one_hot(i[::-1], 16, dtype=h) @ i.astype(h)).astype(I32),
        IDS,
        "convert_element_type",
    ),
    "cholesky": (lambda x, h: jnp.linalg.cholesky(accumulated(x, h) + jnp.eye(16)), X, "cholesky"),
    "solve": (lambda x, h: jnp.linalg.solve(matmul(x, h), jnp.ones(16)), X, "lu"),
    "eigh": (lambda x, h: jnp.linalg.eigh(stored(x, h) + jnp.eye(16))[0], X, "eigh"),
    "in a loop": (
        lambda x, h: jax.lax.scan(lambda c, _: (stored(jnp.tanh(c), h), jnp.log(1.001 - c**2)), x, length=3)[1],
        X,
        "log",
    ),
    "behind a branch": (
        lambda x, h: jnp.log(1 - jax.lax.cond(x[0, 0] > 0, lambda x: stored(jax.nn.sigmoid(x), h), jax.nn.sigmoid, x)),
        X,
        "log",
    ),
}
# What is rounded, and stays as it is: no amplifier, or a sum between.
HARMLESS = {
    "cross-entropy": lambda x, h: -jnp.mean(jax.nn.log_softmax(matmul(x, h))[:, 0]),
    "binary cross-entropy": lambda x, h: jnp.mean(jax.nn.softplus(matmul(x, h)) - matmul(x, h)),
    "softplus by hand": lambda x, h: jnp.mean(jnp.log1p(jnp.exp(-jnp.abs(matmul(x, h))))),
    "log of a sigmoid": lambda x, h: jnp.mean(jnp.log(jax.nn.sigmoid(matmul(x, h)))),
    "squares": lambda x, h: jnp.mean((matmul(x, h) - x) ** 2),
    "norm": lambda x, h: jnp.mean(stored(x, h) * jax.lax.rsqrt(jnp.mean(stored(x, h) ** 2, -1) + 1e-6)),
    "layer norm": lambda x, h: jax.nn.standardize(matmul(x, h)),
    "smooth distance": lambda x, h: jnp.mean(jnp.sqrt((matmul(x, h) - x) ** 2 + 1e-6)),
    "small angles": lambda x, h: rotary(3 * stored(jnp.tanh(x), h)),
    "log1p of squares": lambda x, h: jnp.mean(jnp.log1p(stored(x, h) ** 2)),
    "accuracy": lambda x, h: jnp.mean(jnp.argmax(matmul(x, h), -1) == 3),
    "accuracy of probabilities": lambda x, h: jnp.argmax(stored(jax.nn.log_softmax(matmul(x, h)), h), -1),
    "accuracy by a softmax in half": lambda x, h: jnp.argmax(jax.nn.log_softmax(x.astype(h)), -1),
    "a mask": lambda x, h: jnp.where(stored(x, h) > 0, 1, 0),
    "few slots": lambda x, h: jnp.cumsum((x > 0).astype(h), 0).astype(I32),
    "eight bits": lambda x, h: jnp.round(stored(x, h)).astype(jnp.int8),
}


def false_alarms(fun, *args):
    """The risks of harmless programs that `audit` would report: it also traces a gradient, for other figures."""
    found = risks_of(flow_of(jax.make_jaxpr(fun)(*args)), functools.partial(in_float32, fun, args, {}))
    return [risk for risk in found if risk.kind in ("amplified", "ids", "constant", "epsilon", "norm")]


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, (*_, op) in PROGRAMS.items() if op])
@pytest.mark.standard_promotion
def test_both_lines_are_named(name, half):
    program, x, op = PROGRAMS[name]
    report = mpjax.audit(lambda x: program(x, half), x)
    found = [risk for risk in report.risks if risk.kind in ("amplified", "ids") and risk.op == op]
    if name == "slots" and half == jnp.float16:  # which holds 600
        assert not found
        return
    assert found
    assert "rounded to " + jnp.dtype(half).name in found[0].why
    assert "test_amplified.py:" in found[0].why
    assert found[0].source.startswith("test_amplified.py:")


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.standard_promotion
def test_a_rounding_that_nothing_amplifies_is_no_risk(name, half):
    program = lambda x: HARMLESS[name](x, half)
    has_gradient = not name.startswith(("accuracy", "a mask", "few", "eight", "layer"))
    assert not false_alarms(jax.value_and_grad(program) if has_gradient else program, X)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.standard_promotion
def test_what_autocast_keeps_in_float32_is_no_risk(name, policy):
    loss, params, batch = KINDS[name]
    cast = mpjax.autocast(lambda p, b: loss(p, b), policy)
    assert not false_alarms(lambda p, b: mpjax.value_and_grad(cast, None)(p, b), params, batch)


def test_a_rule_that_the_user_forced_is_named():
    def loss(w, x):
        angles = x @ w
        return jnp.mean(jnp.log(1 - jnp.tanh(angles) ** 2 + 1e-6))

    forced = mpjax.Rules(allow=["tanh", "log", "sub", "add"])
    assert not mpjax.audit(mpjax.autocast(loss, "mixed_bfloat16"), X, X).risks
    found = mpjax.audit(mpjax.autocast(loss, "mixed_bfloat16", rules=forced), X, X).risks
    assert any("near-equal numbers cancel" in risk.why for risk in found)


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.standard_promotion
def test_healthy_programs_have_no_such_risk(name):
    loss, params, batch = harness.abstract(name)
    assert not false_alarms(mpjax.autocast(loss, "mixed_bfloat16"), params, batch)


def test_bounds_beyond_the_largest_number_are_infinite():
    assert not mpjax.audit(lambda x: (((jnp.tanh(x) * 1e38) ** 3) ** 3) ** 3, X).risks
