"""Float8: its options, and the matmuls that run in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax.policy import path_matches
from mpjax.program.source import scopes

_E4M3, _E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
COTANGENTS = {"e5m2": _E5M2, "e4m3": _E4M3}
WEIGHT_GRADIENTS = ("float8", "half")
_MULTIPLE = 16


def check_choices(options: Any, choices: Mapping[str, Sequence[str]]) -> None:
    """Raises a `ValueError` if a field of options has none of its values."""
    for name, values in choices.items():
        if (value := getattr(options, name)) not in values:
            raise ValueError(f"{type(options).__name__}({name}={value!r}): one of {', '.join(map(repr, values))}.")


@dataclasses.dataclass(frozen=True)
class Float8:
    """The options of float8 matmuls (experimental): `Rules(float8=Float8(...))`, under the policy `"mixed_float8"`.

    Args:
        cotangents: `"e5m2"` has the wider range, `"e4m3"` one more bit of mantissa.
        min_size: A matmul of K inputs and N outputs stays in the compute dtype if K is at most the first of these sizes
            and N at most the second: quantising would cost more than the matmul saves. `(0, 0)` takes all sizes.
        weight_gradients: `"half"` computes the gradients of parameters from half operands.
        axis_name: The axes of a `shard_map` over which scales are the same. By default, each device has its own.
            Under `jit`, a scale is always that of the whole array.
        allow: Patterns of module paths whose matmuls run in float8 whatever their size and place.
        deny: Patterns of module paths whose matmuls stay in the compute dtype. `allow` takes precedence.

    Raises:
        ValueError: An option has an unknown value.

    Example:
        >>> import mpjax
        >>> mpjax.Float8(min_size=(1024, 1024)).cotangents
        'e5m2'

    Source: the default sizes are those of torchao's filter for tensor-wise scaling.
    """

    cotangents: str = "e5m2"
    min_size: tuple[int, int] = (4096, 1024)
    weight_gradients: str = "float8"
    axis_name: str | tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choices(self, {"cotangents": tuple(COTANGENTS), "weight_gradients": WEIGHT_GRADIENTS})
        sizes = self.min_size
        if not (isinstance(sizes, tuple) and len(sizes) == 2 and all(isinstance(n, int) and n >= 0 for n in sizes)):
            raise ValueError(f"Float8(min_size={sizes!r}): give two sizes (K, N), such as (4096, 1024) or (0, 0).")
        for name in ("axis_name", "allow", "deny"):
            value = getattr(self, name)
            if isinstance(value, str) and name != "axis_name":
                raise ValueError(f"Float8({name}={value!r}): give a list of patterns.")
            value = (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(part, str) and part for part in value):
                raise ValueError(f"Float8({name}={getattr(self, name)!r}): give strings.")
            object.__setattr__(self, name, value)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of `axis_name`."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name


@dataclasses.dataclass(frozen=True)
class Float8Setting:
    """What a plan knows about float8.

    Args:
        options: The options.
        entries: Patterns of module paths, each with whether their matmuls run in float8. The first match wins.
        everywhere: Whether matmuls that no pattern matches may run in float8.
    """

    options: Float8
    entries: tuple[tuple[str, bool], ...] = ()
    everywhere: bool = True


class Decision(NamedTuple):
    """Whether a matmul runs in float8.

    Args:
        dtypes: The float8 dtypes of its operands; empty if it stays in the compute dtype.
        why: The reason that it stays; empty if it is in float8.
        entry: The pattern that matched, if any.
        backward: Whether it belongs to a gradient that the program takes itself.
        options: The options.
    """

    dtypes: tuple[np.dtype, ...]
    why: str
    entry: str | None
    backward: bool
    options: Float8


def decide(
    eqn: Any, parameters: Sequence[bool | None], followed: bool, setting: Float8Setting, paths: Sequence[str]
) -> Decision:
    """Decides whether a matmul that may run in half runs in float8.

    Args:
        eqn: The equation: a matmul or convolution.
        parameters: For each operand, whether it is a parameter or an input of the function; None if it is not float32.
        followed: Whether another matmul depends on its result.
        setting: The options and patterns.
        paths: The module paths of the equation.
    """
    options = setting.options
    backward = "transpose(" in scopes(eqn)
    matched = next(((p, on) for p, on in setting.entries if any(path_matches(path, p) for path in paths)), None)
    entry, wanted = matched or (None, None)
    why = _never(eqn, parameters)
    if not why and wanted is False:
        why = f"rule {entry!r}"
    if not why and wanted is None:
        why = _why_not(eqn, parameters, followed, backward, setting)
    activation = COTANGENTS[options.cotangents] if backward and sum(map(bool, parameters)) == 1 else _E4M3
    dtypes = () if why else tuple(_E4M3 if parameter else activation for parameter in parameters)
    return Decision(dtypes, why, entry, backward, options)


def _never(eqn: Any, parameters: Sequence[bool | None]) -> str:
    """Why a matmul can't run in float8, whatever the rules."""
    if eqn.primitive.name != "dot_general":
        kind = "convolutions" if eqn.primitive.name.startswith("conv") else "ragged matmuls"
        return f"{kind} have no float8 gradients"
    return "the program itself gives an operand in half" if None in parameters else ""


def _why_not(
    eqn: Any, parameters: Sequence[bool | None], followed: bool, backward: bool, setting: Float8Setting
) -> str:
    if not setting.everywhere:
        return "its module has another policy"
    if all(parameters):
        return "both operands come from arguments, as in a first layer"
    if not any(parameters):
        return "a weight gradient or a product of two activations" if backward else "both operands are activations"
    if not followed:
        return "no matmul follows, as in a last layer"
    k, free = _sizes(eqn)
    sizes = {"K": k, "M": free[0], "N": free[1]}
    odd = [f"{name} = {n}" for name, n in sizes.items() if isinstance(n, int) and n % _MULTIPLE]
    if odd:
        return f"{', '.join(odd)}: not a multiple of {_MULTIPLE}"
    outputs = free[list(parameters).index(True)]
    if _at_most(k, setting.options.min_size[0]) and _at_most(outputs, setting.options.min_size[1]):
        return f"K = {k} and {outputs} outputs are too few to gain (Float8.min_size)"
    return ""


def _at_most(size: Any, limit: int) -> bool:
    return isinstance(size, int) and size <= limit


def _sizes(eqn: Any) -> tuple[Any, list[Any]]:
    """The contracted size of a matmul, and the free size of each operand."""
    contract, batch = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    free = [
        math.prod(n for d, n in enumerate(shape) if d not in (*contracted, *batched))
        for shape, contracted, batched in zip(shapes, contract, batch, strict=True)
    ]
    return math.prod(shapes[0][d] for d in contract[0]), free
