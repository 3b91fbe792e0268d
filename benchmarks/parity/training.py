"""Applies a policy to a family: the only module of the parity suite that concerns precision.

float32                     nothing
mixed_float16, ...          `mpjax.autocast` on each loss
with_policy mixed_float16   `mpjax.with_policy` on each model
mixed_float8                autocast with float8 matmuls of every size, because the default sizes exceed these models
mixed_bfloat16 int8, ...    autocast with `Rules(residuals="int8")`
O2                          `with_policy`, half parameters, `master_weights`
static 1                    mixed_float16 by autocast with a constant loss scale of 1: no loss scaling
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from benchmarks.parity.family import Batch, Family, Models
from testing import cheap_keys

FLOAT32 = "float32"
AUTOCAST = ("mixed_float16", "mixed_bfloat16")
FLOAT8 = "mixed_float8"
EIGHT_BITS = {f"mixed_bfloat16 {name}": mpjax.Rules(residuals=name) for name in ("int8", "float8")}
POLICIES = (
    FLOAT32,
    *AUTOCAST,
    FLOAT8,
    *EIGHT_BITS,
    "with_policy mixed_float16",
    "with_policy mixed_bfloat16",
    "O2",
    "static 1",
)
BY_MODULE = "with_policy "

State = dict[str, Any]
MakeKey = Callable[[int], jax.Array]


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of one training: the same each time, whatever the policy."""

    family: Family
    seed: int

    def __len__(self) -> int:
        return self.family.steps

    def __iter__(self) -> Iterator[Batch]:
        rng = np.random.default_rng(self.seed)
        for _ in range(self.family.steps):
            yield self.family.batch(rng)


class Training:
    """A family under a policy; every seed shares its compiled functions."""

    def __init__(self, family: Family, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; choose from {', '.join(POLICIES)}.")
        self.family = family
        self.policy = mpjax.get_policy(
            {"static 1": "mixed_float16"}.get(policy, policy.removeprefix(BY_MODULE).split()[0])
        )
        by_module = policy.startswith(BY_MODULE) or policy == "O2"
        rules = {FLOAT8: mpjax.Rules(float8=mpjax.Float8(min_size=(0, 0))), **EIGHT_BITS}.get(policy)
        self.cast: Callable[[Any], Any] = (
            (lambda fun: fun) if by_module else functools.partial(mpjax.autocast, policy=self.policy, rules=rules)
        )
        self.modules = {
            name: mpjax.with_policy(module, self.policy) if by_module else module
            for name, module in family.modules.items()
        }
        self.applies = {name: module.apply for name, module in self.modules.items()}
        optimizer = family.optimizer(family.steps * family.passes)
        inner = mpjax.master_weights(optimizer, self.policy) if policy == "O2" else optimizer
        self.tx: Any = (
            mpjax.static_loss_scale(inner, 1.0) if policy == "static 1" else mpjax.loss_scale_for(inner, self.policy)
        )
        # with_policy keeps the float32 model's parameters, so only half parameters need their own initialisation.
        self._init_variables = jax.jit(_init(family, self.modules)) if policy == "O2" else _initializer(family)
        self._init_optimizers = jax.jit(
            lambda variables: {name: self.tx.init(variables[name]["params"]) for name in family.losses}
        )
        self.step = jax.jit(self._step)
        self._predict = jax.jit(lambda variables, test: family.predict(self._for_use(variables), test))

    def init(self, seed: int, make_key: MakeKey = cheap_keys.key) -> State:
        """Parameters and optimizer state; the parameters depend on the seed only."""
        batch = self.family.batch(np.random.default_rng(seed))
        variables = self._init_variables(make_key(seed), batch)
        return {"variables": variables, "optimizers": self._init_optimizers(variables)}

    def metric(self, state: State) -> float:
        """The held-out metric."""
        test = self.family.held_out
        return self.family.score(jax.tree.map(np.asarray, self._predict(state["variables"], test)), test)

    def _for_use(self, variables: Any) -> Models:
        """The models outside of a loss, where each is cast separately."""
        return Models({name: self.cast(apply) for name, apply in self.applies.items()}, variables)

    def _step(self, state: State, batch: Batch) -> tuple[State, jax.Array]:
        if self.family.prepare is not None:
            batch = self.family.prepare(self._for_use(state["variables"]), batch)
        if self.family.passes == 1:
            return self._update(state, batch)
        state, losses = jax.lax.scan(lambda s, _: self._update(s, batch), state, length=self.family.passes)
        return state, jnp.mean(losses)

    def _update(self, state: State, batch: Batch) -> tuple[State, jax.Array]:
        variables, optimizers = dict(state["variables"]), dict(state["optimizers"])
        losses = []
        for name in self.family.losses:
            opt_state, rest = optimizers[name], dict(variables[name])
            params = rest.pop("params")
            loss_fn = self.cast(functools.partial(self._loss, name))
            differentiated = mpjax.value_and_grad(loss_fn, opt_state, has_aux=True)
            (loss, updated), grads = differentiated(params, rest, variables, batch)
            params, opt_state = mpjax.apply_gradients(self.tx, grads, opt_state, params)
            rest |= mpjax.keep_if_finite(opt_state, updated, {kind: rest[kind] for kind in updated})
            variables[name], optimizers[name] = {"params": params, **rest}, opt_state
            losses.append(loss)
        return {"variables": variables, "optimizers": optimizers}, sum(losses[1:], losses[0])

    def _loss(self, name: str, params: Any, rest: Any, variables: Any, batch: Batch) -> tuple[jax.Array, Any]:
        models = Models(self.applies, {**variables, name: {"params": params, **rest}})
        return self.family.losses[name](models, batch)


def _init(family: Family, modules: Any) -> Callable[..., Any]:
    def init(key: jax.Array, batch: Batch) -> dict[str, Any]:
        arguments = family.example(batch)
        keys = jax.random.split(key, len(modules))
        return {name: module.init(k, *arguments[name]) for k, (name, module) in zip(keys, modules.items(), strict=True)}

    return init


@functools.cache
def _training(family_name: str, policy: str) -> Training:
    from benchmarks.parity.families import get

    return Training(get(family_name), policy)


_INITIALIZERS: dict[str, Any] = {}


def _initializer(family: Family) -> Any:
    """The compiled initialisation of the float32 models, shared by the policies."""
    return _INITIALIZERS.setdefault(family.name, jax.jit(_init(family, family.modules)))


def make(family_name: str, policy: str, seed: int) -> mpjax.inspection.Training:
    """The training of one run, for `mpjax.parity`."""
    training = _training(family_name, policy)
    return mpjax.inspection.Training(
        training.init(seed),
        training.step,
        Batches(training.family, seed),
        training.metric,
        larger_is_better=training.family.larger_is_better,
        metric_name=training.family.metric,
    )
