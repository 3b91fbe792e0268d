"""Properties of autocast that must hold on any program that JAX can trace."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

import mpjax
from mpjax.casting.autocast import autocast_of, plan_program, run_planned
from mpjax.casting.plan import Plan
from mpjax.casting.policies import setting_of
from mpjax.inspection.explanation import Explanation, explanation
from mpjax.program import compat
from mpjax.program.tracing import TracedCall
from mpjax.program.tracing import trace as trace_to_plan
from testing.measures import HALF, MATMULS, Equation, equations, inner_jaxprs, is_inner_product, matmul_flops, risky_of
from testing.random_programs.cases import OUTSIDE, TRANSFORMS, Case
from testing.random_programs.evaluate import (
    Unsupported,
    as_typed,
    casts_by_hand,
    evaluate,
    exact,
    float8_casts,
    is_float,
    rounded,
)

# Operations that autocast may add: casts, broadcasts before casts, barriers, data movement, wider weight gradients.
_ADDED_BY_AUTOCAST = frozenset(
    """convert_element_type broadcast_in_dim reshape squeeze slice dynamic_slice transpose rev copy copy_p name
    stop_gradient optimization_barrier device_put expand_dims split unstack iota argmax argmin eq ne lt le gt ge
    eq_to lt_to le_to is_finite pvary pcast reduce_or custom_lin select_n mul sharding_constraint concatenate
    reshard reduce_window_max reduce_window_min detached straight_through aligned matmul_result matmul_tangent
    float8_scale float8_quantise float8_rescale float8_result float8_tangent mxfp8_matmul unfused unscaled""".split()
)


class Failure(AssertionError):
    """A property that does not hold.

    Args:
        property: Its name.
        cause: Identifies the failure, without names of variables.
        detail: Details for the user.
    """

    def __init__(self, property: str, cause: str, detail: str = ""):
        super().__init__(f"{property}: {cause}\n{detail}")
        self.property, self.cause = property, cause

    @property
    def signature(self) -> str:
        """Failures with the same signature are treated as one fault."""
        return f"{self.property}: {self.cause}"


class Rejected(Exception):
    """JAX itself can't trace the program."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function without dead code, which the compiler removes before any dtype matters.

    Args:
        jaxpr: Its open jaxpr.
        whole: The jaxpr with dead code.
        consts: One for each constvar.
        out_avals: The types of its results.
        shapes: The tree of its results.
        arrays: For each result, whether the function returned it as an array.
    """

    jaxpr: Any
    whole: Any
    consts: Any
    out_avals: Any
    shapes: Any
    arrays: Sequence[bool]

    @property
    def marks(self) -> collections.Counter[str]:
        """The equations that stay although nothing reads them, which tools look for."""
        names = (e.name for e in equations(self.whole))
        return collections.Counter(name for name in names if name in ("mark", "name"))

    @property
    def leaks(self) -> bool:
        """Whether a constant, here or in a sub-jaxpr, is a tracer, even an unused one."""
        inside = (inner for e in equations(self.whole) for inner in inner_jaxprs(e.eqn))
        consts = (const for jaxpr in inside for const in getattr(jaxpr, "consts", ()))
        return any(isinstance(const, jax.core.Tracer) for const in (*self.consts, *consts))


def trace(fun: Any, *args: Any) -> Traced:
    """Traces a function, bypassing JAX's caches."""
    arrays: list[bool] = []

    def called(*args: Any) -> Any:
        out = fun(*args)
        arrays[:] = [isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out)]
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        closed, shapes = jax.make_jaxpr(called, return_shape=True)(*args)
    live, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    return Traced(live, closed.jaxpr, closed.consts, closed.out_avals, shapes, arrays)


def cause_of(error: BaseException) -> str:
    """An error's type, the beginning of its message, and the last line of mpjax in its traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/mpjax/" in f.filename]
    where = f" at {frames[-1].filename.rsplit('/mpjax/', 1)[-1]}:{frames[-1].name}" if frames else ""
    message = (str(error).strip().splitlines() or [""])[0]
    message = re.sub(r"Var\(id=\d+\)|Var\([^)]*\)|0x[0-9a-f]+|\d+|<[^>]*>|'[fv]_'", "_", message)
    message = re.sub(r"(float|int|bool|bfloat)_?\[[^\]]*\]", "T", message)
    return f"{type(error).__name__}({message[:90]}){where}"


def _floats(variables: Any) -> tuple[str, ...]:
    return tuple(str(v.aval.dtype) for v in variables if hasattr(v.aval, "dtype") and is_float(v.aval.dtype))


def _wants_float32(eqn: Any) -> bool:
    """Whether the author of a matmul asked for float32 arithmetic."""
    precision = eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    # The algorithm of a fused attention is BF16_BF16_F32 or F16_F16_F32.
    return any(part is not None and ("HIGHEST" in str(part) or "F32_F32" in str(part)) for part in parts)


def _shapes(matmul: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of operands and result, which the matmul shares with those of its derivatives."""
    return tuple(sorted(tuple(sorted(v.aval.shape)) for v in (*matmul.invars[:2], *matmul.outvars)))


def _live_equations(jaxpr: Any, times: int = 1, path: tuple[str, ...] = ()) -> Iterator[Equation]:
    """Equations that are live at their level; before JAX 0.12 a loop's body keeps dead ones."""
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    live, _ = partial_eval.dce_jaxpr(opened, [True] * len(opened.outvars), instantiate=True)
    for eqn in live.eqns:
        yield Equation(eqn, times, path)
        iterations = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        name = _UNTIL_TOLERANCE if _ends_at_tolerance(eqn) else eqn.primitive.name
        for inner in inner_jaxprs(eqn):
            yield from _live_equations(inner, iterations, (*path, name))


_UNTIL_TOLERANCE = "while until a tolerance"


def _ends_at_tolerance(eqn: Any) -> bool:
    """Whether matmuls compute what the condition of a `while` reads. Nothing else in its condition and body is live."""
    if eqn.primitive.name != "while":
        return False
    params = eqn.params
    condition, used = partial_eval.dce_jaxpr(params["cond_jaxpr"].jaxpr, [True])
    needed = used[params["cond_nconsts"] :]
    while True:
        body, used = partial_eval.dce_jaxpr(params["body_jaxpr"].jaxpr, needed)
        wider = [a or b for a, b in zip(needed, used[params["body_nconsts"] :], strict=True)]
        if wider == needed:
            return any(e.name in MATMULS for jaxpr in (condition, body) for e in equations(jaxpr))
        needed = wider


def _widened(jaxpr: Any) -> set[Any]:
    """The float32 values of a jaxpr, at any depth, that casts from bfloat16 make, moved or not."""
    found: set[Any] = set()
    for e in equations(jaxpr):
        operands = [v for v in e.eqn.invars[:1] if not hasattr(v, "val")]
        cast = e.name == "convert_element_type" and e.eqn.invars[0].aval.dtype == jnp.bfloat16
        if cast or (
            e.name in ("transpose", "reshape", "squeeze", "broadcast_in_dim")
            and operands
            and found.issuperset(operands)
        ):
            found.update(e.eqn.outvars)
    return found


def check_structure(case: Case, plain: Traced, found: Traced) -> None:
    """Results have the same tree, types, shapes, shardings, dtypes and weak types; no mark is lost."""
    expected, actual = (str(jax.tree.structure(traced.shapes)) for traced in (plain, found))
    if expected != actual:
        raise Failure("structure", "different tree", f"{expected}\n{actual}")
    if plain.arrays != found.arrays:
        raise Failure("structure", "type of a result", f"arrays: {plain.arrays} became {found.arrays}")
    if case.transform in OUTSIDE and plain.marks - found.marks:
        raise Failure("structure", "a mark is lost", f"{plain.marks} became {found.marks}")
    for a, b in zip(plain.out_avals, found.out_avals, strict=True):
        for field in ("shape", "dtype", "weak_type"):
            if getattr(a, field) != getattr(b, field):
                raise Failure("structure", f"{field} of a result", f"{a.str_short()} became {b.str_short()}")
        # JAX gives the results of constants the mesh of the context or none, depending on the operation.
        same = a.sharding.spec == b.sharding.spec if a.sharding.mesh.empty else a.sharding == b.sharding
        if case.explicit and not same:
            raise Failure("structure", "sharding of a result", f"{a.sharding} became {b.sharding}")


def check_dtypes(case: Case, plain: Traced, found: Traced) -> None:
    """Matmuls run in half unless the user requested float32; no additional risky operation runs in half."""
    if case.rules == "half" or "@mpjax.half_function" in case.features:
        return
    fixed = bool({"@mpjax.float_function", "@without_autocast", "@mpjax.promote_function"} & {*case.features})
    # XLA's CPU compiler lacks some bfloat16 matmuls, which explicit shardings prevent from being rewritten, and half
    # gradients of matmuls in float8: mpjax runs them on widened operands.
    widened = _widened(found.jaxpr) if (case.explicit or case.is_scaled) and case.half == jnp.bfloat16 else set()
    # A batch over explicit axes has no float8 derivative, and that in half is on widened operands too.
    emulated = case.explicit and case.is_scaled and "vmap" in case.transform
    # Off GPUs, JAX's attention without a kernel has no float16. The plan is bfloat16's, which is checked.
    in_full = case.rules == "fused" and case.half == jnp.float16
    # A solve runs as traced, and so does JAX's derivative of it, which applies its operator outside of it.
    of_solves = {
        _shapes(e.eqn) for e in _live_equations(found.jaxpr) if e.name in MATMULS and "custom_linear_solve" in e.path
    }
    exact_ones = _with_exact_results(found.jaxpr) | _of_constants(found.jaxpr) | _of_solved(found.jaxpr)
    fixed |= any(text in case.source for text in _EXACT)
    # JAX removes a solve whose results are not read; what it would have read stays exact.
    fixed |= "custom_linear_solve" in case.source and not of_solves
    for e in _live_equations(found.jaxpr):
        if e.name not in MATMULS or id(e.eqn) in exact_ones or not matmul_flops(e.eqn):
            continue
        operands, wide = tuple(str(dtype) for dtype in e.in_dtypes[:2] if is_float(dtype)), _wants_float32(e.eqn)
        if wide and set(operands) & {str(dtype) for dtype in HALF}:
            raise Failure("precision", f"{e.name} requests float32 but runs on {operands}", "/".join(e.path))
        # `vmap` makes one of each example's sum with a vector that all examples share.
        inner = is_inner_product(e.eqn) or ("vmap" in case.transform and e.eqn.outvars[0].aval.shape == (2,))
        free = wide or fixed or inner or _shapes(e.eqn) in of_solves
        free |= emulated or in_full or _UNTIL_TOLERANCE in e.path
        free |= "root_near" in case.source and "eval_jaxpr" in e.path  # JAX's derivative of an opaque `custom_root`.
        are_wide = [not hasattr(v, "val") and v in widened for v in e.eqn.invars[:2]]
        free |= any(are_wide) if case.is_scaled else all(are_wide)  # the other may be a parameter
        if not free and operands == ("float32", "float32"):
            raise Failure("float32 matmul", f"{e.name} in {e.path[-1] if e.path else 'the program'}", "/".join(e.path))
    risky = _risky(found.jaxpr) - _risky(plain.jaxpr)
    if risky and "@mpjax.promote_function" not in case.features:  # Its operations run in the dtypes of their inputs.
        raise Failure("risky in half", ", ".join(sorted({name for name, _ in risky})), str(risky))


# What keeps matmuls in float32, and their derivatives: integers, products, indices, decompositions.
_EXACT = ("jnp.tri(3) @", "'i,j->ij'", "[::-1] @", "jnp.linalg.", "astype(jnp.int32)")


def _with_exact_results(jaxpr: Any, inside: bool = False) -> set[int]:
    """The matmuls, by `id`, whose results may have to be exact: they reach an index, a decomposition or a solve.

    What a function inside returns, or reads, may reach one of its caller, or of its own.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    read = {v for v in jaxpr.outvars if not hasattr(v, "val")} if inside else set()
    found: set[int] = set()
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        reaches = _reads_exactly(eqn) or not read.isdisjoint(eqn.outvars)
        for function in inner_jaxprs(eqn):
            reaches |= any(_reads_exactly(e.eqn) for e in equations(function))
            found |= _with_exact_results(function, reaches)
        if reaches and name in MATMULS:
            found.add(id(eqn))
        elif reaches:
            read.update(v for v in eqn.invars if not hasattr(v, "val"))
    return found


def _of_constants(jaxpr: Any, constant: Collection[int] = ()) -> set[int]:
    """The matmuls, by `id`, of numbers that depend on no float: an identity, a one-hot matrix, a tangent of ones.

    Inputs at the given positions don't, either.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    dependent = {v for i, v in enumerate(jaxpr.invars) if is_float(v.aval.dtype) and i not in constant}
    found: set[int] = set()
    for eqn in jaxpr.eqns:
        reads = [not hasattr(v, "val") and v in dependent for v in eqn.invars]
        passed = {"cond": reads[1:], "shard_map": reads}.get(eqn.primitive.name, ())
        for function in inner_jaxprs(eqn):
            found |= _of_constants(function, [i for i, each in enumerate(passed) if not each])
        if any(reads):
            dependent.update(v for v in eqn.outvars if is_float(v.aval.dtype))
        elif eqn.primitive.name in MATMULS:
            found.add(id(eqn))
    return found


def _of_solved(jaxpr: Any) -> set[int]:
    """The matmuls, by `id`, that are the gradient of a solve's operands: they read its result, or a sum of results."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    solved: set[Any] = set()
    found: set[int] = set()
    for eqn in jaxpr.eqns:
        for function in inner_jaxprs(eqn):
            found |= _of_solved(function)
        reads = any(not hasattr(v, "val") and v in solved for v in eqn.invars)
        if eqn.primitive.name == "custom_linear_solve" or (reads and eqn.primitive.name in ("neg", "add_any")):
            solved.update(eqn.outvars)
        elif reads and eqn.primitive.name in MATMULS:
            found.add(id(eqn))
    return found


def _reads_exactly(eqn: Any) -> bool:
    """Whether an equation makes indices, decomposes a matrix or solves."""
    indexes = eqn.primitive.name == "convert_element_type" and np.dtype(eqn.params["new_dtype"]) == np.int32
    return eqn.primitive.name in _DECOMPOSITIONS or (indexes and is_float(eqn.invars[0].aval.dtype))


_DECOMPOSITIONS = ("lu", "cholesky", "eigh", "triangular_solve", "custom_linear_solve")


def _risky(jaxpr: Any) -> collections.Counter[tuple[str, str]]:
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for e in risky_of(jaxpr):
        found[e.name, e.path[-1] if e.path else ""] += e.times
    return found


def check_repeats(found: Traced, again: Traced) -> None:
    """The same program gives the same jaxpr."""
    first, second = (re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr)) for traced in (found, again))
    if first != second:
        lines = [(a, b) for a, b in zip(first.splitlines(), second.splitlines(), strict=False) if a != b]
        raise Failure("repeats", "different jaxpr at the second trace", "\n".join(map(str, lines[:3])))


def check_plan(case: Case, subject: Subject, found: Traced) -> None:
    """The plan of a new trace of the program is the one that runs, both applied and as shown by `explain`."""
    try:
        plan = subject.plan(case)
        shown = explanation(plan)
    except Exception as error:
        raise Failure("explain", cause_of(error), traceback.format_exc()) from error
    check_repeats(found, subject.rewritten(plan))
    check_explain(case, subject.plain, found, shown)


def check_explain(case: Case, plain: Traced, found: Traced, plan: Explanation) -> None:
    """`explain` lists exactly the operations that run; those of fused attention are one."""
    if any(row.op == "fused_attention" for row in plan.rows):
        return
    listed: collections.Counter[Any] = collections.Counter()
    inside = {e.name for e in equations(found.whole) if inner_jaxprs(e.eqn)}
    for row in plan.rows:
        of_floats = any(map(is_float, (*row.dtypes_in, *row.dtypes_out)))  # not only of complex numbers
        if row.op == "attention":  # Why it is not fused.
            continue
        if of_floats and row.op not in _ADDED_BY_AUTOCAST and row.op not in inside and row.count and not row.rule:
            listed[_sum_name(row.op), tuple(sorted({dtype for dtype in row.dtypes_in if is_float(dtype)}))] += row.count
    # Operations that are dead except for an effect may be listed or not.
    missing, extra = _runs(_live_equations(found.jaxpr), plain) - listed, listed - _runs(equations(found.whole), plain)
    if missing or extra:
        names = sorted({op for op, _ in (*missing, *extra)})
        raise Failure("explain", f"disagrees about {names[0]}", f"runs, not listed: {missing}\nlisted only: {extra}")


def _runs(found: Iterator[Equation], plain: Traced) -> collections.Counter[Any]:
    """How often each of the program's primitives runs, by the floating dtypes of its operands."""
    known = {e.name for e in equations(plain.whole)} - _ADDED_BY_AUTOCAST
    known |= {"add", "add_any"} if known & {"add", "add_any"} else set()
    runs: collections.Counter[Any] = collections.Counter()
    for e in found:
        floats = [dtype.name for dtype in e.in_dtypes if is_float(dtype)]
        if e.name == "gather" and e.eqn.params["unique_indices"]:  # a slice under vmap
            continue
        if e.times and (floats or _floats(e.eqn.outvars)) and e.name in known and not inner_jaxprs(e.eqn):
            runs[_sum_name(e.name), tuple(sorted(set(floats)))] += e.times
    return runs


def _sum_name(name: str) -> str:
    """Unifies JAX's two primitives for sums of cotangents; retransposing a linear solve uses the other one."""
    return "add" if name == "add_any" else name


def _norm(x: Any) -> float:
    return float(np.sqrt(np.sum(np.square(np.asarray(x, np.float64)))))


# The allowed error against float64, as a multiple of the error from rounding every value at random.
FACTOR = 3.0


def check_values(case: Case, subject: Subject, found: Traced) -> str:
    """Values and gradients are as close to float64 as those of the program with every value rounded to half.

    A result is not judged if its rounding error is a quarter of it, or does not shrink with the rounding unit: the
    program is ill-conditioned there, or discontinuous.

    Returns:
        The outcome: "checked", or why nothing could be checked.
    """
    half, plain, args = case.half, subject.plain, subject.args

    def draw(seed: int, store_inputs: Any = None) -> Any:
        rng = np.random.default_rng(seed)
        casts = float8_casts(rng) if case.is_scaled else None
        return evaluate(plain, args, rounded(half, rng), store_inputs, casts)

    try:
        if case.rules == "half":
            evaluate(found, args, as_typed)
            return "level half"
        reference = subject.reference
        draws = [draw(i) for i in range(3)]
        results = evaluate(found, args, as_typed)
    except Unsupported as reason:
        return str(reason)
    judged = 0
    eps = float(jnp.finfo(half).eps)
    for i, aval in enumerate(plain.out_avals):
        if not is_float(aval.dtype) or not reference[i].size:
            continue
        size = _norm(reference[i])
        errors = [_norm(found[i] - reference[i]) for found in draws]
        if not np.isfinite(size) or not np.isfinite(max(errors)) or max(errors) > 0.25 * size:
            continue
        judged += 1
        error = _norm(results[i] - reference[i])
        limit = FACTOR * max(errors) + eps * size
        if error <= limit:
            continue
        if not np.isfinite(error) and _out_of_range(plain, args, half):
            return "beyond the range of half"
        # Also with exact inputs: rounding one side of a comparison may break a tie.
        stores = [exact if i % 2 else None for i in range(30)]
        more = [draw(10 + i, store) for i, store in enumerate(stores)]
        # In its own dtypes, too: a program may compare a value with its rounding, which exact values can't show.
        more.append(evaluate(plain, args, as_typed))
        errors += [_norm(found[i] - reference[i]) for found in more]
        if error <= FACTOR * max(errors) + eps * size or max(errors) > 0.25 * size:
            continue
        raise Failure(
            "accuracy",
            "not finite" if not np.isfinite(error) else "error above rounding",
            f"result {i}: error {error:.3g} of {size:.3g}, rounding {max(errors):.3g}",
        )
    return "checked" if judged else "ill-conditioned"


# The allowed error as a multiple of that of careful casts by hand, and what one rounding of the result may add.
OF_BY_HAND, UNIT = 2.0, 0.5


def check_against_casts_by_hand(case: Case, subject: Subject, found: Traced) -> None:
    """Values and gradients are as close to float64 as with careful casts by hand around every matmul.

    A few numbers are exact by luck. So these casts round up and down at random, several times, and the largest error
    counts. Half the epsilon of the dtype is added: the carry of a loop that a matmul reads is rounded once, even if the
    loop doesn't run.
    """
    regions = any(feature.startswith("@") for feature in case.features)
    if case.rules != "default" or case.is_scaled or case.explicit or regions:
        return

    def by_hand(seed: int) -> Any:
        store = as_typed if seed == 0 else rounded(case.half, np.random.default_rng(seed))
        return evaluate(subject.plain, subject.args, as_typed, casts=casts_by_hand(case.half, store))

    try:
        results = evaluate(found, subject.args, as_typed)
        draws = [by_hand(seed) for seed in range(4)]
    except Unsupported:
        return
    for i, aval in enumerate(subject.plain.out_avals):
        reference = subject.reference[i]
        if not is_float(aval.dtype) or not reference.size:
            continue
        size, error = _norm(reference), _norm(results[i] - reference)
        errors = [_norm(draw[i] - reference) for draw in draws]
        if not np.isfinite(size) or not np.isfinite(max(errors)) or max(errors) > 0.25 * size:
            continue
        if not max(errors) and any(e.name in ("scan", "while") for e in equations(subject.plain)):
            continue  # A loop carries half what a matmul in it reads: `x - loop(x)`, 0 by hand, may be x's rounding.
        added = UNIT * float(jnp.finfo(case.half).eps) * size
        if error <= OF_BY_HAND * max(errors) + added:
            continue
        errors += [_norm(by_hand(seed)[i] - reference) for seed in range(4, 24)]
        if error <= OF_BY_HAND * max(errors) + added or max(errors) > 0.25 * size:
            continue
        # A comparison may have a tie, which rounding one side breaks.
        stores = [(rounded(case.half, np.random.default_rng(seed)), exact if seed % 2 else None) for seed in range(10)]
        if any(_norm(evaluate(subject.plain, subject.args, *s)[i] - reference) > 0.25 * size for s in stores):
            continue
        if np.isfinite(error) or not _out_of_range(subject.plain, subject.args, case.half):
            raise Failure("by hand", "error above casts by hand", f"result {i}: {error:.3g}, by hand {max(errors):.3g}")


def _out_of_range(plain: Traced, args: Any, half: Any) -> bool:
    """Whether a value of the program exceeds the range of half."""
    largest = 0.0

    def store(x: Any, dtype: Any) -> Any:
        nonlocal largest
        finite = np.abs(x[np.isfinite(x)]) if np.ndim(x) else np.abs(x)
        largest = max(largest, float(np.max(finite, initial=0.0)))
        return x

    evaluate(plain, args, store)
    return largest > 0.5 * float(jnp.finfo(half).max)


def check_runs(case: Case, args: Any) -> None:
    """The program compiles and runs if the plain program does, and is compiled once."""
    fun: Any = jax.jit(case.autocast())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            jax.block_until_ready(fun(*args))
        except Exception as error:
            try:
                jax.block_until_ready(jax.jit(case.plain())(*args))
            except Exception:
                return
            raise Failure("runs compiled", cause_of(error), traceback.format_exc()) from error
        fun(*args)
    if fun._cache_size() != 1:
        raise Failure("runs compiled", "compiled a second time for the same arguments")


class Subject:
    """A program under its transformation as JAX traces it, the input of autocast to any dtype.

    Args:
        case: One of its cases.
        args: Arguments of the program; by default the case's own.

    Raises:
        Rejected: JAX can't trace the program without autocast.
    """

    def __init__(self, case: Case, args: Any = None):
        self.args = case.arguments() if args is None else args
        self._programs: dict[Any, TracedCall] = {}
        self.fun = TRANSFORMS[case.transform](case.program(), lambda fun: fun)
        try:
            with case.on_mesh(), compat.present_primitives():
                self.plain = trace(case.plain(), *self.args)
        except Exception as error:
            raise Rejected(f"{type(error).__name__}: {error}") from error
        if any(e.name == "custom_lin" for e in equations(self.plain.jaxpr)):
            raise Rejected("forward-mode differentiation of a custom_vjp")
        if self.plain.leaks:
            raise Rejected("a rule closes over a differentiated value; JAX leaves a tracer in the program")

    def program(self, half: Any) -> TracedCall:
        """The program as autocast traces it for a half dtype, if autocast is outside the transformation."""
        if half not in self._programs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._programs[half] = trace_to_plan(self.fun, self.args, {}, half)
        return self._programs[half]

    @functools.cached_property
    def reference(self) -> Any:
        """The results in float64."""
        return evaluate(self.plain, self.args)

    def plan(self, case: Case) -> Plan:
        """The plan of the program for the dtype and the rules of a case."""
        cast = autocast_of(case.cast(self.fun))
        assert cast is not None
        setting = setting_of(cast.policy, cast.rules)
        assert setting is not None
        return plan_program(self.program(setting.half), setting)

    def rewritten(self, plan: Plan) -> Traced:
        """The program rewritten by a plan."""
        program = self.program(plan.setting.half)
        return trace(lambda *args: run_planned(dataclasses.replace(program, arrays=args), plan), *self.args)


def _fails_in_jit(case: Case, subject: Subject, error: Exception) -> bool:
    """Whether the program fails in the same way with `jax.jit` in autocast's place.

    Autocast traces a function before JAX differentiates it, as `jax.jit` does. JAX then loses some information, such as
    the named axis of a `vmap` around a custom_jvp whose rule needs it in a loop. Nor does a function in a `jax.jit` of
    its own, as `half_function` makes it, read what a custom_vjp around it closes over.
    """
    marked = re.sub(r"@mpjax\.(half|float)_function", "@jax.jit", case.source)
    for each in (case, dataclasses.replace(case, source=marked)):
        try:
            trace(TRANSFORMS[each.transform](each.program(), jax.jit), *subject.args)
        except Exception as other:
            if type(other) is type(error) and str(other).splitlines()[:1] == str(error).splitlines()[:1]:
                return True
    return False


def _raise_unless_jit_leaks(case: Case, subject: Subject, failure: Failure) -> None:
    """Raises a failure, unless `jax.jit` in autocast's place leaves a tracer in the program.

    This happens if a derivative rule closes over a value of a program whose trace has ended: JAX then returns another
    gradient, or none. In reverse mode, it first removes what nothing reads, and such a rule with it. Autocast keeps
    that in a loop's body, as forward mode does.
    """
    for transform in (case.transform, "jvp"):
        if trace(TRANSFORMS[transform](case.program(), jax.jit), *subject.args).leaks:
            raise Rejected("under jit, JAX leaves a tracer in the program") from failure
    raise failure


def _raise_unless_in_nested_rules(case: Case, subject: Subject, failure: Failure) -> None:
    """Raises a failure, unless it may be due to the backward rule of a custom_vjp inside a custom_jvp rule.

    Autocast runs that as traced, as `explain` says.
    """
    if any(row.op == "custom_lin" for row in mpjax.explain(case.cast(case.program()), *subject.args).rows):
        raise Rejected("a custom_jvp rule differentiates a custom_vjp") from failure
    raise failure


def check(case: Case, compiled: bool = False, subject: Subject | None = None, retrace: bool = True) -> str:
    """Checks all properties of one case.

    Args:
        case: The case.
        compiled: Whether to also compile and run it, which takes a hundred times as long.
        subject: Its program, if already traced.
        retrace: Whether to trace it under autocast a second time, to compare. False if another dtype's case of the
            program was traced twice; if autocast is outside the transformation, the traced program is then shared too.

    Returns:
        The outcome of the numerical check.

    Raises:
        Failure: A property that does not hold.
        Rejected: JAX can't trace the program without autocast.
    """
    with case.on_mesh():
        return _checked(case, compiled, subject or Subject(case), retrace)


def _checked(case: Case, compiled: bool, subject: Subject, retrace: bool) -> str:
    outside = case.transform in OUTSIDE
    try:
        if retrace or not outside:
            found = trace(case.autocast(), *subject.args)
        else:
            found = subject.rewritten(subject.plan(case))
    except Exception as error:
        if _fails_in_jit(case, subject, error):
            raise Rejected("jax.jit fails with the same error") from error
        raise Failure("runs", cause_of(error), traceback.format_exc()) from error
    if found.leaks:
        _raise_unless_jit_leaks(case, subject, Failure("runs", "leaves a tracer in the program"))
    check_structure(case, subject.plain, found)
    try:
        check_dtypes(case, subject.plain, found)
    except Failure as failure:
        _raise_unless_in_nested_rules(case, subject, failure)
    if outside and retrace:
        check_plan(case, subject, found)
    elif outside:
        check_explain(case, subject.plain, found, explanation(subject.plan(case)))
    elif retrace:
        check_repeats(found, trace(case.autocast(), *subject.args))
    if compiled:
        check_runs(case, subject.args)
    try:
        check_against_casts_by_hand(case, subject, found)
        return check_values(case, subject, found)
    except Failure as failure:
        _raise_unless_jit_leaks(case, subject, failure)
        raise
