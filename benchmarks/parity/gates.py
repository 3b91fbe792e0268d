"""Why MobileNet's gradients differ most from float32's: `python -m benchmarks.parity.gates`.

The relative error of the gradients at initialisation, float16 by autocast against float32, of MobileNet unchanged and
with one change at a time: dense convolutions instead of depthwise ones, or a smooth activation instead of ReLU6. A gate
that rounding closes or opens changes its whole element of the gradient. A share f of flipped gates therefore causes an
error of about the square root of f, whatever the arithmetic of the convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

import mpjax
from benchmarks.parity.families.mobilenet import FAMILY, MobileNet
from benchmarks.parity.family import MODEL, Models
from testing import cheap_keys

VARIANTS = {
    "as published": MobileNet(),
    "dense convolutions": MobileNet(depthwise=False),
    "smooth activation": MobileNet(activation=nn.silu),
}


def gradient_error(model: MobileNet, policy: str, seed: int = 0, run: Callable[..., Any] = jax.jit) -> float:
    """The relative distance of all gradients from float32's; `run` executes each traced function."""
    batch = FAMILY.batch(np.random.default_rng(seed))
    variables = run(lambda key: model.init(key, batch["image"], True))(cheap_keys.key(seed))

    def loss(params: Any) -> jax.Array:
        models = Models({MODEL: model.apply}, {MODEL: {**variables, "params": params}})
        return FAMILY.losses[MODEL](models, batch)[0]

    def gradients(params: Any) -> tuple[Any, Any]:
        # A scale of 2**10, divided out again, keeps the gradients in float16's range.
        half = mpjax.autocast(loss, policy)
        return jax.grad(loss)(params), jax.tree.map(lambda g: g / 2**10, jax.grad(lambda p: 2**10 * half(p))(params))

    exact, found = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in run(gradients)(variables["params"])
    )
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def main() -> None:
    print("| MobileNet | error of the gradients in float16 |\n|---|---|")
    for name, model in VARIANTS.items():
        print(f"| {name} | {100 * gradient_error(model, 'mixed_float16'):.2f} % |", flush=True)


if __name__ == "__main__":
    main()
