"""Traverses all equations of a jaxpr and of its sub-jaxprs.

`explain` and the audits share it, so that both count the same FLOPs and name the same source lines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mpjax._jaxpr import compat
from mpjax._jaxpr.flops import matmul_flops
from mpjax._jaxpr.primitives import Op, primitive
from mpjax._jaxpr.source import join, module_of, path_of, phase_of, source_line

_NOBODY: Mapping[int, str] = {}


@dataclasses.dataclass(frozen=True)
class Site:
    """One equation and its context.

    Args:
        eqn: The equation.
        times: How often it runs (lengths of scans, grids of Pallas kernels; a `while` counts as one iteration).
        module: The named scopes around it, at all levels; Flax names modules this way.
        inside: The names of the enclosing primitives, outermost first.
        caller: The source line of the enclosing equation.
        devices: The number of devices that run it on their own shard; 1 outside of `shard_map` and `pmap`, where an
            equation operates on whole arrays.
        owners: Module paths of equations whose scopes don't name an instance (see `instances.py`).
    """

    eqn: Any
    times: int
    module: str
    inside: tuple[str, ...]
    caller: str = ""
    devices: int = 1
    owners: Mapping[int, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """The user's line, as `file.py:12`; for code in a library, the line that called it.

        If a scope names the module, this may be a line inside the layer. Otherwise (Flax NNX), it is the line that
        called the layer, which is more informative.
        """
        return source_line(self.eqn, in_layer=bool(self.path)) or self.caller

    @property
    def place(self) -> str:
        """The primitive and its source line, as `exp at file.py:12`."""
        return f"{self.name} at {self.source or 'an unknown line'}"

    @property
    def flops(self) -> int:
        """FLOPs of a matmul or convolution, summed over all iterations; 0 for any other operation."""
        return self.times * matmul_flops(self.eqn)

    @property
    def path(self) -> str:
        """The module path without the marks of transformations: the same in the forward and backward pass."""
        path = path_of(self.module)
        if self.owners and (not path or path.startswith(_CLASSES)):
            return self.owners.get(id(self.eqn), path)
        return path

    @property
    def phase(self) -> str:
        """`FORWARD`, `BACKWARD`, or `RECOMPUTED` for a forward operation recomputed in the backward pass."""
        return phase_of(self.module)


# Equinox names the classes of its layers, not the instances.
_CLASSES = "eqx.nn."


def site_of(eqn: Any, around: Site | None = None, owners: Mapping[int, str] = _NOBODY) -> Site:
    """The site of an equation, at the top level or in a sub-jaxpr of the equation of `around`."""
    if around is None:
        return Site(eqn, 1, module_of(eqn), (), owners=owners)
    module, inside = join(around.module, module_of(eqn)), (*around.inside, around.name)
    devices = around.devices * replicas(around.eqn)
    return Site(eqn, trip_count(around.eqn, around.times), module, inside, around.source, devices, around.owners)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The sub-jaxprs of an equation."""
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if compat.is_jaxpr(part):
                found.append(part)
    return found


def programs_in(eqn: Any) -> list[Any]:
    """The sub-jaxprs that an equation runs, excluding the scalar function that combines the updates of a scatter."""
    return inner_jaxprs(eqn) if primitive(eqn.primitive.name).op in (Op.ENTER, Op.OPAQUE) else []


def walk(jaxpr: Any, around: Site | None = None, owners: Mapping[int, str] = _NOBODY) -> Iterator[Site]:
    """Yields every equation of an open or closed jaxpr and of its sub-jaxprs, in program order."""
    for eqn in compat.open_jaxpr(jaxpr).jaxpr.eqns:
        site = site_of(eqn, around, owners)
        yield site
        for inner in programs_in(eqn):
            yield from walk(inner, site)


def replicas(eqn: Any) -> int:
    """The number of devices that run the sub-jaxpr of an equation, each on its own shard."""
    if eqn.primitive.name == "shard_map":
        options = compat.shard_map_options(eqn.params)
        return math.prod(options["mesh"].shape[name] for name in options["axis_names"])
    return int(eqn.params["axis_size"]) if eqn.primitive.name == "xla_pmap" else 1


def trip_count(eqn: Any, times: int) -> int:
    """How often the sub-jaxprs of an equation run, if the equation itself runs `times` times."""
    if eqn.primitive.name == "scan":
        return times * eqn.params["length"]
    if eqn.primitive.name == "pallas_call":
        return times * math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return times
