"""`search`: which rules a loss function in half needs to meet an error budget."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.casting import Float8, Rules, autocast_disabled
from mpjax.casting.autocast import Autocast, autocast_of
from mpjax.casting.rules import is_line
from mpjax.inspection.reports import Report, Section, percent, scale_text, totals
from mpjax.inspection.trials import Loss, Trial, relative_error, rounding_scores
from mpjax.policy import HALF_DTYPES, get_policy, path_matches
from mpjax.program.formats import format_of
from mpjax.program.graph import Site, not_entered
from mpjax.program.primitives import Op, primitive


@dataclasses.dataclass(frozen=True)
class SearchedModule:
    """One module of the search, or one line of code in no module.

    Args:
        name: The module path, or the line as `train.py:41`.
        float32: Whether it stays in float32.
        score: What its roundings change the loss by, relative, to first order; None if nothing was scored.
        flops_share: Its share of the FLOPs of matmuls and convolutions, forward and backward.
    """

    name: str
    float32: bool
    score: float | None
    flops_share: float


@dataclasses.dataclass(frozen=True)
class SearchReport(Report):
    """The result of a precision search; `print` it, and paste its `rules`.

    Args:
        function: The name of the loss function.
        policy: The policy of the search.
        budget: The largest allowed error.
        error_before: The error under the policy.
        error: The error with `rules`, measured in a run with them.
        keep_float32: The modules and lines that stay in float32, most sensitive first; empty if another rule suffices.
        patterns: The same as entries of `Rules`.
        rules: The rules to pass to `autocast`.
        added: What `rules` adds, as it is written.
        half_share: The share of the FLOPs of matmuls and convolutions that run in half with these rules.
        modules: All modules and lines with roundings, those in float32 first, then by score.
        minimal: Whether each of `keep_float32` is needed: with any one of them in half, the error is above the budget.
        passes: The number of times the gradient was run.
        kept_dtype: `"float32"`, or under a policy with float8 matmuls the compute dtype, in which the kept modules run.
        unseen: Operations whose internals are not visible, so that no rule applies to them, and why.
        reference_is_finite: Whether the gradients are finite in float32.
        reference_is_zero: Whether they are all zero.
        loss_scale: The loss scale at which the policy alone meets the budget, if the first one flushes too much.
    """

    function: str
    policy: str
    budget: float
    error_before: float
    error: float
    keep_float32: tuple[str, ...]
    patterns: tuple[str, ...]
    rules: Rules = dataclasses.field(repr=False)
    added: str
    half_share: float
    modules: tuple[SearchedModule, ...]
    passes: int
    minimal: bool = True
    kept_dtype: str = "float32"
    unseen: tuple[str, ...] = ()
    reference_is_finite: bool = True
    reference_is_zero: bool = False
    loss_scale: float | None = None

    heading = "Precision search of {0.function}"
    main = "modules"
    derived = "met overrides"

    @property
    def met(self) -> bool:
        """Whether the error is within the budget."""
        return self.error <= self.budget

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """The modules as pairs for `Policy(overrides=...)`, which has no entries for lines."""
        policy = "float32" if self._low == "half" else f"mixed_{self.kept_dtype}"
        return tuple((pattern, policy) for pattern in self.patterns if not is_line(pattern))

    @property
    def _low(self) -> str:
        """The precision of the other modules."""
        scaled = format_of(get_policy(self.policy).matmul_dtype)
        return "half" if scaled is None else scaled.name

    def failure(self) -> str:
        """The failure message if the error is above the budget, else an empty string."""
        return "" if self.met else f"the error {_share(self.error)} is above the budget {_share(self.budget)}"

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        rows = [
            (row.name, self.kept_dtype if row.float32 else self._low, _share(row.score), f"{row.flops_share:.1%}")
            for row in self.modules
        ]
        lines = [*self._finding(), *(f"not inspected: {place}" for place in self.unseen)]
        table = Section("By module and line", "", "module or line|runs in|>score|>FLOPs", rows)
        return [Section("", "\n".join(lines)), table]

    def _finding(self) -> list[str]:
        before, after, budget = _share(self.error_before), _share(self.error), _share(self.budget)
        if not self.reference_is_finite:
            where = "mpjax.find_nonfinite shows where"
            return [f"the gradients of {self.function} are not finite without autocast either: {where}"]
        if self.reference_is_zero:
            where = "mpjax.numerics shows where"
            return [f"the gradients of {self.function} are all zero without autocast either: {where}"]
        if not self.met:
            return [
                f"{self.function} does not meet the budget {budget}: error {before} in {self._low}, {after} with "
                f"every module and line in {self.kept_dtype}",
                "the rest is where no rule applies: half arguments, casts of the code itself, kernels; "
                "mpjax.layerwise_error shows the lines",
            ]
        if not self.added:
            met = f"{self.function} meets the budget {budget} with every module in {self._low}"
            if self.loss_scale is None:
                return [f"{met}: error {after}"]
            scale = scale_text(self.loss_scale)
            return [
                f"{met} at loss scale {scale}: error {after}; {before} at the first one, which flushes gradients",
                f"mpjax.dynamic_loss_scale(tx, init_scale={scale.replace('2^', '2.0**')})",
            ]
        lines = [
            f"error {before} in {self._low}, {after} with this rule (budget {budget}); "
            f"{self.half_share:.1%} of the FLOPs stay in half",
            f"mpjax.autocast(fun, {self.policy!r}, rules=mpjax.Rules({self.added}))",
        ]
        if not self.keep_float32:
            return [f"one rule meets the budget: {self.added}", *lines, f"{self.passes} passes"]
        count = len(self.keep_float32)
        kind = "line" if all(map(is_line, self.keep_float32)) else "module"
        return [
            f"{count} {kind}{'s' if count > 1 else ''} must stay in {self.kept_dtype}: {', '.join(self.keep_float32)}",
            *lines,
            f"{self.passes} passes over {len(self.modules)} modules and lines: "
            + (f"with any one of these in {self._low}, the error is above the budget" if self.minimal else _STOPPED),
        ]


_STOPPED = "stopped at the limit of passes, fewer modules in float32 may suffice"


def _share(error: float | None) -> str:
    if error is None:
        return "-"
    return percent(error) if error else "0.00%"


_SCALES = (2.0**15, 2.0**10, 2.0**5, 1.0)  # tried in turn; the first is that of `dynamic_loss_scale`
_GREATER = (2.0**24, 2.0**20)  # `dynamic_loss_scale` grows to these while gradients are finite
_MOST_PASSES = 13  # each traces and runs the gradient once: about half of the time of compiling it
_PRIMITIVES = 2  # tried alone
_OTHERS = 0.1  # the squared score of a primitive in all other places, over that in its only place
_WORTH = 0.9  # the share of the FLOPs in half that such a rule must leave there


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
    """Finds the rules that half precision needs for its error to meet a budget, tried one by one.

    Under a policy with float8 matmuls, the modules whose matmuls must stay in the compute dtype, bfloat16.

        score each module, or line of code in no module    Σ ‖gradient × rounding error‖ over its results in half
        residual_stream="float32"; deny=[primitive]        for the primitives with the highest scores in several places
        deny=[the 1, 2, 4, ... highest-scored modules]     until the budget is met
        return modules to half while it is met             the least sensitive first

    All scores come from one gradient of the loss. A try runs the gradient on the given batch under its rules, operation
    by operation, and rounds each result that half stores: each error was measured. A search takes thirteen passes at
    most. If it ends before that, each module in float32 is needed.

    Args:
        fun: The loss function in float32. If it is an `autocast` function (`jax.jit` of one included), the search
            starts from its policy and rules.
        args: Its arguments: arrays and trees of arrays.
        budget: The largest allowed error of all gradients together, ‖half − float32‖ / ‖float32‖.
        policy: The policy under which autocast runs `fun`, unless `fun` is an `autocast` function.
        loss_scale: The loss scale. None for one that starts at 2¹⁵ and backs off until the gradients are finite, as
            `dynamic_loss_scale` does (bfloat16: 1), or is greater if that alone meets the budget.
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

    Source: the gradient-based sensitivity scores of NVIDIA ModelOpt's AutoQuantize (`mtq.auto_quantize`).
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


Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Rules to try.

    Args:
        rules: The rules.
        added: What they add to those of the function, as it is written; unique among the choices of a search.
        names: The modules and lines that they keep in float32, if they name any.
        patterns: The same as entries of `Rules`.
    """

    rules: Rules
    added: str = ""
    names: Names = ()
    patterns: Names = ()


def _searched(passes: _Passes, budget: float, policy: str, name: str) -> SearchReport:
    before, flops = passes.error(()), passes.flops()
    scores: Mapping[str, float | None] = dict.fromkeys(flops)
    chosen, needed = passes.keeping(()), True
    finite = all(np.isfinite(np.asarray(x)).all() for x in passes.expected)
    scale = passes.greater_scale(budget) if finite and budget < before < math.inf else None
    if finite and not before <= budget and scale is None:
        scores, primitives = passes.scores()
        rule = next((rule for rule in passes.single_rules(primitives) if passes.is_enough(rule, budget)), None)
        if rule is None:
            kept, needed = _fewest(passes, [*scores], budget)
        chosen = rule or passes.keeping(kept)
    total, (error, half_share) = sum(flops.values()) or 1, passes.tried(chosen)
    rows = [
        SearchedModule(n, is_covered(n, chosen.names), score, flops.get(n, 0) / total) for n, score in scores.items()
    ]
    return SearchReport(
        function=name,
        policy=policy,
        budget=budget,
        error_before=before,
        error=error,
        keep_float32=chosen.names,
        patterns=chosen.patterns,
        rules=chosen.rules,
        added=chosen.added,
        half_share=half_share,
        modules=tuple(sorted(rows, key=lambda row: (not row.float32, -(row.score or 0.0)))),
        minimal=needed and not passes.ended,
        kept_dtype="float32" if passes.policy.matmul_dtype is None else str(passes.policy.compute_dtype),
        passes=passes.count,
        unseen=passes.unseen,
        reference_is_finite=finite,
        reference_is_zero=not any(np.any(x) for x in passes.expected),
        loss_scale=scale,
    )


def _fewest(passes: _Passes, ranked: Sequence[str], budget: float) -> tuple[Names, bool]:
    """The highest-scored modules that meet the budget in float32, and whether each is needed; all if none do."""
    count = 1
    while passes.error(tuple(ranked[:count])) > budget:
        if count >= len(ranked) or passes.ended:
            return tuple(ranked), False
        count = min(2 * count, len(ranked))
    kept = tuple(ranked[:count])
    for name in reversed(kept):  # the least sensitive first
        rest = tuple(other for other in kept if other != name)
        if passes.error(rest) <= budget:
            kept = rest
    return kept, not passes.ended


def is_covered(module: str, kept: Iterable[str]) -> bool:
    """Whether a module is one of those that are kept, or inside of one."""
    return any(f"{module}/".startswith(f"{path}/") for path in kept)


class _Passes:
    """Runs the gradient under rules, and counts the runs."""

    def __init__(self, loss: Loss, policy: Any, rules: Rules, args: tuple[Any, ...], loss_scale: float | None):
        self.loss, self.policy, self.args, self._rules = loss, policy, args, rules
        self.count = 0
        self._seen: dict[str, tuple[float, float]] = {}
        scales = _SCALES[-1:] if policy.compute_dtype == jnp.bfloat16 else _SCALES
        self._scales = scales if loss_scale is None else (loss_scale,)
        with jax.default_matmul_precision("highest"), autocast_disabled():  # TF32 is too coarse for a reference
            self.expected = self._run(Trial("search", loss, args, rounds=False))
        self._half = self._trial(rules)
        self.sites, self.unseen = self._half.sites, not_entered(self._half.sites, evaluated=True)
        self.paths = tuple(dict.fromkeys(site.path for site in self.sites if site.path))

    def keeping(self, names: Names) -> Choice:
        """The rules that keep some modules and lines in float32, or their matmuls out of float8."""
        if not names:
            return Choice(self._rules)
        patterns = tuple(map(self._pattern, names))
        shown = ", ".join(f'"{pattern}"' for pattern in patterns)
        denied = f"deny=[{shown}]"
        if self.policy.matmul_dtype is None:
            return Choice(self._rules.add(deny=patterns), denied, names, patterns)
        float8 = self._rules.float8 or Float8()
        rules = dataclasses.replace(self._rules, float8=dataclasses.replace(float8, deny=(*float8.deny, *patterns)))
        return Choice(rules, f"float8=mpjax.Float8({denied})", names, patterns)

    def single_rules(self, primitives: Sequence[str]) -> Iterator[Choice]:
        """The rules that are tried before modules: they keep matmuls in half, and cure most loops and likelihoods."""
        if self.policy.matmul_dtype is None:
            rules = dataclasses.replace(self._rules, residual_stream="float32")
            yield Choice(rules, 'residual_stream="float32"')
            for name in primitives[:_PRIMITIVES]:
                yield Choice(self._rules.add(deny=[name]), f'deny=["{name}"]')

    def _pattern(self, path: str) -> str:
        """An entry of `Rules` that matches a module or a line, and no other."""
        if is_line(path):
            return path
        escaped = path.replace("[", "[[]")
        others = (other for other in self.paths if not is_covered(other, [path]))
        return f"/{escaped}" if any(path_matches(other, f"*/{escaped}") for other in others) else f"*/{escaped}"

    def error(self, names: Names) -> float:
        """The error with some modules and lines in float32; inf if the passes have ended."""
        return self.tried(self.keeping(names))[0]

    def tried(self, choice: Choice) -> tuple[float, float]:
        """The error under some rules, inf if the passes have ended, and the share of the FLOPs in half."""
        if choice.added not in self._seen:
            if self.ended:
                return math.inf, 0.0
            trial = self._trial(choice.rules) if choice.added else self._half
            self._seen[choice.added] = relative_error(self._run(trial), self.expected), trial.half_share
        return self._seen[choice.added]

    def is_enough(self, rule: Choice, budget: float) -> bool:
        """Whether one rule meets the budget, and leaves almost all FLOPs in half."""
        error, share = self.tried(rule)
        return error <= budget and share >= _WORTH * self.tried(self.keeping(()))[1]

    @property
    def ended(self) -> bool:
        """Whether as many passes were run as a search may take."""
        return self.count >= _MOST_PASSES

    def greater_scale(self, budget: float) -> float | None:
        """A loss scale beyond the first at which the program meets the budget as it is; None if there is none."""
        for scale in _GREATER if self._scales == _SCALES else ():
            error = relative_error(self._half.run(scale), self.expected)
            if error <= budget:
                self._seen[""] = error, self._half.half_share
                return scale
        return None

    def _trial(self, rules: Rules) -> Trial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about operations left in float32, as intended here
            return Trial("search", self.loss.under(self.policy, rules), self.args)

    def scores(self) -> tuple[dict[str, float | None], list[str]]:
        """The scores of modules and lines, and the primitives that lose in several of them, highest first; one pass."""
        self.count += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = rounding_scores("search", self.loss.under(self.policy, self._rules), self.args)
            except ValueError:  # A loop that only a derivative rule of the user's differentiates: by work, unscored.
                return dict.fromkeys(sorted(flops := self.flops(), key=lambda name: -flops[name])), []
        squares = [(site, score**2) for site, score in found]
        by_place = totals((name, square) for site, square in squares if (name := self._name(site)))
        # A rule may name the primitive of a rounding that computes, and is no matmul.
        named = [pair for pair in squares if primitive(pair[0].name).op in (Op.INFER, Op.WIDE, Op.DENY)]
        places = totals(((site.name, self._name(site)), square) for site, square in named)
        by_primitive = totals((name, square) for (name, _), square in places.items())
        # What a primitive does in one place alone is a matter of that place.
        rest = {key: sum(s for k, s in places.items() if k[0] == key[0] and k != key) for key in places}
        alone = {key[0] for key, square in places.items() if rest[key] <= _OTHERS * square and rest[key] < math.inf}
        # A rule on a module applies to its submodules too, so parents come after their children.
        held = {path: sum(other != path for other in by_place if is_covered(other, [path])) for path in by_place}
        ranked = sorted(by_place, key=lambda path: (math.isfinite(by_place[path]), held[path], -by_place[path]))
        primitives = sorted((name for name in by_primitive if name not in alone), key=lambda name: -by_primitive[name])
        return {path: math.sqrt(by_place[path]) for path in ranked}, primitives

    @staticmethod
    def _name(site: Site) -> str:
        return site.path or (site.source if is_line(site.source) else "")

    def flops(self) -> dict[str, int]:
        """FLOPs by module or line, forward and backward."""
        return totals((name, site.flops) for site in self.sites if (name := self._name(site)) and site.flops)

    def _run(self, trial: Trial) -> list[Any]:
        """The gradients at the first loss scale at which they are finite."""
        self.count += 1
        for scale in self._scales:
            grads = trial.run(scale)
            if all(np.isfinite(x).all() for x in grads):
                break
        return grads
