"""The residual stream in half or in float32: `python -m benchmarks.residual_stream`.

A transformer encoder of 24 layers, scanned, without and with a `jax.checkpoint` around each layer. The bytes are those
that JAX keeps for the backward pass. The error is that of the gradient against float32's over all parameters, the
median of three seeds. By hand, Flax's `dtype=` puts the layers in half, and the stream has the dtype of the embedding.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks import RESULTS
from perf.results import save
from testing import measures
from testing.zoo import harness

LAYERS, WIDTH, HEADS, TOKENS, EXAMPLES, CLASSES = 24, 128, 4, 64, 8, 10
SCALE = 1024.0


class Layer(nn.Module):
    """Attention and an MLP, each added to the stream."""

    dtype: Any

    @nn.compact
    def __call__(self, h: jax.Array, _: None) -> tuple[jax.Array, None]:
        norm, dense = functools.partial(nn.LayerNorm, dtype=self.dtype), functools.partial(nn.Dense, dtype=self.dtype)
        h = h + nn.SelfAttention(HEADS, dtype=self.dtype, name="attention")(norm(name="norm1")(h)).astype(h.dtype)
        mlp = dense(WIDTH, name="down")(nn.gelu(dense(4 * WIDTH, name="up")(norm(name="norm2")(h))))
        return h + mlp.astype(h.dtype), None


class Encoder(nn.Module):
    """The transformer.

    Args:
        dtype: Dtype of the layers.
        stream: Dtype of the values between layers.
        checkpoint: Whether each layer is recomputed in the backward pass.
    """

    dtype: Any = None
    stream: Any = jnp.float32
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(WIDTH, dtype=self.dtype, name="embed")(x).astype(self.stream)
        layer = nn.remat(Layer, prevent_cse=False) if self.checkpoint else Layer
        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        h, _ = scanned(self.dtype, name="layers")(h, None)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="norm")(h).mean(1))


def loss_of(model: Encoder) -> Callable[..., jax.Array]:
    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply(params, x)
        assert isinstance(logits, jax.Array)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    return loss


def forms(half: str, checkpoint: bool) -> dict[str, Callable[..., jax.Array]]:
    """The compared losses."""
    plain = loss_of(Encoder(checkpoint=checkpoint))
    stream = mpjax.Rules(residual_stream="float32")
    return {
        "float32": plain,
        "by hand, half stream": loss_of(Encoder(jnp.dtype(half), jnp.dtype(half), checkpoint)),
        "by hand, float32 stream": loss_of(Encoder(jnp.dtype(half), jnp.float32, checkpoint)),
        'autocast, "half" (default)': mpjax.autocast(plain, f"mixed_{half}"),
        'autocast, "float32"': mpjax.autocast(plain, f"mixed_{half}", rules=stream),
    }


def problem(seed: int) -> tuple[Any, jax.Array, jax.Array]:
    """Parameters, inputs [examples, tokens, width] and labels [examples]."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (EXAMPLES, TOKENS, WIDTH))
    return Encoder().init(keys[1], x), x, jax.random.randint(keys[2], (EXAMPLES,), 0, CLASSES)


def gradient(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The gradient in float32, at a loss scale that keeps float16 in range."""
    state = mpjax.static_loss_scale(optax.identity(), SCALE).init({})
    return jax.jit(mpjax.grad(loss, state), compiler_options=harness.COMPILE_TRUE)


def measure(half: str, seeds: int) -> dict[str, dict[str, float]]:
    problems = [problem(seed) for seed in range(seeds)]
    exact = [gradient(loss_of(Encoder()))(*args) for args in problems]
    rows: dict[str, dict[str, float]] = {}
    for checkpoint in (False, True):
        for form, loss in forms(half, checkpoint).items():
            row = rows.setdefault(form, {})
            stored = measures.residual_bytes(loss, *problems[0])
            row["checkpointed_residual_bytes" if checkpoint else "residual_bytes"] = stored
            if form != "float32" and not checkpoint:
                grad = gradient(loss)
                pairs = zip(problems, exact, strict=True)
                errors = [measures.relative_error(grad(*args), true) for args, true in pairs]
                row["gradient_error"] = statistics.median(errors)
            print(half, form, row, flush=True)
    return rows


def summary(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """The results as a Markdown table."""
    head = "| dtype | stream | residuals | residuals, a checkpoint per layer | gradient error |"
    lines = [head, "|---|---|---|---|---|"]
    for half, rows in results.items():
        for form, row in rows.items():
            error = f"{row['gradient_error']:.2e}" if "gradient_error" in row else ""
            sizes = (f"{row[key] / 1e6:.1f} MB" for key in ("residual_bytes", "checkpointed_residual_bytes"))
            lines.append(f"| {half} | {form} | {' | '.join(sizes)} | {error} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"], choices=["bfloat16", "float16"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    results = {half: measure(half, args.seeds) for half in args.dtypes}
    path = save("residual_stream", results, args.out)
    path.with_suffix(".md").write_text(summary(results))
    print(summary(results))


if __name__ == "__main__":
    main()
