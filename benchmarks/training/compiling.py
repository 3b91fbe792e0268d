"""The jitted step of a cell: its compiler options and the layouts of its carry."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from .cells import Cell
from .configurations import Training


def jitted(cell: Cell, made: Training, like: Any = None, **compiler_options: bool | int | str) -> Any:
    """The step; with `auto_layout` XLA chooses the memory layouts of parameters, state and optimizer state.

    The carry is donated, so its layouts are the same in the arguments and in the results.

    Args:
        cell, made: The cell, and its model under its configuration.
        like: A compiled step whose layouts are reused; None lets XLA choose, before any array exists.
        compiler_options: XLA flags in addition to the cell's own.
    """
    options = cell.options()
    layouts: dict[str, Any] = {}
    if options.auto_layout:
        carried = Format(Layout.AUTO) if like is None else like.input_formats[0][0]
        layouts = {"in_shardings": (carried, None), "out_shardings": (carried, None)}
    compiler_options |= options.compiler_options
    return jax.jit(made.step, donate_argnums=0, compiler_options=compiler_options, **layouts)


def initial(compiled: Any, made: Training) -> tuple[Any, Any]:
    """Arguments of a compiled step, in its layouts."""
    carry, batch = compiled.input_formats[0]
    return (
        jax.jit(made.init, out_shardings=carry)(jax.random.key(0)),
        jax.jit(made.workload.batch, out_shardings=batch)(jax.random.key(1)),
    )
