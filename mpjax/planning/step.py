"""A step as it is compiled under changes: traced for a device that may not be present, and never run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np

from mpjax.casting.autocast import autocast
from mpjax.casting.setting import Trial
from mpjax.inspection.auditing.audit import gradient_of
from mpjax.inspection.auditing.matmuls import Matmul, matmuls_of
from mpjax.launcher.patches import autocast_gradients
from mpjax.planning import kernel_time
from mpjax.planning.arguments import INPUTS, Traced, carried_by, kinds_of
from mpjax.planning.target import TARGETS, Target, traced_for
from mpjax.planning.traffic import HOST, LAUNCH, bytes_moved, program_bytes, summary
from mpjax.planning.wrapped import low_bits, masters, with_low_bit_state, with_master_weights
from mpjax.policy import HALF_DTYPES
from mpjax.program import compat, contexts
from mpjax.program.graph import walk
from mpjax.program.objects import is_stateful
from mpjax.program.owners import owners_of
from mpjax.program.source import FORWARD
from mpjax.program.tracing import is_array, trace, traced_call

# The arguments that carry the batch, by position or keyword; None for every input.
BatchArgs = int | str | Sequence[int | str] | None


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a step.

    Args:
        axis: What it changes; a step has one change of an axis at most.
        value: To what; of an edit, its name if the axis has several.
        edit: What it takes in the code, in a sentence; empty for an option of `Rules`.
        price: What it counts in the choice, in shares of the step's time.
    """

    axis: str
    value: str = ""
    edit: str = ""
    price: float = 0.01

    @property
    def name(self) -> str:
        """The change as it is written."""
        return self.value or self.axis if self.edit else f'{self.axis}="{self.value}"'


CAST = Change("autocast", edit="differentiate mpjax.autocast(loss_fn, {policy!r}{rules})", price=0.0)
WHOLE = "run mpjax.autocast(step, {policy!r}{rules}): its calls of JAX's gradients are out of reach"
CHECKPOINT = Change("checkpoint", edit="make the body of the scan over layers a jax.checkpoint", price=0.03)
OFFLOAD = Change(
    "checkpoint",
    "offload",
    edit="make the body of the scan over layers a jax.checkpoint that keeps its carry in host memory: name the carry "
    "at its start, x = jax.ad_checkpoint.checkpoint_name(x, 'x'), and give the checkpoint "
    "policy=jax.checkpoint_policies.save_and_offload_only_these_names(names_which_can_be_saved=[], "
    "names_which_can_be_offloaded=['x'], offload_src='device', offload_dst='pinned_host')",
    price=0.2,
)
DONATE = Change("donate", edit="compile the step with donate_argnums=({argnums})", price=0.005)
MASTER = Change(
    "master_weights",
    edit="store the parameters in {half}, mpjax.get_policy('p={half}').cast_to_param(params), wrap the optimizer, "
    "mpjax.master_weights(tx, 'p={half}'), and differentiate at a float32 copy of the parameters",
    price=0.03,
)
LOW_BIT = Change("low_bit_state", edit="wrap the optimizer: mpjax.low_bit_state(tx)", price=0.1)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step is compiled for.

    Args:
        name: The device's name.
        target: The described device; None for the local one.
        memory: Its memory in bytes, if it is known.
        devices: The devices of one program; empty for the local default device.
        mesh: Their mesh, if there are several.
    """

    name: str
    target: Target | None = None
    memory: int | None = None
    devices: tuple[Any, ...] = ()
    mesh: jax.sharding.Mesh | None = None

    @classmethod
    def of(cls, target: str | Target | None, mesh: Mapping[str, int] | None) -> Place:
        """The place of `plan`'s arguments.

        Raises:
            ValueError: The target or the mesh is unknown.
            RuntimeError: The compiler for the target is not installed.
        """
        if isinstance(target, str) and target.lower() not in TARGETS:
            raise ValueError(
                f"plan(target={target!r}): there are {', '.join(TARGETS)}; describe another GPU by its numbers with a "
                "mpjax.planning.target.Target, or leave it out for this machine's own device."
            )
        if mesh is not None and not (isinstance(mesh, Mapping) and all(n > 0 for n in mesh.values())):
            raise ValueError(f'plan(mesh={mesh!r}): give the size of each axis, such as {{"data": 8}}.')
        count = int(np.prod([*mesh.values()])) if mesh else 1
        known = TARGETS[target.lower()] if isinstance(target, str) else target
        if known is None:
            here = jax.devices()
            if count > len(here):
                raise ValueError(f"plan(mesh={mesh!r}): {count} devices, and here are {len(here)}; give a target.")
            memory = (here[0].memory_stats() or {}).get("bytes_limit")
            devices, name = tuple(here[:count]), here[0].device_kind
        else:
            found = known.devices(count)
            if found is None:
                raise RuntimeError(f"plan(target={known.key!r}): {known.missing}.")
            memory, devices, name = known.memory_bytes, tuple(found), known.name
        if mesh is None:
            return cls(name, known, memory, devices if known else ())
        axes = (jax.sharding.AxisType.Auto,) * len(mesh)
        whole = jax.sharding.Mesh(np.array(devices).reshape(*mesh.values()), tuple(mesh), axis_types=axes)
        return cls(name, known, memory, devices, whole)

    @property
    def platform(self) -> str:
        """The platform to lower for."""
        return self.target.platform if self.target else jax.default_backend()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The context to trace in."""
        if self.mesh is not None:
            return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)
        return traced_for(self.devices[0]) if self.devices else contextlib.nullcontext()

    def placed(self, x: Any) -> jax.ShapeDtypeStruct:
        """The shape of an array, on these devices."""
        sharding = getattr(x, "sharding", None)
        if self.mesh is not None:
            spec = getattr(sharding, "spec", jax.sharding.PartitionSpec())
            sharding = jax.sharding.NamedSharding(self.mesh, spec)
        elif self.devices:
            sharding = jax.sharding.SingleDeviceSharding(self.devices[0])
        return jax.ShapeDtypeStruct(x.shape, jax.typeof(x).dtype, sharding=sharding)


@dataclasses.dataclass
class Compiled:
    """A compiled step.

    Args:
        peak: XLA's plan of its memory on each device: arguments, results and temporaries, in bytes.
        least: The least time of its kernels at the device's peak rates, in seconds; None if these are not known.
        modelled: The time of its kernels by `kernel_time`; None without a model.
        moved: The bytes that its kernels read and write.
        host: The bytes that it keeps in the host's memory.
        text: Its optimised HLO.
        traced: What was compiled.
        program: A hash of the program that XLA was given.
    """

    peak: int
    least: float | None
    modelled: float | None
    moved: int
    host: int
    text: str
    traced: Traced
    program: str

    @property
    def work(self) -> float:
        """What the choice compares: the time of its kernels, else the least, else the bytes that they move."""
        return next((x for x in (self.modelled, self.least) if x is not None), float(self.moved))


class Step:
    """A user's step and the device that it is compiled for.

    Args:
        fun, args, kwargs: The call; shapes will do.
        place: Where it is compiled for.
        policy: The policy of autocast, for a program without mpjax.
    """

    def __init__(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, policy: Any
    ):
        self.fun, self.place, self.policy = fun, place, policy
        self.args, self.kwargs = jax.tree.map(lambda x: place.placed(x) if is_array(x) else x, (args, kwargs))
        self.compiled: dict[str, Compiled] = {}
        self._known: dict[frozenset[Change], Traced] = {}

    def traced(self, changes: Sequence[Change] = ()) -> Traced:
        """The step under changes."""
        if (key := frozenset(changes)) not in self._known:
            self._known[key] = self._under(changes)
        return self._known[key]

    def edits(self, start: Sequence[Change]) -> Iterator[Change]:
        """The edits of the code that may have an effect, besides those of `start`."""
        traced = self.traced(start)
        if traced.trial.autocasts and self.traced((*start, CHECKPOINT)).trial.scans:
            yield CHECKPOINT
            yield OFFLOAD
        if traced.carried and not traced.donated:
            yield DONATE
        if masters(traced) and self.policy.compute_dtype in HALF_DTYPES:
            yield MASTER
        if low_bits(traced):
            yield LOW_BIT

    def _under(self, changes: Sequence[Change]) -> Traced:
        axes = {change.axis: change for change in changes}
        rules = {change.axis: change.value for change in changes if not change.edit}
        trial = Trial(rules, checkpoint=CHECKPOINT.axis in axes, offload=OFFLOAD in changes)
        with contexts.trial(trial), self.place.context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The user's own run warns.
            found = self._traced(trial, CAST in changes)
            if DONATE.axis in axes:
                found.donated = tuple(found.carried)
            found = with_master_weights(found, self.policy.compute_dtype) if MASTER in changes else found
            return with_low_bit_state(found) if LOW_BIT in changes else found

    def _traced(self, trial: Trial, cast: bool) -> Traced:
        fun, args, kwargs = self.fun, self.args, self.kwargs
        if cast:
            with autocast_gradients(self.policy):
                program = traced_call(fun, args, kwargs)
        if whole := cast and not trial.autocasts:  # a loss, or JAX's functions imported by name
            fun = autocast(fun, self.policy)
        if not cast or whole:
            program = traced_call(fun, args, kwargs)
        differentiates = any(site.phase != FORWARD for site in walk(program.jaxpr))
        carried = carried_by(program, args, kwargs) if differentiates else {}
        first = next(iter(compat.open_jaxpr(program.jaxpr).jaxpr.outvars), None)
        is_scalar = first is not None and first.aval.shape == () and compat.is_inexact(first.aval)
        gradient = gradient_of(program) if is_scalar and not differentiates else None
        if gradient is not None:
            with contexts.scaled_losses(()):  # the user did not differentiate it
                program = dataclasses.replace(trace(gradient, tuple(program.arrays), {}, None), names=program.names)
        kinds = kinds_of(program, carried)
        return Traced(program, kinds, carried, self._donated, trial, gradient is not None, whole)

    @functools.cached_property
    def _donated(self) -> tuple[int, ...]:
        """The arguments that the step's own `jax.jit` donates."""
        if not isinstance(self.fun, jax.stages.Wrapped) or not hasattr(self.fun, "trace"):
            return ()
        traced = self.fun.trace(*self.args, **self.kwargs)
        infos = jax.tree.leaves(getattr(traced, "args_info", ()), is_leaf=lambda x: hasattr(x, "donated"))
        same = len(infos) == len([x for x in jax.tree.leaves((self.args, self.kwargs)) if is_array(x)])
        return tuple(i for i, info in enumerate(infos) if same and info.donated)

    def compile(self, changes: Sequence[Change] = ()) -> Compiled:
        """Compiles the step under changes; a program that was compiled before is not compiled again.

        Raises:
            NotImplementedError: XLA makes no copies to host memory for this device, and the changes ask for them.
        """
        if OFFLOAD in changes and self.place.platform == "cpu":
            raise NotImplementedError("the memory of a CPU is the host's")
        traced = self.traced(changes)
        if changes:
            self._known.pop(frozenset(changes))  # A jaxpr of each combination would be too many.
        shapes = [self.place.placed(x) for x in traced.program.arrays]
        call: Any = jax.extend.core.jaxpr_as_fun(traced.program.jaxpr)
        with self.place.context():
            jitted = jax.jit(call, donate_argnums=traced.donated, keep_unused=True)
            lowered = jitted.trace(*shapes).lower(lowering_platforms=(self.place.platform,))
        name = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        if name not in self.compiled:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = lowered.compile()
            text = found.as_text() or ""
            if OFFLOAD in changes and HOST not in text:
                raise NotImplementedError(f"XLA makes no copies to host memory for {self.place.name}")
            moved, least = self._least(text)
            seconds = self._modelled(text, found)
            host = getattr(found.memory_analysis(), "host_temp_size_in_bytes", 0)
            self.compiled[name] = Compiled(program_bytes(found), least, seconds, moved, host, text, traced, name)
        return dataclasses.replace(self.compiled[name], traced=traced)

    def _least(self, text: str) -> tuple[int, float | None]:
        """The bytes that the kernels move, and their least time."""
        rates = self.place.target.rates if self.place.target else None
        if rates is None:
            return bytes_moved(text), None
        row = summary(text, rates, 0.0 if rates.is_tpu else LAUNCH)
        return row["bytes_moved"], row["least_seconds"]

    def _modelled(self, text: str, compiled: jax.stages.Compiled) -> float | None:
        target, executable = self.place.target, compiled.runtime_executable()
        if target is None or executable is None or kernel_time.unavailable(target):
            return None
        rows = kernel_time.timed(text, executable.serialize(), target)
        return kernel_time.seconds_of(rows) if rows else None

    def batched(self, axis: int, args: BatchArgs) -> list[tuple[str, Any]]:
        """The name and the shape of each array that carries the batch.

        Args:
            axis: The batch's axis.
            args: The arguments that carry it, by position or keyword; None for every input of the step.
        """
        return [(name, x) for name, x, carries in self._leaves(axis, args) if carries]

    def with_batch(self, axis: int, args: BatchArgs, size: int) -> Step:
        """The step with another batch: another size of that axis of the arrays that carry it."""
        leaves = [
            x.update(shape=(*x.shape[:axis], size, *x.shape[axis + 1 :])) if carries else x
            for _, x, carries in self._leaves(axis, args)
        ]
        tree = jax.tree.structure((self.args, self.kwargs), is_leaf=is_stateful)
        given, kwargs = jax.tree.unflatten(tree, leaves)
        return Step(self.fun, given, kwargs, self.place, self.policy)

    def _leaves(self, axis: int, args: BatchArgs) -> Iterator[tuple[str, Any, bool]]:
        """The name and the value of each leaf of the call, and whether it carries the batch."""
        leaves = jax.tree_util.tree_leaves_with_path((self.args, self.kwargs), is_leaf=is_stateful)
        kinds = self.traced().kinds
        count = sum(is_array(x) for _, x in leaves)
        inputs = iter(kind == INPUTS for kind in kinds[len(kinds) - count :])  # the state of NNX objects comes first
        named = None if args is None else {*([args] if isinstance(args, (int, str)) else args)}
        for (kind, *path), x in leaves:
            place = getattr(path[0], "idx", getattr(path[0], "key", None))
            is_input = is_array(x) and next(inputs)
            carries = is_array(x) and (is_input if named is None else place in named) and x.ndim > axis >= 0
            name = ("args" if kind.idx == 0 else "kwargs") + jax.tree_util.keystr(tuple(path))
            yield name, x, carries

    def matmuls(self, traced: Traced) -> tuple[Matmul, ...]:
        """The matmuls of a traced step."""
        jaxpr = traced.program.jaxpr
        return matmuls_of(list(walk(jaxpr, owners=owners_of(jaxpr, traced.program.names))))
