"""Test cases: a training program, as choices that a number makes and as source."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator

from testing.random_programs.writing import Index
from testing.random_training import models, optimizers
from testing.random_training.steps import APPLICATIONS, GRADIENTS, INNER_GRADIENTS, LOSSES

# How the step runs. Those on several devices train on a batch of twice the size.
LOOPS = (
    "python",
    "jit",
    "scan",
    "vmap",
    "shard_map",
    "shard_map without checks",
    "automatic mesh",
    "explicit mesh",
)
# What is wrong with a batch: nothing, an input, the loss, or gradients that overflow only if they are scaled.
EVENTS = ("", "input", "loss", "spike")

_VALUE_AND_GRAD = {"nnx": "nnx.value_and_grad", "equinox": "eqx.filter_value_and_grad"}
_ARRAYS = ("tree", "linen", "haiku")

# Lines of the step before the loss, and after the update: `p` is what is trained, `params` what the loop carries.
_ENTER = {
    "nnx": ("p = nnx.merge(GRAPH, params, stats)",),
    "equinox": ("p = eqx.combine(params, STATIC)",),
}
_LEAVE = {"equinox": ("params = eqx.filter(p, eqx.is_inexact_array)",)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training program.

    Args:
        model: The library and the source of the model.
        loss: One of `LOSSES`.
        inner: One of `INNER_GRADIENTS`, for losses that contain a gradient.
        gradient: One of `GRADIENTS`.
        optimizer: The optimizer's source, with `optimizers.OPTIONS`.
        application: One of `APPLICATIONS`.
        loop: One of `LOOPS`.
        events: One of `EVENTS` for each step.
        half_params: Whether the params are bfloat16.
        policy: The policy of the model; only "float32" leaves the gradients as they are.
    """

    model: models.Model
    loss: str = "plain"
    inner: str = INNER_GRADIENTS[0]
    gradient: str = "mpjax.value_and_grad"
    optimizer: str = f"mpjax.dynamic_loss_scale(optax.sgd(0.1){optimizers.OPTIONS})"
    application: str = "apply_gradients"
    loop: str = "python"
    events: tuple[str, ...] = ("",)
    half_params: bool = False
    policy: str = "float32"

    def __repr__(self) -> str:
        events = ", ".join(event or "good" for event in self.events)
        return f"# loop: {self.loop}; policy: {self.policy}; steps: {events}\n{self.source}"

    @property
    def group(self) -> str:
        """Cases of one group share what is under test."""
        return self.model.library if self.policy == "float32" else self.policy

    @property
    def _casts(self) -> bool:
        """Whether the loss runs under autocast. Models of Flax get the policy themselves."""
        return self.policy != "float32" and self.model.library not in ("linen", "nnx")

    @property
    def source(self) -> str:
        """The program: a definition of `tx`, `PARAMS`, `STATS` and `step(carry, batch)`."""
        library, gradient = self.model.library, GRADIENTS[self.gradient]
        loss = [
            *(["p = jax.tree.map(lambda a: a.astype(jnp.float32), p)"] if self.half_params else []),
            *LOSSES[self.loss].lines,
            "total = total + batch['bad'] + batch['spike'] * moved(p)",
            "return total, model_loss(p, x, stats, ids)[1]" if gradient.aux else "return total",
        ]
        parallel = self.loop.startswith("shard_map")
        # What the update changes: params, or a whole Equinox model, whose static leaves optax can't update.
        updated = "params" if library == "nnx" or (library, self.application) == ("equinox", "update") else "p"
        # Gradients that the loop scales itself are compared unscaled.
        shown = "aux" if self.gradient == "by hand" else "grads"
        application = APPLICATIONS[self.application]
        applied, differentiated = application.lines, gradient.lines
        if application.needs != "nnx":
            applied = tuple(re.sub(r"\bp\b", updated, line) for line in applied)
        restored = self.application == "restore_if_skipped"
        if restored:
            make, context, update, read = applied
            applied = (read,)
            differentiated = make, f"with {context}:", *("    " + line for line in (*gradient.lines, update))
        options = ", grads_are_scaled=True" if self.gradient == "by hand" else ""
        options += ", axis_name='i'" if self.loop == "shard_map without checks" else ""
        rules = _RULES.get(self.policy, "")
        body = [
            "params, state, stats = carry",
            "x, ids = batch['x'], batch['ids']",
            *_ENTER.get(library, ("p = params",)),
            "def f(p, x):",
            "    return model_loss(p, x, stats, ids)[0]",
            "def loss_fn(p, x):",
            *("    " + line for line in loss),
            *([f"loss_fn = mpjax.autocast(loss_fn, {self.policy!r}{rules})"] if self._casts else []),
            "aux, new = jnp.float32(0), stats",
            *differentiated,
            *(["new, aux = aux"] if gradient.aux else []),
            *(["new = nnx.as_pure(nnx.state(p, nnx.Not(nnx.Param)))"] if library == "nnx" else []),
            *(["loss = lax.pmean(loss, 'i')", "aux = jnp.float32(0)"] if parallel else []),
            *(["grads = lax.pmean(grads, 'i')"] if self.loop == "shard_map without checks" else []),
            *applied,
            *(_LEAVE.get(library, ("params = p",)) if updated == "p" else ()),
            "stats = new" if restored else "stats = mpjax.keep_if_finite(state, new, stats)",
            f"return (params, state, stats), {{'loss': loss, 'grads': {shown}, 'aux': aux}}",
        ]
        lines = [self.model.source, "PARAMS = halved(PARAMS)"] if self.half_params else [self.model.source]
        lines += [
            f"tx = {self.optimizer.replace(optimizers.OPTIONS, options)}",
            "def step(carry, batch):",
            *("    " + line for line in body),
        ]
        vag = _VALUE_AND_GRAD.get(library, "jax.value_and_grad")
        text = "\n".join(lines) + "\n"
        text = re.sub(r"<grad ([^>]*)>", lambda match: self.inner.replace("{}", match[1]), text)
        return text.replace("<vag>", vag)

    def simpler(self) -> Iterator[Case]:
        """Cases with one simpler choice, the largest changes first."""
        default = Case(self.model)
        for field in (
            "policy",
            "loop",
            "gradient",
            "loss",
            "inner",
            "optimizer",
            "application",
            "half_params",
            "events",
        ):
            if getattr(self, field) != getattr(default, field):
                yield dataclasses.replace(self, **{field: getattr(default, field)})
        for i in range(len(self.events)):
            if len(self.events) > 1:
                yield dataclasses.replace(self, events=self.events[:i] + self.events[i + 1 :])
        for optimizer in optimizers.simpler(self.optimizer):
            yield dataclasses.replace(self, optimizer=optimizer)
        for model in models.simpler(self.model):
            yield dataclasses.replace(self, model=model)


def _choose(index: Index, options: tuple[str, ...]) -> str:
    return options[index(len(options))]


# Arguments of autocast: all matmuls run in float8, whatever their sizes and place.
_RULES = {"mixed_float8": ', rules=mpjax.Rules(float8=mpjax.Float8(allow=("*",)))'}


def _suits(needs: str, library: str) -> bool:
    return needs in ("", library) or (needs == "arrays" and library in _ARRAYS)


def draw(index: Index) -> Case:
    """A random case."""
    policy = _choose(index, ("float32",) * 8 + ("mixed_float16", "mixed_bfloat16", "mixed_float8"))
    model = models.draw(index, policy)
    library = model.library
    if policy == "mixed_float8" and library in ("linen", "nnx"):  # `with_policy` refuses it
        policy = "mixed_bfloat16"
    half = library == "tree" and policy == "float32" and index(6) == 5
    loss = _choose(index, tuple(name for name, form in LOSSES.items() if _suits(form.needs, library)))
    if not index(3) or (policy != "float32" and loss == "fixed point"):  # NumPy can't run the solve of autocast
        loss = "plain"
    gradients = tuple(
        name
        for name, form in GRADIENTS.items()
        if _suits(form.needs, library)
        and not (half and _gives_half_gradients(form.lines))
        and not (policy != "float32" and name.startswith("around"))  # the error of a gradient's gradient is larger
        and not (name == "by hand" and "true_cotangents" in str(LOSSES[loss].lines))  # it needs mpjax's scaling
    )
    if policy != "float32" and library in ("linen", "nnx") and index(2):  # what user code returns must not be rounded
        gradients = tuple(name for name in gradients if GRADIENTS[name].aux)
    gradient = _choose(index, gradients)
    loop = _choose(index, LOOPS if policy == "float32" else LOOPS[:2]) if index(2) else "python"
    optimizer = optimizers.draw(index, half)
    clipped = optimizers.clips_outside(optimizer)
    if gradient == "by hand" and clipped:  # of scaled gradients
        gradient = "mpjax.value_and_grad"
    # A spike overflows at one place only: where the gradients of the whole loss are scaled, before they are added.
    elsewhere = ("around", "closed", "hand", "in a scan", "two losses", "jacrev")
    spikes = loop != "scan" and not clipped and not any(word in gradient for word in elsewhere)
    events: tuple[str, ...] = EVENTS if spikes else EVENTS[:-1]
    applications = tuple(name for name, form in APPLICATIONS.items() if _suits(form.needs, library))
    if "plateau" in optimizer:  # reads the loss
        applications = tuple(name for name in applications if "value=loss" in str(APPLICATIONS[name].lines))
    if library == "nnx":  # few models have statistics that a skipped step would change
        applications += ("restore_if_skipped",) * 4
    if loop == "shard_map without checks":  # the gradients' mean comes before the update
        applications = tuple(name for name in applications if name != "restore_if_skipped")
    return Case(
        model,
        loss,
        _choose(index, INNER_GRADIENTS),
        gradient,
        optimizer,
        _choose(index, applications),
        loop,
        tuple(_choose(index, events) if index(2) else "" for _ in range((2, 2, 3)[index(3)])),
        half,
        policy,
    )


def _gives_half_gradients(lines: tuple[str, ...]) -> bool:
    """Whether a gradient is taken by JAX's functions, so that the gradient of a half param is half."""
    return any(re.search(r"<vag>|\bjax\.(vjp|linearize|jacrev)|scale_loss", line) for line in lines)


def numbered_case(number: int) -> Case:
    """The case of a number, independent of other numbers."""
    return draw(random.Random(number).randrange)
