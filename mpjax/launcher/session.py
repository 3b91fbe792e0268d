"""The state of the launcher while the script runs: options, current trace, and what the script has done so far."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import mpjax
from mpjax.launcher.options import LaunchError, Options
from mpjax.program import compat, contexts
from mpjax.program.fates import Arrays
from mpjax.program.scopes import given
from mpjax.program.source import Callers, function_name

# One row per differentiated function of a compiled step. Further functions share the last row.
ROWS = 8
# The columns of a row. Counters are exact up to 2**24.
SCALE, GOOD, CALLS, RETRIES, NONFINITE, RERUNS = range(6)
COLUMNS = 6

HALF = ("float16", "bfloat16")

# Why gradients stay in float32. The report names them in place of the braces.
NOT_UPDATED = (
    "the gradients of {} do not go, whole and only, into an update that can skip a step: one of optax without a line "
    "search, or of jax.example_libraries.optimizers (--policy mixed_bfloat16 --any-gradient casts them all the same)"
)
OUTSIDE_JIT = "the gradients of {} ran outside of the script's own jax.jit and jax.pmap, or were traced for an export"
CHECKED = "the gradients of {} ran under disable_jit, debug_nans, debug_infs, checkify or a matmul precision of float32"
OF_LIBRARY = (
    "gradients that {} computed. If it trains by them, name it in the list `packages` of a --rules file, and if it "
    "does not update by optax, add --policy mixed_bfloat16 --any-gradient"
)
DIFFERENTIATED_AGAIN = "a library differentiates the gradients of {} again"
NOT_LINEAR = (
    "a loss scale would change {}, a derivative rule that is not linear in its cotangent, so the gradients there need "
    "--policy mixed_bfloat16"
)
SKIPPED = (
    "so far were inf or NaN at any loss scale, and their updates skipped: mpjax.find_nonfinite(loss, ...) shows the "
    "operation; if it overflows float16 alone, use --policy mixed_bfloat16 or --deny PATTERN"
)
_LISTS = ("MPJAX_ALLOWLIST_ADD", "MPJAX_DENYLIST_ADD", "MPJAX_INFERLIST_ADD")


@dataclasses.dataclass
class Gradient:
    """A call of a gradient function in a program that is being traced.

    Args:
        number: Its number in the program.
        name: The name of the differentiated function.
        line: The line of the script that differentiates.
        nested: The lines of gradients inside the function, which may be with respect to data, with their functions.
        parameters: What it is with respect to, as `Parameters` describes it.
        note: What to say about it.
        plan: Its plan for the `--explain` file.
    """

    number: int
    name: str
    line: str
    nested: dict[str, str] = dataclasses.field(default_factory=dict)
    parameters: Collection[Any] = ()
    note: str = ""
    plan: str = ""

    @property
    def places(self) -> dict[tuple[str, str], str]:
        """The lines and functions of this and nested gradients, with what to call them."""
        return {(self.line, self.name): self.name + self.note} | {place: place[1] for place in self.nested.items()}


@dataclasses.dataclass
class Frame:
    """A program that is being traced: one `jit` or `pmap` of the script.

    Args:
        name: Name of the function.
        in_float32: The numbers of gradients that stay in float32.
        guards: Whether its updates skip, even if no gradient of its own is in half.
        states: A mutable array with a row for each site, inside the trace; None if the program has no states.
        optimizes: Whether an optimizer took a step in it.
        unguarded: Whether one took a step that could not be skipped.
        evaluates: Whether it has matmuls and runs under autocast as a whole.
        numbers: Number of gradients so far, in half or not.
        gradients: Those in half.
        kept: The reasons for those that are not, each with lines and functions.
        sites: Number of differentiated functions.
    """

    name: str
    in_float32: Collection[int] = ()
    guards: bool = False
    states: Any = None
    optimizes: bool = False
    unguarded: bool = False
    evaluates: bool = False
    numbers: int = 0
    gradients: list[Gradient] = dataclasses.field(default_factory=list)
    kept: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    sites: int = 0

    @property
    def row(self) -> int:
        """The row of the next differentiated function in the states."""
        return min(self.sites, ROWS - 1)


@dataclasses.dataclass
class Scale:
    """The loss scale of a gradient that is being traced.

    Args:
        value: float32 of shape (); None in a gradient that stays in float32 with all that it contains.
        read: Whether a nested gradient was scaled by it.
        rule: The name of a derivative rule that it would change, and that a nested gradient has run.
        lines: The lines of nested gradients, with their functions.
    """

    value: Any
    read: bool = False
    rule: str = ""
    lines: dict[str, str] = dataclasses.field(default_factory=dict)


_FRAME: contextvars.ContextVar[Frame | None] = contextvars.ContextVar("frame", default=None)
# The loss scale of the gradient that is being traced. Nested gradients use it and are not retried separately.
_SCALE: contextvars.ContextVar[Scale | None] = contextvars.ContextVar("scale", default=None)

# Whether `checkify` is tracing a function.
CHECKIFIED: contextvars.ContextVar[bool] = contextvars.ContextVar("checkified", default=False)

_numbers = itertools.count(1)


def frame() -> Frame | None:
    """The program that is being traced; None outside."""
    return _FRAME.get()


def enclosing_scale() -> Scale | None:
    """The loss scale of the gradient that is being traced; None outside."""
    return _SCALE.get()


@contextlib.contextmanager
def tracing(new: Frame) -> Iterator[None]:
    """Makes `new` the program that is being traced."""
    with given(_FRAME, new), contexts.launcher_trace(next(_numbers)):
        yield


@contextlib.contextmanager
def differentiating(value: Any) -> Iterator[Scale]:
    """Marks the trace of a differentiated function."""
    scale = Scale(value)
    try:
        with given(_SCALE, scale), contexts.launcher_trace(next(_numbers)):
            yield scale
    finally:
        scale.value = None  # A tracer must not outlive its trace.


class Session:
    """The parsed options of this process and what the script has done so far.

    Args:
        options: See `Options`.

    Raises:
        LaunchError: The policy or a rule is invalid.
    """

    def __init__(self, options: Options):
        self.options = options
        self.callers = Callers(options.packages, __package__)
        try:
            self.policy = mpjax.get_policy(options.policy)
            overrides = tuple((pattern, mpjax.get_policy(other)) for pattern, other in options.overrides)
            self.policy = dataclasses.replace(self.policy, overrides=(*self.policy.overrides, *overrides))
            lists = {"allow": options.allow, "deny": options.deny, "infer": options.infer}
            filled_lists: dict[str, Any] = {name: tuple(entries) for name, entries in lists.items() if entries}
            if options.attention != "auto":
                filled_lists["attention"] = options.attention
            self._matched: set[Any] = set()
            self.rules: mpjax.Rules | None = None
            self._entries: tuple[Any, ...] = ()
            # For a faster start, autocast is imported at the first gradient unless there are lists to check.
            if filled_lists or self.policy.overrides or any(os.environ.get(name) for name in _LISTS):
                self._read_rules(filled_lists)
        except (ValueError, TypeError) as error:
            raise LaunchError(str(error)) from error
        policies = (self.policy, *(other for _, other in self.policy.overrides))
        dtypes = {np.dtype(policy.compute_dtype).name for policy in policies}
        self.active = not dtypes.isdisjoint(HALF)  # whether the launcher replaces the gradients of the script
        self.scales = "float16" in dtypes
        if options.any_gradient and self.scales:
            raise LaunchError(
                "--any-gradient: nothing would keep a non-finite float16 gradient out of parameters that the script "
                "updates by hand. Use --policy mixed_bfloat16, which needs no loss scale."
            )
        # Whether nonfinite forward passes run again in float32. bfloat16 has the range of float32 and needs no rerun.
        self.reruns = self.scales and not options.dry_run
        self.optimizers = 0  # those that the script has built
        self.any_gradient = options.any_gradient  # whether a gradient is cast wherever it goes
        self.handed = Arrays()  # gradients that programs have handed out, each as `(Compiled, its leaves)`
        self.updated = Arrays()  # parameters after an update
        self.hands = False  # whether a program has handed out gradients
        self.parameters = Parameters()
        # For each reason, the lines whose gradients stay in float32, with the functions.
        self.kept: dict[str, dict[tuple[str, str], str]] = collections.defaultdict(dict)
        self.differentiated = False  # whether the script called a gradient function, which may have failed
        self.sites: dict[tuple[str, str], str] = {}  # the gradients in half, by line and function
        self.explained: set[str] = set()  # the lines in the `--explain` file
        self.watchers: list[Callable[[Frame, Any], None]] = []  # each receives a traced program and its jaxpr
        self.counts: dict[str, Any] = {}  # the counts of programs whose loss scales are not kept
        self._counting = threading.Lock()
        self.warned: set[str] = set()  # the programs that skip most steps
        self.steps: list[Any] = []  # the clocks of compiled functions that differentiate and have run

    def _read_rules(self, filled_lists: dict[str, Any]) -> None:
        from mpjax.casting.policies import setting_of

        all_half = self.policy == mpjax.get_policy("O3")
        self.rules = _noting(self._matched)(**filled_lists, level="half" if all_half else "default")
        setting = setting_of(self.policy, self.rules)
        self._entries = setting.rules.entries if setting else ()

    @property
    def casts(self) -> bool:
        """Whether anything is cast now: not where each value is checked, also that of an attempt which is repeated."""
        config = jax.config
        checks = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs or CHECKIFIED.get()
        return self.active and not checks and config.jax_default_matmul_precision not in ("highest", "float32")

    def keep(self, reason: str, line: str, name: str) -> None:
        """Records that the gradients of a function stay in float32."""
        if (present := frame()) is not None:
            present.kept.append((reason, line, name))
        elif reason != NOT_UPDATED or (line, name) not in self.sites:
            self.kept[reason].setdefault((line, name), name)

    def gradient(self, fun: Any, line: str) -> Gradient | None:
        """A gradient that may run in half; None for one that stays in float32, which is recorded.

        Args:
            fun: The differentiated function.
            line: The line of the script that differentiates.
        """
        self.differentiated = True
        scale, present, name = enclosing_scale(), frame(), function_name(fun)
        if scale is not None:
            if scale.value is not None:
                scale.lines.setdefault(line, name)
            return None if scale.value is None else Gradient(-1, name, line)
        if present is None or not self.casts:
            # Outside of jit, each call would be traced and planned again, which costs more than half can save.
            self.keep(OUTSIDE_JIT if self.casts else CHECKED, line, name)
            return None
        number, present.numbers = present.numbers, present.numbers + 1
        if number in present.in_float32:
            self.keep(NOT_UPDATED, line, name)
        elif compat.is_differentiating():
            # An overflow of the second derivative could not be seen, and no loss scale protects it.
            self.keep(DIFFERENTIATED_AGAIN, line, name)
        else:
            return Gradient(number, name, line)
        return None

    def record(self, program: Frame) -> None:
        """Records the gradients of a program that runs."""
        for kept in program.kept:
            self.keep(*kept)
        for gradient in program.gradients:
            for place, name in gradient.places.items():
                self.sites.setdefault(place, name)
                # Those that a program hands out are in half from the second call on.
                self.kept.get(NOT_UPDATED, {}).pop(place, None)
            self.parameters.update(gradient.parameters)
            path = self.options.explain
            if gradient.plan and gradient.line not in self.explained:
                with open(path, "a" if self.explained else "w") as file:
                    file.write(f"{gradient.name}, differentiated at {gradient.line}\n\n{gradient.plan}\n\n")
                self.explained.add(gradient.line)

    def counter(self, name: str) -> Callable[[Any], None]:
        """A function that counts gradients of a program whose loss scales are not kept, as under `pmap`."""
        total = self.counts.setdefault(name, np.zeros(COLUMNS - CALLS))

        def count(counts: Any) -> None:
            with self._counting:  # each device calls on a thread of its own
                total[:] += counts
                self.warn_of_skips(name, total)

        return count

    def warn_of_skips(self, name: str, counts: Any) -> None:
        """Says once, while the script runs, that most steps are skipped: it trains nothing."""
        calls, skipped = int(counts[0]), int(counts[NONFINITE - CALLS])
        if calls >= 4 and skipped > calls / 2 and name not in self.warned:
            self.warned.add(name)
            print(f"mpjax run: {name}: {skipped} of {calls} gradients {SKIPPED}", file=sys.stderr, flush=True)

    def receive(self, grads: Iterable[Any]) -> None:
        """Notes that an update receives these arrays, some of which may be gradients that a program handed out."""
        for x in grads if self.handed else ():
            if (handed := self.handed.get(x)) is not None:
                handed[0].received |= handed[1]

    @property
    def setting(self) -> Any:
        """What autocast plans a program by; None if everything stays in float32."""
        from mpjax.casting.policies import is_enabled, setting_of

        return setting_of(self.policy, self.rules) if is_enabled() else None

    @property
    def unused(self) -> list[str]:
        """The rules that have matched no operation so far, and the packages that have taken no gradient."""
        found = [f"{op.value} {entry!r}" for entry, op in self._entries if entry not in self._matched]
        return found + [f"packages {name!r}" for name in sorted(self.callers.packages - self.callers.seen)]

    def initial_states(self) -> Any:
        """The initial state rows of a compiled step."""
        rows = np.zeros((ROWS, COLUMNS), np.float32)
        rows[:, SCALE] = self.options.init_scale if self.scales else 1.0
        return jax.device_put(rows)


def _noting(matched: set[Any]) -> type[mpjax.Rules]:
    """Makes a `Rules` class that records which of its entries decided an operation."""

    class NotingRules(mpjax.Rules):
        def match(self, eqn: Any, paths: Sequence[str]) -> Any:
            found = super().match(eqn, paths)
            if found is not None:
                matched.add(found[0])
            return found

    return NotingRules


# Recognises the training's parameters among the arguments of a program.


class Parameters(set[Any]):
    """The parameters that the script trains: names in their tree, shapes and dtypes.

    An argument with the same is a parameter itself, an average of them, or one of a target network. NNX and Equinox
    pass their modules as flat lists, so their parameters are recognised by shape and dtype alone.
    """

    @staticmethod
    def described(tree: Any) -> set[Any]:
        """A tree without its arrays. A single array has no name to be known by."""
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        of_modules = any(isinstance(key, jax.tree_util.GetAttrKey) for path, _ in leaves for key in path)
        arrays = [(path, x) for path, x in leaves if path and hasattr(x, "dtype")]
        return {_described(() if of_modules else path, x) for path, x in arrays}

    def among(self, leaves: Sequence[tuple[Any, Any]]) -> set[int]:
        """The indices of parameters among the arrays of a program's arguments, given with their tree paths."""
        pairs = enumerate(leaves)
        return {i for i, (path, x) in pairs if not self.isdisjoint((_described(path, x), _described((), x)))}


def _described(path: Sequence[Any], x: Any) -> Any:
    return jax.tree_util.keystr(tuple(path[-1:]), simple=True), tuple(np.shape(x)), x.dtype
