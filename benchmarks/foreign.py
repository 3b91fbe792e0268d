"""JAX's and Flax's own tests under autocast: which fail only when JAX's entry points are wrapped.

    python -m benchmarks.foreign --tests FOLDER

FOLDER holds test files of JAX and Flax (`custom_api_test.py`, `lax_control_flow_test.py`, `shard_map_test.py`,
`nn_test.py`, `linen_transforms_test.py`, `tests/nnx/nn`), of the installed versions; they are not part of this
repository. Every file runs in its own process with the functions given to `jax.jit`, `jax.grad`,
`jax.value_and_grad` and `jax.vmap`, `nn.Module.apply` and calls of NNX layers in `mpjax.autocast`, and with comparisons
as loose as half precision needs. Failing tests run again without autocast. Those that then pass run a third time with
the same functions in `jax.jit` instead. Tests that also fail there are listed separately: they use values in Python's
control flow, or JAX can't trace them for another reason.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

MODE, REPORT, DTYPE = "MPJAX_FOREIGN_MODE", "MPJAX_FOREIGN_REPORT", "MPJAX_FOREIGN_DTYPE"
TOLERANCE = 0.05
CONTROL_FLOW = "control flow on values"
# Operations that a traced function does not support: `if x > 0`, `float(x)`, `np.asarray(x)`.
_CONCRETE = (
    "TracerBoolConversionError",
    "ConcretizationTypeError",
    "TracerIntegerConversionError",
    "TracerArrayConversionError",
    "NonConcreteBooleanIndexError",
)


# The part that runs inside pytest: `-p benchmarks.foreign`.


def pytest_configure(config: Any) -> None:
    """Wraps JAX before a test module is imported."""
    if os.environ.get(MODE) in CASTERS:
        _wrap_jax()
        _wrap_flax()
        _loosen_comparisons()


def pytest_runtest_logreport(report: Any) -> None:
    """Records the outcome of each test."""
    path = os.environ.get(REPORT)
    if path is None or (report.when != "call" and not report.failed):
        return
    with open(path, "a") as file:
        file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "cause": _cause(report)}) + "\n")


def _cause(report: Any) -> str:
    if not report.failed:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)[-300:]
    lines = re.findall(r"mpjax/((?:casting|kernels|program)[\w/]*\.py):(\d+)", str(report.longrepr))
    where = f" at {lines[-1][0]}:{lines[-1][1]}" if lines else ""
    message = re.sub(r"/\S*/(\w+\.py)", r"\1", message.partition("\n-----")[0])  # without the machine's folders
    return re.sub(r"\s+", " ", message)[:200] + where


def _caster(fun: Any) -> Any:
    return CASTERS[os.environ[MODE]](fun)


def _autocast(fun: Any) -> Any:
    import mpjax

    return mpjax.autocast(fun, f"mixed_{os.environ.get(DTYPE, 'float16')}")


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
            if sys._getframe(1).f_globals["__name__"].startswith(("mpjax.", "benchmarks.")):
                return transform(fun, *args, **kwargs)  # autocast's own
            return transform(_caster(fun) if callable(fun) else fun, *args, **kwargs)

        return call

    for name in ("jit", "grad", "value_and_grad", "vmap"):
        _ORIGINAL[name] = getattr(jax, name)
        setattr(jax, name, wrapped(_ORIGINAL[name]))


def _wrap_flax() -> None:
    from flax import linen, nnx

    apply = linen.Module.apply

    @functools.wraps(apply)
    def half_apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        return _caster(lambda variables, *args: apply(self, variables, *args, **kwargs))(variables, *args)

    linen.Module.apply = half_apply  # type: ignore[method-assign]  # wrapped on purpose
    for layer in _layers(nnx):
        layer.__call__ = _half_call(layer.__call__)


def _layers(nnx: Any) -> list[Any]:
    found = [value for value in vars(nnx).values() if isinstance(value, type) and issubclass(value, nnx.Module)]
    return [layer for layer in dict.fromkeys(found) if "__call__" in vars(layer)]


def _half_call(call: Any) -> Any:
    @functools.wraps(call)
    def half(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _caster(call)(self, *args, **kwargs)

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


# The part that runs the files and compares.


def run_tests(path: pathlib.Path, tests: list[str], mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """The outcome and the cause of each named test of a file, or of all tests if none is named."""
    root = pathlib.Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report"
        environment = os.environ | {MODE: mode, REPORT: str(report), DTYPE: options.dtype, "PYTHONPATH": str(root)}
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        environment["JAX_PLATFORMS"] = "cpu"
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading other installed plugins takes seconds
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.foreign", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=", "-W", "ignore", "--rootdir", str(path.parent)]
        command += ["-k", options.k] if options.k and not tests else []
        command += [f"{path}::{test.partition('::')[2]}" for test in tests] or [str(path)]
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, timeout=options.seconds, capture_output=True, text=True
            )
            if not report.exists():
                raise SystemExit(f"{path}: pytest ran no tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        except subprocess.TimeoutExpired:
            print(f"{path.name}, {mode}: stopped after {options.seconds:.0f} s", flush=True)
        lines = report.read_text().splitlines() if report.exists() else []
    found = map(json.loads, lines)
    return {entry["test"]: (entry["outcome"], entry["cause"]) for entry in found}


def limitation_of(cause: str) -> str:
    """Why a test that fails with its functions in `jax.jit` can't pass under autocast."""
    return CONTROL_FLOW if any(name in cause for name in _CONCRETE) else "another limitation of JAX"


def kind_of(cause: str) -> str:
    """A key that groups the causes of one fault: the exception and the line of mpjax."""
    where = cause.rpartition(" at ")[2] if re.search(" at (casting|kernels|program)", cause) else ""
    return f"{re.sub(r'[0-9]+|0x[0-9a-f]+', '_', cause)[:80]} {where}".strip()


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The test files in a folder."""
    folder = folder.resolve()  # Each file runs in a folder of its own.
    return sorted([*folder.rglob("*_test.py"), *folder.rglob("test_*.py")])


def examine(path: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """The results of a file: counts, and the causes of the tests that only autocast fails, or `jax.jit` too."""
    wrapped = run_tests(path, [], "wrapped", options)
    failed = {test: cause for test, (outcome, cause) in wrapped.items() if outcome == "failed"}
    plain_passes = _with_outcome("plain", path, list(failed), options, "passed")
    jit_failures = _with_outcome("jitted", path, list(plain_passes), options, "failed")
    return {
        "passed": sum(outcome == "passed" for outcome, _ in wrapped.values()),
        "skipped": sum(outcome == "skipped" for outcome, _ in wrapped.values()),
        "also without autocast": len(failed) - len(plain_passes),
        "also in jax.jit": {test.partition("::")[2]: cause for test, cause in jit_failures.items()},
        "only under autocast": {
            test.partition("::")[2]: failed[test] for test in plain_passes if test not in jit_failures
        },
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each file, and the tests that fail only under autocast."""
    from benchmarks import commands

    header = ("file", "pass", "fail only under autocast", "fail in `jax.jit` too")
    rows: list[tuple[Any, ...]] = []
    for name, found in results.items():
        counts = (len(found["only under autocast"]), len(found["also in jax.jit"]), found["also without autocast"])
        rows.append((name, found["passed"], *counts, found["skipped"]))
    rows.append(("**all**", *map(sum, zip(*(row[1:] for row in rows), strict=True))))
    faults = [(name, *fault) for name, found in results.items() for fault in found["only under autocast"].items()]
    listed = "".join(f"\n- {name}, `{test}`: {cause}" for name, test, cause in faults)
    return commands.markdown((*header, "fail without autocast too", "skipped"), rows) + (
        f"{listed}\n" if listed else ""
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs from the command line."""
    from benchmarks import commands
    from perf.results import previous

    parser = commands.parser(__doc__)
    parser.add_argument("--tests", type=pathlib.Path, required=True, help="folder of JAX's and Flax's test files")
    parser.add_argument("--only", default="", help="run only files whose path contains this; the other results stay")
    parser.add_argument("-k", default="", help="run only tests that match this pytest expression")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of a file in seconds")
    options = parser.parse_args(arguments)
    name = f"foreign_{options.dtype}"
    results = previous(name, options.out) if options.only else {}
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    limitations: dict[str, list[str]] = collections.defaultdict(list)
    for path in files_in(options.tests):
        if options.only not in str(path):
            continue
        found = results[path.name] = examine(path, options)
        print(f"{path.name}:\n{table({path.name: found})}", flush=True)
        for test, cause in found["only under autocast"].items():
            kinds[kind_of(cause)].append(f"{test}: {cause}")
        for test, cause in found["also in jax.jit"].items():
            limitations[limitation_of(cause)].append(f"{test}: {cause}")
        commands.publish(name, results, table(results), options.out)
    print("\nFail only under autocast:")
    _print_groups(kinds)
    print("\nAlso fail in jax.jit:")
    _print_groups(limitations)


def _with_outcome(mode: str, path: pathlib.Path, tests: list[str], options: argparse.Namespace, outcome: str) -> Any:
    """The tests that have this outcome in another mode, with the cause."""
    found = run_tests(path, tests, mode, options) if tests else {}
    return {test: found[test][1] for test in tests if found.get(test, ("",))[0] == outcome}


def _print_groups(kinds: dict[str, list[str]]) -> None:
    for kind, tests in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"\n## {len(tests)} × {kind}")
        print("\n".join(f"  {test}" for test in tests))


if __name__ == "__main__":
    main()
