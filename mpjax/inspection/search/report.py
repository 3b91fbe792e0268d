"""The report of `search`: the modules that stay in float32, and the rules that keep them there."""

from __future__ import annotations

import dataclasses

from mpjax.casting import Rules
from mpjax.inspection.reports import Report, Section, percent


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
        unseen: Operations whose internals are not visible, so that no rule applies to them, and why.
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
    unseen: tuple[str, ...] = ()

    main = "modules"
    derived = "met overrides"

    @property
    def met(self) -> bool:
        """Whether the error is within the budget."""
        return self.error <= self.budget

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """The same modules as pairs for `Policy(overrides=...)`."""
        return tuple((pattern, "float32") for pattern in self.patterns)

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
            (row.name, "float32" if row.float32 else "half", _share(row.error), f"{row.flops_share:.1%}")
            for row in self.modules
        ]
        lines = [*self._finding(), *(f"not inspected: {place}" for place in self.unseen)]
        return [Section("", "\n".join(lines)), Section("By module", "", "module|runs in|>own error|>FLOPs", rows)]

    def _finding(self) -> list[str]:
        before, after, budget = _share(self.error_before), _share(self.error), _share(self.budget)
        if not self.met:
            return [
                f"{self.function} does not meet the budget {_share(self.budget)}: error {before} in half, {after} with "
                "every module that has a name in float32",
                "the remaining error arises outside named modules: put that code in mpjax.float_function, or name it "
                "with jax.named_scope; mpjax.layerwise_error shows the lines",
            ]
        if not self.keep_float32:
            return [f"{self.function} meets the budget {_share(self.budget)} with every module in half: error {after}"]
        count = len(self.keep_float32)
        shown = ", ".join(f'"{pattern}"' for pattern in self.patterns)
        return [
            f"{count} module{'s' if count > 1 else ''} must stay in float32: {', '.join(self.keep_float32)}",
            f"error {before} in half, {after} with these in float32 (budget {budget}); {self.half_share:.1%} of "
            "the FLOPs stay in half",
            f"mpjax.autocast(fun, {self.policy!r}, rules=mpjax.Rules(deny=[{shown}]))",
            f"{self.passes} passes over {len(self.modules)} modules: "
            + ("with any one of these in half, the error is above the budget" if self.minimal else _STOPPED),
        ]


_STOPPED = "stopped at the limit of passes, fewer modules in float32 may suffice"


def _share(error: float | None) -> str:
    if error is None:
        return "-"
    return percent(error) if error else "0.00%"
