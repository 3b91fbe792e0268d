"""Matmuls in a format with scales (float8, MXFP8): the options, which matmuls run in it, and why others don't."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from mpjax.policy import path_matches
from mpjax.program.formats import FLOAT8, Format
from mpjax.program.source import scopes

# By name: matmuls and convolutions have different parameters.

Cotangents = Literal["e5m2", "e4m3"]
WeightGradients = Literal["float8", "half"]


def check_choices(options: Any, choices: Mapping[str, Sequence[str | None]]) -> None:
    """Raises a `ValueError` if a field of options has none of its values."""
    for name, values in choices.items():
        if (value := getattr(options, name)) not in values:
            raise ValueError(f"{type(options).__name__}({name}={value!r}): one of {', '.join(map(repr, values))}.")


@dataclasses.dataclass(frozen=True)
class Float8:
    """The options of float8 matmuls (experimental), `Rules(float8=...)`, for policies with float8 matmuls.

    Args:
        cotangents: `"e5m2"` has the wider range, `"e4m3"` one more bit of mantissa. None is `"e5m2"` with one scale for
            each tensor, and `"e4m3"` with scales for blocks.
        min_size: A matmul of K inputs and N outputs stays in the compute dtype if K is at most the first of these sizes
            and N at most the second: quantising would cost more than the matmul saves. `(0, 0)` takes all sizes.
        weight_gradients: `"half"` computes the gradients of parameters from half operands.
        axis_name: The axes of a `shard_map` over which scales are the same. By default, each device has its own.
            Under `jit`, a scale is always that of the whole array. Not for `"mixed_mxfp8"`, whose blocks are local.
        allow: Patterns of module paths whose matmuls run in float8 whatever their size and place.
        deny: Patterns of module paths whose matmuls stay in the compute dtype. `allow` takes precedence.

    Raises:
        ValueError: An option has an unknown value.

    Example:
        >>> import mpjax
        >>> mpjax.Float8(min_size=(1024, 1024)).weight_gradients
        'float8'

    Source: the default sizes are those of torchao's filter for tensor-wise scaling.
    """

    cotangents: Cotangents | None = None
    min_size: tuple[int, int] = (4096, 1024)
    weight_gradients: WeightGradients = "float8"
    axis_name: str | Sequence[str] = ()  # a tuple from `__post_init__` on, as are the patterns
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_choices(
            self, {"cotangents": (None, *get_args(Cotangents)), "weight_gradients": get_args(WeightGradients)}
        )
        sizes = self.min_size
        if not (isinstance(sizes, tuple) and len(sizes) == 2 and all(type(n) is int and n >= 0 for n in sizes)):
            raise ValueError(f"Float8(min_size={sizes!r}): give two sizes (K, N), such as (4096, 1024) or (0, 0).")
        for name in ("axis_name", "allow", "deny"):
            value = getattr(self, name)
            if isinstance(value, str) and name != "axis_name":
                raise ValueError(f"Float8({name}={value!r}): give a list of patterns.")
            value = (value,) if isinstance(value, str) else value
            if not isinstance(value, Iterable) or not all(isinstance(part, str) and part for part in value):
                raise ValueError(f"Float8({name}={getattr(self, name)!r}): give strings.")
            value = tuple(value)
            object.__setattr__(self, name, value)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of `axis_name`."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else tuple(self.axis_name)


@dataclasses.dataclass(frozen=True)
class ScaledSetting:
    """What a plan knows about matmuls in formats with scales.

    Args:
        options: The options.
        format: The format of matmuls that no pattern matches; None if they stay in the compute dtype.
        entries: Patterns of module paths, each with the format of their matmuls, or None. The first match wins.
    """

    options: Float8
    format: Format | None
    entries: tuple[tuple[str, Format | None], ...] = ()


class Decision(NamedTuple):
    """Whether a matmul runs in a format with scales.

    Args:
        format: The format.
        dtypes: The dtypes of its operands; empty if it stays in the compute dtype.
        why: The reason that it stays; empty if it does not.
        entry: The pattern that matched, if any.
        backward: Whether it belongs to a gradient that the program takes itself.
        options: The options.
    """

    format: Format
    dtypes: tuple[np.dtype, ...]
    why: str
    entry: str | None
    backward: bool
    options: Float8

    def __str__(self) -> str:
        return f"; not {self.format.name}: {self.why}" if self.why else f": {self.format.name}"


def decide(
    eqn: Any, parameters: Sequence[bool | None], followed: bool, setting: ScaledSetting, paths: Sequence[str]
) -> Decision:
    """Decides whether a matmul that may run in half runs in a format with scales.

    Args:
        eqn: The equation: a matmul or convolution.
        parameters: For each operand, whether it is a parameter or an input of the function; None if it is not float32.
        followed: Whether another matmul depends on its result.
        setting: The options and patterns.
        paths: The module paths of the equation.
    """
    options = setting.options
    backward = "transpose(" in scopes(eqn)
    matched = next(((p, to) for p, to in setting.entries if any(path_matches(path, p) for path in paths)), None)
    entry, wanted = matched or (None, setting.format)
    known = (setting.format, *(format for _, format in setting.entries))
    # The groups of a ragged matmul have no blocks.
    format = FLOAT8 if _is_ragged(eqn) else wanted or next(each for each in known if each is not None)
    why = _never(eqn, parameters, format)
    if not why and entry is not None and wanted is None:
        why = f"rule {entry!r}"
    if not why and entry is None:
        why = _why_not(eqn, parameters, followed, backward, setting)
    activation = cotangents_of(format, options) if backward and sum(map(bool, parameters)) == 1 else format.dtype
    dtypes = () if why else tuple(format.dtype if parameter else activation for parameter in parameters)
    return Decision(format, dtypes, why, entry, backward, options)


def cotangents_of(format: Format, options: Float8) -> np.dtype:
    """The dtype of cotangents in a format."""
    name: str = options.cotangents or next(iter(format.cotangents))
    return format.cotangents[name]


def _is_ragged(eqn: Any) -> bool:
    return eqn.primitive.name == "ragged_dot_general"


def _groups(eqn: Any) -> Sequence[int]:
    """The dimension of the second operand that holds the groups of a ragged matmul; none if groups are contracted."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    return ragged.rhs_group_dimensions if ragged else ()


def _never(eqn: Any, parameters: Sequence[bool | None], format: Format) -> str:
    """Why a matmul can't run in a format, whatever the rules."""
    if eqn.primitive.name != "dot_general" and not (_is_ragged(eqn) and _groups(eqn)):
        kind = "convolutions" if eqn.primitive.name.startswith("conv") else "ragged contractions"
        return f"{kind} have no {format.name} gradients"
    shapes = [v.aval.shape for v in eqn.invars[:2]]
    if any(0 in shape for shape in shapes):
        return "an operand is empty"
    if format.scaling == "block" and not all(isinstance(n, int) for shape in shapes for n in shape):
        return "a size is symbolic, and may be no whole number of blocks"
    return "the program itself gives an operand in half" if None in parameters else ""


def _why_not(
    eqn: Any, parameters: Sequence[bool | None], followed: bool, backward: bool, setting: ScaledSetting
) -> str:
    if setting.format is None:
        return "its module has another policy"
    if all(parameters):
        return "both operands come from arguments, as in a first layer"
    if not any(parameters):
        return "a weight gradient or a product of two activations" if backward else "both operands are activations"
    if not followed:
        return "no matmul follows, as in a last layer"
    k, free = _sizes(eqn)
    sizes = {"K": k, "M": free[0], "N": free[1]}
    odd = [f"{name} = {n}" for name, n in sizes.items() if isinstance(n, int) and n % setting.format.multiple]
    if odd:
        return f"{', '.join(odd)}: not a multiple of {setting.format.multiple}"
    outputs = free[list(parameters).index(True)]
    if _at_most(k, setting.options.min_size[0]) and _at_most(outputs, setting.options.min_size[1]):
        return f"K = {k} and {outputs} outputs are too few to gain (Float8.min_size)"
    return ""


def _at_most(size: Any, limit: int) -> bool:
    return isinstance(size, int) and size <= limit


def _sizes(eqn: Any) -> tuple[Any, list[Any]]:
    """The contracted size of a matmul, and the free size of each operand."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    contract, batch = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars[:2]]
    free = [
        math.prod(n for d, n in enumerate(shape) if d not in (*contracted, *batched, *groups))
        for shape, contracted, batched, groups in zip(shapes, contract, batch, ((), _groups(eqn)), strict=True)
    ]
    return math.prod(shapes[0][d] for d in contract[0]), free
