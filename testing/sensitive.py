"""float32 programs whose results amplify a rounding: where it happens decides whether training works.

Each is a kind of program that people train, small enough for NumPy. A value that a matmul also reads is updated, or
reaches a logarithm, an index, a decomposition, a difference of near-equal numbers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from testing import by_hand

# Keeps the gradients of a mean loss in float16's range, as in training; a power of two rounds nothing.
LOSS_SCALE = 2.0**10
KINDS: dict[str, Kind] = {}
Loss = Callable[[Any, Any], Any]
Draw = Callable[..., Any]


class Kind(NamedTuple):
    """A loss function with its parameters and its batch.

    The loss may take the precision of those matmuls that careful authors keep in float32, `exact`. No two are equal.
    """

    loss: Loss
    params: Any
    batch: Any

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def kind(build: Callable[[Draw], tuple[Loss, Any, Any]]) -> Any:
    """Registers a program by the name of the function that builds it from a function that draws normal arrays."""
    rng = np.random.default_rng(0)
    KINDS[build.__name__] = Kind(*build(lambda *shape, scale=1.0: (scale * rng.normal(size=shape)).astype(np.float32)))
    return build


def gradient(loss: Loss) -> Loss:
    """The gradient with a loss scale."""
    return lambda params, batch: jax.tree.map(
        lambda g: g / LOSS_SCALE, jax.grad(lambda p: loss(p, batch) * LOSS_SCALE)(params)
    )


def error_of_by_hand(kind: Kind, cast: Callable[[Loss], Loss], half: Any, of_gradient: bool = False) -> float:
    """The error of a cast program's gradient against float64, divided by that of careful casts by hand.

    Args:
        kind: The program.
        cast: Casts it.
        half: The dtype of the casts by hand.
        of_gradient: Whether the gradient is cast, and not the loss before it is differentiated.
    """
    given = cast(gradient(kind.loss)) if of_gradient else gradient(cast(kind.loss))
    ratio = _measured(kind, half)(jax.make_jaxpr(given)(kind.params, kind.batch))
    assert ratio is not None, "casts by hand lose the gradient"
    return ratio


@functools.lru_cache(maxsize=1)
def _traced(kind: Kind) -> Any:
    """The gradient in float32."""
    careful = kind.loss
    if "exact" in inspect.signature(kind.loss).parameters:
        careful = functools.partial(kind.loss, **{"exact": "highest"})
    return jax.make_jaxpr(gradient(careful))(kind.params, kind.batch)


@functools.lru_cache(maxsize=2)  # for both half dtypes
def _measured(kind: Kind, half: Any) -> Callable[[Any], float | None]:
    return by_hand.measured(_traced(kind), jax.tree.leaves((kind.params, kind.batch)), half, draws=1)


Measures = Sequence[Callable[[Any], float | None]]


def measured(loss: Loss, draws: Sequence[tuple[Any, Any]], half: Any) -> Measures:
    """For params and batches, the errors of casts by hand, as functions of the program under test."""
    plain = jax.make_jaxpr(gradient(loss))(*draws[0])
    return [by_hand.measured(plain, jax.tree.leaves(draw), half, draws=1) for draw in draws]


def mean_errors(
    loss: Loss,
    draws: Sequence[tuple[Any, Any]],
    casts: Sequence[Callable[[Loss], Loss]],
    half: Any,
    of_gradient: bool,
    measures: Measures | None = None,
) -> list[float]:
    """The same for several casts, each the mean over params and batches: one draw may be exact, or not, by luck.

    `measures` are those of a loss with the same numbers, such as one without checkpoints; by default of this loss.
    """
    trace = lambda fun: jax.make_jaxpr(fun)(*draws[0])
    programs = [trace(cast(gradient(loss)) if of_gradient else gradient(cast(loss))) for cast in casts]
    errors = [[of(program) for program in programs] for of in measures or measured(loss, draws, half)]
    return np.mean(np.asarray(errors, float), axis=0).tolist()


def dense(draw: Any, *sizes: int, scale: float = 1.0) -> list[Any]:
    """The weights of an MLP."""
    return [draw(a, b, scale=scale * a**-0.5) for a, b in itertools.pairwise(sizes)]


def mlp(weights: Any, x: Any) -> Any:
    *hidden, last = weights
    for w in hidden:
        x = jnp.tanh(x @ w)
    return x @ last


def sample(image: Any, xy: Any) -> Any:
    """Bilinear samples of an image (h, w, channels) at points (n, 2), in pixels."""
    corner = jnp.floor(xy)
    f = xy - corner
    out = jnp.zeros((xy.shape[0], image.shape[-1]))
    for dx in (0, 1):
        for dy in (0, 1):
            i = jnp.clip(corner[:, 1].astype(jnp.int32) + dy, 0, image.shape[0] - 1)
            j = jnp.clip(corner[:, 0].astype(jnp.int32) + dx, 0, image.shape[1] - 1)
            weight = (f[:, 0] if dx else 1 - f[:, 0]) * (f[:, 1] if dy else 1 - f[:, 1])
            out = out + weight[:, None] * image[i, j]
    return out


def smooth_image(draw: Any, size: int, channels: int) -> Any:
    t = np.linspace(0, 2 * np.pi, size, dtype=np.float32)
    waves = np.stack([np.sin((k + 1) * t[:, None] + k * t[None]) for k in range(channels)], -1)
    return (waves + 0.1 * draw(size, size, channels)).astype(np.float32)


# What a program updates: steps of one map.


def _images_and_points(draw: Draw) -> Any:
    images = smooth_image(draw, 40, 4), smooth_image(draw, 40, 4)
    return *images, (np.abs(draw(64, 2, scale=9)) + 4).astype("float32")


def _optical_flow(draw: Draw, repeat: Any) -> Any:
    """RAFT: coordinates are updated, and index; `repeat` runs its step eight times and adds the losses."""
    params = {"in": draw(8, 16, scale=0.3), "hidden": draw(16, 16, scale=0.25), "flow": draw(16, 2, scale=0.1)}

    def loss(p: Any, batch: Any) -> Any:
        first, second, xy = batch
        start = sample(first, xy)

        def step(carry: Any, _: Any) -> Any:
            h, xy = carry
            h = jnp.tanh(jnp.concatenate([start, sample(second, xy)], -1) @ p["in"] + h @ p["hidden"])
            xy = xy + h @ p["flow"]
            return (h, xy), jnp.mean((sample(second, xy) - start) ** 2)

        return repeat(step, (jnp.zeros((xy.shape[0], 16)), xy))

    return loss, params, _images_and_points(draw)


@kind
def optical_flow(draw: Draw) -> Any:
    """Unrolled."""

    def unrolled(step: Any, carry: Any) -> Any:
        total = jnp.float32(0)
        for _ in range(8):
            carry, each = step(carry, None)
            total = total + each
        return total

    return _optical_flow(draw, unrolled)


@kind
def optical_flow_in_a_scan(draw: Draw) -> Any:
    return _optical_flow(draw, lambda step, carry: jnp.sum(lax.scan(step, carry, None, length=8)[1]))


@kind
def stereo(draw: Draw) -> Any:
    """Disparities, updated by an unrolled loop over shared weights."""
    params = {"in": draw(9, 16, scale=0.3), "out": draw(16, 1, scale=0.2)}

    def loss(p: Any, batch: Any) -> Any:
        left, right, xy = batch
        start, disparity = sample(left, xy), jnp.zeros((xy.shape[0], 1))
        for _ in range(6):
            shifted = xy - jnp.concatenate([disparity, jnp.zeros_like(disparity)], -1)
            features = jnp.concatenate([start, sample(right, shifted), disparity], -1)
            disparity = disparity + jnp.tanh(features @ p["in"]) @ p["out"]
        return jnp.mean(jnp.abs(disparity - 2.0))

    return loss, params, _images_and_points(draw)


@kind
def euler_steps(draw: Draw) -> Any:
    """A neural ODE, 400 steps."""

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        x, _ = lax.scan(lambda x, _: (x + 0.01 * mlp(p, x), None), x, None, length=400)
        return jnp.mean((x - y) ** 2)

    return loss, dense(draw, 4, 16, 4), (draw(8, 4), draw(8, 4))


@kind
def runge_kutta_with_time(draw: Draw) -> Any:
    """The time is a feature, and the state is updated by a sum of stages."""

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch

        def field(t: Any, x: Any) -> Any:
            return mlp(p, jnp.concatenate([x, jnp.broadcast_to(t, (x.shape[0], 1))], -1))

        def step(x: Any, t: Any) -> Any:
            k1 = field(t, x)
            k2 = field(t + 0.005, x + 0.005 * k1)
            k3 = field(t + 0.005, x + 0.005 * k2)
            k4 = field(t + 0.01, x + 0.01 * k3)
            return x + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        return jnp.mean((lax.scan(step, x, jnp.arange(100) * 0.01)[0] - y) ** 2)

    return loss, dense(draw, 5, 16, 4), (draw(8, 4), draw(8, 4))


@kind
def pde_in_the_loop(draw: Draw) -> Any:
    """A solver of a heat equation with a learned correction by convolutions."""
    params = {"in": draw(5, 1, 8, scale=0.4), "out": draw(5, 8, 1, scale=0.15)}

    def loss(p: Any, batch: Any) -> Any:
        u, target = batch

        def convolve(x: Any, w: Any) -> Any:
            return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

        def step(u: Any, _: Any) -> Any:
            laplacian = jnp.roll(u, 1, 1) - 2 * u + jnp.roll(u, -1, 1)
            return u + 0.1 * laplacian + 0.01 * convolve(jnp.tanh(convolve(u, p["in"])), p["out"]), None

        return jnp.mean((lax.scan(step, u, None, length=60)[0] - target) ** 2)

    return loss, params, (draw(2, 32, 1), draw(2, 32, 1))


@kind
def leapfrog(draw: Draw) -> Any:
    """A Hamiltonian network, integrated by a symplectic method."""

    def loss(p: Any, batch: Any) -> Any:
        (q, v), target = batch

        def force(q: Any) -> Any:
            return -jax.grad(lambda q: jnp.sum(mlp(p, q)) + 0.5 * jnp.sum(q**2))(q)

        def step(state: Any, _: Any) -> Any:
            q, v = state
            v = v + 0.005 * force(q)
            q = q + 0.01 * v
            return (q, v + 0.005 * force(q)), None

        (q, v), _ = lax.scan(step, (q, v), None, length=100)
        return jnp.mean((jnp.concatenate([q, v], -1) - target) ** 2)

    return loss, dense(draw, 3, 16, 1), ((draw(8, 3), draw(8, 3)), draw(8, 6))


@kind
def leapfrog_of_one_state(draw: Draw) -> Any:
    """The same with positions and momenta in one array."""

    def loss(p: Any, batch: Any) -> Any:
        z, target = batch
        field = jax.grad(lambda z: jnp.sum(mlp(p, z)) + 0.5 * jnp.sum(z**2))

        def step(z: Any, _: Any) -> Any:
            dq, dv = jnp.split(field(z), 2, -1)
            return z + 0.01 * jnp.concatenate([dv, -dq], -1), None

        return jnp.mean((lax.scan(step, z, None, length=100)[0] - target) ** 2)

    return loss, dense(draw, 6, 16, 1), (draw(8, 6), draw(8, 6))


@kind
def cart_pole(draw: Draw) -> Any:
    """A policy, trained through the simulated system."""

    def loss(p: Any, state: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            v, angle, w = (state[:, i] for i in (1, 2, 3))
            force = jnp.tanh(mlp(p, state))[:, 0]
            s, c = jnp.sin(angle), jnp.cos(angle)
            pushed = force + 0.05 * w**2 * s
            a = (9.8 * s - c * pushed) / (0.5 * (4 / 3 - 0.1 * c**2))
            change = jnp.stack([v, pushed - 0.05 * a * c, w, a], -1)
            new = state + 0.02 * change
            return new, jnp.mean(1 - jnp.cos(new[:, 2]) + 0.1 * new[:, 0] ** 2)

        return jnp.mean(lax.scan(step, state, None, length=60)[1])

    return loss, dense(draw, 4, 16, 1), draw(8, 4, scale=0.3)


@kind
def ffjord(draw: Draw) -> Any:
    """A continuous flow with the trace of its Jacobian."""

    def loss(p: Any, x: Any) -> Any:
        directions = jnp.eye(3)

        def step(carry: Any, t: Any) -> Any:
            x, log_det = carry

            def field(x: Any) -> Any:
                return mlp(p, jnp.concatenate([x, jnp.full((x.shape[0], 1), t)], -1))

            dx = field(x)
            trace = sum(
                jax.jvp(field, (x,), (jnp.broadcast_to(d, x.shape),))[1][:, i] for i, d in enumerate(directions)
            )
            return (x + 0.02 * dx, log_det + 0.02 * trace), None

        (x, log_det), _ = lax.scan(step, (x, jnp.zeros(x.shape[0])), jnp.arange(50) * 0.02)
        return jnp.mean(0.5 * jnp.sum(x**2, -1) - log_det)

    return loss, dense(draw, 4, 16, 3), draw(16, 3)


@kind
def neural_cde(draw: Draw) -> Any:
    params = {"field": dense(draw, 6, 16, 18), "out": draw(6, 1)}

    def loss(p: Any, batch: Any) -> Any:
        path, h, y = batch

        def step(h: Any, dx: Any) -> Any:
            matrix = jnp.tanh(mlp(p["field"], h)).reshape(-1, 6, 3)
            return h + jnp.einsum("bhc,bc->bh", matrix, dx), None

        h, _ = lax.scan(step, h, jnp.diff(path, axis=0))
        return jnp.mean((h @ p["out"] - y) ** 2)

    return loss, params, (np.cumsum(draw(100, 8, 3, scale=0.05), 0), draw(8, 6), draw(8, 1))


@kind
def latent_sde(draw: Draw) -> Any:
    """The likelihood of a path under a learned drift, beside the path's divergence from the prior."""
    params = {"drift": dense(draw, 4, 16, 4), "prior": dense(draw, 4, 16, 4)}

    def loss(p: Any, batch: Any) -> Any:
        x, noise, y = batch

        def step(carry: Any, dw: Any) -> Any:
            x, kl = carry
            f, g = mlp(p["drift"], x), mlp(p["prior"], x)
            return (x + 0.02 * f + 0.1 * dw, kl + 0.01 * jnp.sum(((f - g) / 0.7) ** 2, -1)), x

        (x, kl), path = lax.scan(step, (x, jnp.zeros(x.shape[0])), noise)
        return jnp.mean(kl) + jnp.mean((path - y) ** 2) / 0.02

    return loss, params, (draw(8, 4), draw(50, 8, 4), draw(50, 8, 4))


@kind
def maml(draw: Draw) -> Any:
    """Five steps of gradient descent on each task; the gradient goes through them."""

    def loss(p: Any, batch: Any) -> Any:
        x, y, x2, y2 = batch

        def inner(p: Any, x: Any, y: Any) -> Any:
            return jnp.mean((mlp(p, x) - y) ** 2)

        for _ in range(5):
            p = jax.tree.map(lambda w, g: w - 0.02 * g, p, jax.grad(inner)(p, x, y))
        return inner(p, x2, y2)

    x, x2 = draw(8, 3), draw(8, 3)
    return loss, dense(draw, 3, 16, 16, 1), (x, np.sin(x[:, :1]), x2, np.sin(x2[:, :1]))


@kind
def learned_optimizer(draw: Draw) -> Any:
    """A network reads gradients and updates the parameters of another one, in a loop."""

    def loss(p: Any, batch: Any) -> Any:
        w, x, y = batch

        def step(w: Any, _: Any) -> Any:
            value, g = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)
            features = jnp.stack([g, w], -1)
            return w - 0.01 * g - 0.01 * mlp(p, features)[..., 0], value

        return jnp.mean(lax.scan(step, w, None, length=30)[1])

    x, w = draw(16, 4), draw(4, 4)
    return loss, dense(draw, 2, 16, 1), (draw(4, 4), x, np.tanh(x @ w))


@kind
def diffusion_sampler(draw: Draw) -> Any:
    """The gradient of a reward through the steps of a sampler, without a scan."""

    def loss(p: Any, batch: Any) -> Any:
        x, noise = batch
        for i in range(30):
            t = jnp.full((x.shape[0], 1), i / 30, jnp.float32)
            x = x - 0.05 * mlp(p, jnp.concatenate([x, t], -1)) + 0.05 * noise[i]
        return jnp.mean((x[:, :2] - 1.0) ** 2)

    return loss, dense(draw, 5, 16, 4), (draw(8, 4), draw(30, 8, 4))


@kind
def steps_of_an_encoded_state(draw: Draw) -> Any:
    """Steps of one map from an activation, without a scan."""
    params = {"encoder": draw(6, 8, scale=0.4), "field": dense(draw, 8, 16, 8), "out": draw(8, 1)}

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        z = x @ p["encoder"]
        for _ in range(60):
            z = z + 0.02 * mlp(p["field"], z)
        return jnp.mean((z @ p["out"] - y) ** 2)

    return loss, params, (draw(8, 6), draw(8, 1))


@kind
def inner_training_on_batches(draw: Draw) -> Any:
    """Gradient descent in a scan, on another batch in each step, from learned parameters."""

    def loss(p: Any, batch: Any) -> Any:
        xs, x2 = batch

        def inner(p: Any, x: Any) -> Any:
            return jnp.mean((mlp(p, x) - jnp.sin(x[:, :1])) ** 2)

        def step(p: Any, x: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.02 * g, p, jax.grad(inner)(p, x)), None

        return inner(lax.scan(step, p, xs)[0], x2)

    return loss, dense(draw, 3, 16, 2), (draw(40, 8, 3), draw(8, 3))


@kind
def fast_weights(draw: Draw) -> Any:
    """Linear attention as a recurrence: a matrix that decays, and to which each token adds."""
    params = [draw(8, 8, scale=0.35) for _ in range(3)]

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        q, k, v = (x @ w for w in p)

        def step(state: Any, token: Any) -> Any:
            q, k, v = token
            state = 0.99 * state + k[:, :, None] * v[:, None]
            return state, jnp.einsum("bk,bkv->bv", q, state)

        _, out = lax.scan(step, jnp.zeros((4, 8, 8)), (q, k, v))
        return jnp.mean((out / 10 - y) ** 2)

    return loss, params, (draw(100, 4, 8, scale=0.5), draw(100, 4, 8))


# Logarithms, roots and differences near a singularity, beside a matmul that reads the same value.


def _squashed(mean: Any, log_std: Any, eps: Any) -> Any:
    std = jnp.exp(jnp.clip(log_std, -5, 2))
    u = mean + std * eps
    action = jnp.tanh(u)
    normal = -0.5 * eps**2 - jnp.log(std) - 0.919
    return action, jnp.sum(normal - jnp.log(1 - action**2 + 1e-6), -1)


def _sac(draw: Any, critics: Any) -> Any:
    params = {"actor": dense(draw, 6, 32, 6, scale=1.6), "critics": [dense(draw, 9, 32, 1) for _ in range(critics)]}

    def loss(p: Any, batch: Any) -> Any:
        obs, eps = batch
        mean, log_std = jnp.split(mlp(p["actor"], obs), 2, -1)
        action, log_p = _squashed(3 * mean, log_std, eps)
        values = [mlp(critic, jnp.concatenate([obs, action], -1)) for critic in p["critics"]]
        value = values[0] if critics == 1 else jnp.minimum(*values)
        return jnp.mean(0.2 * log_p - value[:, 0])

    return loss, params, (draw(64, 6), draw(64, 3))


@kind
def squashed_gaussian(draw: Draw) -> Any:
    return _sac(draw, 1)


@kind
def twin_critics(draw: Draw) -> Any:
    return _sac(draw, 2)


@kind
def squashed_action_in_one_matmul(draw: Draw) -> Any:
    """The smallest form."""

    def loss(p: Any, x: Any) -> Any:
        a = jnp.tanh(4 * (x @ p["w"]))
        return jnp.mean(a @ p["v"]) - jnp.mean(jnp.log(1 - a**2 + 1e-6))

    return loss, {"w": draw(8, 8, scale=0.4), "v": draw(8, 4)}, draw(32, 8)


@kind
def noisy_or(draw: Draw) -> Any:
    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        each = jax.nn.sigmoid(x @ p["w"] + 3)
        log_off = jnp.log1p(-jnp.minimum(each, 1 - 1e-6))
        either = -jnp.expm1(jnp.sum(log_off, -1))
        return jnp.mean((each @ p["v"] - y) ** 2) - jnp.mean(log_off) + jnp.mean(either)

    return loss, {"w": draw(8, 8, scale=0.7), "v": draw(8, 1)}, (draw(32, 8), draw(32, 1))


@kind
def hyperbolic_embedding(draw: Draw) -> Any:
    """Distances in the Poincaré ball: arccosh near 1 and a denominator near 0."""

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        z = x @ p["w"]
        size = lambda z: jnp.sqrt(jnp.sum(z**2, -1, keepdims=True) + 1e-6)
        z = 0.97 * jnp.tanh(size(z)) * z / size(z)
        edge = 1 - jnp.sum(z**2, -1)
        gap = jnp.sum((z - jnp.roll(z, 1, 0)) ** 2, -1)
        distance = jnp.arccosh(1 + 2 * gap / (edge * jnp.roll(edge, 1)) + 1e-6)
        return jnp.mean(distance) + jnp.mean((z @ p["v"] - y) ** 2)

    return loss, {"w": draw(6, 4), "v": draw(4, 1)}, (draw(32, 6), draw(32, 1))


@kind
def arctanh_of_a_tanh(draw: Draw) -> Any:
    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        a = jnp.tanh(2 * (x @ p["w"]))
        return jnp.mean(jnp.arctanh(jnp.clip(a, -1 + 1e-6, 1 - 1e-6)) ** 2) + jnp.mean((a @ p["v"] - y) ** 2)

    return loss, {"w": draw(6, 8, scale=0.5), "v": draw(8, 1)}, (draw(32, 6), draw(32, 1))


@kind
def beta_likelihood(draw: Draw) -> Any:
    """Powers of a probability near 1, which a decoder also reads."""

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        q = jax.nn.sigmoid(x @ p["w"] + 4)
        return -jnp.mean(0.5 * jnp.log(q) - 0.9 * jnp.log(1 - q + 1e-6)) + jnp.mean((q @ p["v"] - y) ** 2)

    return loss, {"w": draw(6, 8), "v": draw(8, 1)}, (draw(32, 6), draw(32, 1))


# Coordinates: indices from floats, large angles.


@kind
def sampling_grid(draw: Draw) -> Any:
    """A spatial transformer."""
    axis = np.linspace(-1, 1, 16, dtype=np.float32)
    grid = np.stack([*np.meshgrid(axis, axis), np.ones((16, 16), np.float32)]).reshape(3, -1)
    params = {"theta": np.array([[0.9, 0.1, 0.05], [-0.1, 0.8, 0.02]], np.float32), "w": draw(3, 8)}

    def loss(p: Any, batch: Any, exact: Any = None) -> Any:
        image, grid, y = batch
        xy = jnp.matmul(p["theta"], grid, precision=exact).T
        return jnp.mean((jnp.tanh(sample(image, (xy + 1) * 31.5) @ p["w"]) - y) ** 2)

    return loss, params, (smooth_image(draw, 64, 3), grid, draw(256, 8))


@kind
def homography(draw: Draw) -> Any:
    axis = np.linspace(0, 60, 16, dtype=np.float32)
    points = np.stack([*np.meshgrid(axis, axis), np.ones((16, 16), np.float32)], -1).reshape(-1, 3)
    params = {"h": np.array([[0.95, 0.02, 1], [0.01, 1.0, 0.5], [1e-4, -2e-4, 1]], np.float32), "w": draw(3, 8)}

    def loss(p: Any, batch: Any, exact: Any = None) -> Any:
        image, points, y = batch
        moved = jnp.matmul(points, p["h"].T, precision=exact)
        return jnp.mean((jnp.tanh(sample(image, moved[:, :2] / moved[:, 2:]) @ p["w"]) - y) ** 2)

    return loss, params, (smooth_image(draw, 64, 3), points, draw(256, 8))


@kind
def hash_grid(draw: Draw) -> Any:
    """Features of a grid at learned points: Instant NGP behind a deformation."""
    params = {"deform": dense(draw, 3, 16, 2), "grid": draw(32, 32, 4), "w": dense(draw, 4, 16, 1)}

    def loss(p: Any, batch: Any) -> Any:
        x, y = batch
        points = jax.nn.sigmoid(mlp(p["deform"], x)) * 31
        return jnp.mean((mlp(p["w"], sample(p["grid"], points)) - y) ** 2)

    return loss, params, (draw(64, 3), draw(64, 1))


def _rotary(angles_of: Any) -> Any:
    def build(draw: Draw) -> Any:
        params = {"q": draw(16, 16, scale=0.25), "k": draw(16, 16, scale=0.25), "v": draw(16, 16, scale=0.25)}
        inverse = (10000.0 ** (-np.arange(8) / 8)).astype(np.float32)

        def loss(p: Any, batch: Any, exact: Any = None) -> Any:
            x, y, start = batch
            positions = (jnp.arange(x.shape[0]) + start).astype(jnp.float32)
            angles = angles_of(positions, inverse, exact)
            sin, cos = jnp.sin(angles), jnp.cos(angles)

            def rotate(z: Any) -> Any:
                a, b = jnp.split(z, 2, -1)
                return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

            scores = rotate(x @ p["q"]) @ rotate(x @ p["k"]).T
            return jnp.mean((jax.nn.softmax(scores) @ (x @ p["v"]) - y) ** 2)

        return loss, params, (draw(24, 16), draw(24, 16), np.int32(15_900))

    return build


@kind
def rotary_angles_by_einsum(draw: Draw) -> Any:
    return _rotary(lambda positions, inverse, exact: jnp.einsum("i,j->ij", positions, inverse, precision=exact))(draw)


@kind
def rotary_angles_by_matmul(draw: Draw) -> Any:
    """As Hugging Face writes it."""
    return _rotary(lambda positions, inverse, exact: jnp.matmul(inverse[:, None], positions[None], precision=exact).T)(
        draw
    )


@kind
def fourier_features(draw: Draw) -> Any:
    """Frequencies times a time, a feature of size one, in a matmul."""
    params = {"w": dense(draw, 16, 32, 1)}
    frequencies = draw(1, 8, scale=30.0)

    def loss(p: Any, batch: Any, exact: Any = None) -> Any:
        t, y = batch
        angles = jnp.matmul(t, frequencies, precision=exact)
        return jnp.mean((mlp(p["w"], jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)) - y) ** 2)

    return loss, params, (draw(32, 1), draw(32, 1))


# Integers.


@kind
def labels_through_a_permutation(draw: Draw) -> Any:
    """Targets above 256, permuted by a matmul, that are looked up."""

    def loss(p: Any, batch: Any, exact: Any = None) -> Any:
        order, ids, y = batch
        permutation = jax.nn.one_hot(order, order.shape[0])
        moved = jnp.matmul(permutation, ids.astype(jnp.float32)[:, None], precision=exact)[:, 0]
        return jnp.mean((p["table"][moved.astype(jnp.int32)] @ p["w"] - y) ** 2)

    rng = np.random.default_rng(1)
    batch = rng.permutation(32).astype(np.int32), rng.integers(0, 1000, 32).astype(np.int32), draw(32, 4)
    return loss, {"table": draw(1000, 8), "w": draw(8, 4)}, batch


@kind
def regression_targets_from_ids(draw: Draw) -> Any:
    """Counts above 256 through a one-hot matmul, used as numbers."""

    def loss(p: Any, batch: Any, exact: Any = None) -> Any:
        x, group, counts = batch
        which = (group[:, None] == jnp.arange(4)[None]).astype(jnp.float32)
        target = jnp.matmul(which.T, counts.astype(jnp.float32)[:, None], precision=exact)
        return jnp.mean((which.T @ jnp.tanh(x @ p["w"]) @ p["v"] - target / 1000) ** 2)

    rng = np.random.default_rng(1)
    batch = draw(32, 8), rng.integers(0, 4, 32).astype(np.int32), rng.integers(0, 1000, 32).astype(np.int32)
    return loss, {"w": draw(8, 8, scale=0.3), "v": draw(8, 1)}, batch


@kind
def expert_slots(draw: Draw) -> Any:
    """Places in the buffers of experts from a cumulative sum by `tril`, for 600 tokens."""
    params = {"router": draw(8, 4), "experts": draw(4, 8, 8, scale=0.3)}

    def loss(p: Any, batch: Any, exact: Any = None) -> Any:
        x, y = batch
        gates = jax.nn.softmax(x @ p["router"])
        choice = jax.nn.one_hot(jnp.argmax(gates, -1), 4)
        tokens, capacity = x.shape[0], 200
        place = (jnp.matmul(jnp.tril(jnp.ones((tokens, tokens))), choice, precision=exact) - 1) * choice
        kept = (place < capacity) * choice
        slot = jax.nn.one_hot(jnp.sum(place * kept, -1).astype(jnp.int32), capacity)
        dispatch = kept[:, :, None] * slot[:, None]
        inside = jnp.tanh(jnp.einsum("esd,edf->esf", jnp.einsum("tes,td->esd", dispatch, x), p["experts"]))
        out = jnp.einsum("tes,esf->tf", dispatch * gates[:, :, None], inside)
        return jnp.mean((out - y) ** 2)

    return loss, params, (draw(600, 8), draw(600, 8))


# Decompositions and solves.


@kind
def cholesky_of_a_gram_matrix(draw: Draw) -> Any:
    """A Gaussian process with a deep kernel."""

    def loss(p: Any, batch: Any, exact: Any = None) -> Any:
        x, y = batch
        f = jnp.tanh(x @ p["w"])
        factor = jnp.linalg.cholesky(jnp.matmul(f, f.T, precision=exact) + 1e-2 * jnp.eye(x.shape[0]))
        z = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return jnp.mean(z**2) + jnp.mean(jnp.log(jnp.diag(factor)))

    return loss, {"w": draw(4, 8)}, (draw(24, 4), draw(24, 1))


@kind
def whitening(draw: Draw) -> Any:
    def loss(p: Any, batch: Any, exact: Any = None) -> Any:
        x, y = batch
        h = jnp.tanh(x @ p["w"])
        h = h - h.mean(0)
        factor = jnp.linalg.cholesky(jnp.matmul(h.T, h, precision=exact) / x.shape[0] + 1e-4 * jnp.eye(8))
        white = jax.scipy.linalg.solve_triangular(factor, h.T, lower=True).T
        return jnp.mean((white @ p["v"] - y) ** 2)

    return loss, {"w": draw(6, 8), "v": draw(8, 1)}, (draw(64, 6), draw(64, 1))


@kind
def ridge_regression(draw: Draw) -> Any:
    """The last layer of each task in closed form."""

    def loss(p: Any, batch: Any, exact: Any = None) -> Any:
        x, y, x2, y2 = batch
        f, f2 = jnp.tanh(x @ p), jnp.tanh(x2 @ p)
        gram, moments = (jnp.matmul(f.T, z, precision=exact) for z in (f, y))
        head = jnp.linalg.solve(gram + 1e-2 * jnp.eye(8), moments)
        return jnp.mean((f2 @ head - y2) ** 2)

    return loss, draw(4, 8), (draw(24, 4), draw(24, 2), draw(24, 4), draw(24, 2))


@kind
def log_determinant(draw: Draw) -> Any:
    def loss(p: Any, x: Any, exact: Any = None) -> Any:
        f = jnp.tanh(x @ p)
        return -jnp.linalg.slogdet(jnp.matmul(f.T, f, precision=exact) / x.shape[0] + 1e-3 * jnp.eye(8))[1]

    return loss, draw(4, 8), draw(64, 4)
