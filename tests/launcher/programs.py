"""Scripts that several files launch."""

LINEAR = """
import sys, jax, jax.numpy as jnp, numpy as np, optax
tx = optax.sgd(0.1)
@jax.jit
def step(w, s, x):
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    u, s = tx.update(g, s)
    return optax.apply_updates(w, u), s, loss
w = jnp.eye(16); s = tx.init(w)
for _ in range(3):
    w, s, loss = step(w, s, np.ones((8, 16), np.float32))
print(f"loss {loss:.3f}", *sys.argv[1:])
"""
ATTENTION = LINEAR.replace("(x @ w) ** 2", "(jax.nn.softmax((x @ w) @ (x @ w).T) @ x @ w) ** 2")
