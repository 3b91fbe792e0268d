"""A sequence-to-sequence LSTM that learns to copy sums, with teacher forcing."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

DIGITS = 12


class Seq2Seq(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        carry, _ = nn.RNN(nn.OptimizedLSTMCell(32), return_carry=True, name="encoder")(source)
        outputs = nn.RNN(nn.OptimizedLSTMCell(32), name="decoder")(target[:, :-1], initial_carry=carry)
        return nn.Dense(DIGITS)(outputs)


def digits(numbers, length):
    text = [str(n).rjust(length, "0") for n in numbers]
    return np.eye(DIGITS, dtype=np.float32)[[[int(c) for c in t] for t in text]]


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    model, tx = Seq2Seq(), optax.adam(1e-2)
    params = model.init(jax.random.key(args.seed), digits([1], 4), digits([1], 4))["params"]
    state = tx.init(params)

    @jax.jit
    def train_step(params, state, source, target):
        def loss_fn(params):
            logits = model.apply({"params": params}, source, target)
            return -jnp.mean(jnp.sum(nn.log_softmax(logits) * target[:, 1:], -1))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(args.steps):
        a, b = rng.integers(0, 50, (2, 32))
        params, state, loss = train_step(params, state, digits(100 * a + b, 4), digits(a + b, 3))
    print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
