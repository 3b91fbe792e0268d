"""Constants that rounding makes 0 or 1, such as an epsilon: each is compared with what the program says in float64."""

from __future__ import annotations

import collections
import functools
import linecache
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.casting import autocast_disabled
from mpjax.inspection.reports import by_key
from mpjax.program import compat
from mpjax.program.dtypes import is_half, widened
from mpjax.program.graph import Site
from mpjax.program.inlining import Node, Value, flow_of
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import BACKWARD, is_library_file
from mpjax.program.tracing import TracedCall, traced_call


class Lost(NamedTuple):
    """A constant that its dtype rounds to 0, 1 or inf.

    Args:
        site: The operation that reads it.
        operand: Its position among the operands.
        dtype: The dtype.
        value: The rounded constant.
        written: What the program says; None if that is not known: the code itself casts.
    """

    site: Site
    operand: int
    dtype: str
    value: float
    written: float | None

    @property
    def text(self) -> str:
        """The finding in words."""
        if self.written is None:
            return f"zero in {self.dtype}: nothing guards"
        return rounded_text(self.written, self.dtype)

    @property
    def instead(self) -> str:
        """A number near what is written that the dtype holds."""
        limits, number = compat.finfo(self.dtype), abs(self.written or 0)
        if not math.isfinite(self.value):
            return f"{math.copysign(float(limits.max), self.value):.4g}"
        near_one = 1 + float(limits.eps) if number > 1 else 1 - float(limits.epsneg)
        return f"{math.copysign(near_one, self.value):.8g}" if self.value else f"{float(limits.smallest_normal):.2g}"


def rounded(number: float, dtype: Any) -> float:
    """A number as a half dtype holds it.

    Example:
        >>> rounded(0.999, "bfloat16"), rounded(1e-8, "float16")
        (1.0, 0.0)
    """
    with np.errstate(over="ignore"):
        return float(jnp.dtype(dtype).type(number))


def extreme(value: float) -> str:
    """The number that a half dtype holds in place of one beyond its range, in words."""
    return f"jnp.finfo(dtype).{'min' if value < 0 else 'max'} fits"


def rounded_text(number: float, dtype: Any) -> str:
    """What a half dtype makes of a constant, in words."""
    held, least = rounded(number, dtype), float(compat.finfo(dtype).smallest_subnormal)
    note = "" if held else f" (its smallest positive number is {least:.2g})"
    text = next(text for text in (f"{number:.7g}", repr(float(number))) if float(text) != held or float(number) == held)
    return f"{text} is {f'{held:g}' if held else 'zero'} in {jnp.dtype(dtype).name}{note}"


def in_float32(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> TracedCall:
    """A call traced with float32 in place of half arguments, and without autocast."""

    def wide(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, np.float32) if is_half(x) else x
        return widened(x) if hasattr(x, "dtype") and is_half(x) else x

    wide_args, wide_kwargs = jax.tree.map(wide, (tuple(args), dict(kwargs)))
    with autocast_disabled():
        return traced_call(fun, wide_args, wide_kwargs)


def as_written(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> TracedCall:
    """A call traced with float64 in place of floats, so with constants as the code has them; float32 if that fails."""

    def wide(x: Any) -> Any:
        is_float = hasattr(x, "dtype") and hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape, np.float64) if is_float else x

    try:
        with jax.enable_x64(True), autocast_disabled():
            return traced_call(fun, *jax.tree.map(wide, (tuple(args), dict(kwargs))))
    except Exception:  # The function may require its dtypes.
        return in_float32(fun, args, kwargs)


def lost_constants(
    nodes: Iterable[Node], original: Callable[[], TracedCall], low: Callable[[Any], bool] = is_half
) -> Iterator[Lost]:
    """The constants of a program that were rounded to 0, 1 or inf, and zeros of unknown origin.

    A constant that meets an array is rounded while it is traced. So the program is traced in a wider dtype as well, and
    the same operation of the same line there has the constant as it was written. Code that casts itself is the same in
    both. There the numbers in the text of the line tell.

    Args:
        nodes: The program's equations.
        original: Traces the call in a wider dtype; called only if there is a constant of 0 or 1.
        low: Whether the constants of a value's dtype are looked at.
    """
    numbered = [(key, node, i) for key, node in _numbered(nodes) if node.writes for i in range(len(node.reads))]
    constants = [(key, node, i) for key, node, i in numbered if _is_number(node.reads[i]) and low(_reader(node, i))]
    found = [(key, node, i) for key, node, i in constants if abs(_held(node, i)[1]) in (0, 1, math.inf)]
    if not found:
        return
    try:
        wide = dict(_numbered(flow_of(original().jaxpr).eqns))
    except Exception:  # The function may require half arguments.
        wide = {}
    for key, node, i in found:
        dtype, (number, value) = _reader(node, i).aval.dtype, _held(node, i)
        other: Any = wide.get(key)
        literal: Any = None if other is None or i >= len(other.reads) else other.reads[i]
        is_wider = literal is not None and _is_number(literal) and literal.aval.dtype.itemsize > dtype.itemsize
        written = number if number != value else float(literal.constant) if is_wider else None
        numbers = _numbers(node.site)  # without their signs
        if written is None or rounded(written, dtype) != value or (written == value and abs(value) not in numbers):
            unknown = written is None and (literal is None or literal.aval.dtype == dtype) and not value
            unknown &= numbers is not _UNKNOWN and 0.0 not in numbers and not _is_start(node.site, i)
            signed = (math.copysign(n, value) for n in numbers)
            written = next((n for n in signed if n != value and rounded(n, dtype) == value), None)
            if written is None and not unknown:
                continue
        if written != value:
            yield Lost(node.site, i, dtype.name, value, written)


def _is_number(value: Value) -> bool:
    """Whether a value is a number of the program's text, and no array that it closes over."""
    return value.constant is not None and np.size(value.constant) == 1 and not isinstance(value.constant, jax.Array)


def _reader(node: Node, i: int) -> Value:
    """The value whose dtype an operand has when it is read: a conversion's result."""
    return node.writes[0] if primitive(node.site.name).op is Op.CONVERT else node.reads[i]


def _held(node: Node, i: int) -> tuple[float, float]:
    """A constant operand, and what its dtype makes of it."""
    number = float(np.asarray(node.reads[i].constant).item())
    return number, rounded(number, _reader(node, i).aval.dtype)


def _is_start(site: Site, i: int) -> bool:
    """Whether an operand starts a sum, pads an array, is a dividend, or is a constant of a derivative."""
    row = primitive(site.name)
    return row.join or (row.whole and site.phase == BACKWARD) or (i == 0 and (row.adds or row.linear == "first"))


def unexplained(sites: Iterable[Site]) -> str:
    """A half constant of 0, 1 or inf that its line lacks, in words: another number may have been rounded to it."""
    read = ((v, site) for site in sites for i, v in enumerate(site.invars) if is_half(v) and not _is_start(site, i))
    every = ((v.val, site) for v, site in read if isinstance(v, compat.Literal) and np.size(v.val) == 1)
    # Of a maximum and an infinity, the other number is the result: it starts one, as that of a softmax.
    literals = ((n, site) for n, site in every if not (np.isinf(n) and primitive(site.name).elements == "all"))
    alike = by_key(((abs(float(n)), _numbers(site)), site) for n, site in literals if abs(float(n)) in (0, 1, math.inf))
    found = ((value, sites[0]) for (value, numbers), sites in alike.items() if len(sites) > numbers.count(value))
    value, site = min(found, key=lambda each: each[0], default=(0, None))
    return f"the {value:g} that {site.label} reads" if site is not None else ""


def _numbered(nodes: Iterable[Node]) -> Iterator[tuple[Any, Node]]:
    """The equations with their lines, primitives, and how many of the same came before."""
    seen = collections.Counter[Any]()
    for node in nodes:
        site = node.site
        frames = compat.user_frames(site.eqn)
        key = (frames[0].file_name, frames[0].start_line) if frames else None, site.name, site.phase
        seen[key] += 1
        yield (*key, seen[key]), node


_NUMBER = re.compile(r"(?<![\w.])(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?|\binf\b", re.IGNORECASE)
_ONE_LESS = re.compile(rf"(?<![\w.])1(?:\.0*)? *- *({_NUMBER.pattern})", re.IGNORECASE)
_UNKNOWN: tuple[float, ...] = ()


@functools.lru_cache(maxsize=4096)
def _numbers_of(file: str, first: int, last: int) -> tuple[float, ...]:
    text = "".join(linecache.getline(file, line) for line in range(first, max(first, last) + 1))
    return (*map(float, _NUMBER.findall(text)), *(1 - float(number) for number in _ONE_LESS.findall(text)))


def _numbers(site: Site) -> tuple[float, ...]:
    """The numbers in the text of an equation's line; `_UNKNOWN` in a library, whose code is not the user's fault."""
    frames = compat.user_frames(site.eqn)
    if not frames or is_library_file(frames[0].file_name):
        return _UNKNOWN
    return (*_numbers_of(frames[0].file_name, frames[0].start_line, frames[0].end_line), math.nan)  # not `_UNKNOWN`
