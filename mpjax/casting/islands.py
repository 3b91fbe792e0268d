"""Islands: stretches of float32 arithmetic that the backward pass computes again instead of storing.

A normalisation, a softmax or a loss starts from half activations and stores float32 values for its
derivative, several for each element. An island is issued under `jax.checkpoint`, so that only what goes in
is stored, which is half. Only cheap work is computed again: elementwise operations and reductions,
no matmul, loop, sort, random number or collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpjax.casting import versions
from mpjax.casting.classify import tracked
from mpjax.casting.oplists import Op
from mpjax.casting.states import FULL, INPUT, LOW, RAW, State

# Reads twice as if they were cheap, but are not; or must not happen twice.
_DEAR = frozenset(
    """sort top_k approx_top_k fft lu qr geqrf ormqr householder_product eig eigh svd schur hessenberg
    cholesky cholesky_update tridiagonal tridiagonal_solve triangular_solve random_gamma
    random_gamma_grad symmetric_product psum psum_invariant reduce_scatter all_gather
    all_gather_invariant all_to_all ppermute pmax pmin pvary pbroadcast optimization_barrier name
    scatter scatter-add scatter-mul scatter-min scatter-max scatter_add gather cumsum cumprod
    cumlogsumexp cummax cummin device_put regularized_incomplete_beta igamma igammac igamma_grad_a
    """.split()
)
_LINEAR = frozenset(
    """add add_any sub neg reduce_sum broadcast_in_dim convert_element_type select_n reshape transpose
    squeeze slice dynamic_slice rev concatenate pad copy stop_gradient reduce_window_sum sign round
    floor ceil
    """.split()
)
_CALLS = frozenset({"jit", "pjit", "custom_jvp_call", "closed_call"})
# Integers and masks that an island needs may be made in it.
_BESIDE = frozenset("iota eq ne lt le gt ge and or not xor is_finite broadcast_in_dim reshape".split())


@dataclasses.dataclass(slots=True)
class Island:
    """Steps that are issued together under `jax.checkpoint`.

    Args:
        steps: the steps.
        ins: what they read from outside, and the slot of each.
        outs: what is read of theirs outside, and the slots.
    """

    steps: list[Any]
    ins: tuple[tuple[Any, int], ...]
    outs: tuple[tuple[Any, int], ...]


def cheap(eqn: Any) -> bool:
    """Whether an equation may be computed a second time."""
    name = eqn.primitive.name
    if eqn.effects or name in _DEAR:
        return False
    if name in _CALLS:
        jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return all(map(cheap, versions.open_jaxpr(jaxpr).jaxpr.eqns))
    return "jaxpr" not in eqn.params and "branches" not in eqn.params and not name.startswith(("random", "threefry"))


def stored_by(eqn: Any) -> int:
    """About how many bytes the derivative of an equation stores."""
    name = eqn.primitive.name
    if name in _CALLS:
        jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return sum(map(stored_by, versions.open_jaxpr(jaxpr).jaxpr.eqns))
    if name in _LINEAR or not any(map(tracked, eqn.outvars)):
        return 0
    if name in ("mul", "div") and any(isinstance(v, versions.Literal) for v in eqn.invars):
        return 0
    return sum(4 * v.aval.size for v in eqn.outvars)


def form(steps: Sequence[Any], states: dict[Any, State], read_outside: Sequence[tuple[Any, int]]) -> list[Any]:
    """Divides steps into islands and the rest, in their order.

    Args:
        steps: the steps of a plan.
        states: the states of its values.
        read_outside: the outputs of the plan, and their slots.
    """
    readers: dict[tuple[Any, int], list[int]] = {}
    for step in steps:
        for read in step.touched:
            readers.setdefault(read, []).append(id(step))
    for read in read_outside:
        readers.setdefault(read, []).append(0)
    formed: list[Any] = []
    run: list[Any] = []
    made: set[Any] = set()

    def close() -> None:
        """Ends the run of steps."""
        tail: list[Any] = []
        while run and not _works(run[-1]):
            tail.insert(0, run.pop())
        island = _island(run, readers, states) if run else None
        formed.extend([island] if island is not None else run)
        formed.extend(tail)
        run.clear()
        made.clear()

    for step in steps:
        if _belongs(step):
            run.append(step)
            made.update(step.eqn.outvars)
        elif run and not _floats(step) and not step.eqn.effects and made.isdisjoint(_variables(step)):
            formed.append(step)  # a mask or an index, of no value in the run: it may go first
        else:
            close()
            formed.append(step)
    close()
    return formed


def _variables(step: Any) -> list[Any]:
    return [v for v in step.eqn.invars if not isinstance(v, versions.Literal)]


def _floats(step: Any) -> list[Any]:
    return [*filter(tracked, step.eqn.invars), *filter(tracked, step.eqn.outvars)]


def _belongs(step: Any) -> bool:
    if step.action == "skip":
        return True
    if step.action not in ("bind", "alias") or step.low or step.verdict.op is Op.OPAQUE or not cheap(step.eqn):
        return False
    if not _floats(step):
        return step.eqn.primitive.name in _BESIDE
    return all(slot in (FULL, RAW) for slot in step.reads) and all(s is None or s.slot == FULL for s in step.outs)


def _works(step: Any) -> bool:
    return step.action != "skip" and any(map(tracked, step.eqn.invars))


def _island(steps: Sequence[Any], readers: dict[Any, list[int]], states: dict[Any, State]) -> Island | None:
    inside = {id(step) for step in steps}
    made = {v for step in steps if step.action != "skip" for v in step.eqn.outvars}
    ins: dict[tuple[Any, int], None] = {}
    for step in steps:
        for v, slot in step.touched:
            if v not in made:
                ins[v, slot if slot == RAW else states[v].slot] = None
    outs = [
        (v, slot)
        for step in steps
        if step.action != "skip"
        for v in step.eqn.outvars
        for slot in ((FULL, LOW) if v in states and tracked(v) else (RAW,))
        if any(reader not in inside for reader in readers.get((v, slot), ()))
    ]
    saved = sum(stored_by(step.eqn) for step in steps if step.action == "bind")
    cost = sum(_bytes(v, slot) for v, slot in ins if slot == RAW or states[v].kind != INPUT)
    if saved <= cost or not outs:
        return None
    return Island(list(steps), tuple(ins), tuple(outs))


def _bytes(v: Any, slot: int) -> int:
    if not versions.is_shaped(v.aval):
        return 0
    return v.aval.size * (2 if slot == LOW else v.aval.dtype.itemsize)
