"""`search`: which modules must stay in float32 for a loss function in half to meet an error budget."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.casting import Float8, Rules, autocast_disabled
from mpjax.casting.autocast import Autocast, autocast_of
from mpjax.inspection.layer_errors import errors_by_module
from mpjax.inspection.reports import Report, Section, folded, percent, totals
from mpjax.inspection.trials import Loss, Trial, relative_error, scale_state
from mpjax.policy import HALF_DTYPES, get_policy, path_matches
from mpjax.program.formats import format_of
from mpjax.program.graph import not_entered


@dataclasses.dataclass(frozen=True)
class SearchedModule:
    """One module of the search.

    Args:
        name: The module path.
        float32: Whether it stays in float32.
        error: Its own error in half, as in `layerwise_error`; None if it was not measured.
        flops_share: Its share of the FLOPs of matmuls and convolutions, forward and backward.
    """

    name: str
    float32: bool
    error: float | None
    flops_share: float


@dataclasses.dataclass(frozen=True)
class SearchReport(Report):
    """The result of a precision search; `print` it, and paste its `rules`.

    Args:
        function: The name of the loss function.
        policy: The policy of the search.
        budget: The largest allowed error.
        error_before: The error under the policy, with every module in half.
        error: The error with `keep_float32`, measured in a rerun with `rules`.
        keep_float32: The paths of the modules that stay in float32, most sensitive first.
        patterns: The same modules as patterns for `Rules` and `Policy(overrides=...)`.
        rules: The rules to pass to `autocast`.
        half_share: The share of the FLOPs of matmuls and convolutions that run in half with these rules.
        modules: All modules, those in float32 first, then by their own error.
        minimal: Whether each of these modules is needed: with any one of them in half, the error is above the budget.
        passes: The number of times the gradient was run.
        kept_dtype: `"float32"`, or under a policy with float8 matmuls the compute dtype, in which the kept modules run.
        unseen: Operations whose internals are not visible, so that no rule applies to them, and why.
        reference_is_finite: Whether the gradients are finite in float32.
    """

    function: str
    policy: str
    budget: float
    error_before: float
    error: float
    keep_float32: tuple[str, ...]
    patterns: tuple[str, ...]
    rules: Rules = dataclasses.field(repr=False)
    half_share: float
    modules: tuple[SearchedModule, ...]
    passes: int
    minimal: bool = True
    kept_dtype: str = "float32"
    unseen: tuple[str, ...] = ()
    reference_is_finite: bool = True

    main = "modules"
    derived = "met overrides"

    @property
    def met(self) -> bool:
        """Whether the error is within the budget."""
        return self.error <= self.budget

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """The same modules as pairs for `Policy(overrides=...)`."""
        policy = "float32" if self._low == "half" else f"mixed_{self.kept_dtype}"
        return tuple((pattern, policy) for pattern in self.patterns)

    @property
    def _low(self) -> str:
        """The precision of the other modules."""
        scaled = format_of(get_policy(self.policy).matmul_dtype)
        return "half" if scaled is None else scaled.name

    @property
    def title(self) -> str:
        """The page's title."""
        return f"Precision search of {self.function}"

    def failure(self) -> str:
        """The failure message if the error is above the budget, else an empty string."""
        return "" if self.met else f"the error {_share(self.error)} is above the budget {_share(self.budget)}"

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        rows = [
            (row.name, self.kept_dtype if row.float32 else self._low, _share(row.error), f"{row.flops_share:.1%}")
            for row in self.modules
        ]
        lines = [*self._finding(), *(f"not inspected: {place}" for place in self.unseen)]
        return [Section("", "\n".join(lines)), Section("By module", "", "module|runs in|>own error|>FLOPs", rows)]

    def _finding(self) -> list[str]:
        before, after, budget = _share(self.error_before), _share(self.error), _share(self.budget)
        if not self.reference_is_finite:
            return [
                f"the gradients of {self.function} are not finite in float32 either: mpjax.find_nonfinite shows where"
            ]
        if not self.met:
            return [
                f"{self.function} does not meet the budget {budget}: error {before} in {self._low}, {after} with "
                f"every module that has a name in {self.kept_dtype}",
                "the remaining error arises outside named modules: put that code in mpjax.float_function, or name it "
                "with jax.named_scope; mpjax.layerwise_error shows the lines",
            ]
        if not self.keep_float32:
            return [f"{self.function} meets the budget {budget} with every module in {self._low}: error {after}"]
        count = len(self.keep_float32)
        shown = ", ".join(f'"{pattern}"' for pattern in self.patterns)
        denied = f"deny=[{shown}]" if self._low == "half" else f"float8=mpjax.Float8(deny=[{shown}])"
        return [
            f"{count} module{'s' if count > 1 else ''} must stay in {self.kept_dtype}: {', '.join(self.keep_float32)}",
            f"error {before} in {self._low}, {after} with these in {self.kept_dtype} (budget {budget}); "
            f"{self.half_share:.1%} of the FLOPs stay in half",
            f"mpjax.autocast(fun, {self.policy!r}, rules=mpjax.Rules({denied}))",
            f"{self.passes} passes over {len(self.modules)} module{'s' if len(self.modules) > 1 else ''}: "
            + (f"with any one of these in {self._low}, the error is above the budget" if self.minimal else _STOPPED),
        ]


_STOPPED = "stopped at the limit of passes, fewer modules in float32 may suffice"


def _share(error: float | None) -> str:
    if error is None:
        return "-"
    return percent(error) if error else "0.00%"


# The start of `dynamic_loss_scale`, and here the factor of each backoff and the smallest scale.
_FIRST_SCALE, _BACKOFF, _LAST_SCALE = 2.0**15, 2.0**5, 1.0
_MOST_PASSES = 13  # each traces and runs the gradient once: about half of the time of compiling it


def search(
    fun: Callable[..., Any],
    *args: Any,
    budget: float = 0.01,
    policy: Any = "mixed_float16",
    loss_scale: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> SearchReport:
    """Finds the modules that must stay in float32 for the error of half precision to meet a budget.

    Under a policy with float8 matmuls, the modules whose matmuls must stay in the compute dtype, bfloat16.

        rank the modules by their own error in half           (`layerwise_error`, one pass)
        keep the fewest top-ranked modules to meet the budget (bisection)
        return modules to half while the budget is met        (several together, then one by one)

    Repeated layers are kept or returned together at first, then one by one. A pass runs the gradient on the given batch
    under the rules that it tries, operation by operation, and rounds each result that half stores: each error was
    measured. A search takes thirteen passes at most. If it ends before that, each module in float32 is needed.

    Args:
        fun: The loss function in float32. If it is an `autocast` function (`jax.jit` of one included), the search
            starts from its policy and rules.
        args: Its arguments: arrays and trees of arrays.
        budget: The largest allowed error of all gradients together, ‖half − float32‖ / ‖float32‖.
        policy: The policy under which autocast runs `fun`, unless `fun` is an `autocast` function.
        loss_scale: The loss scale. None for one that starts at 2¹⁵ and backs off until the gradients are finite, as
            `dynamic_loss_scale` does (bfloat16: 1).
        argnums: Positions of the arguments to differentiate.
        has_aux: Whether `fun` returns `(loss, aux)`.
        kwargs: Keyword arguments of `fun`.

    Returns:
        A `SearchReport`. `print` it for the `Rules` to paste, or read its `rules` and `overrides`.

    Raises:
        ValueError: The policy computes in float32, or the budget is negative.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     with jax.named_scope("hot"):
        ...         y = (300 * x) @ (300 * w[0]) / 1e4  # the product leaves float16's range
        ...     with jax.named_scope("mild"):
        ...         return jnp.mean((y @ w[1]) ** 2)
        >>> found = mpjax.search(loss, jnp.full((2, 4, 4), 0.5), jnp.ones((2, 4)), budget=0.01)
        >>> found.keep_float32, found.rules.deny
        (('hot',), ('*/hot',))

    Source: the sensitivity search of NVIDIA ModelOpt's AutoQuantize (`mtq.auto_quantize`).
    """
    if not budget >= 0:
        raise ValueError(f"search: budget={budget!r}: give the largest error that is allowed, 0.01 for one percent.")
    cast = autocast_of(fun) or Autocast(fun, fun, policy, None)
    policy, half = cast.policy, get_policy(cast.policy)
    if half.compute_dtype not in HALF_DTYPES:
        raise ValueError(f"search: the policy {policy!r} computes in {half.compute_dtype}; give one that is half.")
    loss = Loss(cast.fun, argnums, has_aux, kwargs)
    passes = _Passes(loss, half, cast.rules or Rules(), args, loss_scale)
    return _searched(passes, budget, str(policy), getattr(fun, "__name__", type(fun).__name__))


def _searched(passes: _Passes, budget: float, policy: str, name: str) -> SearchReport:
    before = passes.error(())
    flops = passes.flops()
    ranked: Mapping[str, float | None] = dict.fromkeys(flops)
    kept: tuple[str, ...] = ()
    needed = True
    finite = all(np.isfinite(np.asarray(x)).all() for x in passes.expected)
    if finite and not before <= budget:
        ranked = passes.ranked()
        kept, needed = _smallest(passes, [*ranked], budget)
    total = sum(flops.values()) or 1
    rows = [
        SearchedModule(module, is_covered(module, kept), error, flops.get(module, 0) / total)
        for module, error in ranked.items()
    ]
    return SearchReport(
        function=name,
        policy=policy,
        budget=budget,
        error_before=before,
        error=passes.error(kept),
        keep_float32=kept,
        patterns=passes.patterns(kept),
        rules=passes.rules(kept),
        half_share=passes.half_share(kept),
        modules=tuple(sorted(rows, key=lambda row: (not row.float32, -(row.error or 0.0)))),
        minimal=needed and not passes.ended,
        kept_dtype="float32" if passes.policy.matmul_dtype is None else str(passes.policy.compute_dtype),
        passes=passes.count,
        unseen=passes.unseen,
        reference_is_finite=finite,
    )


Modules = tuple[str, ...]


def _smallest(passes: _Passes, ranked: Sequence[str], budget: float) -> tuple[Modules, bool]:
    """Modules that meet the budget in float32, and whether each of them is needed; all modules if none do.

    Repeated layers are one group at first. Then groups that are needed are searched in the same way.
    """
    names = folded(ranked)
    groups: dict[str, Modules] = {}
    for module in ranked:
        groups[names[module]] = (*groups.get(names[module], ()), module)
    kept = _needed(passes, [*groups.values()], (), budget)
    for group in reversed(kept):  # the least sensitive first
        if len(group) > 1:
            rest = [other for other in kept if other != group]
            kept = [*rest, *_needed(passes, [(module,) for module in group], sum(rest, ()), budget)]
    found = tuple(module for module in ranked if any(module in group for group in kept))
    return found, all(passes.error([m for m in found if m != module]) > budget for module in found)


def _needed(passes: _Passes, groups: Sequence[Modules], fixed: Modules, budget: float) -> list[Modules]:
    """The groups, ranked by their errors, that meet the budget in float32 beside the modules that are fixed there.

    Where the passes end, an error that was not measured counts as above the budget, and groups are kept.
    """

    def meets(chosen: Sequence[Modules]) -> bool:
        return passes.error([*fixed, *sum(chosen, ())]) <= budget

    low, high = 0, len(groups)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(groups[:middle]) else (middle, high)
    kept = list(groups[:high])
    if not meets(kept):
        return list(groups)

    def thin_out(candidates: Sequence[Modules], needed: bool) -> None:
        """Returns candidates to half; `needed` means that not all of them can return."""
        rest = [group for group in kept if group not in candidates]
        if candidates and not needed and meets(rest):
            kept[:] = rest
        elif len(candidates) > 1:
            first, second = candidates[: len(candidates) // 2], candidates[len(candidates) // 2 :]
            thin_out(second, False)  # less sensitive, so it can return more often
            thin_out(first, all(group not in kept for group in second))

    thin_out(tuple(kept), True)
    for group in reversed(tuple(kept)):  # Another group may have become unnecessary since it was tried.
        if meets(rest := [other for other in kept if other != group]):
            kept = rest
    return kept


def is_covered(module: str, kept: Iterable[str]) -> bool:
    """Whether a module is one of those that are kept, or inside of one."""
    return any(f"{module}/".startswith(f"{path}/") for path in kept)


class _Passes:
    """Runs the gradient with some modules in float32, and counts the runs."""

    def __init__(self, loss: Loss, policy: Any, rules: Rules, args: tuple[Any, ...], loss_scale: float | None):
        self.loss, self.policy, self.args = loss, policy, args
        self.count = 0
        self._rules = rules
        self._errors, self._shares = dict[frozenset[str], float](), dict[frozenset[str], float]()
        self.paths: tuple[str, ...] = ()
        start = 1.0 if policy.compute_dtype == jnp.bfloat16 else _FIRST_SCALE
        self._scales = [loss_scale] if loss_scale is not None else _backing_off(start)
        self._scale = self._scales[0]
        with jax.default_matmul_precision("highest"), autocast_disabled():  # TF32 is too coarse for a reference
            self.expected = self._run(Trial("search", loss.with_named_modules(), args))
        self._half = self._trial(())
        self.sites, self.unseen = self._half.sites, not_entered(self._half.sites, evaluated=True)
        self.paths = tuple(dict.fromkeys(site.path for site in self.sites if site.path))

    def rules(self, kept: Iterable[str]) -> Rules:
        """The rules that keep some modules in float32, or their matmuls out of float8."""
        patterns = self.patterns(kept)
        if patterns and self.policy.matmul_dtype is not None:
            float8 = self._rules.float8 or Float8()
            return dataclasses.replace(self._rules, float8=dataclasses.replace(float8, deny=(*float8.deny, *patterns)))
        return self._rules.add(deny=patterns) if patterns else self._rules

    def patterns(self, kept: Iterable[str]) -> tuple[str, ...]:
        """Patterns that match these modules and no others."""
        return tuple(self._pattern(path) for path in kept)

    def _pattern(self, path: str) -> str:
        escaped = path.replace("[", "[[]")
        others = (other for other in self.paths if not is_covered(other, [path]))
        return f"/{escaped}" if any(path_matches(other, f"*/{escaped}") for other in others) else f"*/{escaped}"

    def error(self, kept: Sequence[str]) -> float:
        """The error under the rules that keep some modules in float32; inf if the passes have ended."""
        key = frozenset(kept)
        if key not in self._errors:
            if self.ended:
                return math.inf
            trial = self._trial([*dict.fromkeys(kept)]) if key else self._half
            self._errors[key], self._shares[key] = self._error(trial), trial.half_share
        return self._errors[key]

    @property
    def ended(self) -> bool:
        """Whether as many passes were run as a search may take."""
        return self.count >= _MOST_PASSES

    def half_share(self, kept: Iterable[str]) -> float:
        """The share of the FLOPs in half under the rules of a pass that was run."""
        return self._shares[frozenset(kept)]

    def _trial(self, kept: Sequence[str]) -> Trial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about operations left in float32, as intended here
            return Trial("search", self.loss.under(self.policy, self.rules(kept)).with_named_modules(), self.args)

    def _error(self, trial: Trial) -> float:
        return relative_error(self._run(trial), self.expected)

    def ranked(self) -> dict[str, float]:
        """The modules with operations in half and their own errors, largest first; takes one pass."""
        self.count += 1
        scale = self._scale if self._scale > _LAST_SCALE else self._scales[len(self._scales) // 2]
        half = self.loss.under(self.policy, self._rules)
        rows = errors_by_module("search", half, self.args, scale_state(scale))
        errors: dict[str, float] = {}
        for row in rows:
            if row.path and row.dtypes:
                errors[row.path] = max(row.error, errors.get(row.path, 0.0))
        # A rule on a module also applies to its submodules: parents come after their children, the outermost last. A
        # module that is not finite by itself comes before all others.
        held = {path: sum(other != path for other in errors if is_covered(other, [path])) for path in errors}
        order = sorted(errors, key=lambda path: (math.isfinite(errors[path]), held[path], -errors[path]))
        return {path: errors[path] for path in order}

    def flops(self) -> dict[str, int]:
        """FLOPs by module, forward and backward."""
        return totals((site.path, site.flops) for site in self.sites if site.path)

    def _run(self, trial: Trial) -> list[Any]:
        """The gradients at the first loss scale at which they are finite."""
        self.count += 1
        for scale in self._scales:
            grads = trial.run(scale)
            if all(np.isfinite(x).all() for x in grads):
                break
        self._scale = float(scale)
        return grads


def _backing_off(scale: float) -> list[float]:
    scales = [scale]
    while scales[-1] > _LAST_SCALE:
        scales.append(max(scales[-1] / _BACKOFF, _LAST_SCALE))
    return scales
