"""Evaluates a jaxpr in NumPy: in float64, in the dtypes of the jaxpr, or with every value rounded to half.

Nothing is compiled, so a program takes milliseconds, and the arithmetic is independent of the one under test. Each
operation computes in float64; the modes differ in how results are stored. Programs for several devices are evaluated
in lockstep, with one environment per device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.interpreters import partial_eval

from mpjax.kernels import attention, cross_entropy
from mpjax.program import compat
from mpjax.program.dataflow import once_per_jaxpr
from testing import cheap_keys
from testing.random_programs import numpy_rules

Array = np.ndarray[Any, Any]
Store = Callable[[Array, Any], Array]
Replicas = list[Array]

# Matmuls and convolutions.
_MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


# Primitives with formulas in JAX.
PROGRAMS = attention.PROGRAMS | cross_entropy.PROGRAMS


class Unsupported(Exception):
    """An equation that this evaluator does not support."""


@functools.cache
def is_float(dtype: Any) -> bool:
    """Whether a dtype is real floating-point, including bfloat16."""
    return jnp.issubdtype(dtype, jnp.floating)


def exact(x: Array, dtype: Any) -> Array:
    """Stores a result in float64: the reference."""
    return x


def as_typed(x: Array, dtype: Any) -> Array:
    """Stores a result in its dtype in the program."""
    return x.astype(dtype).astype(np.float64)


@functools.cache
def _coarser_limits(dtype: Any, half: Any) -> Any:
    """The limits of a dtype if it is a coarser float than half, otherwise those of half."""
    limits = jnp.finfo(half)
    return jnp.finfo(dtype) if is_float(dtype) and jnp.finfo(dtype).nmant < limits.nmant else limits


def rounded(half: Any, rng: np.random.Generator) -> Store:
    """Stores every result in half, rounded up or down at random, but large values do not overflow.

    Results that the program stores in a coarser dtype are rounded to that dtype.
    """

    def store(x: Array, dtype: Any) -> Array:
        limits = _coarser_limits(dtype, half)
        with np.errstate(all="ignore"):
            _, exponent = np.frexp(x)
            quantum = np.maximum(np.ldexp(1.0, exponent - limits.nmant - 1), float(limits.smallest_subnormal))
            found = np.floor(x / quantum + rng.random(x.shape)) * quantum
            return np.where(np.isfinite(x), found, x)

    return store


class Casts(NamedTuple):
    """How the matmuls of a program round, beyond what its dtypes say.

    Args:
        operand: Rounds an operand of a matmul.
        applies: Whether it does so for an equation.
        result: Rounds its result.
    """

    operand: Callable[[Array], Array]
    applies: Callable[[Any], bool]
    result: Callable[[Array], Array] = lambda x: x


def casts_by_hand(half: Any, store: Store = as_typed) -> Casts:
    """Careful casts by hand: every float32 matmul reads half operands and writes a half result; all else is float32.

    `torch.autocast` does so where dtypes promote. The derivative of such a program is its derivative in float32, with
    the same casts around the matmuls of the backward pass. A matmul whose author requested a precision keeps it, and
    so do those of a solve (`evaluate` looks at no matmul inside one).
    """

    def applies(eqn: Any) -> bool:
        operands = [v.aval.dtype for v in eqn.invars[:2]]
        precision = eqn.params.get("precision")
        precisions = precision if isinstance(precision, tuple) else (precision,)
        algorithm = type(precision).__name__.startswith("DotAlgorithm") and precision.name != "DEFAULT"
        requested = jax.lax.Precision.HIGHEST in precisions or algorithm
        return not requested and all(dtype == np.float32 for dtype in operands)

    def cast(x: Array) -> Array:
        return store(x, half)

    return Casts(cast, applies, cast)


def float8_casts(rng: np.random.Generator) -> Casts:
    """Casts of the operands of matmuls, not of convolutions, to float8; see `_float8_operand`."""

    def applies(eqn: Any) -> bool:
        return eqn.primitive.name in ("dot_general", "ragged_dot_general") and is_float(eqn.outvars[0].aval.dtype)

    return Casts(_float8_operand(rng), applies)


def _float8_operand(rng: np.random.Generator) -> Callable[[Array], Array]:
    """Perturbs an operand of a matmul as much as any float8 copy with one scale differs from it.

    The errors are uniform within half a unit in the last place of float8_e5m2, which is a unit of float8_e4m3fn's, and
    at least within the smallest number of float8_e4m3fn under the scale. An operand that float8 happens to hold
    exactly is perturbed too: divided by a scale it need not be exact. Equal elements have equal errors, which do not
    cancel in a sum, so every other operand gets one error for all elements.
    """

    def perturb(x: Array) -> Array:
        _, exponent = np.frexp(x)
        amax = np.max(np.abs(x), initial=0.0, where=np.isfinite(x))
        error = 2 * rng.random(x.shape if rng.random() < 0.5 else ()) - 1
        unit = np.maximum(np.ldexp(1.0, exponent - 4), amax * 2.0**-9 / 448)
        return np.where(np.isfinite(x) & (x != 0), x + error * unit, x)

    return perturb


def evaluate(
    closed: Any,
    args: Sequence[Any],
    store: Store = exact,
    store_inputs: Store | None = None,
    casts: Casts | None = None,
) -> list[Array]:
    """The results of a closed jaxpr: floats as float64, cheap keys as uint32, other keys as JAX arrays.

    Args:
        closed: The jaxpr.
        args: Its arguments.
        store: How each result is stored.
        store_inputs: How arguments and constants are stored; by default like results.
        casts: How matmuls round; by default as the dtypes say.

    Raises:
        Unsupported: The evaluator does not support an equation.
    """
    jaxpr, consts = closed.jaxpr, closed.consts
    machine = _Machine(store, 1, store_inputs or store, casts)
    ins = [machine.load(v, x) for v, x in zip(jaxpr.invars, args, strict=True)]
    with np.errstate(all="ignore"):
        outs = machine.run(jaxpr, [machine.load(v, c) for v, c in zip(jaxpr.constvars, consts, strict=True)], ins)
    return [out[0] for out in outs]


def in_numpy(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, traced and evaluated by `evaluate` in the program's dtypes; floats are returned as float64."""

    def run(*args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(jaxpr, jax.tree.leaves(args), as_typed))

    return run


def arrays_in_numpy(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Like `in_numpy`, but returns JAX arrays in the dtypes of `fun`'s results; initialises without compiling."""

    def run(*args: Any) -> Any:
        return as_arrays(*jax.make_jaxpr(fun, return_shape=True)(*args), args)

    return run


def as_arrays(jaxpr: Any, shapes: Any, args: Any) -> Any:
    """The results of a closed jaxpr as JAX arrays, with the tree structure of `shapes`."""
    leaves, tree = jax.tree.flatten(shapes)
    live, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(leaves), instantiate=True)
    found = evaluate(jax.extend.core.ClosedJaxpr(live, jaxpr.consts), jax.tree.leaves(args), as_typed)

    def array(x: Any, shape: Any) -> jax.Array:
        is_number = shape.dtype == cheap_keys.dtype()
        # `jnp.asarray` would compile a cast and a copy for each shape.
        return cheap_keys.keys(x) if is_number else x if isinstance(x, jax.Array) else put(x, shape.dtype)

    return jax.tree.unflatten(tree, map(array, found, leaves))


def put(x: Any, dtype: Any) -> jax.Array:
    """A JAX array of this dtype, cast by NumPy."""
    return jax.device_put(np.asarray(x).astype(dtype))


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def _is_key(aval: Any) -> bool:
    return _is_extended(aval.dtype)


@functools.cache
def _is_extended(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.extended)


class _Step(NamedTuple):
    """An equation, read once: a loop evaluates it in each iteration.

    Args:
        eqn: The equation.
        reads: Its operands, each with whether it is a literal.
        writes: Its results.
        dtypes: Of each result, its dtype, and whether this is of floats; None for random keys.
        rule: The rule by which NumPy evaluates it on one device; None for any other equation.
        of_devices: The rule of a higher-order primitive or a collective, for all devices.
        of_keys: Whether it reads random keys, which may be arrays of JAX.
        plain: The rule if it alone evaluates the equation, which then has one result.
    """

    eqn: Any
    reads: tuple[tuple[Any, bool], ...]
    writes: tuple[Any, ...]
    dtypes: tuple[tuple[Any, bool] | None, ...]
    rule: Callable[..., Any] | None
    of_devices: Callable[[_Machine, Any, list[Replicas]], list[Replicas]] | None
    of_keys: bool
    plain: Callable[..., Any] | None


@once_per_jaxpr
def _steps(jaxpr: Any) -> list[_Step]:
    steps = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        reads, of_keys = tuple((v, hasattr(v, "val")) for v in eqn.invars), any(_is_key(v.aval) for v in eqn.invars)
        dtypes = tuple(None if _is_key(v.aval) else (v.aval.dtype, is_float(v.aval.dtype)) for v in eqn.outvars)
        rule, of_devices = _RULES.get(name), _HIGHER.get(name) or _COLLECTIVES.get(name)
        plain = None if of_devices or of_keys or eqn.primitive.multiple_results else rule
        steps.append(_Step(eqn, reads, tuple(eqn.outvars), dtypes, rule, of_devices, of_keys, plain))
    return steps


@dataclasses.dataclass
class _Machine:
    """Evaluates equations on several devices in lockstep."""

    store: Store
    devices: int
    store_inputs: Store
    casts: Casts | None = None

    def load(self, v: Any, x: Any) -> Replicas:
        """A constant or an argument, on every device."""
        if _is_key(v.aval):
            return [_numbers(x) if isinstance(x, jax.Array) else x] * self.devices
        array, dtype = np.asarray(x), v.aval.dtype
        if is_float(dtype):
            array = self.store_inputs(array.astype(np.float64), dtype)
        return [array] * self.devices

    def run(self, jaxpr: Any, consts: Sequence[Replicas], args: Sequence[Replicas]) -> list[Replicas]:
        env: dict[Any, Replicas] = {}
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        for step in _steps(jaxpr):
            casts = self.casts and step.eqn.primitive.name in _MATMULS
            if step.plain and self.devices == 1 and not casts:  # the same as below, in two thirds of the time
                operands = [self.load(v, v.val)[0] if is_literal else env[v][0] for v, is_literal in step.reads]
                if (out := step.plain(step.eqn, *operands)) is not None:
                    env[step.writes[0]] = self.stored(step.dtypes[0], (out,))
                    continue
            args = [self.load(v, v.val) if is_literal else env[v] for v, is_literal in step.reads]
            env.update(zip(step.writes, self.equation(step, args), strict=True))
        return [self.load(v, v.val) if hasattr(v, "val") else env[v] for v in jaxpr.outvars]

    def run_closed(self, jaxpr: Any, args: Sequence[Replicas]) -> list[Replicas]:
        inner, consts = _open(jaxpr)
        return self.run(inner, [self.load(v, c) for v, c in zip(inner.constvars, consts, strict=True)], args)

    def equation(self, step: _Step, args: list[Replicas]) -> list[Replicas]:
        eqn = step.eqn
        if step.of_devices is not None:
            return step.of_devices(self, eqn, args)
        casts = self.casts if self.casts and eqn.primitive.name in _MATMULS and self.casts.applies(eqn) else None
        if casts:
            args = [[casts.operand(x) for x in arg] for arg in args[:2]] + args[2:]
        rows = [_apply(step, row) for row in (zip(*args, strict=True) if args else [()] * self.devices)]
        if casts:
            rows = [[casts.result(x) for x in row] for row in rows]
        return [self.stored(kind, outs) for kind, outs in zip(step.dtypes, zip(*rows, strict=True), strict=True)]

    def stored(self, kind: tuple[Any, bool] | None, outs: Sequence[Any]) -> Replicas:
        """Stores a result; `kind` as in `_Step.dtypes`."""
        if kind is None:
            return list(outs)
        dtype, of_floats = kind
        if of_floats:
            return [self.store(np.asarray(out, np.float64), dtype) for out in outs]
        return [np.asarray(out).astype(dtype) for out in outs]

    def store_output(self, eqn: Any, i: int, outs: Replicas) -> Replicas:
        aval = eqn.outvars[i].aval
        return self.stored(None if _is_key(aval) else (aval.dtype, is_float(aval.dtype)), outs)

    def same_on_all_devices(self, x: Replicas) -> Array:
        """A value that must be equal on all devices, such as a loop's condition."""
        if any(not np.array_equal(x[0], other) for other in x[1:]):
            raise Unsupported("devices disagree about a branch")
        return x[0]


# Higher-order primitives.


def _call(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if key in eqn.params:
            return machine.run_closed(eqn.params[key], args)
    raise Unsupported(eqn.primitive.name)


def _scan_split(params: dict[str, Any]) -> tuple[int, int]:
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _scan(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    params = eqn.params
    first, count = _scan_split(params)
    consts, carry, xs = args[:first], args[first : first + count], args[first + count :]
    carry = [machine.store_output(eqn, i, x) for i, x in enumerate(carry)]  # in the dtype of the body's result
    steps: list[list[Replicas]] = []
    order = range(params["length"])
    for t in reversed(order) if params["reverse"] else order:
        outs = machine.run_closed(params["jaxpr"], [*consts, *carry, *([x[t] for x in each] for each in xs)])
        carry = outs[:count]
        steps.append(outs[count:])
    if params["reverse"]:
        steps.reverse()
    avals = [v.aval for v in eqn.outvars[count:]]
    ys = [
        [
            np.stack([step[i][d] for step in steps]) if steps else np.zeros(aval.shape, _evaluation_dtype(aval.dtype))
            for d in range(machine.devices)
        ]
        for i, aval in enumerate(avals)
    ]
    return [*carry, *ys]


def _evaluation_dtype(dtype: Any) -> Any:
    return np.float64 if is_float(dtype) else dtype


def _while(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    params = eqn.params
    split = params["cond_nconsts"]
    test, rest = args[:split], args[split:]
    consts, carry = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :]
    carry = [machine.store_output(eqn, i, x) for i, x in enumerate(carry)]
    for _ in range(100):
        (active,) = machine.run_closed(params["cond_jaxpr"], [*test, *carry])
        active = [np.asarray(g) for g in active]
        if not any(g.any() for g in active):
            return carry
        new = machine.run_closed(params["body_jaxpr"], [*consts, *carry])
        if active[0].ndim:  # batched: finished elements keep their carry
            new = [
                [_masked(*values) for values in zip(active, a, b, strict=True)] for a, b in zip(new, carry, strict=True)
            ]
        else:
            machine.same_on_all_devices(active)
        carry = new
    raise Unsupported("a loop with more than 100 iterations")


def _masked(active: Array, new: Array, old: Array) -> Array:
    return np.where(active.reshape(active.shape + (1,) * (new.ndim - active.ndim)), new, old)


def _cond(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    branches = eqn.params["branches"]
    index = int(np.clip(machine.same_on_all_devices(args[0]), 0, len(branches) - 1))
    return machine.run_closed(branches[index], args[1:])


def _shard_map(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    if machine.devices != 1:
        raise Unsupported("shard_map in shard_map")
    params = eqn.params
    ((_, size),) = params["mesh"].shape.items()
    inner = dataclasses.replace(machine, devices=size)

    def axis_of(spec: Any) -> int | None:
        found = [i for i, part in enumerate(spec) if part]
        return found[0] if found else None

    parts = []
    for spec, (x,) in zip(params["in_specs"], args, strict=True):
        axis = axis_of(spec)
        parts.append([x] * size if axis is None else np.split(x, size, axis))
    outs = inner.run_closed(params["jaxpr"], parts)
    whole = []
    for spec, out in zip(params["out_specs"], outs, strict=True):
        axis = axis_of(spec)
        whole.append([out[0] if axis is None else np.concatenate(out, axis)])
    return whole


def _linear_solve(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    lengths = eqn.params["const_lengths"]
    if hasattr(lengths, "_fields"):
        sizes = list(lengths)
        start = sum(sizes[:2])
        consts, operands = args[start : start + sizes[2]], args[sum(sizes) :]
        in_full = dataclasses.replace(machine, casts=None)
        return in_full.run_closed(eqn.params["jaxprs"].solve, [*consts, *operands])
    raise Unsupported("custom_linear_solve")


def _expanded(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    """A primitive that JAX replaces by others when it lowers a program (`custom_root` since JAX 0.12)."""
    avals = tuple(v.aval for v in eqn.invars)
    try:
        others = _traced(eqn.primitive, tuple(eqn.params.items()), avals)
    except NameError as error:  # an axis of the `shard_map` around it
        raise Unsupported("a primitive that JAX replaces, with a named axis") from error
    except Exception as error:  # what JAX would say when it lowers the program
        raise Unsupported("a primitive that JAX fails to replace") from error
    try:
        return machine.run_closed(others, args)
    except (jax.errors.UnexpectedTracerError, jax.errors.TracerArrayConversionError) as error:
        # A derivative rule inside closes over the program, which ended.
        raise Unsupported("a rule that closes over its program") from error


@functools.lru_cache(maxsize=256)
def _traced(primitive: Any, params: tuple[tuple[str, Any], ...], avals: tuple[Any, ...]) -> Any:
    return jax.make_jaxpr(lambda *arrays: primitive.to_lojax(*arrays, **dict(params)))(*avals)


def _formulas(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    """An attention, or a loss without logits, by its formulas, in the dtypes of the program."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    program = jax.make_jaxpr(functools.partial(PROGRAMS[eqn.primitive], **eqn.params))(*shapes)
    return machine.run_closed(program, args)


_HIGHER: dict[str, Callable[[_Machine, Any, list[Replicas]], list[Replicas]]] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "custom_vmap_call"), _call),
    **dict.fromkeys(("remat2", "checkpoint", "remat"), _call),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_linear_solve": _linear_solve,
    "call_hi_primitive": _expanded,
    **{primitive.name: _formulas for primitive in PROGRAMS},
}


def _reduction(combine: Any) -> Any:
    def collective(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
        axes = tuple(axis for axis in eqn.params["axes"] if isinstance(axis, int))
        if axes:  # vmap replaced the axis name by its number
            return [[combine(x, axis=axes) for x in arg] for arg in args]
        return [[combine(np.stack(arg), axis=0)] * machine.devices for arg in args]

    return collective


def _unchanged(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    return args


def _index(machine: _Machine, eqn: Any, args: list[Replicas]) -> list[Replicas]:
    return [[np.asarray(d, np.int32) for d in range(machine.devices)]]


def _stored(collective: Callable[..., list[Replicas]]) -> Callable[..., list[Replicas]]:
    return lambda machine, eqn, args: [
        machine.store_output(eqn, i, outs) for i, outs in enumerate(collective(machine, eqn, args))
    ]


_COLLECTIVES = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant"), _stored(_reduction(np.sum))),
    "pmax": _stored(_reduction(np.max)),
    "pmin": _stored(_reduction(np.min)),
    **dict.fromkeys(("pvary", "pbroadcast", "pcast"), _stored(_unchanged)),
    "axis_index": _stored(_index),
}


# First-order primitives: one device.


def _apply(step: _Step, args: Sequence[Array]) -> list[Any]:
    eqn, name = step.eqn, step.eqn.primitive.name
    # NumPy has no arrays of keys.
    rule = None if step.of_keys and any(isinstance(x, jax.Array) for x in args) else step.rule
    if rule is not None and (out := rule(eqn, *args)) is not None:
        return list(out) if eqn.primitive.multiple_results else [out]
    if name == "platform_index":
        platforms = [names or ("cpu",) for names in eqn.params["platforms"]]
        return [np.asarray([jax.default_backend() in names for names in platforms].index(True), np.int32)]
    if name in ("pure_callback", "io_callback", "debug_callback"):
        raise Unsupported(name)
    if name in _RANDOM:
        rule = _RANDOM[name]
        if isinstance(args[0], jax.Array):
            rule = numpy_rules.threefry_bits if name == "random_bits" else lambda eqn, *args: None
        out = rule(eqn, *args)
        return _evaluated_with_jax(eqn, args) if out is None else [out]
    return _evaluated_with_jax(eqn, args)


def _evaluated_with_jax(eqn: Any, args: Sequence[Array]) -> list[Any]:
    """Evaluates an operation with JAX in float64, or in the program's dtype if the operation fixes one.

    Scatters and general reductions fix the dtype of their sum, and bit casts their operand's.
    """
    if eqn.primitive.name.startswith("scatter") or eqn.primitive.name in ("bitcast_convert_type", "reduce"):
        typed = [put(x, v.aval.dtype) for v, x in zip(eqn.invars, args, strict=True)]
        return [np.asarray(x) for x in jax.tree.leaves(eqn.primitive.bind(*typed, **eqn.params))]
    operands: list[Any] = []
    no_mesh = jax.sharding.Mesh(np.empty((), object), ())  # The arrays are on one device.
    with jax.enable_x64(True), jax.set_mesh(no_mesh):
        for v, x in zip(eqn.invars, args, strict=True):
            is_number = _is_key(v.aval) and not isinstance(x, jax.Array)
            operands.append(cheap_keys.keys(x) if is_number else x if _is_key(v.aval) else jax.device_put(x))
        params = eqn.primitive.get_bind_params(eqn.params)
        for key in ("preferred_element_type", "dtype"):
            if params.get(key) is not None and is_float(params[key]):
                params = {**params, key: np.dtype(np.float64)}
        if "precision" in params and not isinstance(params["precision"], tuple):
            params = {**params, "precision": None}
        outs = eqn.primitive.bind(*operands, **params)
    outs = outs if eqn.primitive.multiple_results else [outs]
    return [_numbers(x) for x in outs]


def _numbers(x: Any) -> Any:
    if isinstance(x.dtype, compat.Empty):  # It stands for an array of floats.
        return np.zeros(x.shape)
    if not _is_key(x):
        return np.asarray(x)
    return cheap_keys.numbers(x) if x.dtype == cheap_keys.dtype() else x


def _scatter_add(eqn: Any, *args: Array) -> Array | None:
    """A scatter-add in float32 or wider; in half its rounding depends on the dtype, so JAX evaluates it."""
    aval = eqn.outvars[0].aval
    wide = is_float(aval.dtype) and aval.dtype.itemsize >= 4
    return numpy_rules.scattered(np.add, eqn, *args) if wide else None


def _ufunc(fun: Callable[..., Any]) -> Any:
    return lambda eqn, *args: fun(*args)


def _dot_general(eqn: Any, a: Array, b: Array) -> Array:
    left, right, shape = _matrices(eqn.params["dimension_numbers"], a.shape, b.shape)
    return (a.transpose(left[0]).reshape(left[1]) @ b.transpose(right[0]).reshape(right[1])).reshape(shape)


@functools.lru_cache(maxsize=4096)
def _matrices(numbers: Any, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[Any, Any, tuple[int, ...]]:
    """The order of dimensions and the shape of each operand as a batch of matrices, and the shape of the result."""
    (ca, cb), (ba, bb) = numbers
    free_a = [i for i in range(len(a)) if i not in (*ca, *ba)]
    free_b = [i for i in range(len(b)) if i not in (*cb, *bb)]
    batch = [a[i] for i in ba]
    rows, columns, inner = (math.prod(x[i] for i in axes) for x, axes in ((a, free_a), (b, free_b), (a, ca)))
    left = (*ba, *free_a, *ca), (*batch, rows, inner)
    right = (*bb, *cb, *free_b), (*batch, inner, columns)
    return left, right, (*batch, *(a[i] for i in free_a), *(b[i] for i in free_b))


def _restored(eqn: Any, x: Array, kept: Array, exponents: Array | None = None) -> Array:
    if exponents is None:
        return kept
    kept = _float8_of_bits(kept) if kept.dtype == np.uint8 else kept
    return kept * np.repeat(np.ldexp(1.0, exponents), kept.shape[-1] // exponents.shape[-1], axis=-1)


# Between numbers of 8 bits with a sign: 8, 8, 8, 16, 16, 32 and 32 in binades from 1/4 on, and 8 below these.
_STEPS = np.repeat(2.0 ** np.array([-5, -5, -4, -3, -3, -2, -2, -1]), [8, 8, 8, 8, 16, 16, 32, 32])


def _float8_of_bits(word: Array) -> Array:
    number = (np.cumsum(_STEPS) - _STEPS)[word & 127]
    return np.where(word > 127, -number, number)


def _float8_scale(eqn: Any, x: Array) -> Array:
    """`max|x| / limit`, rounded up to four significant bits."""
    amax = np.float32(np.max(np.abs(x), initial=0.0))
    if amax == 0 or not np.isfinite(amax):
        return np.where(amax == 0, 1.0, amax)
    significand, exponent = np.frexp(np.float64(amax * np.float32(1.0667 / float(jnp.finfo(eqn.params["dtype"]).max))))
    return np.maximum(np.ldexp(np.round(significand * 16) / 16, exponent), 2.0**-126)


def _float8_quantise(eqn: Any, x: Array, scale: Array) -> Array:
    return _in_float8(x, scale, eqn.params["dtype"])


def _in_float8(x: Array, scale: Array, dtype: Any) -> Array:
    limit = float(jnp.finfo(dtype).max)
    return as_typed(np.clip(x / scale, -limit, limit), dtype)


def _float8_tangent(eqn: Any, *args: Array) -> Array:
    """The sum of the matmuls of each tangent and the other operand."""
    named = dict(zip(eqn.params["names"], args, strict=True))
    e4m3, out = np.dtype(jnp.float8_e4m3fn), np.zeros(eqn.outvars[0].aval.shape)
    for i in (0, 1):
        if f"d{i}" not in named:
            continue
        d, other = named[f"d{i}"], named[f"x{1 - i}"]
        if f"s{1 - i}" in named:  # Otherwise the matmul is in half.
            scale = _float8_scale(_WITH_E4M3, d)
            d, other = _in_float8(d, scale, e4m3) * scale, _in_float8(other, named[f"s{1 - i}"], e4m3)
            other = other * named[f"s{1 - i}"]
        out = out + _dot_general(eqn, *((d, other), (other, d))[i])
    return out


def _mxfp8_matmul(eqn: Any, *pair: Array) -> Array:
    """The matmul of operands that are rounded to blocks of 32 along the contraction."""
    numbers, dtypes = eqn.params["dimension_numbers"], eqn.params["dtypes"]
    return _dot_general(eqn, *map(_in_blocks, pair, dtypes, numbers[0]))


def _in_blocks(x: Array, dtype: Any, contracted: Sequence[int]) -> Array:
    last = range(-len(contracted), 0)
    moved = np.moveaxis(x, contracted, last)
    flat = moved.reshape(*moved.shape[: x.ndim - len(contracted)], -1)
    blocks = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 32)])
    blocks = blocks.reshape(*flat.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True, initial=0.0)
    _, exponent = np.frexp(largest / float(jnp.finfo(dtype).max) * 1.4999 / 1.5)
    scale = np.where(np.isfinite(largest), np.maximum(np.ldexp(1.0, exponent), 2.0**-126), np.nan)
    back = (as_typed(blocks / scale, dtype) * scale).reshape(*flat.shape[:-1], -1)[..., : flat.shape[-1]]
    return np.moveaxis(back.reshape(moved.shape), last, contracted)


_WITH_E4M3 = types.SimpleNamespace(params={"dtype": np.dtype(jnp.float8_e4m3fn)})


def _broadcast_in_dim(eqn: Any, x: Array, *_: Any) -> Array:
    shape = [1] * len(eqn.params["shape"])
    for i, d in enumerate(eqn.params["broadcast_dimensions"]):
        shape[d] = x.shape[i]
    x = np.reshape(x, shape)
    return x if x.shape == eqn.params["shape"] else np.broadcast_to(x, eqn.params["shape"])


def _convert(eqn: Any, x: Array) -> Array:
    new, old = eqn.params["new_dtype"], eqn.invars[0].aval.dtype
    if np.iscomplexobj(x) and not jnp.issubdtype(new, jnp.complexfloating):
        x = x.real
    return x if is_float(new) and is_float(old) else x.astype(_evaluation_dtype(new))


def _reshape(eqn: Any, x: Array, *_: Any) -> Array:
    order = eqn.params["dimensions"]
    return np.reshape(x if order is None else np.transpose(x, order), eqn.params["new_sizes"])


def _slice(eqn: Any, x: Array) -> Array:
    p = eqn.params
    steps = p["strides"] or (1,) * x.ndim
    return x[tuple(slice(a, b, c) for a, b, c in zip(p["start_indices"], p["limit_indices"], steps, strict=True))]


def _window(x: Array, sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    found = []
    for length, size, start in zip(x.shape, sizes, starts, strict=True):
        begin = int(np.clip(int(start), 0, length - size))
        found.append(slice(begin, begin + size))
    return tuple(found)


def _dynamic_slice(eqn: Any, x: Array, *starts: Any) -> Array:
    return x[_window(x, eqn.params["slice_sizes"], starts)]


def _dynamic_update_slice(eqn: Any, x: Array, update: Array, *starts: Any) -> Array:
    out = np.array(x)
    out[_window(x, update.shape, starts)] = update
    return out


def _pad(eqn: Any, x: Array, value: Array) -> Array:
    config = eqn.params["padding_config"]
    if any(low < 0 or high < 0 for low, high, _ in config):
        return np.asarray(_evaluated_with_jax(eqn, [x, value])[0])
    sizes = [n + max(n - 1, 0) * inner for n, (_, _, inner) in zip(x.shape, config, strict=True)]
    out = np.full([low + n + high for n, (low, high, _) in zip(sizes, config, strict=True)], value, x.dtype)
    where = (slice(low, low + n, inner + 1) for n, (low, _, inner) in zip(sizes, config, strict=True))
    out[tuple(where)] = x
    return out


def _select_n(eqn: Any, which: Array, *cases: Array) -> Array:
    return np.choose(np.broadcast_to(which, cases[0].shape).astype(int), cases) if len(cases) > 1 else cases[0]


def _reduce(fun: Any) -> Any:
    return lambda eqn, x: fun(x, axis=tuple(eqn.params["axes"]))


def _integer_pow(eqn: Any, x: Array) -> Array:
    return np.power(x, float(eqn.params["y"])) if x.dtype.kind == "f" else np.power(x, eqn.params["y"])


def _div(x: Array, y: Array) -> Array:
    if np.asarray(x).dtype.kind in "iu":
        return np.where(y == 0, -1, np.trunc(x / np.where(y == 0, 1, y))).astype(x.dtype)
    return x / y


def _reduce_precision(eqn: Any, x: Array) -> Array | None:
    """The identity of a dtype that has no more bits than are kept; else left to JAX, which computes in float64.

    `jax.checkpoint` reduces float16 to float16's own bits. In a wider dtype that would flush subnormal numbers.
    """
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    kept = eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant
    return x if kept else None


def _iota(eqn: Any, *_: Any) -> Array:
    p = eqn.params
    shape = [1] * len(p["shape"])
    shape[p["dimension"]] = -1
    out = np.arange(p["shape"][p["dimension"]], dtype=_evaluation_dtype(p["dtype"])).reshape(shape)
    return np.broadcast_to(out, p["shape"])


def _identity(eqn: Any, x: Array) -> Array:
    return x


def _identities(eqn: Any, *xs: Array) -> Sequence[Array]:
    return xs


def _not(x: Array) -> Array:
    return np.logical_not(x) if np.asarray(x).dtype == bool else np.invert(x)


# JAX evaluates those that few programs have.
_RULES: dict[str, Callable[..., Any]] = {
    name: _ufunc(fun)
    for name, fun in {
        "add": np.add,
        "add_any": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": _div,
        "rem": np.fmod,
        "neg": np.negative,
        "abs": np.abs,
        "sign": np.sign,
        "max": np.maximum,
        "min": np.minimum,
        "pow": np.power,
        "exp": np.exp,
        "expm1": np.expm1,
        "log": np.log,
        "log1p": np.log1p,
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
        "atan2": np.arctan2,
        "logistic": scipy.special.expit,
        "erf": scipy.special.erf,
        "erf_inv": scipy.special.erfinv,
        "one_minus_square": lambda x: 1 - x * x,
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "square": np.square,
        "floor": np.floor,
        "is_finite": np.isfinite,
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "shift_left": np.left_shift,
        "shift_right_logical": lambda x, by: np.right_shift(x, by) if x.dtype.kind == "u" else None,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": _not,
        "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    }.items()
}
_RULES.update(
    {
        "dot_general": _dot_general,
        **dict.fromkeys(
            ("detached", "matmul_result", "straight_through", "aligned", "rounded_cotangent", "unscaled", "unfused"),
            lambda eqn, x, *operands: x,
        ),
        "unstored": lambda eqn, x: x,
        "restored": _restored,
        "float8_scale": _float8_scale,
        "float8_quantise": _float8_quantise,
        "float8_rescale": lambda eqn, x, scale: x * scale,
        "float8_result": lambda eqn, out, *operands: out,
        "float8_tangent": _float8_tangent,
        "mxfp8_matmul": _mxfp8_matmul,
        "conv_general_dilated": numpy_rules.convolution,
        "gather": numpy_rules.gather,
        **dict.fromkeys(("scatter-add", "scatter_add"), _scatter_add),
        "scatter-max": functools.partial(numpy_rules.scattered, np.maximum),
        "scatter-min": functools.partial(numpy_rules.scattered, np.minimum),
        "bitcast_convert_type": numpy_rules.bits,
        "broadcast_in_dim": _broadcast_in_dim,
        "convert_element_type": _convert,
        "reshape": _reshape,
        "squeeze": lambda eqn, x: np.squeeze(x, tuple(eqn.params["dimensions"])),
        "expand_dims": lambda eqn, x: np.expand_dims(x, tuple(eqn.params["dimensions"])),
        "transpose": lambda eqn, x: np.transpose(x, eqn.params["permutation"]),
        "rev": lambda eqn, x: np.flip(x, tuple(eqn.params["dimensions"])),
        "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
        "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
        "split": lambda eqn, x: np.split(x, np.cumsum(eqn.params["sizes"])[:-1], eqn.params["axis"]),
        "unstack": lambda eqn, x: [*np.moveaxis(x, eqn.params["axis"], 0)],
        "slice": _slice,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update_slice,
        "pad": _pad,
        "select_n": _select_n,
        "integer_pow": _integer_pow,
        "reduce_precision": _reduce_precision,
        "iota": _iota,
        "reduce_sum": _reduce(np.sum),
        "reduce_max": _reduce(np.max),
        "reduce_min": _reduce(np.min),
        "reduce_and": _reduce(np.all),
        "reduce_or": _reduce(np.any),
        **dict.fromkeys(
            ("stop_gradient", "copy", "copy_p", "name", "reshard", "sharding_constraint", "layout_constraint"),
            _identity,
        ),
        **dict.fromkeys(("optimization_barrier", "device_put"), _identities),
    }
)
# Operations on cheap keys, which are numbers.
_RANDOM: dict[str, Callable[..., Any]] = {
    "random_bits": numpy_rules.random_bits,
    "random_split": numpy_rules.random_split,
    "random_fold_in": numpy_rules.random_fold_in,
    "random_unwrap": lambda eqn, keys: keys[..., None],
    "random_clone": _identity,
}
