"""DeepSpeech (Hannun et al., 2014, https://arxiv.org/abs/1412.5567): dense layers around one recurrent one."""

from __future__ import annotations

import jax
from flax import nnx

from examples.speech.config import Config
from examples.speech.layers import MaskedConv, clipped_relu, time_mask
from examples.speech.recurrence import Recurrent


class DeepSpeech(nnx.Module):
    """Three dense layers with clipped ReLU, one recurrent layer, one more dense layer, and the output layer.

    Args:
        flags: Those of `Config` that describe the model.
        characters: Number of logits per frame, including the CTC blank.
        rngs: Random streams of the initialisation.
    """

    def __init__(self, flags: Config, characters: int, *, rngs: nnx.Rngs) -> None:
        hidden, kernel = flags.hidden, 2 * flags.context + 1
        self.window = MaskedConv(flags.front_end.mels, hidden, kernel, flags.stride, rngs=rngs)
        self.dense = nnx.List([nnx.Linear(hidden, hidden, rngs=rngs) for _ in range(2)])
        self.recurrent = Recurrent(flags.cell, hidden, hidden, bidirectional=flags.bidirectional, rngs=rngs)
        self.last = nnx.Linear(hidden * self.recurrent.directions, hidden, rngs=rngs)
        self.characters = nnx.Linear(hidden, characters, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(hidden, rngs=rngs) for _ in range(4)] if flags.layer_norm else [])
        self.dropout = nnx.Dropout(flags.dropout)

    def __call__(
        self, x: jax.Array, lengths: jax.Array, *, train: bool = False, rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x [batch, time, features] with lengths [batch] → logits [batch, time / stride, characters], lengths."""

        def activate(index: int, x: jax.Array) -> jax.Array:
            if self.norms:
                x = self.norms[index](x)
            return self.dropout(clipped_relu(x), deterministic=not train, rngs=rngs)

        x, lengths = self.window(x, lengths)
        x = activate(0, x)
        for index, dense in enumerate(self.dense, start=1):
            x = activate(index, dense(x))
        x = self.recurrent(x, time_mask(lengths, x.shape[1]))
        return self.characters(activate(3, self.last(x))), lengths
