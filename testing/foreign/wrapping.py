"""A pytest plugin that runs JAX's and Flax's own tests under autocast: `-p testing.foreign.wrapping`.

The environment names the mode: functions given to JAX's transformations and calls of Flax's layers run under autocast
("wrapped"), in `jax.jit` ("jitted"), or as they are, and are compared with casts by hand ("by hand").
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from testing.foreign import accuracy

MODE, REPORT, DTYPE = "MPJAX_FOREIGN_MODE", "MPJAX_FOREIGN_REPORT", "MPJAX_FOREIGN_DTYPE"
TOLERANCE = 0.05


def pytest_configure(config: Any) -> None:
    """Wraps JAX before a test module is imported."""
    if os.environ.get(MODE) in WRAPPERS:
        _wrap_jax()
        _wrap_flax()
    if os.environ.get(MODE) in CASTERS:
        _loosen_comparisons()


def pytest_runtest_logreport(report: Any) -> None:
    """Records the outcome of each test."""
    path = os.environ.get(REPORT)
    if path is None or (report.when != "call" and not report.failed):
        return
    _record({"test": report.nodeid, "outcome": report.outcome, "cause": _cause(report)})


def _record(entry: Any) -> None:
    with open(os.environ[REPORT], "a") as file:
        file.write(json.dumps(entry) + "\n")


def _cause(report: Any) -> str:
    if not report.failed:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)[-300:]
    lines = re.findall(r"mpjax/((?:casting|kernels|program)[\w/]*\.py):(\d+)", str(report.longrepr))
    where = f" at {lines[-1][0]}:{lines[-1][1]}" if lines else ""
    message = re.sub(r"/\S*/(\w+\.py)", r"\1", message.partition("\n-----")[0])  # without the machine's folders
    return re.sub(r"\s+", " ", message)[:200] + where


def _transformed(transform: Callable[[Any], Any], fun: Any) -> Any:
    """A transformation of a function, in this process's mode."""
    mode = os.environ[MODE]
    return _compared(transform, fun) if mode == BY_HAND else transform(CASTERS[mode](fun))


def _compared(transform: Callable[[Any], Any], fun: Any) -> Any:
    """The transformed function as it is; each call from outside is compared with casts by hand."""
    plain, cast = transform(fun), transform(_autocast(fun))

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if accuracy.is_from_outside(args, kwargs):
            test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
            _record({"test": test, **accuracy.compare(plain, cast, args, kwargs, _half())})
        return plain(*args, **kwargs)

    return call


def _half() -> str:
    return os.environ.get(DTYPE, "float16")


def _autocast(fun: Any) -> Any:
    import mpjax

    return mpjax.autocast(fun, f"mixed_{_half()}")


def _jitted(fun: Any) -> Any:
    """The function in `jax.jit`, called like autocast: arguments that are not arrays are passed through unchanged."""
    import jax

    from mpjax.program.tracing import functional, is_array

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call, args, kwargs, finish = functional(fun, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        output: dict[str, Any] = {}

        def flat(*arrays: Any) -> list[Any]:
            values = iter(arrays)
            args, kwargs = jax.tree.unflatten(tree, [next(values) if is_array(x) else x for x in leaves])
            results, output["tree"] = jax.tree.flatten(call(*args, **kwargs))
            output["rest"] = [None if isinstance(x, jax.Array) else x for x in results]
            return [x for x in results if isinstance(x, jax.Array)]

        outs = iter(_ORIGINAL["jit"](flat)(*filter(is_array, leaves)))
        return finish(jax.tree.unflatten(output["tree"], [next(outs) if x is None else x for x in output["rest"]]))

    return wrapped


_ORIGINAL: dict[str, Any] = {}
CASTERS = {"wrapped": _autocast, "jitted": _jitted}
BY_HAND = "by hand"
WRAPPERS = (*CASTERS, BY_HAND)


def _wrap_jax() -> None:
    import flax.linen
    import flax.nnx
    import jax
    import optax

    import mpjax.casting

    del flax, mpjax, optax  # imported first: functions that libraries jit themselves are not under test

    def wrapped(transform: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(transform)
        def call(fun: Any = None, *args: Any, **kwargs: Any) -> Any:
            if fun is None:
                return lambda fun: call(fun, *args, **kwargs)
            own = sys._getframe(1).f_globals["__name__"].startswith(("mpjax.", "testing."))
            if own or not callable(fun):
                return transform(fun, *args, **kwargs)
            return _transformed(lambda fun: transform(fun, *args, **kwargs), fun)

        return call

    for name in ("jit", "grad", "value_and_grad", "vmap"):
        _ORIGINAL[name] = getattr(jax, name)
        setattr(jax, name, wrapped(_ORIGINAL[name]))


def _wrap_flax() -> None:
    from flax import linen, nnx

    apply = linen.Module.apply

    @functools.wraps(apply)
    def half_apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        called = lambda variables, *args: apply(self, variables, *args, **kwargs)
        return _transformed(lambda fun: fun, called)(variables, *args)

    linen.Module.apply = half_apply  # type: ignore[method-assign]  # wrapped on purpose
    for layer in _layers(nnx):
        layer.__call__ = _half_call(layer.__call__)


def _layers(nnx: Any) -> list[Any]:
    found = [value for value in vars(nnx).values() if isinstance(value, type) and issubclass(value, nnx.Module)]
    return [layer for layer in dict.fromkeys(found) if "__call__" in vars(layer)]


def _half_call(call: Any) -> Any:
    @functools.wraps(call)
    def half(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _transformed(lambda fun: fun, call)(self, *args, **kwargs)

    return half


def _loosen_comparisons() -> None:
    """Loosens comparisons, exact ones included, to half's precision; finite differences are not compared."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax._src import public_test_util, test_util

    close = np.testing.assert_allclose

    def inexact(*arrays: Any) -> bool:
        try:
            return any(jnp.issubdtype(np.asarray(x).dtype, jnp.inexact) for x in arrays)
        except Exception:  # the operands are not arrays
            return False

    def loose(actual: Any, desired: Any, *args: Any, **kwargs: Any) -> None:
        if jax.dtypes.float0 in (getattr(actual, "dtype", None), getattr(desired, "dtype", None)):
            assert np.shape(actual) == np.shape(desired)
            return None
        if not inexact(actual, desired):
            return close(actual, desired, **{k: v for k, v in kwargs.items() if k in ("err_msg", "verbose")})
        dtype = complex if np.iscomplexobj(actual) or np.iscomplexobj(desired) else float
        actual, desired = (np.asarray(x, dtype) for x in (actual, desired))
        scale = np.nanmax(np.abs(desired), initial=1.0, where=np.isfinite(desired))
        return close(actual, desired, rtol=TOLERANCE, atol=TOLERANCE * scale)

    def loose_equal(actual: Any, desired: Any, *args: Any, **kwargs: Any) -> None:
        return loose(actual, desired) if inexact(actual, desired) else equal(actual, desired, *args, **kwargs)

    equal = np.testing.assert_array_equal
    np.testing.assert_allclose = np.testing.assert_array_almost_equal = np.testing.assert_almost_equal = loose
    np.testing.assert_array_equal = loose_equal
    np.isclose = functools.partial(_is_close, np.isclose)
    np.allclose = lambda a, b, **kwargs: bool(np.all(np.isclose(a, b)))
    jnp.allclose = lambda a, b, **kwargs: jax.numpy.all(_is_close(jnp.isclose, a, b))
    public_test_util._assert_numpy_allclose = lambda a, b, atol=None, rtol=None, err_msg="": loose(a, b)
    public_test_util._check_dtypes_match = lambda a, b: None
    test_util.check_grads = public_test_util.check_grads = lambda *args, **kwargs: None
    case: Any = test_util.JaxTestCase
    case.assertArraysEqual = lambda self, a, b, **kwargs: loose_equal(a, b)
    case.assertArraysAllClose = lambda self, a, b, **kwargs: loose(a, b)
    case.assertAllClose = _loose_comparison_of_trees(loose)


def _is_close(is_close: Callable[..., Any], a: Any, b: Any, **_: Any) -> Any:
    return is_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def _loose_comparison_of_trees(loose: Any) -> Any:
    import jax

    def compare(self: Any, a: Any, b: Any, **kwargs: Any) -> None:
        first, second = jax.tree.leaves(a), jax.tree.leaves(b)
        assert len(first) == len(second)
        for x, y in zip(first, second, strict=True):
            loose(x, y)

    return compare
