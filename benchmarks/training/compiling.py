"""The step of a cell as it is compiled: its compiler options, and the layouts of what it carries."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from .cells import Cell
from .configurations import Training


def jitted(cell: Cell, made: Training, like: Any = None, **compiler_options: bool | int | str) -> Any:
    """The step; with `auto_layout` XLA chooses how parameters, state and optimizer state lie in memory.

    What is carried is donated, so it comes out in the layouts that it goes in with.

    Args:
        cell, made: the cell, and its model under its configuration.
        like: the compiled step whose layouts to keep to; None lets XLA choose, for which there must be no arrays yet.
        compiler_options: XLA's flags beside the cell's own.
    """
    options = cell.options()
    layouts: dict[str, Any] = {}
    if options.auto_layout:
        carried = Format(Layout.AUTO) if like is None else like.input_formats[0][0]
        layouts = {"in_shardings": (carried, None), "out_shardings": (carried, None)}
    compiler_options |= options.compiler_options
    return jax.jit(made.step, donate_argnums=0, compiler_options=compiler_options, **layouts)


def initial(compiled: Any, made: Training) -> tuple[Any, Any]:
    """Arguments of a compiled step, in the layouts that it takes them in."""
    carry, batch = compiled.input_formats[0]
    return (
        jax.jit(made.init, out_shardings=carry)(jax.random.key(0)),
        jax.jit(made.workload.batch, out_shardings=batch)(jax.random.key(1)),
    )
