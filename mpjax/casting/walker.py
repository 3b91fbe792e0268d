"""A walk over all equations of a program, loops and branches and functions inside included.

Planning reports (`explain`) and audits share it, so that both count the same FLOPs and name the same places.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

from mpjax.casting import versions
from mpjax.casting.classify import MARK, join
from mpjax.casting.oplists import ALLOW

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"
_REMATTED = "rematted_computation"  # JAX's own scope around what a remat computes again
_TRANSFORM = re.compile(r"\b\w+\(")


@dataclasses.dataclass(frozen=True)
class Site:
    """One equation and where it stands.

    Args:
        eqn: the equation.
        times: how often it runs (lengths of scans, grids of Pallas kernels; a `while` counts as one turn).
        module: the named scopes around it, through all levels; Flax names modules this way.
        inside: the names of the primitives that it is inside of, outermost first.
        caller: the line of the equation around it.
    """

    eqn: Any
    times: int
    module: str
    inside: tuple[str, ...]
    caller: str = ""

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """The user's line, as `file.py:12`; of what a library made, the line that called it.

        Under a module's name that is the line in the layer; where no scope names the module (Flax NNX), the line
        that called the layer tells more.
        """
        return versions.source_line(self.eqn, in_layer=bool(self.path)) or self.caller

    @property
    def flops(self) -> int:
        """FLOPs of a matmul or convolution, all its turns together; 0 for anything else."""
        return self.times * matmul_flops(self.eqn)

    @property
    def path(self) -> str:
        """The module path without the transformations' marks: the same forward and backward."""
        return path_of(self.module)

    @property
    def phase(self) -> str:
        """`FORWARD`, `BACKWARD`, or `RECOMPUTED`: forward, but computed again in the backward pass."""
        return phase_of(self.module)


def site_of(eqn: Any, around: Site | None = None) -> Site:
    """The site of an equation that stands in the program inside another one, or at the top."""
    if around is None:
        return Site(eqn, 1, module_of(eqn), ())
    module = join(around.module, module_of(eqn))
    return Site(eqn, turns(around.eqn, around.times), module, (*around.inside, around.name), around.source)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The programs inside an equation."""
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if versions.is_jaxpr(part):
                found.append(part)
    return found


def walk(jaxpr: Any, around: Site | None = None) -> Iterator[Site]:
    """Every equation of a jaxpr, open or closed, and of those inside it, in the program's order."""
    for eqn in versions.open_jaxpr(jaxpr).jaxpr.eqns:
        site = site_of(eqn, around)
        yield site
        for inner in inner_jaxprs(eqn):
            yield from walk(inner, site)


def turns(eqn: Any, times: int) -> int:
    """How often what is inside an equation runs, if the equation runs so often."""
    if eqn.primitive.name == "scan":
        return times * eqn.params["length"]
    if eqn.primitive.name == "pallas_call":
        return times * math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return times


def module_of(eqn: Any) -> str:
    """The module path of an equation, without mpjax's own marks."""
    scopes = versions.scopes(eqn)
    if MARK not in scopes:
        return scopes
    return join(*(part for part in scopes.split("/") if MARK not in part))


@functools.lru_cache(maxsize=4096)
def phase_of(module: str) -> str:
    """Which pass a module path with the transformations' marks belongs to (`transpose` is JAX's word for backward)."""
    if _REMATTED in module:
        return RECOMPUTED
    return BACKWARD if "transpose(" in module else FORWARD


@functools.lru_cache(maxsize=4096)
def path_of(module: str) -> str:
    """A module path without the transformations' marks: `Net/Dense_0` for `transpose(jvp(Net))/Dense_0`."""
    parts: list[str] = []
    for part in module.split("/"):
        name = _TRANSFORM.sub("", part).rstrip(")") if "(" in part else part
        if "jvp(" in part and parts[:1] == [name]:
            parts = []  # The backward pass of a remat gives the whole path a second time.
        if name and name != _REMATTED:
            parts.append(name)
    return "/".join(parts)


def matmul_flops(eqn: Any) -> int:
    """FLOPs of one matmul or convolution, a multiply and an add counting two; 0 for anything else."""
    name = eqn.primitive.name
    if name not in ALLOW:
        return 0
    lhs, rhs = (v.aval for v in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(lhs.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        return 2 * _conv_multiplications(eqn)
    # A ragged dot multiplies each row with the matrix of its group.
    return 2 * math.prod(lhs.shape) * rhs.shape[-1]


def _conv_multiplications(eqn: Any) -> int:
    """Multiplications of a convolution: those of each output, or of each input where these are fewer.

    They are fewer in a transposed convolution, which the gradient by the input is too: the rest are by the zeros
    that its stride puts between the inputs, and by its padding.
    """
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    out, numbers = eqn.outvars[0].aval.shape, eqn.params["dimension_numbers"]
    features, inner = (max(rhs[d], 1) for d in numbers.rhs_spec[:2])
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    return min(math.prod(out) * math.prod(rhs) // features, math.prod(lhs) * math.prod(rhs) // (inner * groups))
