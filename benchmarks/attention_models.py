"""Attention that other libraries write: `python -m benchmarks.attention_models`. Says which is fused, or why not.

Each model is small and traced, not run. Hugging Face's need transformers 4, the last major version with Flax, in an
environment of its own; libraries that are not installed are left out. `--big-vision FOLDER` adds its ViT from a
checkout of google-research/big_vision.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import mpjax

WIDTH, HEADS = 64, 4
X = jax.ShapeDtypeStruct((2, 16, WIDTH), jnp.float32)
TOKENS = jnp.ones((2, 16), jnp.int32)


def linen(mask: Any) -> Iterator[Any]:
    """The function and the shapes of its arguments."""
    layer = nn.MultiHeadDotProductAttention(HEADS)
    yield lambda params, x: layer.apply(params, x, x, mask=mask)
    yield jax.eval_shape(layer.init, jax.random.key(0), X, X)
    yield X


def linen_cache() -> Iterator[Any]:
    layer = nn.MultiHeadDotProductAttention(HEADS, decode=True)
    yield lambda variables, x: layer.apply(variables, x[:, :1], x[:, :1], mutable=["cache"])[0]
    yield jax.eval_shape(layer.init, jax.random.key(0), X, X)
    yield X


def nnx_layer() -> Iterator[Any]:
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    yield lambda state, x: nnx.merge(graph, state)(x, mask=nnx.make_causal_mask(x[..., 0]))
    yield state
    yield X


def haiku() -> Iterator[Any]:
    hk = importlib.import_module("haiku")

    def attend(x: jax.Array) -> Any:
        return hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=hk.initializers.Constant(0.1))(x, x, x)

    made = hk.without_apply_rng(hk.transform(attend))
    yield made.apply
    yield jax.eval_shape(made.init, jax.random.key(0), X)
    yield X


def equinox() -> Iterator[Any]:
    eqx = importlib.import_module("equinox")
    layer = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))
    yield lambda layer, x: jax.vmap(lambda x: layer(x, x, x, mask=jnp.tril(jnp.ones((16, 16), bool))))(x)
    yield layer
    yield X


def hugging_face(name: str, **options: Any) -> Iterator[Any]:
    library = importlib.import_module("transformers")
    if "a_max" not in inspect.signature(jnp.clip).parameters:  # FlaxT5 names the argument as JAX once did.
        library_clip = jnp.clip

        def clip(x: Any, low: Any = None, high: Any = None, a_max: Any = None) -> Any:
            return library_clip(x, low, high if a_max is None else a_max)

        setattr(jnp, "clip", clip)  # noqa: B010 - mypy refuses an assignment of another signature
    config = getattr(library, f"{name}Config")(**options)
    suffix = "Model" if name != "T5" else "ForConditionalGeneration"
    model = getattr(library, f"Flax{name}{suffix}")(config, _do_init=False)
    extra = {"decoder_input_ids": TOKENS} if name == "T5" else {}
    seen = jnp.ones_like(TOKENS).at[:, 12:].set(0)
    yield lambda params, seen: model(TOKENS, attention_mask=seen, params=params, **extra)[0]
    yield jax.eval_shape(lambda: model.init_weights(jax.random.key(0), TOKENS.shape))
    yield seen


def big_vision(folder: str) -> Iterator[Any]:
    sys.path.insert(0, folder)
    # It loads checkpoints, by TensorFlow.
    sys.modules["big_vision.utils"] = importlib.import_module("big_vision").utils = types.ModuleType("utils")  # type: ignore[attr-defined]
    vit = importlib.import_module("big_vision.models.vit")
    model = vit.Model(num_classes=8, width=WIDTH, depth=2, mlp_dim=WIDTH, num_heads=HEADS, patch_size=(8, 8))
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    yield lambda params, images: model.apply(params, images)[0]
    yield jax.eval_shape(model.init, jax.random.key(0), images)
    yield images


_BERT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDTH,
    "attention_probs_dropout_prob": 0.0,
}
MODELS: dict[str, Callable[[], Iterator[Any]]] = {
    "Flax Linen": lambda: linen(None),
    "Flax Linen, causal": lambda: linen(nn.make_causal_mask(jnp.ones((2, 16)))),
    "Flax Linen, one token and a cache": linen_cache,
    "Flax NNX, causal": nnx_layer,
    "Haiku": haiku,
    "Equinox under vmap, causal": equinox,
    "Hugging Face FlaxBert": lambda: hugging_face("Bert", **_BERT),
    "Hugging Face FlaxGPT2": lambda: hugging_face("GPT2", n_embd=WIDTH, n_layer=2, n_head=HEADS),
    "Hugging Face FlaxT5": lambda: hugging_face("T5", d_model=WIDTH, d_kv=16, num_layers=2, num_heads=HEADS),
}


def outcomes(made: Iterator[Any]) -> collections.Counter[str]:
    """How often each outcome: the kind of the fused attention, or why it is not fused."""
    fun, *args = made

    def loss(*args: Any) -> jax.Array:
        return jnp.mean(fun(*args) ** 2)

    rules = mpjax.Rules(attention="xla")
    rows = mpjax.explain(mpjax.autocast(loss, "mixed_bfloat16", rules=rules), *args).rows
    found: collections.Counter[str] = collections.Counter()
    for row in rows:
        if row.op in ("fused_attention", "attention"):
            found[("fused, " if row.op == "fused_attention" else "not fused: ") + row.why] += row.count
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--big-vision", metavar="FOLDER", help="a checkout of google-research/big_vision")
    args = parser.parse_args()
    models = dict(MODELS)
    if args.big_vision:
        models["big_vision's ViT"] = lambda: big_vision(args.big_vision)
    for name, make in models.items():
        try:
            found = dict(outcomes(make()))
        except Exception as error:  # not installed, or of another version of JAX
            found = {f"{type(error).__name__}: {error}".splitlines()[0]: 1}
        print(f"{name}: {', '.join(f'{count} × {what}' for what, count in found.items()) or 'none found'}", flush=True)


if __name__ == "__main__":
    main()
