"""Properties that training with mpjax must have, whatever the program."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from testing import cheap_keys
from testing.measures import equations
from testing.random_programs.evaluate import Store, as_typed, evaluate, exact, float8_casts, rounded
from testing.random_programs.properties import Failure, Rejected, cause_of
from testing.random_training.cases import Case
from testing.random_training.namespace import IDS, X, namespace
from testing.random_training.reference import JITTED, PLAIN

# A cotangent that float32 holds, but not times a scale above 2**9.
SPIKE = 2.0**118
_SMALLEST_NORMAL, _LARGEST = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def batch(event: str, rows: int = 1) -> dict[str, Any]:
    """A batch on which this happens; `rows` times the usual size."""
    x = np.concatenate([X * np.float32(0.5**i) for i in range(rows)])
    if event == "input":
        x = x.copy()
        x[-1, 1] = np.inf
    bad, spike = np.float32(np.inf if event == "loss" else 0), np.float32(SPIKE if event == "spike" else 0)
    return {"x": x, "ids": IDS, "bad": bad, "spike": spike}


@dataclasses.dataclass
class Traced:
    """A traced function: its jaxpr, and the shapes of its results."""

    jaxpr: Any
    shapes: Any

    def __call__(self, store: Store, *args: Any, casts: Any = None) -> Any:
        """Evaluates it in NumPy; `casts` as of `evaluate`."""
        found = evaluate(self.jaxpr, jax.tree.leaves(args), store, as_typed, casts)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), found)


def _trace(fun: Any, *args: Any) -> Traced:
    return Traced(*jax.make_jaxpr(fun, return_shape=True)(*args))


class TrainingProgram:
    """A traced training program.

    Args:
        case: The case.
        meaning: What replaces mpjax, without a loss scale; None for mpjax.
    """

    def __init__(self, case: Case, meaning: dict[str, Any] | None):
        self.case = case
        space = namespace(meaning, case.policy)
        exec(compile(case.source, "<training>", "exec"), space)
        self.step, self.params, stats = space["step"], space["PARAMS"], space["STATS"]
        self.init = _trace(lambda params: (params, space["tx"].init(params), stats), self.params)
        loop = case.loop
        rows = 2 if loop.startswith("shard_map") else 1
        self.batches = [batch(event, rows) for event in case.events]
        context: Any = contextlib.nullcontext()
        carry = self.init.shapes
        run, batches = self.step, self.batches[0]
        if loop == "jit":
            run = jax.jit(run, donate_argnums=0)
        elif loop == "scan":
            run = lambda carry, batches: jax.lax.scan(self.step, carry, batches)
            self.batches = [jax.tree.map(lambda *xs: np.stack(xs), *self.batches)]
            batches = self.batches[0]
        elif loop == "vmap":
            run = jax.vmap(run, (0, None))
            carry = jax.tree.map(lambda x: _struct(x, (2, *x.shape)), carry)
        elif loop not in ("python",):
            explicit = loop == "explicit mesh"
            kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
            mesh = jax.make_mesh((2,), ("i",), axis_types=(kind,), devices=jax.devices()[:2])
            split = {name: jax.P("i") if name == "x" else jax.P() for name in batches}
            if loop.startswith("shard_map"):
                run = jax.shard_map(
                    run, mesh=mesh, in_specs=(jax.P(), split), out_specs=jax.P(), check_vma=loop == "shard_map"
                )
            else:
                context = jax.set_mesh(mesh)
                sharded = lambda x, spec: _struct(x, np.shape(x), jax.NamedSharding(mesh, spec))
                carry = jax.tree.map(lambda x: sharded(x, jax.P()), carry)
                batches = {name: sharded(batches[name], split[name]) for name in batches}
                run = jax.jit(run)
        self.function, self.context = run, context
        with context:
            self.run = _trace(run, carry, batches)

    def start(self, store: Store) -> Any:
        """The first carry."""
        carry = self.init(store, self.params)
        if self.case.loop == "vmap":
            carry = jax.tree.map(_members, carry)
        return carry


def _struct(x: Any, shape: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))


def _members(x: Any) -> Any:
    x = np.asarray(x)
    return np.stack([x, x * 0.5]) if x.dtype.kind == "f" and x.ndim else np.stack([x, x])


def _leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f"))


class _Watching:
    """Stores results in their dtypes, and notes whether one left float32's range."""

    def __init__(self) -> None:
        self.overflowed = self.underflowed = False

    def __call__(self, x: Any, dtype: Any) -> Any:
        out = as_typed(x, dtype)
        self.overflowed |= bool(np.any(np.isfinite(x) & ~np.isfinite(out)))
        self.underflowed |= bool(np.any((x != 0) & (np.abs(x) < _SMALLEST_NORMAL)))
        return out


def _structures(plain: TrainingProgram, scaled: TrainingProgram) -> None:
    for name in ("init", "run"):
        a, b = (_leaves(getattr(program, name).shapes) for program in (plain, scaled))
        if a.keys() != b.keys():
            raise Failure("structure", f"{name}: different trees", f"{a.keys() ^ b.keys()}")
        for path in a:
            if (a[path].shape, a[path].dtype) != (b[path].shape, b[path].dtype):
                raise Failure("structure", f"{name}: shape or dtype", f"{path}: {a[path]} became {b[path]}")


def _differences(a: Any, b: Any) -> list[str]:
    a, b = _leaves(a), _leaves(b)
    return [path for path in a if not _same(a[path], b[path])]


def _norm(x: Any) -> float:
    return float(np.sqrt(np.sum(np.square(np.asarray(x, np.float64)))))


def _check_compiled(plain: TrainingProgram, scaled: TrainingProgram) -> None:
    """Compiled, the gradients of the first step differ by rounding only: fusions may add in another order."""
    batch = plain.batches[0]
    if np.any(batch["spike"]) or plain.case.loop == "scan":
        return
    reference = plain.run(exact, plain.start(as_typed), batch)[1]
    results = []
    for program in (plain, scaled):
        carry = jax.tree.map(_typed, program.start(as_typed), program.run.shapes[0])
        with program.context, warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
            warnings.simplefilter("ignore")
            try:
                results.append(jax.block_until_ready(jax.jit(program.function)(carry, batch))[1])
            except Exception as error:
                if program is plain:
                    return
                raise Failure("compiled", cause_of(error), traceback.format_exc()) from error
    exactly, a, b = (_leaves(tree) for tree in (reference, *results))
    for path in exactly:
        if not _close(exactly[path], a[path], b[path], 2.0**-18):
            raise Failure("compiled", f"differs in {_kind(path)}", f"{path}: {a[path]} became {b[path]}")


def _typed(x: Any, like: Any) -> Any:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.extended):
        return cheap_keys.keys(x)
    return x if isinstance(x, jax.Array) else np.asarray(x).astype(like.dtype)


class _Comparing:
    """Stores results exactly, and notes which of them depend on the params: those that another run does not repeat."""

    def __init__(self, first: Sequence[Any] = ()) -> None:
        self.first, self.results = first, []  # type: tuple[Sequence[Any], list[Any]]

    def __call__(self, x: Any, dtype: Any) -> Any:
        self.results.append(x)
        return x

    @property
    def dependent(self) -> list[bool]:
        """Whether each result depends on the params."""
        return [not _same(a, b) for a, b in zip(self.first, self.results, strict=True)]


def _rounding(half: Any, seed: int, dependent: Sequence[bool] | None) -> Store:
    """Rounds results to half at random: those that depend on the params, or all of them."""
    round_to_half = rounded(half, np.random.default_rng(seed))
    if dependent is None:
        return round_to_half
    each = iter(dependent)
    return lambda x, dtype: round_to_half(x, dtype) if next(each) else x


def _check_half(case: Case, plain: TrainingProgram, scaled: TrainingProgram) -> str:
    """With a half policy, each step is as close to float64 as one whose activations are rounded to half.

    Only what depends on the params is rounded for that bound: `with_policy` leaves other values of user code, such as
    ids, masks and counters, in float32. (`autocast` casts what a matmul reads, whoever computed it.)
    """
    outcomes = []
    carry = scaled.start(as_typed)
    for batch in plain.batches:
        first = _Comparing()
        reference = _evaluated(plain, first, carry, batch)
        found = scaled.run(as_typed, carry, batch)
        if np.all(_skips(found[0]) > _skips(carry)):
            for part in (0, 2):
                if _differences(found[0][part], carry[part]):
                    raise Failure("half", f"a skipped step changed the {'params' if part == 0 else 'model state'}")
            outcomes.append("half: overflow")
        else:
            with np.errstate(invalid="ignore"):
                outcomes.append(_check_half_step(case, plain, carry, batch, found[1], reference, first.results))
        carry = found[0]  # each step is judged on its own
    return min(outcomes)  # the strongest


def _check_half_step(
    case: Case,
    plain: TrainingProgram,
    carry: Any,
    batch: Any,
    found: Any,
    reference: Any,
    exactly_each: Sequence[Any],
) -> str:
    half, dependent = mpjax.get_policy(case.policy).compute_dtype, None
    if case.model.library in ("linen", "nnx"):
        moved = (jax.tree.map(lambda x: 1.25 * x if x.dtype.kind == "f" else x, carry[0]), *carry[1:])
        second = _Comparing(exactly_each)
        plain.run(second, moved, batch)
        dependent = second.dependent if len(exactly_each) == len(second.results) else None

    def draw(seed: int) -> Any:
        casts = float8_casts(np.random.default_rng(seed)) if case.policy == "mixed_float8" else None
        return _leaves(plain.run(_rounding(half, seed, dependent), carry, batch, casts=casts)[1])

    draws = [draw(i) for i in range(2)]
    eps, judged = float(jnp.finfo(half).eps), 0
    results = _leaves(found)
    for path, x in _leaves(reference[1]).items():
        errors, size = [_norm(found[path] - x) for found in draws], _norm(x)
        # Values outside of float32's range are infinite in the program, as they are in the float32 model.
        if not size <= _LARGEST or not max(errors) <= 0.25 * size:
            continue
        judged += 1
        # An auxiliary result that no activation enters is that of the float32 model.
        exactly = path == "['aux']" and max(errors) == 0
        error, unit = _norm(results[path] - x), (2.0**-20 if exactly else 4 * eps) * size
        if error > 4 * max(errors) + unit:
            errors += [_norm(draw(2 + i)[path] - x) for i in range(20)]
        if error > 4 * max(errors) + unit and max(errors) <= 0.25 * size:
            raise Failure("half", f"error above rounding in {_kind(path)}", f"{path}: {error} of {size}, {max(errors)}")
    return "half" if judged else "half: ill-conditioned"


def _close(reference: Any, a: Any, b: Any, tolerance: float) -> bool:
    """Whether two values differ by rounding only: by a few errors of the first one against float64."""
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    if not np.array_equal(np.isfinite(reference), np.isfinite(a)):
        return True  # one leaves float32's range
    where = np.isfinite(reference)
    reference, a, b = (np.asarray(x)[where] for x in (reference, a, b))
    size = _norm(reference)
    return _norm(np.subtract(a, b)) <= 8 * _norm(np.subtract(a, reference)) + tolerance * size


def check(case: Case, compiled: bool = False) -> str:
    """Checks all properties of one case.

    Args:
        case: The case.
        compiled: Whether to also compile and run its first step, which takes a hundred times as long.

    Returns:
        "bitwise", or why the comparison is weaker; "half" for a case with a half policy.

    Raises:
        Failure: A property that does not hold.
        Rejected: JAX can't trace the plain program.
    """
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("ignore")
        try:
            plain = TrainingProgram(case, PLAIN)
        except Exception as error:
            raise Rejected(f"{type(error).__name__}: {error}") from error
        if any(e.name == "custom_lin" for e in equations(plain.run.jaxpr)):
            raise Rejected("forward-mode differentiation of a custom_vjp")
        try:
            scaled = TrainingProgram(case, None)
        except Exception as error:
            _raise_if_jit_fails(case, error)
            raise Failure("runs", cause_of(error), traceback.format_exc()) from error
    _structures(plain, scaled)
    if case.policy != "float32":
        return _check_half(case, plain, scaled)
    outcome = _check_values(plain, scaled)
    if compiled:
        _check_compiled(plain, scaled)
    return outcome


def _raise_if_jit_fails(case: Case, error: Exception) -> None:
    """Raises `Rejected` if the program fails in the same way with `jax.jit` where mpjax traces a function."""
    try:
        TrainingProgram(case, JITTED)
    except Exception as other:
        # Flax refuses the same in several ways; mpjax adds a note that it traces the function.
        if type(other) is type(error) or any("traces the function" in note for note in getattr(error, "__notes__", ())):
            raise Rejected(f"jax.jit fails with the same error: {error}") from error


def _evaluated(plain: TrainingProgram, store: Store, carry: Any, batch: Any) -> Any:
    """A step of the plain program; the evaluator must support it."""
    try:
        return plain.run(store, carry, batch)
    except Exception as reason:
        raise Rejected(f"not evaluated: {type(reason).__name__}: {reason}") from reason


def _check_values(plain: TrainingProgram, scaled: TrainingProgram) -> str:
    carry, other = plain.start(as_typed), scaled.start(as_typed)
    for i, batch in enumerate(plain.batches):
        expected = _evaluated(plain, as_typed, carry, batch)
        found = scaled.run(as_typed, other, batch)
        different = _differences(expected, found)
        if np.any(batch["spike"]):  # the gradients themselves overflow, as they must
            different = [path for path in different if not path.startswith(("[1]['grads']", "[1]['aux']"))]
        if different:
            return _explained(plain, scaled, carry, other, batch, different, f"step {i}")
        carry, other = expected[0], found[0]
    return "bitwise"


def _explained(
    plain: TrainingProgram,
    scaled: TrainingProgram,
    carry: Any,
    other: Any,
    batch: Any,
    different: Sequence[str],
    step: str,
) -> str:
    """Why a step's results are not bitwise equal, if there is a reason."""
    gradients = [path for path in different if path.startswith("[1]")]
    if not gradients and not np.any(batch["spike"]):  # equal gradients give equal updates
        raise Failure("bitwise", f"differs in {_kind(different[0])}", f"{step}: {different[0]}")
    watches = _Watching(), _Watching()
    expected, found = plain.run(watches[0], carry, batch), scaled.run(watches[1], other, batch)
    # A step that is skipped depends on no value, in whatever range.
    skipped = np.all(_skips(expected[0]) > _skips(carry))
    if not skipped and any(watch.overflowed or watch.underflowed for watch in watches):
        return "leaves float32's range"
    exact_runs = plain.run(exact, carry, batch), scaled.run(exact, other, batch)
    reference, ours, theirs, typed = (_leaves(tree) for tree in (*exact_runs, expected, found))
    # An optimizer may amplify the rounding error of a gradient: what follows from a different gradient is not judged.
    for path in gradients or different:
        x = np.asarray(reference[path])
        if x.dtype.kind != "f":
            raise Failure("bitwise", f"differs in {_kind(path)}", f"{step}: {path}: {theirs[path]}, {typed[path]}")
        finite = np.isfinite(x)
        exactly, ours_exactly, theirs_typed = (np.asarray(v)[finite] for v in (x, ours[path], theirs[path]))
        # A gradient of zero is all rounding.
        limit = 1e-9 * _norm(exactly) + 1e-6 * _norm(theirs_typed - exactly)
        close = np.array_equal(np.isfinite(ours[path]), finite) and _norm(ours_exactly - exactly) <= limit
        if not (close or _same(ours[path], x)):
            detail = f"{step}: {path}: {np.ravel(x)[:4]} became {np.ravel(ours[path])[:4]}"
            raise Failure("values", f"differs in {_kind(path)}", detail)
        if not _close(x, theirs[path], typed[path], 2.0**-20):
            detail = f"{step}: {path}: {np.ravel(theirs[path])[:4]} became {np.ravel(typed[path])[:4]}"
            raise Failure("rounding", f"differs in {_kind(path)}", detail)
    return "another order of sums"


def _skips(carry: Any) -> Any:
    """The number of skipped steps."""
    return optax.tree_utils.tree_get(carry[1], "skipped_steps")


def _kind(path: str) -> str:
    """The part of a step's results to which a leaf belongs."""
    kinds = {"[0][0]": "params", "[0][1]": "optimizer state", "[0][2]": "model state"}
    for prefix, kind in kinds.items():
        if path.startswith(prefix):
            name = path.rsplit(".", 1)[-1]
            return f"{kind} {name}" if "loss_scale" in path or "skip" in name or "good" in name else kind
    return path.split("'")[1]
