"""Models of random training programs, as source: a function of arrays, or a small model of a library.

Each defines `PARAMS`, `STATS` (what the optimizer does not own) and `model_loss(p, x, stats, ids) -> (loss, (stats,
aux))`, where p is what is trained: a tree, or the model. `x` has shape (2, 3).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from testing.random_programs.cases import PARAMETERS
from testing.random_programs.writing import Index, Scope, Writer

Choice = TypeVar("Choice")

# Statements whose value depends on more than float32's range, or that the NumPy evaluator can't run.
_EXCLUDED = ("float16", "mpjax", "callback", "region", "without_autocast")


class _Float32Writer(Writer):
    """Writes programs that compute in float32 only, and call nothing of mpjax.

    Their derivative rules close over nothing: where a function is traced first, as by `jit`, JAX loses what they close
    over.
    """

    def choose(self, options: Sequence[Choice]) -> Choice:
        if set(options) == {True, False}:  # whether a rule's function is closed
            return options[0]
        kept = [option for option in options if not any(word in str(option) for word in _EXCLUDED)]
        return super().choose(kept or options)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model.

    Args:
        library: Its library; "tree" for a function of a dict of arrays.
        source: The definitions.
    """

    library: str
    source: str


def _tree(index: Index) -> str:
    writer = _Float32Writer(index, reverse=True, forward=False, explicit=False, budget=(1, 2, 3, 4)[index(4)])
    scope = Scope([(name, type_) for name, type_ in reversed(PARAMETERS)], 0, [])
    outs = ", ".join(name for name, _ in writer.body(scope))
    lines = ["def program(w, x, b, s, n):", *scope.lines, f"    return {outs},"]
    lines += [
        'PARAMS = {"w": array(3, 3), "b": array(3), "s": array(), "frozen": array(3)}',
        'STATS = {"mean": array()}',
        "def model_loss(p, x, stats, ids):",
        '    outs = program(p["w"], x + lax.stop_gradient(p["frozen"]), p["b"], p["s"], np.int32(1))',
        '    new = {"mean": 0.9 * stats["mean"] + 0.1 * outs[0].mean()}',
        "    return sum(jnp.mean(out * 0.7) for out in outs), (new, ids + outs[-1].mean())",
    ]
    return "\n".join(lines)


# A layer of each library: what it defines in the constructor, and its call on `h` of shape (2, 3). `{i}` is its number.
_LINEN = (
    ("", "h = jnp.tanh(nn.Dense(3)(h))"),
    ("", "h = nn.LayerNorm()(h)"),
    ("", "h = nn.BatchNorm(use_running_average=False, momentum=0.5)(h)"),
    ("", "h = h + nn.Embed(8, 3)(ids.astype(jnp.int32))"),
    ("", "h = nn.RNN(nn.SimpleCell(3))(h[None])[0]"),
    ("", "h = nn.MultiHeadDotProductAttention(1, deterministic=True)(h[None], mask=ids[None, None, None] > 2)[0]"),
    ("", "h = nn.Conv(3, (2,))(h[None])[0]"),
    ("", "h = nn.remat(nn.Dense)(3)(h)"),
    ("", "layer = nn.Dense(3); h = layer(nn.relu(layer(h)))"),
    ("", "h = h @ self.param('kernel{i}', nn.initializers.normal(), (3, 3))"),
    ("", "h = h + lax.stop_gradient(nn.Dense(3)(h))"),
    ("", "h = nn.softmax(jnp.where(ids[:, None] > 2, h, -1e9)) * h"),
    ("", "count, h = lax.scan(lambda c, r: (c + 1, jnp.sin(r)), aux, h); aux = count"),
    ("", "h = nn.scan(Cell, variable_broadcast='params', split_rngs=dict(params=False))()(h, jnp.zeros((2, 1)))[0]"),
    ("", "h = h + jnp.sin(ids[:, None] * 997.0)"),
    ("", "h = nn.GRUCell(3)(h, x)[1]"),
    ("", "h = jax.nn.gelu(nn.DenseGeneral(3)(h))"),
)
_NNX = (
    ("nnx.Linear(3, 3, rngs=rngs)", "h = jnp.tanh(self.l{i}(h))"),
    ("nnx.LayerNorm(3, rngs=rngs)", "h = self.l{i}(h)"),
    ("nnx.BatchNorm(3, momentum=0.5, rngs=rngs)", "h = self.l{i}(h)"),
    ("nnx.Embed(8, 3, rngs=rngs)", "h = h + self.l{i}(ids.astype(jnp.int32))"),
    ("nnx.RNN(nnx.SimpleCell(3, 3, rngs=rngs), rngs=False)", "h = self.l{i}(h[None], initial_carry=x[:1])[0]"),
    (
        "nnx.MultiHeadAttention(1, 3, decode=False, deterministic=True, rngs=rngs, keep_rngs=False)",
        "h = self.l{i}(h[None], mask=ids[None, None, None] > 2)[0]",
    ),
    ("nnx.Conv(3, 3, (2,), rngs=rngs)", "h = self.l{i}(h[None])[0]"),
    ("nnx.Linear(3, 3, rngs=rngs)", "h = nnx.remat(lambda layer, h: layer(h))(self.l{i}, h)"),
    ("nnx.Linear(3, 3, rngs=rngs)", "h = self.l{i}(nnx.relu(self.l{i}(h)))"),
    ("nnx.Param(array(3, 3))", "h = h @ self.l{i}[...]"),
    ("nnx.Variable(array(3, 3))", "h = h @ self.l{i}[...]"),
    ("nnx.Linear(3, 3, rngs=rngs)", "h = h + lax.stop_gradient(self.l{i}(h))"),
    ("None", "h = nnx.softmax(jnp.where(ids[:, None] > 2, h, -1e9)) * h"),
    ("None", "count, h = lax.scan(lambda c, r: (c + 1, jnp.sin(r)), aux, h); aux = count"),
    # Often: what a skipped step must not change.
    *(("nnx.BatchStat(array(3))", "h = h + 0.1 * self.l{i}[...]; self.l{i}[...] = lax.stop_gradient(h[0])"),) * 5,
)
_EQUINOX = (
    ("eqx.nn.Linear(3, 3, key=key)", "h = jnp.tanh(jax.vmap(self.l{i})(h))"),
    ("eqx.nn.LayerNorm(3)", "h = jax.vmap(self.l{i})(h)"),
    ("eqx.nn.Embedding(8, 3, key=key)", "h = h + jax.vmap(self.l{i})(ids.astype(jnp.int32))"),
    ("eqx.nn.GRUCell(3, 3, key=key)", "h = lax.scan(lambda c, r: (self.l{i}(r, c),) * 2, jnp.zeros(3), h)[1]"),
    ("eqx.nn.MultiheadAttention(1, 3, key=key)", "h = self.l{i}(h, h, h, mask=ids[None] > jnp.array([[2.0], [1.0]]))"),
    ("eqx.nn.Conv1d(3, 3, 1, key=key)", "h = self.l{i}(h.T).T"),
    ("eqx.nn.Linear(3, 3, key=key)", "h = jax.vmap(self.l{i})(jax.nn.relu(jax.vmap(self.l{i})(h)))"),
    ("eqx.nn.MLP(3, 3, 3, 1, key=key)", "h = jax.vmap(eqx.filter_checkpoint(self.l{i}))(h)"),
    ("eqx.nn.Linear(3, 3, key=key)", "h = h + lax.stop_gradient(jax.vmap(self.l{i})(h))"),
    ("eqx.nn.Lambda(jnp.sin)", "h = self.l{i}(h)"),
    ("jnp.arange(3)", "h = h[:, self.l{i}[::-1]]"),
)
_HAIKU = (
    ("", "h = jnp.tanh(hk.Linear(3)(h))"),
    ("", "h = hk.LayerNorm(-1, True, True)(h)"),
    ("", "h = hk.BatchNorm(True, True, 0.5)(h, True)"),
    ("", "h = h + hk.Embed(8, 3)(ids.astype(jnp.int32))"),
    ("", "h = hk.dynamic_unroll(hk.GRU(3), h, jnp.zeros(3))[0]"),
    ("", "h = hk.Conv1D(3, 2)(h[None])[0]"),
    ("", "h = hk.remat(hk.Linear(3))(h)"),
    ("", "layer = hk.Linear(3); h = layer(jax.nn.relu(layer(h)))"),
    ("", "h = hk.scan(lambda c, r: (c + 1, jnp.sin(r)), aux, h)[1]"),
    ("", "h = h * hk.get_parameter('scale{i}', (3,), init=jnp.ones)"),
)

_CELL = """class Cell(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        return jnp.tanh(nn.Dense(3)(h)), None
"""


def _layers(index: Index, layers: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """The constructor's lines and the call's lines of one to three layers."""
    chosen = [layers[index(len(layers))] for _ in range(1 + index(3))]
    made = [f"self.l{i} = {make}" for i, (make, _) in enumerate(chosen) if make]
    return made, [call.format(i=i) for i, (_, call) in enumerate(chosen)]


def _block(lines: Sequence[str], depth: int) -> str:
    return "\n".join("    " * depth + line for line in lines)


def _linen(index: Index) -> str:
    _, calls = _layers(index, _LINEN)
    body = _block(["h, aux = nn.Dense(3)(x), ids.sum() * 99.7", *calls, "return h, aux"], 2)
    return f"""{_CELL if "nn.scan(Cell" in body else ""}class Net(nn.Module):
    @nn.compact
    def __call__(self, x, ids):
{body}
NET = with_policy(Net())
PARAMS, STATS = initialised(lambda key: NET.init(key, X, IDS))
def model_loss(p, x, stats, ids):
    (h, aux), new = NET.apply({{"params": p, **stats}}, x, ids, mutable=list(stats))
    return h.mean() + 0.1 * jnp.sum(jnp.square(h)), (new, aux)"""


def _nnx(index: Index) -> str:
    made, calls = _layers(index, _NNX)
    return f"""class Net(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(3, 3, rngs=rngs)
{_block(made, 2)}
    def __call__(self, x, ids):
{_block(["h, aux = self.out(x), ids.sum() * 99.7", *calls, "return h, aux"], 2)}
GRAPH, PARAMS, STATS = split(with_policy(abstract(lambda: Net(nnx.Rngs(KEY)))))
def model_loss(p, x, stats, ids):
    h, aux = p(x, ids)
    return h.mean() + 0.1 * jnp.sum(jnp.square(h)), (stats, aux)"""


def _equinox(index: Index) -> str:
    made, calls = _layers(index, _EQUINOX)
    fields = _block([line.split(" = ")[0].removeprefix("self.") + ": Any" for line in made], 1)
    return f"""class Net(eqx.Module):
    out: Any
{fields}
    def __init__(self, key):
        self.out = eqx.nn.Linear(3, 3, key=key)
{_block(made, 2)}
    def __call__(self, x, ids):
{_block(["h, aux = jax.vmap(self.out)(x), ids.sum() * 99.7", *calls, "return h, aux"], 2)}
PARAMS, STATIC = partition(filled(eqx.filter_eval_shape(Net, KEY)))
STATS = {{}}
def model_loss(p, x, stats, ids):
    h, aux = p(x, ids)
    return h.mean() + 0.1 * jnp.sum(jnp.square(h)), (stats, aux)"""


def _haiku(index: Index) -> str:
    _, calls = _layers(index, _HAIKU)
    return f"""def net(x, ids):
{_block(["h, aux = hk.Linear(3)(x), ids.sum() * 99.7", *calls, "return h, aux"], 1)}
NET = hk.without_apply_rng(hk.transform_with_state(net))
PARAMS, STATS = haiku_initialised(NET)
def model_loss(p, x, stats, ids):
    (h, aux), new = NET.apply(p, stats, x, ids)
    return h.mean() + 0.1 * jnp.sum(jnp.square(h)), (new, aux)"""


MODELS: dict[str, Callable[[Index], str]] = {
    "tree": _tree,
    "linen": _linen,
    "nnx": _nnx,
    "equinox": _equinox,
    "haiku": _haiku,
}


def draw(index: Index, policy: str) -> Model:
    """A random model; most of them are functions of a tree, which trace in half the time.

    A half policy means most to models of Flax, where `with_policy` decides what is cast.
    """
    likely = ("tree",) * 9 if policy == "float32" else ("tree", *("linen", "nnx") * 2)
    libraries = (*likely, "linen", "nnx", "equinox", "haiku")
    library = libraries[index(len(libraries))]
    return Model(library, MODELS[library](index))


def simpler(model: Model) -> Iterator[Model]:
    """Models with one statement less."""
    lines = model.source.splitlines()
    for i, line in enumerate(lines):
        if re.match(r"    +(v\d+ =|h = |count, h = |layer = )", line) and not line.startswith("    h, aux"):
            yield dataclasses.replace(model, source="\n".join(lines[:i] + lines[i + 1 :]))
    if model.library == "tree" and "return v" in model.source:
        yield dataclasses.replace(model, source=re.sub(r"return (v\d+), .*", r"return \1,", model.source, count=1))
