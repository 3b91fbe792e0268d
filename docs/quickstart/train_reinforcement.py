"""Cart-pole by actor and critic (A2C), in float16, the environment in JAX."""

import jax
import jax.numpy as jnp
import optax

import mpjax

# The constants are those of Gymnasium's CartPole-v1
GRAVITY, CART, POLE = 9.8, 1.0, 0.1
LENGTH, FORCE, DT = 0.5, 10.0, 0.02
ENVS, HORIZON, DISCOUNT = 64, 32, 0.99


def move(state, action):
    """The physics of a step, in float32: they are not part of the loss."""
    x, v, angle, omega, steps = state.T
    force = jnp.where(action == 1, FORCE, -FORCE)
    sin, cos, mass = jnp.sin(angle), jnp.cos(angle), CART + POLE
    pull = (force + POLE * LENGTH * omega**2 * sin) / mass
    acceleration = (GRAVITY * sin - cos * pull) / (
        LENGTH * (4 / 3 - POLE * cos**2 / mass)
    )
    thrust = pull - POLE * LENGTH * acceleration * cos / mass
    return jnp.stack(
        [
            x + DT * v,
            v + DT * thrust,
            angle + DT * omega,
            omega + DT * acceleration,
            steps + 1,
        ],
        -1,
    )


def reset(key):
    return jnp.concatenate(
        [
            jax.random.uniform(key, (ENVS, 4), minval=-0.05, maxval=0.05),
            jnp.zeros((ENVS, 1)),
        ],
        -1,
    )


def init(key, width=64):
    keys = jax.random.split(key, 4)
    shapes = {
        "up": (4, width),
        "hidden": (width, width),
        "actor": (width, 2),
        "critic": (width, 1),
    }
    return {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def forward(params, state):
    h = jnp.tanh(jnp.tanh(state[..., :4] @ params["up"]) @ params["hidden"])
    return h @ params["actor"], (h @ params["critic"])[..., 0]


@mpjax.autocast
def loss_fn(params, states, actions, returns):
    logits, values = forward(params, states)
    policy = jax.nn.log_softmax(logits)
    advantages = returns - values
    taken = jnp.take_along_axis(policy, actions[..., None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(policy) * policy, -1)
    actor = -jnp.mean(
        taken * jax.lax.stop_gradient(advantages)
    ) - 0.01 * jnp.mean(entropy)
    return actor + 0.5 * jnp.mean(advantages**2) / 100


UPDATES = 600
# counts the steps that are taken
schedule = optax.linear_schedule(3e-3, 0.0, UPDATES)
tx = mpjax.dynamic_loss_scale(
    optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule))
)


@jax.jit
def train_step(params, opt_state, state, key):
    # the policy that acts is the policy that is trained, in its precision
    act = mpjax.autocast(forward)

    def step(state, key):
        act_key, reset_key = jax.random.split(key)
        logits, _ = act(params, state)
        action = jax.random.categorical(act_key, logits)
        new = move(state, action)
        fell = (jnp.abs(new[:, 0]) > 2.4) | (jnp.abs(new[:, 2]) > 0.2095)
        done = fell | (new[:, 4] >= 500)
        return jnp.where(done[:, None], reset(reset_key), new), (
            state,
            action,
            done,
            jnp.where(done, new[:, 4], jnp.nan),
        )

    state, (states, actions, dones, lengths) = jax.lax.scan(
        step, state, jax.random.split(key, HORIZON)
    )
    _, last = act(params, state)

    def discount(later, done):
        now = 1.0 + DISCOUNT * jnp.where(done, 0.0, later)
        return now, now

    _, returns = jax.lax.scan(discount, last, dones, reverse=True)
    loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(
        params, states, actions, returns
    )
    params, opt_state = mpjax.apply_gradients(
        tx, grads, opt_state, params, value=loss
    )
    return params, opt_state, state, jnp.nanmean(lengths)


def main(updates: int = UPDATES) -> float:
    params = init(jax.random.key(0))
    opt_state, state = tx.init(params), reset(jax.random.key(1))
    recent: list[float] = []
    for update in range(updates):
        params, opt_state, state, length = train_step(
            params, opt_state, state, jax.random.key(update + 2)
        )
        recent = [*recent, float(length)][-50:] if length == length else recent
        if update % 150 == 149:
            length = sum(recent) / len(recent)
            print(f"update {update + 1}: episodes of {length:.0f} steps")
    print(
        f"loss scale {opt_state.loss_scale:.0f}, "
        f"skipped steps {opt_state.skipped_steps}"
    )
    return sum(recent) / len(recent)


if __name__ == "__main__":
    main()
