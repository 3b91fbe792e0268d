"""Losses of language models without their logits."""

import functools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax import Rules
from mpjax.kernels import cross_entropy
from testing import measures
from testing.random_programs.evaluate import as_typed, evaluate, in_numpy
from testing.random_programs.evaluate import exact as float64

CHOICES = ("unfused", "fused")
pytestmark = pytest.mark.standard_promotion
UNFUSED = pytest.mark.filterwarnings("ignore:.*fuses nothing of this program")
B, T, D, V = 2, 6, 8, 44


def logits_of(params, x):
    w, _, _ = params
    return x @ w


def log_softmax(params, x, y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits_of(params, x)), y[..., None], -1))


def integer_labels(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y).mean()


def one_hot(params, x, y):
    return optax.softmax_cross_entropy(logits_of(params, x), jax.nn.one_hot(y, V)).mean()


def smoothed(params, x, y):
    labels = optax.smooth_labels(jax.nn.one_hot(y, V), 0.1)
    return optax.softmax_cross_entropy(logits_of(params, x), labels).mean()


def logsumexp(params, x, y):
    logits = logits_of(params, x)
    taken = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - taken)


def z_loss(params, x, y):
    logits = logits_of(params, x)
    z = jax.nn.logsumexp(logits, -1)
    taken = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return jnp.mean(z - taken) + 1e-2 * jnp.mean(z**2)


def compared(params, x, y):
    log_p = jax.nn.log_softmax(logits_of(params, x))
    hit = jnp.arange(V) == y[..., None]
    return -jnp.mean(jnp.sum(jnp.where(hit, log_p, 0.0), -1))


def tied(params, x, y):
    _, table, _ = params
    logits = jnp.einsum("btd,vd->btv", x, table)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def biased_and_cold(params, x, y):
    w, _, b = params
    logits = (x @ w + b) / 0.7
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def capped(params, x, y):
    logits = 3 * jnp.tanh(logits_of(params, x) / 3)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def shifted_and_ignored(params, x, y):
    logits, y = logits_of(params, x)[:, :-1], y[:, 1:]
    keep = y != 3
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(keep, y, 0))
    return jnp.sum(losses * keep) / jnp.sum(keep)


def flat(params, x, y):
    logits = logits_of(params, x).reshape(-1, V)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y.reshape(-1)).sum()


def with_accuracy(params, x, y):
    logits = logits_of(params, x)
    right = jnp.mean(jnp.argmax(logits, -1) == y)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() + 0.0 * right


def with_accuracy_before_a_temperature(params, x, y):
    """Accuracy comes first, so that its equations are before those of the scale."""
    logits = logits_of(params, x)
    right = jnp.mean(jnp.argmax(logits, -1) == y)
    return optax.softmax_cross_entropy_with_integer_labels(logits / 0.7, y).mean() + 0.0 * right


def with_accuracy_after_a_temperature(params, x, y):
    logits = logits_of(params, x)
    right = jnp.mean(jnp.argmax(2.0 * logits, -1) == y)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() + 0.0 * right


def policy_gradient(params, x, y):
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits_of(params, x)), y[..., None], -1)[..., 0]
    return jnp.mean(jnp.exp(log_p - jax.lax.stop_gradient(log_p) + 0.1) * jnp.sin(y))


def indexed(params, x, y):
    log_p = jax.nn.log_softmax(logits_of(params, x).reshape(-1, V))
    return -jnp.mean(log_p[jnp.arange(B * T), y.reshape(-1)])


def indexed_by_rows(params, x, y):
    log_p = jax.nn.log_softmax(logits_of(params, x))
    return -jnp.mean(log_p[jnp.arange(B)[:, None], jnp.arange(T)[None], y])


def jitted(params, x, y):
    return jax.jit(integer_labels)(params, x, y)


def checkpointed(params, x, y):
    return jax.checkpoint(log_softmax)(params, x, y)


def scanned(params, x, y):
    add = lambda c, xy: (c + logsumexp(params, *xy), None)
    return jax.lax.scan(add, 0.0, (x[:, None], y[:, None]))[0]


def mapped(params, x, y):
    return jax.vmap(lambda x, y: integer_labels(params, x, y))(x, y).mean()


def outside(params, x, y):
    """Labels that no vocabulary has count as zeros of a one-hot."""
    return one_hot(params, x, y.at[0, 0].set(V + 3).at[1, 1].set(-1))


def of_a_layer_of_each_token(params, x, y):
    """Equinox's layers multiply a vector: JAX swaps the operands, and transposes the result."""
    logits = jax.vmap(lambda h: params[1] @ h + params[2])(x.reshape(-1, D))
    return -jnp.mean(jax.vmap(lambda z, y: jax.nn.log_softmax(z)[y])(logits, y.reshape(-1)))


def of_each_row(params, x, y):
    """Equinox's layers map one row: weights come first, and JAX moves the vocabulary behind the rows."""
    _, table, b = params
    each = lambda h, y: optax.softmax_cross_entropy_with_integer_labels(table @ h + b, y)
    return jax.vmap(jax.vmap(each))(x, y).mean()


def rows_behind_and_swapped(params, x, y):
    _, table, _ = params
    logits = jnp.einsum("vd,btd->vbt", table, x).transpose(2, 1, 0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y.T).mean()


def capped_and_named_before_it_is_transposed(params, x, y):
    """With the weights of tokens as factors of the logits."""
    _, table, b = params
    capped = checkpoint_name(3 * jnp.tanh(jnp.einsum("vd,btd->vbt", table, x) / 3), "logits")
    logits, weights = capped.transpose(1, 2, 0), jax.nn.softplus(b[y])[..., None]
    return jnp.mean(jax.nn.logsumexp(logits, -1)) - jnp.sum(jax.nn.one_hot(y, V) * (logits * weights)) / y.size


def on_and_off_values(params, x, y):
    """Flax's `common_utils.onehot` with label smoothing, as in its examples of translation and language models."""
    hit = y[..., None] == jnp.arange(V).reshape((1,) * y.ndim + (-1,))
    soft = jax.lax.select(hit, jnp.full(hit.shape, 0.9), jnp.full(hit.shape, 0.1 / (V - 1)))
    return -jnp.mean(jnp.sum(soft * jax.nn.log_softmax(logits_of(params, x)), -1))


def smoothed_where(params, x, y):
    soft = jnp.where(jax.nn.one_hot(y, V) > 0, 0.9, 0.1 / (V - 1))
    return optax.softmax_cross_entropy(logits_of(params, x), soft).mean()


def padded_vocabulary(params, x, y):
    """A vocabulary padded to a multiple of 128, as in MaxText and Megatron."""
    logits = jnp.where(jnp.arange(V) < V - 5, logits_of(params, x), -1e9)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y % (V - 5)).mean()


def labels_in_the_padding(params, x, y):
    logits = jnp.where(jnp.arange(V) < V - 5, logits_of(params, x), -1e9)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y.at[0, 0].set(V - 1).at[0, 1].set(V - 2))
    return jnp.mean(jnp.minimum(losses, 30.0))


def padded_then_scaled_and_capped(params, x, y):
    """With a label in the padding, whose logit is scaled and capped too."""
    logits = 5 * jnp.tanh(jnp.where(jnp.arange(V) < V - 5, logits_of(params, x), -1e9) / 2.0 / 5)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y.at[0, 0].set(V - 2)).mean()


def summed_at_once(params, x, y):
    """The label's term is summed over tokens and vocabulary together."""
    log_p = jax.nn.log_softmax(logits_of(params, x))
    return -jnp.sum(jax.nn.one_hot(y, V) * log_p) / y.size + 0.01 * jnp.mean(log_p)


def contracted(params, x, y):
    return -jnp.einsum("btv,btv->bt", jax.nn.log_softmax(logits_of(params, x)), jax.nn.one_hot(y, V)).mean()


def named_and_divided_by_a_root(params, x, y):
    logits = checkpoint_name(logits_of(params, x), "logits") / jnp.sqrt(x.shape[-1])
    on_one = jax.sharding.NamedSharding(jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,)), P())
    return optax.softmax_cross_entropy_with_integer_labels(jax.lax.with_sharding_constraint(logits, on_one), y).mean()


def padded_and_biased(params, x, y):
    w, _, b = params
    logits = jnp.where(jnp.arange(V) >= V - 5, -jnp.inf, x @ w + b)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), (y % (V - 5))[..., None], -1))


def at_a_learned_temperature(params, x, y):
    temperature = jnp.exp(params[2][0])
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x) / temperature, y).mean()


def biased_scaled_and_capped(params, x, y):
    scale, bias = params[2][:1], params[2]
    logits = 5 * jnp.tanh(scale * (logits_of(params, x) / 3 + bias) / 5)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def weighted_in_the_labels(params, x, y):
    """The weights of tokens are factors of the labels, which are smoothed."""
    weights = jnp.where(y % 5 > 0, 1.0, 0.0)
    labels = optax.smooth_labels(jax.nn.one_hot(y, V), 0.1) * (weights / jnp.sum(weights))[..., None]
    return jnp.sum(optax.softmax_cross_entropy(logits_of(params, x), labels))


def weighted_by_learned_weights(params, x, y):
    picked = jax.nn.one_hot(y, V) * jax.nn.log_softmax(logits_of(params, x))
    return -jnp.sum(picked * jax.nn.softplus(params[2][y])[..., None])


def focal(params, x, y):
    """The weights follow from the loss's own statistics."""
    log_p = jax.nn.log_softmax(logits_of(params, x))
    weights = (1 - jnp.exp(jnp.take_along_axis(log_p, y[..., None], -1))) ** 2
    return -jnp.sum(jax.nn.one_hot(y, V) * log_p * weights)


def with_an_entropy(params, x, y):
    """A policy gradient's bonus, as rlax and TRL's ports write it."""
    log_p = jax.nn.log_softmax(logits_of(params, x))
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    return -jnp.mean(jnp.take_along_axis(log_p, y[..., None], -1)[..., 0]) - 0.3 * jnp.mean(entropy**2)


def with_an_entropy_without_zeros(params, x, y):
    """Distrax's entropy."""
    log_p = jax.nn.log_softmax(jnp.where(jnp.arange(V) < V - 5, logits_of(params, x), -1e9))
    p = jnp.exp(log_p)
    entropy = -jnp.sum(jnp.where(p == 0, 0.0, p * log_p), -1)
    return -jnp.mean(jnp.take_along_axis(log_p, y[..., None] % (V - 5), -1)) - 0.3 * jnp.mean(entropy)


def with_an_entropy_of_logits(params, x, y):
    logits = jnp.where(jnp.arange(V) < V - 5, logits_of(params, x) + params[2], -1e9)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y % (V - 5))
    mean = jnp.einsum("btv,btv->bt", jax.nn.softmax(logits), logits)
    return jnp.mean(losses + jax.nn.logsumexp(logits, -1) - mean)


def of_probabilities(params, x, y):
    """The label's probability, by lookup and by one-hot, the logarithm of all, and the largest, in one loss."""
    p = jax.nn.softmax(logits_of(params, x) + params[2])
    picked = jnp.take_along_axis(p, y[..., None], -1)[..., 0] + jnp.sum(
        p * optax.smooth_labels(jax.nn.one_hot(y, V), 0.1), -1
    )
    return jnp.mean(-picked - jnp.log(jnp.max(p, -1))) - jnp.mean(jnp.sum(jax.nn.one_hot(y, V) * jnp.log(p), -1))


def margin(params, x, y):
    """No two logits are the largest in half only: the gradient is that of the first, where JAX takes the mean."""
    logits = logits_of(params, x) + params[2]
    z = logits - jnp.max(logits, -1, keepdims=True)
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(z), -1)) - jnp.max(logits, -1))


def shifted_with_a_gradient(params, x, y):
    logits = logits_of(params, x)
    z = logits - jnp.max(logits, -1, keepdims=True)
    log_p = z - jnp.log(jnp.sum(jnp.exp(z), -1, keepdims=True))
    return -jnp.mean(jnp.take_along_axis(log_p, y[..., None], -1))


def stopped_metrics(params, x, y):
    logits = logits_of(params, x)
    stopped = jax.lax.stop_gradient(logits)
    log_p = jax.nn.log_softmax(stopped)
    entropy = -jnp.sum(jax.nn.softmax(stopped) * log_p, -1).mean()
    metrics = entropy + jnp.max(stopped) + jnp.mean(jnp.argmax(stopped, -1) == y)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() + metrics


def at_a_temperature_of_each_row(params, x, y):
    temperature = 0.5 + jax.nn.softplus(params[2][y])[..., None]
    logits = (logits_of(params, x) / temperature).transpose(1, 0, 2)[2:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y.T[2:]).mean()


def without_columns(params, x, y):
    """A vocabulary that is sliced to the words of a tokenizer; labels outside of these are not those sliced off."""
    w, table, b = params
    plain, biased = (h @ matrix + b for h, matrix in ((x[:, 1:], w), (x, table.T)))
    plain, biased = plain[:, 1:, :37], biased[..., 3:-2]
    losses = optax.softmax_cross_entropy(plain, jax.nn.one_hot(y[:, 2:], 37))
    return losses.mean() + optax.softmax_cross_entropy_with_integer_labels(biased, y % 39).mean()


def padded_and_without_columns(params, x, y):
    logits = jnp.where(jnp.arange(V) < V - 5, logits_of(params, x) + params[2], -1e9)[..., 1:-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, (y % (V - 6)).at[0, 0].set(V - 3))
    return jnp.mean(jnp.minimum(losses, 30.0))


def of_the_second_axis(params, x, y):
    """PyTorch's layout, with a bias, labels by lookup and by comparison, and an entropy."""
    w, _, b = params
    logits = jnp.einsum("btd,dv->bvt", x, w) + b[:, None]
    log_p = jax.nn.log_softmax(logits, axis=1)
    smooth = optax.smooth_labels(jax.nn.one_hot(y, V, axis=1), 0.1) * log_p
    right = jnp.mean(jnp.argmax(logits, 1) == y)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, 1)
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], 1)) - jnp.mean(smooth) - 0.3 * jnp.mean(entropy) + right


def of_a_middle_axis(params, x, y):
    """Logits are moved, cut in two of their axes, and padded where they are."""
    logits = 3 * jnp.tanh(jnp.moveaxis(logits_of(params, x)[:, 1:], -1, 0)[:37, :, ::2] / 3)
    logits = jnp.where(jnp.arange(37)[:, None] < 30, logits.reshape(37, B, -1).swapaxes(0, 1), -1e9)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y[:, 1::2] % 30, axis=1).mean()


def of_columns(params, x, y):
    """A matrix of which each column is a token, whose factor is its own."""
    logits = (x.reshape(-1, D) @ params[0]).T / (0.5 + jax.nn.softplus(params[2][y].ravel()))
    taken = logits[y.ravel(), jnp.arange(B * T)]
    return jnp.mean(jax.nn.logsumexp(logits, 0) - taken) + 0.1 * jnp.max(logits)


def masked_twice(params, x, y):
    """A mask that is computed for each token, one for each word, and labels in both."""
    logits = logits_of(params, x) + params[2] + jnp.sin(params[2])
    logits = jnp.where(jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) < V - 5, logits, -1e9)
    logits = jnp.where((jnp.arange(V) % 7 == 3)[None, None], jnp.finfo(jnp.float32).min, logits) / 0.7
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y.at[0, 0].set(V - 2).at[0, 1].set(10))
    return jnp.mean(jnp.minimum(losses, 30.0))


def without_words(params, x, y):
    """Generation's list of words, a word, and the end of the vocabulary, before a bias."""
    logits = logits_of(params, x).at[..., jnp.array([1, 5, -9])].set(-jnp.inf).at[..., 0].set(-1e9)
    log_p = jax.nn.log_softmax(logits.at[:, :, V - 5 :].set(-jnp.inf) + params[2])
    picked = jnp.take_along_axis(log_p, y.at[0, 0].set(5).at[0, 1].set(0)[..., None], -1)
    return -jnp.mean(jnp.maximum(picked, -30.0)) - 0.1 * jnp.mean(jnp.exp(log_p).max(-1))


def masked_where(params, x, y):
    """`where=` masks logits, their exponentials and the result."""
    mask = jax.lax.broadcasted_iota(jnp.int32, (B, T, V), 2) < V - 5
    logits, others = (x @ w for w in (params[0], params[1].T))
    log_p = jax.nn.log_softmax(logits + params[2], where=mask)
    p = jax.nn.softmax(others, where=jnp.arange(V) % 5 > 0)
    picked, taken = (jnp.take_along_axis(q, y.at[0, 0].set(V - 4)[..., None], -1) for q in (log_p, p))
    return -jnp.mean(jnp.maximum(picked, -30.0)) - jnp.mean(jnp.log(taken + 0.1))


def masked_where_in_columns(params, x, y):
    table = params[1]
    logits = jnp.einsum("vd,btd->bvt", table, x).at[:, jnp.array([2, 3])].set(-jnp.inf)
    log_p = jax.nn.log_softmax(logits, 1, where=(jnp.arange(V) < V - 5)[:, None])
    return -jnp.mean(jnp.maximum(jnp.take_along_axis(log_p, y[:, None], 1), -30.0))


def both_ways(params, x, y):
    """CLIP's two losses: columns are rows of another matmul."""
    _, table, b = params
    logits = x.reshape(-1, D) @ table[: B * T].T * jnp.exp(b[0])
    losses = (optax.softmax_cross_entropy_with_integer_labels(z, jnp.arange(B * T)).mean() for z in (logits, logits.T))
    return sum(losses)


def at_the_diagonal(params, x, y):
    """InfoNCE. JAX writes `jnp.diag` as a switch by platform."""
    logits = x.reshape(-1, D) @ params[1][: B * T].T / 0.3
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))


def of_parts(params, x, y):
    logits = logits_of(params, x)
    parts = (logits[:, -1], y[:, -1]), (logits[:, :3], y[:, :3])
    return sum(optax.softmax_cross_entropy_with_integer_labels(*part).mean() for part in parts)


def at_two_temperatures(params, x, y):
    logits = logits_of(params, x)
    return sum(optax.softmax_cross_entropy_with_integer_labels(z, y).mean() for z in (logits / 2, logits * 1.5))


def teacher_of(params, x):
    """Its logits are of another vocabulary's matrix, first, and biased."""
    _, table, b = params
    return jnp.einsum("vd,btd->btv", table, jnp.sin(x)) + b


def distilled(params, x, y):
    """The teacher has no derivative, and both have a temperature."""
    student = jax.nn.log_softmax(logits_of(params, x) / 2)
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_of(params, x)) / 2)
    return 4 * jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - student), -1))


def distilled_on_policy(params, x, y):
    """The reverse divergence, and its gradient is stopped behind the teacher's softmax."""
    student = jax.nn.log_softmax(logits_of(params, x))
    teacher = jax.lax.stop_gradient(jax.nn.log_softmax(teacher_of(params, x)))
    return jnp.mean(y * jnp.sum(jnp.exp(student) * (student - teacher), -1))


def distilled_by_optax(params, x, y):
    """Its targets of 0 have no logarithm. The label's loss is added, and logits of padding are in no loss."""
    student, teacher = (
        jnp.where(jnp.arange(V) < V - 5, z, -1e9)[..., 1:] for z in (logits_of(params, x), teacher_of(params, x))
    )
    targets = jax.lax.stop_gradient(jax.nn.softmax(teacher))
    divergence = optax.losses.kl_divergence(jax.nn.log_softmax(student), targets).mean()
    return divergence + optax.softmax_cross_entropy_with_integer_labels(student, y % 9).mean()


def of_soft_labels(params, x, y):
    """Both heads learn."""
    soft = jax.nn.softmax(teacher_of(params, x)[:, 1:])
    return optax.softmax_cross_entropy(logits_of(params, x)[:, 1:], soft).mean()


def near_a_reference(params, x, y):
    """A policy's full divergence, with its entropy and with metrics of the reference."""
    log_p, log_r = jax.nn.log_softmax(logits_of(params, x)), jax.nn.log_softmax(jax.lax.stop_gradient(x @ params[0]))
    divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_r), -1)
    ratio = jnp.exp(jnp.take_along_axis(log_p - log_r, y[..., None], -1)[..., 0])
    return jnp.mean(0.1 * divergence - ratio) + jnp.mean(jnp.argmax(log_r, -1) == y)


def poly(params, x, y):
    return optax.losses.poly_loss_cross_entropy(logits_of(params, x), jax.nn.one_hot(y, V), epsilon=2.0).mean()


def mixed_up(params, x, y):
    labels = 0.3 * jax.nn.one_hot(y, V) + 0.7 * jax.nn.one_hot(y[:, ::-1], V)
    return optax.softmax_cross_entropy(logits_of(params, x), labels).mean()


def focal_of_all_words(params, x, y):
    """Functions of all probabilities, of which a one-hot keeps the label's; a label is outside of the vocabulary."""
    hot, log_p = jax.nn.one_hot(y.at[0, 0].set(V + 3), V), jax.nn.log_softmax(logits_of(params, x))
    p = jnp.exp(log_p)
    plain = jnp.sum(hot * (1 - p) ** 2 * log_p + hot * jax.lax.stop_gradient(jnp.sqrt(p)) * log_p, -1)
    other = hot * jnp.log(jnp.clip(p, 1e-7, 1.0)) * p * (1 - p) ** 0.5 * 2.0
    return -jnp.mean(plain) - jnp.mean(jnp.sum(other, -1))


def of_probabilities_and_a_little(params, x, y):
    """And of the logits of padding, where a label is."""
    logits = jnp.where(jnp.arange(V) < V - 5, logits_of(params, x), -1e9)
    hot, p = jax.nn.one_hot(y.at[0, 1].set(V - 2), V), jax.nn.softmax(logits)
    return -jnp.einsum("btv,btv->bt", hot, jnp.log(p + 1e-3)).mean() + jnp.sum(hot * jnp.where(p > 0.1, p, p * p))


def weighted_by_words(params, x, y):
    """The weights of words are learned. One factor is a number of each token and each word."""
    weights, log_p = jax.nn.softmax(params[2]), jax.nn.log_softmax(logits_of(params, x))
    losses = -jnp.sum(weights * jax.nn.one_hot(y, V) * log_p, -1) - jnp.sum(
        log_p * weights * (y[..., None] == jnp.arange(V)), -1
    )
    near = jnp.cos(jnp.arange(V) - y[..., None] / 2 + 0.0 * log_p) * jnp.exp(log_p)
    return losses.mean() + jnp.mean(jnp.take_along_axis(near, jnp.flip(y, 1)[..., None], -1))


def several_labels_of(y):
    return jnp.stack([y, (y + 1) % V, (7 * y) % V], -1)


def of_several_labels(params, x, y):
    """Unlikelihood of words, and a teacher's largest probabilities that were stored."""
    log_p = jax.nn.log_softmax(logits_of(params, x))
    taken = jnp.take_along_axis(log_p, several_labels_of(y), -1)
    soft = jnp.sum(taken * jnp.array([0.5, 0.3, 0.2]), -1)
    return -jnp.mean(jnp.log1p(-jnp.clip(jnp.exp(taken), 0, 0.999))) - jnp.mean(soft)


def of_several_labels_in_columns(params, x, y):
    """And of the first row alone, one of them by a one-hot, too."""
    p = jax.nn.softmax(jnp.einsum("vd,td->vt", params[1], x[0]) + params[2][:, None], 0)
    taken = jnp.take_along_axis(p, several_labels_of(y[0]).T, 0)
    return jnp.sum(jax.nn.one_hot(y[0], V, axis=0) * (1 - p) ** 2) - jnp.mean(jnp.log(taken + 0.1).min(0))


LOSSES = {
    f.__name__: f
    for f in (
        log_softmax, integer_labels, one_hot, smoothed, logsumexp, z_loss, compared, tied, biased_and_cold, capped,
        shifted_and_ignored, flat, indexed, indexed_by_rows, with_accuracy, policy_gradient, jitted, checkpointed,
        with_accuracy_before_a_temperature, with_accuracy_after_a_temperature,
        scanned, mapped, outside, of_a_layer_of_each_token, of_each_row, rows_behind_and_swapped,
        capped_and_named_before_it_is_transposed, on_and_off_values, smoothed_where,
        padded_vocabulary, padded_and_biased, labels_in_the_padding, padded_then_scaled_and_capped,
        summed_at_once, contracted, named_and_divided_by_a_root, at_a_learned_temperature, biased_scaled_and_capped,
        weighted_in_the_labels, weighted_by_learned_weights, focal,
        with_an_entropy, with_an_entropy_of_logits, with_an_entropy_without_zeros,
        of_probabilities, margin, shifted_with_a_gradient,
        stopped_metrics, both_ways, of_parts, at_two_temperatures, at_a_temperature_of_each_row,
        masked_twice, without_words, masked_where, masked_where_in_columns,
        without_columns, padded_and_without_columns, at_the_diagonal, of_the_second_axis, of_a_middle_axis, of_columns,
        distilled, distilled_on_policy, distilled_by_optax, of_soft_labels, near_a_reference, poly, mixed_up,
        focal_of_all_words, of_probabilities_and_a_little, weighted_by_words, of_several_labels,
        of_several_labels_in_columns,
    )
}  # fmt: skip


def model(loss):
    """A loss of a hidden layer."""
    return lambda params, x, y: loss(params[1], jnp.tanh(x @ params[0]), y)


def arguments():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = (normal(D, D) / 3, (normal(D, V), normal(V, D), normal(V)))
    return params, normal(B, T, D), jax.device_put(rng.integers(0, V, (B, T)).astype(np.int32))


def autocast(loss, choice, policy="mixed_bfloat16"):
    return mpjax.autocast(model(loss), policy, rules=Rules(cross_entropy=choice))


def rows(loss, *args):
    plan = mpjax.explain(autocast(loss, "fused"), *args)
    return [row for row in plan.rows if "cross_entropy" in row.op]


def relative(found, exact):
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True))
    pairs = [(np.asarray(a, float), np.asarray(b, float)) for a, b in pairs if np.any(b)]
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])


@functools.cache
def exact_and_row(name):
    """The value and gradient in float64, and the only row of the plan."""
    args = arguments()
    exact = evaluate(jax.make_jaxpr(jax.value_and_grad(model(LOSSES[name])))(*args), jax.tree.leaves(args), float64)
    (row,) = rows(LOSSES[name], *args)
    return exact, row


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:float16 is differentiated")
def test_a_loss_stores_no_logits_and_is_as_exact_as_today(name, policy, monkeypatch):
    # Blocks that overlap, of pieces of four parts of the vocabulary.
    monkeypatch.setattr(cross_entropy, "_BLOCK", 12 * 16)
    monkeypatch.setattr(cross_entropy, "_PIECE", 2)
    loss, args = LOSSES[name], arguments()
    exact, row = exact_and_row(name)
    assert row.op == "fused_cross_entropy", row.why
    value_and_grad = lambda choice: jax.value_and_grad(autocast(loss, choice, policy))
    today, program = (jax.make_jaxpr(value_and_grad(c))(*args) for c in ("unfused", "fused"))
    assert max(np.prod(v.aval.shape) for e in measures.equations(program) for v in e.eqn.outvars) < B * T * V
    leaves = jax.tree.leaves(args)
    if policy == "mixed_bfloat16":
        outs = jax.jit(jax.extend.core.jaxpr_as_fun(program))(*leaves)
    else:  # Compiling all of them in both dtypes takes a minute.
        outs = evaluate(program, leaves, as_typed)
    today, fused = relative(evaluate(today, leaves, as_typed), exact), relative(outs, exact)
    half = float(jnp.finfo(policy.removeprefix("mixed_")).eps)
    assert (fused <= 1.1 * today + half / 4).all(), (fused, today)


def of_the_row_before(params, x, y):
    log_p = jax.nn.log_softmax(logits_of(params, x))
    return -jnp.mean(log_p[jnp.arange(B)[:, None], (jnp.arange(T)[None] + 1) % T, y])


def of_heads_in_a_batch(params, x, y):
    """Two predictions of each token, by a matrix of their own."""
    logits = jax.vmap(lambda w: x @ w)(jnp.stack([params[0], params[1].T]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.stack([y, (y + 1) % V])).mean()


def with_other_zeros(params, x, y):
    """They are 1 where there is no probability."""
    log_p = jax.nn.log_softmax(logits_of(params, x))
    p = jnp.exp(log_p)
    entropy = -jnp.sum(jnp.where(p == 0, 1.0, p * log_p), -1)
    return -jnp.mean(jnp.take_along_axis(log_p, y[..., None], -1)) - 0.3 * jnp.mean(entropy)


def returned(params, x, y):
    logits = logits_of(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() + logits[0, 0, 0]


def squared(params, x, y):
    logits = logits_of(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() + jnp.mean(logits**2)


def at_its_own_argmax(params, x, y):
    """Self-training. The labels can't be given to what computes the logits."""
    logits = logits_of(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.argmax(logits, -1)).mean()


def seen(params, x, y):
    """The logits are a result too."""
    logits = logits_of(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits


def cast_by_the_program(params, x, y):
    """A stranger's head: its logits were stored, and nothing said why."""
    logits = x.astype(jnp.bfloat16) @ params[0].astype(jnp.bfloat16)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y).mean()


def of_labels_as_integers(params, x, y):
    """They are all 0."""
    labels = (jax.nn.one_hot(y, V) * 0.5).astype(jnp.int32).astype(jnp.float32)
    return -jnp.sum(labels * jax.nn.log_softmax(logits_of(params, x)))


def scaled_and_squared(params, x, y):
    """A matmul of its own for the scaled logits would not be one of a loss."""
    logits = logits_of(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() + jnp.mean((2 * logits) ** 2)


def half_stopped(params, x, y):
    """The gradient of an expected log-probability by these alone."""
    logits = logits_of(params, x)
    p = jax.nn.softmax(jax.lax.stop_gradient(logits))
    return -jnp.mean(jnp.sum(p * jax.nn.log_softmax(logits), -1))


def of_the_tokens(params, x, y):
    """A softmax over tokens."""
    log_p = jax.nn.log_softmax(logits_of(params, x), axis=1)
    return -jnp.mean(jnp.take_along_axis(log_p, y[..., None], -1))


def of_both_axes(params, x, y):
    """Labels of columns, in a softmax of rows."""
    logits = (x @ params[0]).reshape(-1, V)[:, : B * T]
    log_p = jax.nn.log_softmax(logits, 1)
    return -jnp.mean(jnp.take_along_axis(log_p, y.reshape(1, -1) % (B * T), 0))


def masked_by_token(params, x, y):
    mask = jnp.arange(V) + y[..., None] < V
    return optax.softmax_cross_entropy_with_integer_labels(jnp.where(mask, logits_of(params, x), -1e9), y).mean()


def without_a_word_of_a_row(params, x, y):
    logits = logits_of(params, x).at[0, :, 3].set(-jnp.inf)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def masked_by_little(params, x, y):
    """Logits are not lost in this number."""
    logits = jnp.where(jnp.arange(V) < V - 5, logits_of(params, x), -1e4)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def masked_where_and_elsewhere(params, x, y):
    """Another mask than that of the softmax."""
    log_p = jax.nn.log_softmax(logits_of(params, x), where=jnp.arange(V) < V - 5)
    p = jnp.exp(jnp.where(jnp.arange(V) > 3, log_p, -jnp.inf))
    return jnp.mean(jnp.max(p, -1)) - jnp.mean(jnp.take_along_axis(p, y[..., None], -1))


def with_an_entropy_and_a_little(params, x, y):
    """Of all words, where a one-hot keeps the label's."""
    p = jax.nn.softmax(logits_of(params, x))
    return jnp.mean(jnp.sum(p * jnp.log(p + 1e-9), -1)) - jnp.mean(jnp.sum(jax.nn.one_hot(y, V) * jnp.log(p), -1))


def focal_and_smoothed(params, x, y):
    log_p = jax.nn.log_softmax(logits_of(params, x))
    labels = optax.smooth_labels(jax.nn.one_hot(y, V), 0.1)
    return -jnp.mean(jnp.sum(labels * (1 - jnp.exp(log_p)) ** 2 * log_p, -1))


def focal_of_zeros(params, x, y):
    """Log-probabilities are 0 where probabilities are."""
    log_p = jax.nn.log_softmax(logits_of(params, x))
    p = jnp.exp(log_p)
    return -jnp.mean(jnp.sum(jax.nn.one_hot(y, V) * jnp.where(p == 0, 0.0, log_p) ** 2, -1))


def focal_of_the_next_word(params, x, y):
    p = jax.nn.softmax(logits_of(params, x))
    return -jnp.mean(jnp.sum(jax.nn.one_hot(y, V) * jnp.log(p + jnp.roll(p, 1, -1)), -1))


def of_many_labels(params, x, y):
    p = jax.nn.softmax(logits_of(params, x))
    return -jnp.mean(jnp.take_along_axis(p, jnp.arange(40) + 0 * y[..., None], -1))


def focal_of_two_labels(params, x, y):
    p, hot = jax.nn.softmax(logits_of(params, x)), jax.nn.one_hot(y, V)
    return -jnp.mean(jnp.sum(hot * (1 - p) ** 2 * (jax.nn.one_hot((y + 1) % V, V) + hot), -1))


def masked_in_the_sum_alone(params, x, y):
    logits = logits_of(params, x)
    taken = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1, where=jnp.arange(V) < V - 5) - taken)


REFUSED = {
    of_heads_in_a_batch: "its rows do not share one matrix of weights",
    with_other_zeros: "read by select_n",
    masked_by_token: "read by select_n",
    without_a_word_of_a_row: "read by scatter (test_cross_entropy.py:",
    masked_by_little: "read by select_n",
    masked_where_and_elsewhere: "read by select_n",
    with_an_entropy_and_a_little: "read by log (test_cross_entropy.py:",
    focal_and_smoothed: "read by integer_pow (test_cross_entropy.py:",
    focal_of_zeros: "read by integer_pow (test_cross_entropy.py:",
    focal_of_the_next_word: "read by",
    of_many_labels: "read by gather",
    focal_of_two_labels: "read by mul (test_cross_entropy.py:",
    masked_in_the_sum_alone: "read by select_n",
    of_the_tokens: "read by reduce_max",
    of_both_axes: "read by gather",
    of_labels_as_integers: "read by mul (test_cross_entropy.py:",
    cast_by_the_program: "casts its operands to half itself",
    returned: "read by",
    squared: "read by",
    scaled_and_squared: "read by integer_pow (test_cross_entropy.py:",
    half_stopped: "read by mul (test_cross_entropy.py:",
    at_its_own_argmax: "its labels follow from its own logits",
    of_the_row_before: "read by gather (test_cross_entropy.py:",
    seen: "its logits are returned",
}


@pytest.mark.parametrize("loss", REFUSED)
def test_a_loss_whose_logits_are_read_stays_as_it_is(loss):
    args = arguments()
    (row,) = rows(loss, *args)
    assert row.op == "cross_entropy"
    assert REFUSED[loss] in row.why
    with pytest.warns(mpjax.UnusedRuleWarning, match=rf"'fused'\) fuses nothing.*{re.escape(REFUSED[loss])}"):
        programs = [str(jax.make_jaxpr(jax.grad(autocast(loss, c), has_aux=loss is seen))(*args)) for c in CHOICES]
    assert programs[0] == programs[1]


@pytest.mark.standard_promotion
def test_the_gradient_in_a_program_is_the_reason_in_a_loop_too():
    """What the derivative keeps of a step is returned by the loop, which was given as the reason."""

    def loss(params, x, y):
        step = lambda total, chunk: (total + integer_labels(params, *chunk), None)
        return jax.lax.scan(step, 0.0, (x, y))[0]

    gradient = mpjax.autocast(jax.grad(model(loss)), rules=Rules(cross_entropy="fused"))
    with pytest.warns(mpjax.UnusedRuleWarning, match="of this program: the program contains its gradient already"):
        jax.make_jaxpr(gradient)(*arguments())


def test_a_teacher_of_one_of_two_temperatures_is_no_loss_of_its_own():
    """It comes before the student's second temperature, and was listed as unfused."""

    def loss(params, x, y):
        logits, soft = logits_of(params, x), jax.lax.stop_gradient(jax.nn.softmax(teacher_of(params, x) / 2))
        hard = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return hard + 4 * optax.softmax_cross_entropy(logits / 2, soft).mean()

    assert [row.op for row in rows(loss, *arguments())] == ["fused_cross_entropy"] * 2


def test_what_is_read_of_the_logits_may_be_returned():
    """Autocast raised a KeyError: the results of the program were not those of the walk."""

    def loss(params, x, y):
        logits = logits_of(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits.argmax(-1)

    args = arguments()
    grads, best = jax.grad(autocast(loss, "fused"), has_aux=True)(*args)
    expected, of_unfused = jax.grad(autocast(loss, "unfused"), has_aux=True)(*args)
    assert (relative(grads, expected) < 0.02).all()
    np.testing.assert_array_equal(best, of_unfused)


@UNFUSED
def test_a_matmul_without_a_softmax_stays_as_it_is():
    """The value of an action, of which Q-learning has no logarithm, was computed like a loss, and again backward."""

    def loss(params, x, y):
        return jnp.mean((jnp.take_along_axis(logits_of(params, x), y[..., None], -1) - 1) ** 2)

    assert not rows(loss, *arguments())


@pytest.mark.parametrize("of_bias", [False, True])
def test_what_each_step_reads_twice_is_read_once(of_bias):
    """The time to trace doubled with each step: 2 s for 4 steps of a function, 54 s for 15 of a bias."""

    def loss(params, x, y):
        logits = logits_of(params, x)
        start = jnp.broadcast_to(params[2], logits.shape) if of_bias else jax.nn.softmax(logits)
        out = functools.reduce(lambda h, _: h * (h + 1.0), range(40), start)
        if of_bias:
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits + out), y[..., None], -1))
        return -jnp.mean(jnp.sum(jax.nn.one_hot(y, V) * out, -1))

    (row,) = rows(loss, *arguments())
    assert row.op == ("cross_entropy" if of_bias else "fused_cross_entropy")
    assert "read by add" in row.why or not of_bias


def test_heads_that_label_each_other_end():
    """One of them is fused, and gives its argmax to the other, which stays as it is."""

    def mutual(params, x, y):
        a, b = logits_of(params, x), x @ params[1].T
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(a, jnp.argmax(b, -1)).mean() + losses(b, jnp.argmax(a, -1)).mean()

    args = arguments()
    found = rows(mutual, *args)
    assert [row.op for row in found] == ["fused_cross_entropy", "cross_entropy"]
    assert "its labels follow from logits that follow from it" in found[1].why
    today, fused = (jax.jit(autocast(mutual, c))(*args) for c in CHOICES)
    np.testing.assert_allclose(fused, today, rtol=1e-2)


def test_a_maximum_whose_mean_is_stopped_has_no_gradient():
    def logged(params, x, y):
        logits = logits_of(params, x)
        confidence = jnp.exp(jax.nn.log_softmax(logits).max(-1)).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean() + jax.lax.stop_gradient(confidence)

    assert rows(logged, *arguments())[0].op == "fused_cross_entropy"


@UNFUSED
def test_labels_in_a_dtype_that_counts_no_whole_vocabulary_hit_as_they_are_written():
    """`jnp.arange(300, dtype=jnp.uint8)` begins again after 256."""
    rng = np.random.default_rng(0)
    w, x, y = rng.normal(size=(8, 300)), rng.normal(size=(6, 8)), np.arange(6, dtype=np.uint8)

    def loss(w):
        return optax.softmax_cross_entropy(np.float32(x) @ w, jax.nn.one_hot(y, 300)).mean()

    found, expected = (
        mpjax.autocast(loss, "mixed_bfloat16", rules=Rules(cross_entropy=c))(np.float32(w)) for c in CHOICES
    )
    assert found == expected


def labels_of_all(params, x, y):
    """Each device has the same labels."""
    return one_hot(params, x, jnp.arange(y.size).reshape(y.shape) % V)


@pytest.mark.parametrize(
    "loss",
    [
        log_softmax, integer_labels, one_hot, smoothed, biased_and_cold, padded_vocabulary, labels_of_all,
        at_a_learned_temperature, masked_twice, without_words,
    ],
)  # fmt: skip
def test_tokens_may_be_shared_in_a_shard_map_that_checks_axes(loss):
    """One-hot labels stayed as they are written, without a word."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    (_, (w, _, bias)), x, y = arguments()

    def each(w, bias, x, y):
        return jax.lax.pmean(loss((w, None, bias), x, y), "i")

    shared = jax.shard_map(each, mesh=mesh, in_specs=(P(), P(), P("i"), P("i")), out_specs=P())
    found, expected = (
        jax.jit(jax.grad(mpjax.autocast(shared, "mixed_bfloat16", rules=Rules(cross_entropy=c)), (0, 1)))(w, bias, x, y)
        for c in CHOICES
    )
    assert (relative(found, expected) < 0.01).all()


def test_labels_that_no_vocabulary_has_are_nan_where_they_are_as_written():
    params, x, y = arguments()
    y = y.at[0, 0].set(V + 3)
    fused = jax.jit(autocast(log_softmax, "fused"))(params, x, y)
    assert np.isnan(fused)
    assert np.isnan(jax.jit(autocast(log_softmax, "unfused"))(params, x, y))


@pytest.mark.parametrize("loss", [z_loss, biased_scaled_and_capped, with_an_entropy])
def test_second_derivatives_and_forward_mode(loss):
    args = arguments()
    direction = jax.tree.map(jnp.ones_like, args[0])
    hvp = lambda fun: jax.jit(lambda p: jax.jvp(jax.grad(lambda p: fun(p, *args[1:])), (p,), (direction,))[1])(args[0])
    exact = hvp(model(loss))
    today, fused = (relative(hvp(autocast(loss, c)), exact) for c in ("unfused", "fused"))
    assert (fused <= 1.5 * today + 0.004).all()


LAYOUTS = {
    "vocabulary": (P(None, "i"), P()),
    "tokens": (P(), P(None, "i")),
    "both": (P(None, "i"), P("j")),
    "features": (P("i"), P("j")),
}


@pytest.mark.parametrize(("of_weights", "of_tokens"), LAYOUTS.values(), ids=LAYOUTS)
def test_devices_that_share_a_vocabulary_send_no_weights(of_weights, of_tokens, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_BLOCK", 64 * 1024)
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    w, x = (np.float32(rng.normal(size=shape)) for shape in ((16, 4096), (4, 16, 16)))
    y = rng.integers(0, 4096, (4, 16))
    specs = (of_weights, of_tokens, of_tokens)
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((w, x, y), specs, strict=True)]

    def loss(w, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()

    fused, today = (
        jax.jit(jax.grad(mpjax.autocast(loss, "mixed_bfloat16", rules=Rules(cross_entropy=c))))
        for c in ("fused", "unfused")
    )
    exact = in_numpy(jax.grad(loss))(w, x, y)
    assert (relative(fused(*args), exact) <= 1.1 * relative(today(*args), exact)).all()
    if "i" in of_weights[1:]:
        program = fused.lower(*args).compile().as_text()
        gathered = [
            math.prod(map(int, sizes.split(","))) for sizes in re.findall(r"\[([\d,]+)\]\S* all-gather\(", program)
        ]
        assert max(gathered) <= 2 * y.size  # statistics of two devices
        assert "all-reduce" in program


def test_auto_axes_let_a_loss_on_explicit_axes_be_found():
    """The advice of the reason."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rng = np.random.default_rng(0)
        w, x = (jax.device_put(np.float32(rng.normal(size=(16, 16))), P("i")) for _ in range(2))
        y = jax.device_put(rng.integers(0, 16, 16), P("i"))
        loss = lambda w, x, y: optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()
        auto = jax.sharding.auto_axes(loss, out_sharding=P())
        cast = [mpjax.autocast(auto, "mixed_bfloat16", rules=Rules(cross_entropy=c)) for c in CHOICES]
        assert "fused_cross_entropy" in {row.op for row in mpjax.explain(cast[1], w, x, y).rows}
        today, fused, exact = (jax.jit(jax.grad(fun))(w, x, y) for fun in (*cast, auto))
        half = float(jnp.finfo(jnp.bfloat16).eps)
        assert (relative(fused, exact) <= 1.1 * relative(today, exact) + half / 4).all()


@UNFUSED
def test_explicit_axes_are_refused():
    """JAX can't slice their arrays."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w, x = (jax.device_put(np.ones((16, 16), np.float32), P("i")) for _ in range(2))

        def loss(w, x):
            logits = jnp.einsum("td,dv->tv", x, jax.sharding.reshard(w, P()))
            hit = jax.sharding.reshard(jnp.arange(16) % 4, P("i"))[:, None] == jnp.arange(16)
            return -jnp.mean(jnp.sum(jnp.where(hit, jax.nn.log_softmax(logits), 0), -1))

        fused = mpjax.autocast(loss, "mixed_bfloat16", rules=Rules(cross_entropy="fused"))
        (row,) = (row for row in mpjax.explain(fused, w, x).rows if row.list == "unfused")
        assert "auto_axes" in row.why
        found, expected = (jax.jit(jax.grad(fun))(w, x) for fun in (fused, loss))
        np.testing.assert_allclose(found, expected, atol=0.01)


@pytest.mark.parametrize("of", ["n, 6", "2, n"])
def test_a_program_is_exported_for_any_number_of_tokens(of):
    """Export failed: the size of blocks depends on it."""
    params, x, y = arguments()
    fun = jax.jit(jax.value_and_grad(autocast(smoothed, "fused")))
    shape = jax.export.symbolic_shape(of)
    shapes = jax.ShapeDtypeStruct((*shape, D), np.float32), jax.ShapeDtypeStruct(shape, np.int32)
    found = jax.export.export(fun)(params, *shapes).call(params, x, y)
    assert (relative(found, fun(params, x, y)) < 1e-6).all()


@UNFUSED
def test_a_symbolic_vocabulary_is_refused():
    (vocabulary,) = jax.export.symbolic_shape("v")
    weights = jax.ShapeDtypeStruct((D, vocabulary), np.float32)
    fused = mpjax.autocast(log_softmax, "mixed_bfloat16", rules=Rules(cross_entropy="fused"))
    _, x, y = arguments()
    jax.export.export(jax.jit(lambda w, x, y: fused((w, None, None), x, y)))(weights, x, y)


def test_blocks_are_smaller_on_tpus():
    """Temporaries of a v5e were 0.57 GB with blocks as for GPUs, and are 0.46."""
    x, w, y = (jax.ShapeDtypeStruct(*each) for each in (((8192, 8), "f4"), ((8, 16384), "f4"), ((8192,), "i4")))
    loss = lambda x, w, y: optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()
    fused = mpjax.autocast(loss, "mixed_bfloat16", rules=Rules(cross_entropy="fused"))
    traced = jax.jit(fused).trace(x, w, y)
    texts = [traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "tpu")]
    assert ["stablehlo.while" in text for text in texts] == [False, True]


def test_off_by_default():
    assert Rules().cross_entropy == "unfused"
    with pytest.raises(ValueError, match="cross_entropy='on'"):
        Rules(cross_entropy="on")


@UNFUSED
def test_audit_counts_the_product_in_the_dtype_in_which_it_runs():
    params, x, y = arguments()
    for fun in (model(LOSSES["integer_labels"]), jax.grad(model(LOSSES["integer_labels"]))):
        fused = mpjax.autocast(fun, "mixed_bfloat16", rules=Rules(cross_entropy="fused"))
        assert mpjax.audit(fused, params, x, y).half_share == 1


def test_a_loss_with_a_derivative_rule_of_its_own_is_named():
    """The form of t5x and MaxText."""

    @jax.custom_vjp
    def loss(logits, labels):
        z = jax.nn.logsumexp(logits, -1, keepdims=True)
        return -jnp.sum(labels * (logits - z), -1)

    loss.defvjp(lambda z, t: (loss(z, t), (z, t)), lambda r, ct: ((jax.nn.softmax(r[0]) - r[1]) * ct[..., None], None))
    (_, (w, _, _)), x, y = arguments()
    fused = mpjax.autocast(
        lambda w: loss(x @ w, jax.nn.one_hot(y, V)).mean(), "mixed_bfloat16", rules=Rules(cross_entropy="fused")
    )
    (row,) = (row for row in mpjax.explain(fused, w).rows if row.list == "unfused")
    assert row.why.startswith("a function with a derivative rule of its own reads its logits (test_cross_entropy.py:")


def test_a_rule_that_returns_the_vocabulary_is_named_if_it_normalises():
    """optax's safe cross entropy stayed as it is without a word; so does an activation, which has no reason to."""

    def of(loss):
        fused = mpjax.autocast(loss, "mixed_bfloat16", rules=Rules(cross_entropy="fused"))
        return [row.why for row in mpjax.explain(fused, w).rows if row.list == "unfused"]

    (_, (w, _, _)), x, y = arguments()
    (why,) = of(lambda w: optax.losses.safe_softmax_cross_entropy(x @ w, jax.nn.one_hot(y, V)).mean())
    assert why.startswith("a function with a derivative rule of its own reads its logits (test_cross_entropy.py:")
    assert not of(lambda w: jax.nn.relu(x @ w).mean())
