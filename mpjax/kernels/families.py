"""Functions with several results as primitives, with a backward pass of their own (attention, losses).

    forward     (operands)                              → results
    tangent     (operands, kept results, tangents)      → tangents of the results that have a derivative
    backward    (operands, kept results, cotangents)    → cotangents of operands

`tangent` is linear in the tangents, and its transpose is `backward`, so every transformation works. The parameter `wrt`
of both has the names of the operands with tangents, or whose cotangents are wanted. Forward mode and second derivatives
run the function's formula as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad

from mpjax.kernels.derivatives import Rule, define, same_axes, set_rules
from mpjax.program import compat
from mpjax.program.objects import filled


def primitives(name: str) -> tuple[Primitive, Primitive, Primitive]:
    """New primitives for the forward pass of a function, its tangents and its backward pass."""
    return Primitive(name), Primitive(f"{name}_tangent"), Primitive(f"{name}_backward")


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """The primitives of a function.

    Args:
        forward, tangent, backward: The primitives.
        names: `names(**params)` returns a name for each operand.
        formula: `formula(*operands, **params)` returns the results.
        constant: The indices of those without a derivative.
        kept: `kept(results, **params)` returns the results that the backward pass reads.
    """

    forward: Primitive
    tangent: Primitive
    backward: Primitive
    names: Callable[..., Sequence[str]]
    formula: Rule
    constant: Collection[int]
    kept: Rule

    def define(
        self, forward: Rule, avals: Rule, backward: Rule, batch: Callable[[Primitive], Rule]
    ) -> dict[Primitive, Rule]:
        """Defines the primitives. Returns each with its program.

        Args:
            forward: `forward(*operands, **params)` computes the results.
            avals: The abstract values of these.
            backward: Computes the cotangents, as a list.
            batch: Makes the batching rule of each primitive.
        """
        define(self.forward, forward, avals, batch(self.forward), several=True)
        set_rules(self.forward, self._tangents_of, self._has_tangent)

        def tangent_avals(*avals_in: Any, wrt: Sequence[str], **params: Any) -> list[Any]:
            return self._varied(avals(*avals_in, **params))

        def backward_avals(*avals_in: Any, wrt: Sequence[str], **params: Any) -> list[Any]:
            return [avals_in[i] for i in self._places(wrt, params)]

        define(self.tangent, self._tangent_program, tangent_avals, batch(self.tangent), several=True)
        define(self.backward, backward, backward_avals, batch(self.backward), several=True)
        _derive(self.tangent, self._tangent_program)
        _derive(self.backward, self._backward_of_formula)
        ad.primitive_transposes[self.tangent] = self._transpose
        return {self.forward: forward, self.tangent: self._tangent_program, self.backward: backward}

    def _varied(self, results: Sequence[Any]) -> list[Any]:
        return [x for i, x in enumerate(results) if i not in self.constant]

    def _places(self, wrt: Sequence[str], params: dict[str, Any]) -> list[int]:
        names = self.names(**params)
        return [names.index(name) for name in wrt]

    def _of_formula(self, arrays: Sequence[Any], wrt: Sequence[str], params: dict[str, Any]) -> tuple[Rule, list[Any]]:
        """The formula as a function of some operands, and these operands."""
        operands, places = arrays[: len(self.names(**params))], self._places(wrt, params)

        def fun(*chosen: Any) -> list[Any]:
            return self._varied(self.formula(*filled(operands, places, chosen), **params))

        return fun, [operands[i] for i in places]

    def _tangent_program(self, *arrays: Any, wrt: Sequence[str], **params: Any) -> list[Any]:
        fun, chosen = self._of_formula(arrays, wrt, params)
        return list(jax.jvp(fun, chosen, list(arrays[len(arrays) - len(wrt) :]))[1])

    def _backward_of_formula(self, *arrays: Any, wrt: Sequence[str], **params: Any) -> list[Any]:
        """The backward pass as a function of operands and cotangents alone: its derivative is that of the formula."""
        fun, chosen = self._of_formula(arrays, wrt, params)
        outs, pullback = jax.vjp(fun, *chosen)
        return list(pullback(list(arrays[len(arrays) - len(outs) :])))

    def _tangents_of(self, primals: Any, tangents: Any, outs: Any, params: dict[str, Any]) -> list[Any]:
        names = self.names(**params)
        floats = {name: t for name, t in zip(names, tangents, strict=True) if type(t) is not ad.Zero}
        found = [compat.zero_tangent(out) for out in outs]
        if floats:
            arrays = same_axes([*primals, *self.kept(outs, **params), *map(ad.instantiate_zeros, floats.values())])
            varied = self._varied(range(len(outs)))
            found = filled(found, varied, self.tangent.bind(*arrays, wrt=tuple(floats), **params))
        return found

    def _has_tangent(self, nonzeros: Sequence[bool], primals: Sequence[Any], outs: Sequence[Any]) -> list[bool]:
        return [any(nonzeros) and i not in self.constant for i in range(len(outs))]

    def _transpose(self, cts: Sequence[Any], *arrays: Any, wrt: Sequence[str], **params: Any) -> list[Any]:
        count = len(arrays) - len(wrt)
        asked = [name for name, x in zip(wrt, arrays[count:], strict=True) if ad.is_undefined_primal(x)]
        found: dict[str, Any] = {}
        if asked and any(type(ct) is not ad.Zero for ct in cts):
            operands = same_axes([*arrays[:count], *map(ad.instantiate_zeros, cts)])
            found = dict(zip(asked, self.backward.bind(*operands, wrt=tuple(asked), **params), strict=True))
        return [*[None] * count, *(found.get(name) for name in wrt)]


def _derive(primitive: Primitive, formula: Rule) -> None:
    """Gives a primitive the derivative of a formula, in forward mode; JAX transposes that one."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        inexact = [i for i, p in enumerate(primals) if compat.is_inexact(jax.typeof(p))]

        def of_floats(*floats: Any) -> Any:
            return formula(*filled(primals, inexact, floats), **params)

        _, out = jax.jvp(of_floats, [primals[i] for i in inexact], [ad.instantiate_zeros(tangents[i]) for i in inexact])
        return primitive.bind(*primals, **params), out

    ad.primitive_jvps[primitive] = jvp
