"""Test cases: a random program with a transformation, a dtype and rules."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import linecache
import random
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax
from testing.random_programs.namespace import namespace
from testing.random_programs.operations import Type
from testing.random_programs.writing import Index, Scope, Writer

Function = Callable[..., Any]
BATCH = 2

# The parameters of every program.
PARAMETERS = (("w", Type.MATRIX), ("x", Type.ROWS), ("b", Type.VECTOR), ("s", Type.SCALAR))


def arguments() -> tuple[Any, ...]:
    """The arguments of programs; the last is an integer."""
    rng = np.random.default_rng(0)
    floats = (rng.normal(size=type_.value).astype(np.float32) * 0.8 for _, type_ in PARAMETERS)
    return (*(jnp.asarray(x) for x in floats), jnp.int32(1))


@functools.lru_cache(16)
def _compiled(source: str) -> types.CodeType:
    """Compiles a program's source; tracebacks show its lines."""
    name = f"<program {hash(source) & 0xFFFFFF:x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    return compile(source, name, "exec")


def _loss(fun: Function) -> Function:
    def loss(*args: Any) -> Any:
        return sum((jnp.mean(out * 0.7) for out in fun(*args)), start=jnp.float32(0))

    return loss


def _gradient(fun: Function) -> Function:
    return jax.grad(fun, argnums=(0, 1, 2))


def _batched(fun: Function) -> Function:
    """Maps a function over its second argument, as for per-example gradients."""

    def call(w: Any, x: Any, *rest: Any) -> Any:
        return jax.vmap(lambda row: fun(w, row, *rest))(jnp.stack([x, 0.5 * x]))

    return call


def _directional(fun: Function) -> Function:
    def call(w: Any, x: Any, b: Any, s: Any, n: Any) -> Any:
        return jax.jvp(lambda w, x: fun(w, x, b, s, n), (w, x), (jnp.ones_like(w), 0.5 * x))

    return call


# Each takes a program and a caster. With the caster inside, JAX transforms the rewritten program. With the caster
# outside, autocast rewrites the transformed program.
TRANSFORMS: dict[str, Callable[[Function, Function], Function]] = {
    "value": lambda f, cast: cast(f),
    "grad": lambda f, cast: _gradient(cast(_loss(f))),
    "outside_grad": lambda f, cast: cast(_gradient(_loss(f))),
    "grad_of_jit": lambda f, cast: _gradient(jax.jit(cast(_loss(f)))),
    "jit_inside": lambda f, cast: cast(jax.jit(f)),
    "jvp": lambda f, cast: _directional(cast(f)),
    "outside_jvp": lambda f, cast: cast(_directional(f)),
    "vmap": lambda f, cast: _batched(cast(f)),
    "vmap_of_grad": lambda f, cast: _batched(_gradient(cast(_loss(f)))),
    "outside_vmap_of_grad": lambda f, cast: cast(_batched(_gradient(_loss(f)))),
    "outside_grad_of_remat": lambda f, cast: cast(_gradient(jax.checkpoint(_loss(f)))),
}
REVERSE = {name for name in TRANSFORMS if "grad" in name}
FORWARD = {name for name in TRANSFORMS if "jvp" in name}
VALUES = {"value", "jit_inside", "vmap"}
OUTSIDE = {"value", "jit_inside"} | {name for name in TRANSFORMS if name.startswith("outside")}

RULES = {
    "default": mpjax.Rules(),
    "full": mpjax.Rules(residuals="full"),
    "conservative": mpjax.Rules(level="conservative"),
    "half": mpjax.Rules(level="half"),
    "fused": mpjax.Rules(attention="xla"),
}
# The options of float8 under these rules. All matmuls run in float8, whatever their sizes and place.
FLOAT8: dict[str, dict[str, Any]] = {"full": {"weight_gradients": "half"}, "conservative": {"cotangents": "e4m3"}}


@dataclasses.dataclass(frozen=True)
class Case:
    """One test case.

    Args:
        source: The program, a definition of `program(w, x, b, s, n)`.
        transform: One of `TRANSFORMS`.
        dtype: "float16", "bfloat16", or "float8" and "mxfp8", whose half dtype is bfloat16.
        rules: One of `RULES`.
        features: The program's higher-order statements.
        explicit: Whether its arrays have explicit shardings.
    """

    source: str
    transform: str
    dtype: str = "float16"
    rules: str = "default"
    features: tuple[str, ...] = ()
    explicit: bool = False

    def __repr__(self) -> str:
        mesh = ", explicit mesh" if self.explicit else ""
        return f"# {self.transform}, {self.dtype}, rules={self.rules}{mesh}\n{self.source}"

    @property
    def _space(self) -> dict[str, Any]:
        return namespace(AxisType.Explicit if self.explicit else AxisType.Auto)

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which it is traced."""
        return jax.set_mesh(self._space["MESH"]) if self.explicit else contextlib.nullcontext()

    def arguments(self) -> tuple[Any, ...]:
        """Its arguments, on its mesh."""
        found = arguments()
        return jax.device_put(found, NamedSharding(self._space["MESH"], PartitionSpec())) if self.explicit else found

    @property
    def group(self) -> str:
        """Cases of one group share what is under test."""
        return self.rules

    def program(self) -> Function:
        """A new definition of the program, for which JAX has no caches."""
        space = dict(self._space)
        exec(_compiled(self.source), space)
        return space["program"]

    @property
    def is_scaled(self) -> bool:
        """Whether its matmuls run in a format with scales."""
        return self.dtype in ("float8", "mxfp8")

    @property
    def half(self) -> Any:
        """The half dtype."""
        return mpjax.get_policy(f"mixed_{self.dtype}").compute_dtype

    def cast(self, fun: Function) -> Function:
        """The caster under test."""
        rules = RULES[self.rules]
        if self.is_scaled:
            rules = dataclasses.replace(rules, float8=mpjax.Float8(allow=("*",), **FLOAT8.get(self.rules, {})))
        return mpjax.autocast(fun, f"mixed_{self.dtype}", rules=rules)

    def plain(self) -> Function:
        """The transformed program without autocast."""
        return TRANSFORMS[self.transform](self.program(), lambda fun: fun)

    def autocast(self) -> Function:
        """The transformed program with autocast."""
        return TRANSFORMS[self.transform](self.program(), self.cast)


def _case(index: Index, dtype: str | None) -> Case:
    """Builds a case from a sequence of choices."""
    transform = tuple(TRANSFORMS)[index(len(TRANSFORMS))]
    rules = ("default", "default", "default", "full", "conservative", "half")[index(6)]
    if dtype is None:
        dtype = ("float16", "bfloat16", "float8")[index(3)]
        dtype = "mxfp8" if dtype == "float8" and index(2) else dtype
    explicit = index(5) == 4
    budget = (4, 6, 8, 12)[index(4)]
    writer = Writer(index, transform in REVERSE, transform in FORWARD, explicit, budget)
    scope = Scope([(name, type_) for name, type_ in reversed(PARAMETERS)], 0, [])
    outs = writer.body(scope)
    constants: tuple[str, ...] = ("jnp.float32(2)", "CONSTANT[0]", "ARRAY", "jnp.zeros((2, 3))")
    if transform in VALUES:
        constants += ("jnp.array(False)", "n > 5", "jnp.arange(3)", "jnp.array(3)", "jnp.float16(2)", "0.5", "None")
    if index(4) == 3:
        outs.append((constants[index(len(constants))], Type.SCALAR))
    if rules == "default" and any("softmax" in line and "@" in line for line in scope.lines) and index(2):
        rules = "fused"
    lines = ["def program(w, x, b, s, n):", *scope.lines]
    lines.append(f"    return {', '.join(name for name, _ in outs)}{',' if len(outs) == 1 else ''}")
    return Case("\n".join(lines) + "\n", transform, dtype, rules, tuple(dict.fromkeys(writer.used)), explicit)


@st.composite
def cases(draw: Any, dtype: str | None = None) -> Case:
    """A Hypothesis strategy of random cases; Hypothesis shrinks failures."""
    return _case(lambda count: draw(st.integers(0, count - 1)), dtype)


def numbered_case(number: int, dtype: str) -> Case:
    """The random case of a number, independent of other numbers; Hypothesis derives most examples from earlier ones.

    Args:
        number: Number that determines the program, its transformation and its rules.
        dtype: The half dtype's name.
    """
    return _case(random.Random(number).randrange, dtype)
