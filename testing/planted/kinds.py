"""Further kinds of causes, planted in a module of each library's model, alone and two at once.

Of two causes the report must name both, the one that decides first. Each printed cure is applied, and must work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mpjax
from testing.planted.answers import Answers, array_loss, arrays_of, fault_of, is_nnx, numerics_of
from testing.planted.causes import dense, flushed
from testing.planted.models import HALF, SIZE, Model, Plant, X

Half = jnp.bfloat16


def is_here(model: Model, module: str, source: str) -> None:
    """The planted module, or where no module is named, a line of this file."""
    named = f"/{module}".endswith(f"/{model.path}") if module else source.startswith("kinds.py")
    assert named, f"names {module!r} {source!r}, not {model.path!r}"


def gradient(model: Model) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return jax.grad(array_loss(model)), arrays_of(model)


def risks_in(model: Model, of: Callable[..., Any] | None = None) -> set[str]:
    """The kinds of the risks that `audit` finds; those in other places than the plant are its errors."""
    found = mpjax.audit(of or array_loss(model), *arrays_of(model))
    planted = [risk for risk in found.risks if risk.kind not in ("loss", "sum")]
    for risk in planted:
        is_here(model, risk.module, risk.source)
    if planted:
        first = str(found).splitlines()[0]
        assert planted[0].kind in first, first
    return {risk.kind for risk in planted}


# One cause


def summed(x: Any, w: Any, dtype: Any = Half) -> Any:
    """A sum over the iterations of a loop."""
    terms = jnp.stack([x @ w] * 64) / 64
    return lax.scan(lambda c, t: (c + t.astype(dtype), None), jnp.zeros((*x.shape[:-1], SIZE), dtype), terms)[0]


def summed_in_float32(x: Any, w: Any) -> Any:
    return summed(x, w, jnp.float32)


def summed_and_stored(x: Any, w: Any) -> Any:
    """Each term is added in float32, and the sum is stored in half."""
    terms = jnp.stack([x @ w] * 64) / 64
    start = jnp.zeros((*x.shape[:-1], SIZE), Half)
    return lax.fori_loop(0, 64, lambda i, c: (c.astype(jnp.float32) + terms[i]).astype(Half), start)


def unrolled(x: Any, w: Any, dtype: Any = Half) -> Any:
    """The same by a loop of Python."""
    total = jnp.zeros((*x.shape[:-1], SIZE), dtype)
    for i in range(16):
        total = total + (jnp.sin(x + i) @ w / 16).astype(dtype)
    return total


def accumulates(model: Model) -> None:
    assert "accumulator" in risks_in(model)
    assert not risks_in(model.again(summed_in_float32)), "the advice does not help"


def decay_of_one(x: Any, w: Any) -> Any:
    """1 - 0.999 in bfloat16, where 0.999 is 1."""
    y = (x @ w).astype(Half)
    decay = 0 * y + 0.999
    return (y / (1 - decay)).astype(jnp.float32)


def decay_that_half_holds(x: Any, w: Any) -> Any:
    y = (x @ w).astype(Half)
    decay = 0 * y + 0.99609375
    return (y / (1 - decay)).astype(jnp.float32)


def loses_a_decay(model: Model) -> None:
    found = fault_of(model.loss, *model.args)
    assert found.primitive == "div", str(found)
    is_here(model, found.module, found.source)
    assert "0.999 is 1 in bfloat16, at kinds.py" in found.diagnosis, str(found)
    assert "float32 fails too" not in found.diagnosis, str(found)
    held = model.again(decay_that_half_holds)
    assert mpjax.find_nonfinite(held.loss, *held.args) is None, "the advice does not help"


def rounds_a_decay(model: Model) -> None:
    assert "constant" in risks_in(model)


def label_out_of_range(x: Any, w: Any, label: int = SIZE) -> Any:
    """A lookup of row 16 of 16."""
    rows = jnp.take(w, label + (0 * x[..., 0]).astype(int), axis=0, mode="fill")
    return x @ w + rows


def misses_a_row(model: Model) -> None:
    for fun, args in ((model.loss, model.args), gradient(model)):
        found = fault_of(fun, *args)
        assert (found.primitive, found.direction) == ("gather", "forward"), str(found)
        assert f"index {SIZE} of an axis of {SIZE}" in found.diagnosis, str(found)
    cured = model.again(lambda x, w: label_out_of_range(x, w, SIZE - 1))
    assert mpjax.find_nonfinite(cured.loss, *cured.args) is None


def overflowing(x: Any, w: Any) -> Any:
    return (300 * x) @ (300 * w) / 9e4


def overflows_forward(model: Model) -> None:
    """In whatever order it is cast and differentiated, the overflow is of the forward pass."""
    loss, args = array_loss(model), arrays_of(model)
    of_checkpoint = jax.grad(jax.checkpoint(mpjax.autocast(loss, HALF)))
    for fun in (mpjax.autocast(jax.grad(loss), HALF), jax.grad(mpjax.autocast(loss, HALF)), of_checkpoint):
        found = fault_of(fun, *args)
        assert (found.primitive, found.direction) == ("dot_general", "forward"), str(found)
        assert "overflow of float16" in found.diagnosis, str(found)
        assert "scale" not in found.diagnosis, str(found)


def log_in_a_checkpoint(x: Any, w: Any) -> Any:
    return jnp.log(jnp.abs(x @ w) - 1) ** 2


def is_not_defined(model: Model) -> None:
    loss, args = array_loss(model), arrays_of(model)
    for fun in (loss, jax.grad(loss), jax.grad(jax.checkpoint(loss))):
        found = fault_of(fun, *args)
        assert (found.primitive, found.direction) == ("log", "forward"), str(found)
        is_here(model, found.module, found.source)
        assert "log of a negative number" in found.diagnosis, str(found)


def wide(x: Any, w: Any) -> Any:
    """Keeps 64 values for each that it returns."""
    return jnp.sum(jnp.sin(jnp.repeat((x @ w)[..., None], 64, -1) * jnp.arange(64)), -1) / 64


def keeps_much(model: Model) -> None:
    grad, args = gradient(model)
    kept = mpjax.audit(grad, *args).kept
    before = sum(row.bytes for row in kept)
    is_here(model, kept[0].module, kept[0].source)
    assert kept[0].bytes > before / 3, str(kept)
    grad, args = gradient(model.again(jax.checkpoint(wide)))
    after = sum(row.bytes for row in mpjax.audit(grad, *args).kept)
    assert after < before / 4, "the advice does not help"


def warns_of_flushing(model: Model) -> None:
    def warned(scale: float) -> bool:
        watched = mpjax.watch(lambda *args: scale * model.loss(*args), every=1, policy=HALF)
        update = watched.update if is_nnx(model) else jax.jit(watched.update)
        return "flushed to zero" in str(update(watched.init(*model.args), *model.args).records()[-1])

    assert warned(1e-8), "does not warn"
    assert not warned(1e-8 * 2.0**24), "the advice, a larger scale, does not help"


def flushes(model: Model) -> None:
    found = mpjax.numerics(mpjax.autocast(lambda *args: 1e-8 * model.loss(*args), HALF), *model.args)
    assert "flushes 100% of the activation gradients" in str(found).splitlines()[0], str(found)


# Two causes at once


def summed_decay(x: Any, w: Any) -> Any:
    y = summed(x, w)
    return (0.999 * y + y[..., :1]).astype(jnp.float32)


def accumulates_and_decays(model: Model) -> None:
    assert {"accumulator", "constant"} <= risks_in(model)


def epsilon_in_a_sum(x: Any, w: Any) -> Any:
    y = summed(x, w, jnp.float16)
    return (y / (jnp.abs(y) + 1e-8)).astype(jnp.float32)


def accumulates_and_divides(model: Model) -> None:
    assert {"accumulator", "epsilon"} <= risks_in(model)


def log_and_an_overflow(x: Any, w: Any) -> Any:
    """An overflow of half, and behind it a logarithm of a negative number, which no precision cures."""
    return overflowing(x, w) + jnp.log(jnp.abs(x) - 2)


def overflows_before_a_log(model: Model) -> None:
    first = fault_of(mpjax.autocast(model.loss, HALF), *model.args)
    assert (first.primitive, first.direction) == ("dot_general", "forward"), str(first)
    second = fault_of(model.loss, *model.args)
    assert second.primitive == "log", str(second)
    assert "negative number" in second.diagnosis, str(second)


def two_batches(model: Model) -> None:
    """A batch of NaN and one that is 10,000 times as large, among five."""
    params, _, *rest = model.args

    def loss(params: Any, x: Any) -> Any:
        return 1e-6 * jnp.mean(x**2) * model.loss(params, x, *rest)

    found = mpjax.numerics(loss, params, batches=[X, X, np.nan * X, X, 1e4 * X])
    assert (found.nonfinite, found.outliers) == ((2,), (4,)), str(found)
    assert "not finite in float32 either" in str(found).splitlines()[0], str(found)
    assert found.init_scale == mpjax.numerics(loss, params, batches=[X, X, X]).init_scale, str(found)
    assert mpjax.find_nonfinite(model.loss, params, np.nan * X, *rest) is not None, "the advice does not help"


def flushed_overflow(model: Model) -> None:
    """A module that overflows, under a loss whose gradients are flushed."""
    found = numerics_of(flushed(model))
    named = [path.rpartition("/")[2] for path in found.keep_float32] or [*found.losing_lines]
    assert named, str(found)
    assert all(name == "planted" or "kinds.py" in name for name in named), str(found)
    assert (found.init_scale or 0) > 1024, str(found)


def label_and_an_overflow(x: Any, w: Any) -> Any:
    return label_out_of_range(x, w) + overflowing(x, w)


def overflows_beside_a_label(model: Model) -> None:
    """The lookup comes first; without it, the overflow is left."""
    half = fault_of(mpjax.autocast(model.loss, HALF), *model.args)
    assert (half.primitive, half.direction) == ("gather", "forward"), str(half)
    cured = model.again(overflowing)
    rest = fault_of(mpjax.autocast(cured.loss, HALF), *cured.args)
    assert (rest.primitive, rest.direction) == ("dot_general", "forward"), str(rest)
    assert mpjax.find_nonfinite(cured.loss, *cured.args) is None


def wide_sum(x: Any, w: Any) -> Any:
    return wide(x, w) + summed(x, w).astype(jnp.float32)


def keeps_and_accumulates(model: Model) -> None:
    grad, args = gradient(model)
    found = mpjax.audit(grad, *args)
    is_here(model, found.kept[0].module, found.kept[0].source)
    assert "accumulator" in {risk.kind for risk in found.risks}, str(found)


KINDS: dict[str, tuple[Plant, Answers]] = {
    "sum in half": (summed, {"audit": accumulates}),
    "sum stored in half": (summed_and_stored, {"audit": accumulates}),
    "sum of a Python loop": (unrolled, {"audit": accumulates}),
    "decay of one": (decay_of_one, {"find_nonfinite": loses_a_decay, "audit": rounds_a_decay}),
    "label out of range": (label_out_of_range, {"find_nonfinite": misses_a_row}),
    "forward overflow": (overflowing, {"find_nonfinite": overflows_forward}),
    "log in a checkpoint": (log_in_a_checkpoint, {"find_nonfinite": is_not_defined}),
    "much is kept": (wide, {"audit": keeps_much}),
    "flushed gradients": (dense, {"watch": warns_of_flushing, "numerics": flushes}),
}
COMPETING: dict[str, tuple[Plant, Answers]] = {
    "sum in half and a decay": (summed_decay, {"audit": accumulates_and_decays}),
    "sum in half and an epsilon": (epsilon_in_a_sum, {"audit": accumulates_and_divides}),
    "overflow and a log": (log_and_an_overflow, {"find_nonfinite": overflows_before_a_log}),
    "NaN batch and an outlier": (dense, {"numerics": two_batches}),
    "overflow and flushed gradients": (overflowing, {"numerics": flushed_overflow}),
    "label and an overflow": (label_and_an_overflow, {"find_nonfinite": overflows_beside_a_label}),
    "much is kept and a sum in half": (wide_sum, {"audit": keeps_and_accumulates}),
}
