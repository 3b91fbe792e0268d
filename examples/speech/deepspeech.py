"""DeepSpeech (Hannun et al., 2014, https://arxiv.org/abs/1412.5567): dense layers around one recurrent one."""

from __future__ import annotations

import jax
from flax import nnx

from examples.speech.layers import MaskedConv, clipped_relu, time_mask
from examples.speech.recurrence import Recurrent


class DeepSpeech(nnx.Module):
    """Three dense layers with clipped ReLU, one recurrent layer, one more dense layer, and the output layer.

    Args:
        features: Number of features per frame.
        characters: Number of logits per frame, including the CTC blank.
        hidden: Units of each dense layer and of each direction of the recurrent layer.
        context: Frames on either side in the window of the first layer, which is a convolution.
        stride: Frames from one window to the next.
        cell: `rnn`, `gru` or `lstm`.
        bidirectional: Whether the recurrent layer also runs backward in time.
        layer_norm: Whether to apply layer normalisation before each clipped ReLU, as in Mozilla's DeepSpeech.
        dropout: Dropout rate after each dense layer in training.
        rngs: Random streams of the initialisation.
    """

    def __init__(
        self,
        features: int,
        characters: int,
        hidden: int,
        *,
        context: int,
        stride: int,
        cell: str,
        bidirectional: bool,
        layer_norm: bool,
        dropout: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.window = MaskedConv(features, hidden, 2 * context + 1, stride, rngs=rngs)
        self.dense = nnx.List([nnx.Linear(hidden, hidden, rngs=rngs) for _ in range(2)])
        self.recurrent = Recurrent(cell, hidden, hidden, bidirectional=bidirectional, rngs=rngs)
        self.last = nnx.Linear(hidden * self.recurrent.directions, hidden, rngs=rngs)
        self.characters = nnx.Linear(hidden, characters, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(hidden, rngs=rngs) for _ in range(4)] if layer_norm else [])
        self.dropout = nnx.Dropout(dropout)

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
