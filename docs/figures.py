"""Draws the figures of the documentation from runs of the program: `python -m docs.figures`.

Each figure is drawn twice, on a light and on a dark page. The runs take some seconds on a CPU.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import optax

import mpjax

FOLDER = pathlib.Path(__file__).parent / "figures"
INK = {"light": "#24292f", "dark": "#d7dbe0"}
# Distinguishable to colour-blind readers, on white and on dark grey.
HALF, FULL, ALERT = "#2b8cbe", "#e08214", "#c51b7d"


class Block(nn.Module):
    """The smallest network to which every rule of autocast applies: attention, a norm, a residual sum."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(name="norm")(x)
        scores = nn.softmax(nn.Dense(64, name="scores")(h))
        return nn.Dense(10, name="head")(x + nn.Dense(64, name="mix")(scores))


def loss_fn(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of a batch of inputs [examples, 64] and labels [examples]."""
    return optax.softmax_cross_entropy_with_integer_labels(Block().apply(params, x), labels).mean()


def program() -> tuple[Any, jax.Array, jax.Array]:
    """Parameters and a batch of that network."""
    x = jax.random.normal(jax.random.key(1), (256, 64))
    return Block().init(jax.random.key(0), x), x, jnp.arange(256) % 10


def dtypes(plot: Any, ink: str) -> None:
    """The dtype of each operation, before and after autocast; the length of its bar is its share of the FLOPs."""
    args = program()
    rows = mpjax.explain(mpjax.autocast(loss_fn), *args).rows
    total = sum(row.flops for row in rows)
    _, (before, after) = plot.subplots(1, 2, figsize=(7.2, 0.17 * len(rows) + 0.9), sharey=True)
    for axes, title in ((before, "as written"), (after, "under mpjax.autocast")):
        halves = [axes is after and "float16" in row.dtypes_in for row in rows]
        shares = [max(row.flops / total, 0.004) for row in rows]  # work without matmuls is a line
        axes.barh(range(len(rows)), shares, color=[HALF if half else FULL for half in halves], height=0.86)
        for i, (row, half, share) in enumerate(zip(rows, halves, shares, strict=True)):
            work = f", {row.flops / total:.0%} of FLOPs" if row.flops else ""
            dtype = "float16" if half else "float32"
            axes.text(share + 0.01, i, dtype + work, va="center", color=ink, fontsize=6.5)
        in_half = sum(row.flops for row, half in zip(rows, halves, strict=True) if half) / total
        axes.set_title(f"{title}: {in_half:.0%} of FLOPs in half", fontsize=8)
        axes.set(xlim=(0, 0.8), ylim=(len(rows) - 0.4, -0.6), xticks=[])
        axes.spines[:].set_visible(False)
    names = [f"{row.module.strip('-').rpartition('/')[2] or 'loss'}: {row.op}" for row in rows]
    before.set_yticks(range(len(rows)), names, fontsize=6.5)
    before.tick_params(length=0)
    after.tick_params(length=0)


def loss_scale(plot: Any, ink: str) -> None:
    """The loss scale over a run of 200 steps in float16 that starts at the highest scale and has two outliers."""
    steps, scales, skipped = 200, [], []
    tx = mpjax.dynamic_loss_scale(optax.adam(1e-3), init_scale=2.0**24, growth_interval=25)
    params, x, labels = program()
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, weight: Any) -> Any:
        # A weight on the loss stands for an outlier: its gradients are that much larger.
        weighted = mpjax.autocast(lambda p: jnp.sum(weight * loss_fn(p, x, labels)))
        loss, grads = mpjax.value_and_grad(weighted, opt_state)(params)
        return mpjax.apply_gradients(tx, grads, opt_state, params, value=loss)

    for i in range(steps):
        scales.append(float(opt_state.loss_scale))
        params, opt_state = step(params, opt_state, 64.0 if i in (90, 160) else 1.0)
        skipped += [] if opt_state.last_finite else [i]
    _, axes = plot.subplots(figsize=(7.2, 2.8))
    axes.step(range(steps), scales, where="post", color=HALF, label="loss scale")
    axes.plot(skipped, [scales[i] for i in skipped], "x", color=ALERT, label=f"skipped step ({len(skipped)})")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale")
    axes.legend(frameon=False, labelcolor=ink)


def memory(plot: Any, ink: str) -> None:
    """The bytes that the network of the memory guide stores for the backward pass, from the guide's own code."""
    page = (FOLDER.parent / "guides" / "memory.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    forms, args = names["forms"], (names["params"], names["x"])
    _, axes = plot.subplots(figsize=(7.2, 2.2))
    for i, form in enumerate(forms.values()):
        residuals = mpjax.audit(form, *args).residuals
        full, half = residuals.get("float32", 0) / 1e3, residuals.get("float16", 0) / 1e3
        axes.barh(i, half, color=HALF, label="float16" if i == 0 else None)
        axes.barh(i, full, left=half, color=FULL, label="float32" if i == 0 else None)
        axes.text(full + half, i, f" {full + half:.0f} kB", va="center", color=ink)
    labels = [name.replace(", ", ",\n").replace(" (", "\n(") for name in forms]
    axes.set(yticks=range(len(forms)), yticklabels=labels, xlabel="kept for the backward pass, kB")
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.legend(frameon=False, labelcolor=ink, loc="lower right")


FIGURES: Iterable[Callable[[Any, str], None]] = (dtypes, loss_scale, memory)


def main() -> None:
    """Draws every figure in both themes."""
    matplotlib.use("svg")
    # The same drawing gives the same file.
    matplotlib.rcParams |= {
        "svg.hashsalt": "mpjax",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
    }
    import matplotlib.pyplot as plot

    FOLDER.mkdir(exist_ok=True)
    for draw in FIGURES:
        for theme, ink in INK.items():
            colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
            with plot.rc_context(dict.fromkeys(colours, ink) | {"axes.spines.top": False, "axes.spines.right": False}):
                draw(plot, ink)
                path = FOLDER / f"{draw.__name__}_{theme}.svg"
                plot.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None})
                plot.close()
                print(f"drew {path}")


if __name__ == "__main__":
    main()
