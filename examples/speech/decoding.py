"""CTC decoding on the device: greedy, and prefix beam search. Both read logits in float32 and should be jitted.

The published decoders (pyctcdecode, flashlight-text) run on the host, one utterance at a time, and optax only has the
loss. There is no language model: pyctcdecode requires NumPy 1 and JAX NumPy 2, and flashlight-text has no wheel for
Python 3.13.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import mpjax

_BLANK = 0


class Decoded(NamedTuple):
    """Decoded labels; `Alphabet.decode(labels[i, :lengths[i]])` is the text of utterance i."""

    labels: jax.Array  # [batch, frames], int32, 0 past the length
    lengths: jax.Array  # [batch], int32
    scores: jax.Array  # [batch], float32: log probability (of the best alignment if greedy)


@mpjax.float_function
def greedy(logits: ArrayLike, lengths: ArrayLike) -> Decoded:
    """The text of the most probable alignment: the best label of each frame, without repeats and blanks.

    Args:
        logits: [batch, frames, labels], of any float dtype; label 0 is the blank.
        lengths: [batch], in frames; later frames are ignored.
    """
    log_probs = _log_softmax(logits)
    best = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
    inside = jnp.arange(best.shape[1]) < jnp.asarray(lengths)[:, None]
    before = jnp.pad(best, ((0, 0), (1, 0)), constant_values=_BLANK)[:, :-1]
    written = inside & (best != _BLANK) & (best != before)
    # A stable sort by "not written" moves the written labels to the front, in order.
    order = jnp.argsort(~written, axis=1, stable=True)
    labels = jnp.take_along_axis(jnp.where(written, best, 0), order, axis=1)
    scores = jnp.sum(jnp.max(log_probs, axis=-1), axis=1, where=inside)
    return Decoded(labels, jnp.sum(written, axis=1, dtype=jnp.int32), scores)


class _Beam(NamedTuple):
    """The most probable prefixes of one utterance, all distinct."""

    prefixes: jax.Array  # [beam, frames], int32, 0 past the length
    lengths: jax.Array  # [beam], int32
    blank: jax.Array  # [beam], float32: log probability of alignments that end in a blank
    label: jax.Array  # [beam], float32: log probability of alignments that end in the prefix's last label

    @property
    def total(self) -> jax.Array:
        return jnp.logaddexp(self.blank, self.label)

    @property
    def last(self) -> jax.Array:
        return _last(self.prefixes, self.lengths)


@mpjax.float_function
def beam_search(logits: ArrayLike, lengths: ArrayLike, beam: int = 16) -> Decoded:
    """The most probable text, by prefix beam search, which sums over all alignments of a text.

    The search updates p_blank(prefix) and p_label(prefix) frame by frame for the `beam` best prefixes. The result is
    exact if the beam holds all prefixes. Work and memory grow with beam × (beam + labels).

    Args:
        logits: [batch, frames, labels], of any float dtype; label 0 is the blank.
        lengths: [batch], in frames; later frames are ignored.
        beam: Number of prefixes kept, 1 or more (static).

    Source: A. Hannun et al., "First-Pass Large Vocabulary Continuous Speech Recognition using Bi-Directional Recurrent
    DNNs" (2014), without a language model.
    """
    if beam < 1:
        raise ValueError(f"a beam of {beam}: it must be 1 or more.")

    def search(log_probs: jax.Array, length: jax.Array) -> Decoded:
        frames = log_probs.shape[0]
        minus_inf = jnp.full(beam, -jnp.inf)
        # One empty prefix; the other entries have probability 0.
        start = _Beam(
            jnp.zeros((beam, frames), jnp.int32), jnp.zeros(beam, jnp.int32), minus_inf.at[0].set(0), minus_inf
        )

        def step(state: _Beam, frame: tuple[jax.Array, jax.Array]) -> tuple[_Beam, None]:
            index, scores = frame
            after = _advance(state, scores)
            return jax.tree.map(lambda new, old: jnp.where(index < length, new, old), after, state), None

        final, _ = jax.lax.scan(step, start, (jnp.arange(frames), log_probs))
        best = jnp.argmax(final.total)
        return Decoded(final.prefixes[best], final.lengths[best], final.total[best])

    return jax.vmap(search)(_log_softmax(logits), jnp.asarray(lengths))


def _advance(state: _Beam, scores: jax.Array) -> _Beam:
    """The beam after one more frame with these log probabilities, [labels]."""
    beam, labels = len(state.lengths), scores.shape[0]
    stay = _stay(state, scores)
    extended = state.total[:, None] + scores[None, :]  # [beam, labels]
    # Repeating the last label extends the prefix only after a blank.
    repeats = jnp.arange(labels)[None, :] == state.last[:, None]
    extended = jnp.where(repeats, state.blank[:, None] + scores[None, :], extended)
    extended = extended.at[:, _BLANK].set(-jnp.inf)
    # If prefix i extended by one label is prefix j of the beam, j gains the probability of that extension.
    parents = _parents(state)
    gained = jnp.where(parents, extended[:, state.last], -jnp.inf)  # [beam, beam]
    stay = stay._replace(label=jnp.logaddexp(stay.label, jax.nn.logsumexp(gained, axis=0)))
    taken = jnp.any(parents[:, :, None] & (jnp.arange(labels) == state.last[:, None])[None], axis=1)
    extended = jnp.where(taken, -jnp.inf, extended)

    _, chosen = jax.lax.top_k(jnp.concatenate([stay.total, extended.reshape(-1)]), beam)
    is_new = chosen >= beam
    parent, label = jnp.divmod(chosen - beam, labels)
    origin = jnp.where(is_new, parent, chosen)
    prefixes, lengths = state.prefixes[origin], state.lengths[origin]
    place = jnp.arange(prefixes.shape[1])[None, :] == lengths[:, None]
    return _Beam(
        jnp.where(place & is_new[:, None], label[:, None], prefixes),
        lengths + is_new,
        jnp.where(is_new, -jnp.inf, stay.blank[origin]),
        jnp.where(is_new, extended.reshape(-1)[jnp.where(is_new, chosen - beam, 0)], stay.label[origin]),
    )


def _stay(state: _Beam, scores: jax.Array) -> _Beam:
    """The unchanged prefixes after a blank, or after a repeat of their last label."""
    again = jnp.where(state.lengths > 0, state.label + scores[state.last], -jnp.inf)
    return state._replace(blank=state.total + scores[_BLANK], label=again)


def _parents(state: _Beam) -> jax.Array:
    """[beam, beam], bool: whether prefix j is prefix i with one more label."""
    length = state.lengths
    shortened = jnp.where(jnp.arange(state.prefixes.shape[1]) == length[:, None] - 1, 0, state.prefixes)
    same = jnp.all(state.prefixes[:, None, :] == shortened[None, :, :], axis=-1)
    # Entries of probability 0 are copies of the empty prefix, and must not count as parents.
    return same & (length[None, :] == length[:, None] + 1) & jnp.isfinite(state.total)[:, None]


def _last(prefixes: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.take_along_axis(prefixes, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]


def _log_softmax(logits: ArrayLike) -> jax.Array:
    return jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=-1)
