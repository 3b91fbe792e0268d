"""DeepSpeech (Hannun et al., 2014, https://arxiv.org/abs/1412.5567): dense layers around one recurrent one."""

from __future__ import annotations

import jax
from flax import nnx

from examples.speech.layers import Lookahead, MaskedBatchNorm, MaskedConv, clipped_relu, time_mask
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
        self.window = MaskedConv(features, hidden, (2 * context + 1,), (stride,), bias=True, rngs=rngs)
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
        x, lengths = self.window(x, lengths)
        x = self._activate(0, x, train, rngs)
        for index, dense in enumerate(self.dense, start=1):
            x = self._activate(index, dense(x), train, rngs)
        x = self.recurrent(x, time_mask(lengths, x.shape[1]), train=train)
        return self.characters(self._activate(3, self.last(x), train, rngs)), lengths

    def _activate(self, index: int, x: jax.Array, train: bool, rngs: nnx.Rngs | None) -> jax.Array:
        if self.norms:
            x = self.norms[index](x)
        return self.dropout(clipped_relu(x), deterministic=not train, rngs=rngs)


# Deep Speech 2 (Amodei et al., 2015, https://arxiv.org/abs/1512.02595): convolutions, then recurrent layers.

# Kernel sizes over time and frequency, as in the paper.
_KERNELS = ((11, 41), (11, 21))
_FREQUENCY_STRIDE = 2


class DeepSpeech2(nnx.Module):
    """Two 2-D convolutions and recurrent layers, all with batch normalisation, and the output layer.

    Args:
        features: Number of features per frame, ordered by frequency.
        characters: Number of logits per frame, including the CTC blank.
        hidden: Units of each direction of a recurrent layer.
        layers: Number of recurrent layers.
        channels: Channels of the convolutions.
        stride: Input frames per output frame; the time stride of the first convolution.
        cell: `rnn`, `gru` or `lstm`.
        bidirectional: Whether the recurrent layers also run backward in time.
        lookahead: Future frames seen by a row convolution after the recurrent layers; 0 for no such layer.
        dropout: Dropout rate after each recurrent layer in training.
        rngs: Random streams of the initialisation.
    """

    def __init__(
        self,
        features: int,
        characters: int,
        hidden: int,
        *,
        layers: int,
        channels: int,
        stride: int,
        cell: str,
        bidirectional: bool,
        lookahead: int,
        dropout: float,
        rngs: nnx.Rngs,
    ) -> None:
        strides = ((stride, _FREQUENCY_STRIDE), (1, _FREQUENCY_STRIDE))
        sizes = zip((1, channels), _KERNELS, strides, strict=True)
        # No bias: the normalisation would subtract it.
        self.convs = nnx.List(MaskedConv(n, channels, *size, bias=False, rngs=rngs) for n, *size in sizes)
        self.norms = nnx.List(MaskedBatchNorm(channels, rngs=rngs) for _ in self.convs)
        for _ in self.convs:
            features = -(-features // _FREQUENCY_STRIDE)
        width = hidden * (2 if bidirectional else 1)
        self.recurrent = nnx.List(
            Recurrent(cell, n, hidden, bidirectional=bidirectional, norm=True, rngs=rngs)
            for n in (features * channels, *(width,) * (layers - 1))
        )
        self.lookahead = Lookahead(width, lookahead, rngs=rngs) if lookahead else None
        self.norm = MaskedBatchNorm(width, rngs=rngs)
        self.characters = nnx.Linear(width, characters, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)

    def __call__(
        self, x: jax.Array, lengths: jax.Array, *, train: bool = False, rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x [batch, time, features] with lengths [batch] → logits [batch, time / stride, characters], lengths."""
        x = x[..., None]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x, lengths = conv(x, lengths)
            mask = time_mask(lengths, x.shape[1])
            x = clipped_relu(norm(x, mask, train=train))
        x = x.reshape(*x.shape[:2], -1)
        for layer in self.recurrent:
            x = self.dropout(layer(x, mask, train=train), deterministic=not train, rngs=rngs)
        if self.lookahead is not None:
            x = clipped_relu(self.lookahead(x, mask))
        return self.characters(self.norm(x, mask, train=train)), lengths
