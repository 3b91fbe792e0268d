"""An LSTM classifier of text with embeddings, dropout and masks, as in sentiment analysis."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

VOCABULARY, LENGTH = 40, 12


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, tokens, lengths, deterministic):
        x = nn.Dropout(0.1, deterministic=deterministic)(nn.Embed(VOCABULARY, 32)(tokens))
        forward = nn.RNN(nn.LSTMCell(32), return_carry=True)
        (_, last), _ = forward(x, seq_lengths=lengths)
        return nn.Dense(1)(nn.tanh(nn.Dense(32)(last)))[:, 0]


@jax.jit
def train_step(state, tokens, lengths, labels, key):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens, lengths, False, rngs={"dropout": key})
        loss = optax.sigmoid_binary_cross_entropy(logits, labels).mean()
        return loss, {"correct": ((logits > 0) == (labels > 0)).sum()}

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss, metrics


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    model = Classifier()
    tokens, lengths = np.zeros((1, LENGTH), np.int32), np.ones(1, np.int32)
    params = model.init(jax.random.key(args.seed), tokens, lengths, True)["params"]
    tx = optax.chain(optax.add_decayed_weights(1e-5), optax.sgd(0.5, momentum=0.9))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for i in range(args.steps):
        tokens = rng.integers(0, VOCABULARY, (32, LENGTH))
        lengths = rng.integers(6, LENGTH + 1, 32)
        labels = (np.where(np.arange(LENGTH) < lengths[:, None], tokens < VOCABULARY // 2, 0.5).mean(1) > 0.5) * 1.0
        state, loss, _ = train_step(state, tokens, lengths, jnp.float32(labels), jax.random.key(i))
    print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
