"""Constants that half rounds to 0 or 1, such as an epsilon: each is compared with what the program says in float32."""

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
from mpjax.program import compat
from mpjax.program.graph import Site, walk
from mpjax.program.interpreter import is_half, widened
from mpjax.program.source import is_library_file
from mpjax.program.tracing import TracedCall, traced_call


class Lost(NamedTuple):
    """A constant that half rounds to 0, 1 or inf.

    Args:
        site: The operation that reads it.
        operand: Its position among the operands.
        dtype: The half dtype.
        written: What the program says; None if that is not known: the code itself casts to half.
    """

    site: Site
    operand: int
    dtype: str
    written: float | None

    @property
    def value(self) -> float:
        """The rounded constant."""
        return float(self.site.invars[self.operand].val)

    @property
    def text(self) -> str:
        """The finding in words."""
        if self.written is None:
            return f"zero in {self.dtype}: nothing guards"
        return rounded_text(self.written, self.dtype)


def rounded(number: float, dtype: Any) -> float:
    """A number as a half dtype holds it.

    Example:
        >>> rounded(0.999, "bfloat16"), rounded(1e-8, "float16")
        (1.0, 0.0)
    """
    return float(jnp.dtype(dtype).type(number))


def rounded_text(number: float, dtype: Any) -> str:
    """What a half dtype makes of a constant, in words."""
    held, least = rounded(number, dtype), float(compat.finfo(dtype).smallest_subnormal)
    note = "" if held else f" (its smallest positive number is {least:.2g})"
    return f"{number:.7g} is {f'{held:g}' if held else 'zero'} in {jnp.dtype(dtype).name}{note}"


def in_float32(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> TracedCall:
    """A call traced with float32 in place of half arguments, and without autocast."""

    def wide(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, np.float32) if is_half(x) else x
        return widened(x) if hasattr(x, "dtype") and is_half(x) else x

    wide_args, wide_kwargs = jax.tree.map(wide, (tuple(args), dict(kwargs)))
    with autocast_disabled():
        return traced_call(fun, wide_args, wide_kwargs)


def lost_constants(sites: Iterable[Site], original: Callable[[], TracedCall]) -> Iterator[Lost]:
    """The constants of a program that were rounded to 0, 1 or inf, and zeros of unknown origin.

    A constant that meets a half array is rounded while it is traced. So the program is traced in float32 as well, and
    the same operation of the same line there has the constant as it was written. Code that casts to half itself is the
    same in both. There the numbers in the text of the line tell.

    Args:
        sites: The program's equations.
        original: Traces the call in float32; called only if there is a constant of 0 or 1.
    """
    found = [(key, site, i) for key, site in _numbered(sites) for i, v in enumerate(site.invars) if is_suspect(v)]
    if not found:
        return
    try:
        wide = dict(_numbered(walk(original().jaxpr)))
    except Exception:  # The function may require half arguments.
        wide = {}
    for key, site, i in found:
        v, other = site.invars[i], wide.get(key)
        dtype, value = v.aval.dtype, float(v.val)
        literal = None if other is None or i >= len(other.invars) else other.invars[i]
        written = float(literal.val) if isinstance(literal, compat.Literal) and not is_half(literal) else None
        if written is None or written in (value, 0.0) or rounded(written, dtype) != value:
            numbers = _numbers(site)
            lost = next((n for n in numbers if n != value and rounded(n, dtype) == value), None)
            unknown = written is None and (literal is None or is_half(literal)) and not value
            if lost is not None or (unknown and numbers is not _UNKNOWN and 0.0 not in numbers):
                yield Lost(site, i, dtype.name, lost)
        else:
            yield Lost(site, i, dtype.name, written)


def is_suspect(v: Any) -> bool:
    """Whether an operand is a half constant of 0, 1 or inf."""
    return (
        isinstance(v, compat.Literal) and is_half(v) and np.size(v.val) == 1 and abs(float(v.val)) in (0, 1, math.inf)
    )


def are_unexplained(sites: Iterable[Site]) -> bool:
    """Whether half constants of 0 or 1 are more than the texts of their lines have: others were rounded to them."""
    suspects = ((v, site) for site in sites for v in filter(is_suspect, site.invars))
    counts = collections.Counter((abs(float(v.val)), _numbers(site)) for v, site in suspects)
    return any(count > numbers.count(value) for (value, numbers), count in counts.items())


def _numbered(sites: Iterable[Site]) -> Iterator[tuple[Any, Site]]:
    """The equations with their lines, primitives, and how many of the same came before."""
    seen = collections.Counter[Any]()
    for site in sites:
        frames = compat.user_frames(site.eqn)
        key = (frames[0].file_name, frames[0].start_line) if frames else None, site.name, site.phase
        seen[key] += 1
        yield (*key, seen[key]), site


_NUMBER = re.compile(r"(?<![\w.])\d+\.?\d*(?:e[+-]?\d+)?", re.IGNORECASE)
_UNKNOWN: tuple[float, ...] = ()


@functools.lru_cache(maxsize=4096)
def _numbers_of(file: str, first: int, last: int) -> tuple[float, ...]:
    text = "".join(linecache.getline(file, line) for line in range(first, max(first, last) + 1))
    found = [float(number) for number in _NUMBER.findall(text)]
    return (*found, *(1 - x for x in found if 0 < x < 1e-2))


def _numbers(site: Site) -> tuple[float, ...]:
    """The numbers in the text of an equation's line; `_UNKNOWN` in a library, whose code is not the user's fault."""
    frames = compat.user_frames(site.eqn)
    if not frames or is_library_file(frames[0].file_name):
        return _UNKNOWN
    return (*_numbers_of(frames[0].file_name, frames[0].start_line, frames[0].end_line), math.inf)  # not `_UNKNOWN`
