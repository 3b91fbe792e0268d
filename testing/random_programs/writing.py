"""Writes random programs as Python source, from choices of Hypothesis or a random number generator.

Source is easy to read, to edit and to paste into a test, and shrinks with its choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from testing.random_programs.operations import BINARY, MASKED, MASKS, MATMULS, OTHERS, UNARY, Type

Choice = TypeVar("Choice")
Index = Callable[[int], int]

DEPTH = 3  # of nested functions

_CONSTANTS = {
    Type.SCALAR: "0.5",
    Type.VECTOR: "jnp.array(CONSTANT[0])",
    Type.ROWS: "jnp.array(CONSTANT[:2])",
    Type.MATRIX: "jnp.array(CONSTANT)",
}


@dataclasses.dataclass
class Scope:
    """The body of a function that is being written.

    Args:
        variables: The readable variables with their types, in order of definition, including those of outer functions.
        depth: Number of enclosing functions.
        lines: Its statements.
        axis: The name of a mapped axis that collectives may use; empty if there is none.
    """

    variables: list[tuple[str, Type]]
    depth: int
    lines: list[str]
    axis: str = ""

    def add(self, line: str) -> None:
        self.lines.append("    " * (self.depth + 1) + line)


class Writer:
    """One random program.

    Args:
        index: Makes each choice: a number below its argument, of which 0 is the simplest.
        reverse: Use only operations that support reverse-mode differentiation (no `while`).
        forward: Use only operations that support forward-mode differentiation (no `custom_vjp`).
        explicit: Whether arrays have explicit shardings.
        budget: The largest number of statements.
    """

    def __init__(self, index: Index, reverse: bool, forward: bool, explicit: bool, budget: int = 12):
        self.index, self.reverse, self.forward, self.explicit, self.budget = index, reverse, forward, explicit, budget
        self.count = 0
        self.used: list[str] = []

    # Choices.

    def choose(self, options: Sequence[Choice]) -> Choice:
        """Chooses an option; the first is the simplest."""
        return options[self.index(len(options))] if len(options) > 1 else options[0]

    def recent(self, options: list[Choice]) -> Choice:
        """Chooses an option, most often a late one, so that computed values are read."""
        latest = options[:-4:-1]
        return self.choose([*latest, *latest, *latest, *options[::-1]])

    def flag(self) -> bool:
        return bool(self.index(2))

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def variable(self, scope: Scope, type_: Type) -> str:
        """A variable of a type, preferably a recent one, or a small expression if there is none."""
        found = [name for name, of_type in scope.variables if of_type is type_]
        if found:
            return self.recent(found)
        return _CONSTANTS[type_]

    def any_variable(self, scope: Scope) -> tuple[str, Type]:
        return self.recent(scope.variables) if scope.variables else ("0.5", Type.SCALAR)

    # Statements.

    def assign(self, scope: Scope, type_: Type, text: str) -> str:
        name = self.name("v")
        scope.add(f"{name} = {text}")
        scope.variables.append((name, type_))
        return name

    def statement(self, scope: Scope) -> None:
        """Adds one statement: a first-order operation, or a function that is transformed and called."""
        self.budget -= 1
        kinds = ["matmul", "unary", "binary", "other", "masked"]
        if scope.axis:
            kinds.append("collective")
        if scope.depth < DEPTH and self.budget > 1:
            kinds += ["higher"] * (6 if scope.depth < DEPTH - 1 else 2)
        getattr(self, f"_{self.choose(kinds)}")(scope)

    def _apply(self, scope: Scope, entry: tuple[Type, tuple[Type, ...], str]) -> None:
        result, operands, template = entry
        text = template.format(*(self.variable(scope, of) for of in operands))
        self.assign(scope, result, text)

    def _matmul(self, scope: Scope) -> None:
        self._apply(scope, self.choose(MATMULS))

    def _other(self, scope: Scope) -> None:
        self._apply(scope, self.choose(OTHERS))

    def _masked(self, scope: Scope) -> None:
        """Attention with masked scores, or their softmax, or a masked matrix."""
        matrix, mask, masked = self.variable(scope, Type.MATRIX), self.choose(MASKS), self.choose(MASKED)
        rows = self.choose(("jax.nn.softmax({0}) @ {1}", "jax.nn.softmax({0})", "jnp.clip({0}, -9.1)"))
        name = self.name("m")
        scope.add(f"{name} = {mask}")
        scores = masked.format(self.choose((f"({matrix} @ {matrix}.T)", matrix)), name)
        self.assign(scope, Type.MATRIX, rows.format(scores, matrix))

    def _unary(self, scope: Scope) -> None:
        name, type_ = self.any_variable(scope)
        self.assign(scope, type_, self.choose(UNARY).format(name))

    def _binary(self, scope: Scope) -> None:
        name, type_ = self.any_variable(scope)
        other = self.variable(scope, self.choose(type_.smaller))
        self.assign(scope, type_, self.choose(BINARY).format(name, other))

    def _collective(self, scope: Scope) -> None:
        name, type_ = self.any_variable(scope)
        collective = self.choose(("lax.psum({}, {!r})", "lax.pmean({}, {!r})", "lax.pmax(lax.stop_gradient({}), {!r})"))
        self.assign(scope, type_, collective.format(name, scope.axis))

    def _higher(self, scope: Scope) -> None:
        from testing.random_programs.functions import HIGHER_ORDER

        excluded = {"while_loop": self.reverse, "custom_vjp": self.forward, "shard_map": scope.axis == "i"}
        names = [name for name in HIGHER_ORDER if not excluded.get(name)]
        chosen = self.choose(names)
        self.used.append(chosen)
        HIGHER_ORDER[chosen](self, scope)

    # Functions.

    def body(self, scope: Scope, results: tuple[Type, ...] | None = None) -> list[tuple[str, Type]]:
        """Fills a body with statements and returns its results.

        Args:
            scope: The body, with its arguments as variables.
            results: The types to return; drawn if None.
        """
        for _ in range(1 + self.index(4 if scope.depth == 0 else 3)):
            if self.budget > 0 or not scope.lines:
                self.statement(scope)
        if results is not None:
            return [(self.variable(scope, of), of) for of in results]
        return [self.any_variable(scope) for _ in range(self.choose((1, 2, 3)))]

    def function(
        self,
        scope: Scope,
        arguments: list[tuple[str, Type]],
        results: tuple[Type, ...] | None = None,
        *,
        closed: bool = False,
        decorators: tuple[str, ...] = (),
        unpack: tuple[str, ...] = (),
        signature: str | None = None,
        returned: str = "{}",
        axis: str | None = None,
        forward: bool = False,
        reverse: bool = False,
    ) -> tuple[str, list[Type]]:
        """Writes a nested function; returns its name and the types of its results.

        Args:
            scope: Scope of the definition.
            arguments: Names and types of the body's arguments, after `unpack`.
            results: The types that it must return; drawn if None.
            closed: Whether it must not read variables of enclosing functions.
            decorators, unpack: Lines above it and at its beginning.
            signature: Its parameters, if they differ from the arguments' names.
            returned: Format of the return value around the results `a, b`.
            axis: Name of the mapped axis inside.
            forward, reverse: Modes in which it is differentiated.
        """
        name, limits = self.name("f"), (self.forward, self.reverse)
        self.forward, self.reverse = self.forward or forward, self.reverse or reverse
        for decorator in decorators:
            scope.add(decorator)
        scope.add(f"def {name}({', '.join(n for n, _ in arguments) if signature is None else signature}):")
        outer = [] if closed else scope.variables
        inner = Scope([*outer, *arguments], scope.depth + 1, scope.lines, scope.axis if axis is None else axis)
        for line in unpack:
            inner.add(line)
        outs = self.body(inner, results)
        self.forward, self.reverse = limits
        inner.add("return " + returned.format(", ".join(n for n, _ in outs) + ("," if len(outs) == 1 else "")))
        return name, [of for _, of in outs]

    def bind(self, scope: Scope, types: list[Type], text: str) -> list[str]:
        """Assigns a call's tuple of results to new variables."""
        names = [self.name("v") for _ in types]
        scope.add(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {text}")
        scope.variables += zip(names, types, strict=True)
        return names
