"""CTC decoding on the device: greedy, and prefix beam search."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Decoded(NamedTuple):
    """Labels found, best first where there are several: Alphabet.decode makes text of labels[i, :lengths[i]]."""

    labels: jax.Array  # [batch, frames], int32, 0 behind the length
    lengths: jax.Array  # [batch], int32
    scores: jax.Array  # [batch], float32: log probability (greedy: of its best alignment)


def greedy(logits: jax.Array, lengths: jax.Array) -> Decoded:
    """Best label of each frame; logits [batch, frames, labels], 0 is blank; lengths [batch] in frames. jit it."""
    raise NotImplementedError


def beam_search(logits: jax.Array, lengths: jax.Array, beam: int = 16) -> Decoded:
    """Prefix beam search (Hannun et al., 2014); arguments as of `greedy`, `beam` static. jit it."""
    raise NotImplementedError
