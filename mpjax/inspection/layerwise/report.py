"""The report of `layerwise_error`: the errors of modules and of parameters' gradients."""

from __future__ import annotations

import dataclasses

from mpjax.inspection.reports import Report, Section, folded_rows, percent, short_dtypes


@dataclasses.dataclass(frozen=True)
class LayerError:
    """The relative errors of one module: ‖half − float32‖ / ‖float32‖ of the arrays that it passes on.

    Args:
        name: The module path; where no module has a name, the user's function.
        path: The module path; empty for a function.
        dtypes: The half dtypes in it.
        forward, backward: Its own error in each pass: its operands are exact, and only this module is in half. inf if
            it has an inf or NaN where float32 has none, or a NaN where float32 has one too.
        total_forward, total_backward: The program's error at this module, including that of all modules before it.
        op, source: The operation whose result has the largest own error, and its source line.
        denied: Its operations in half that need float32: those on autocast's deny list.
    """

    name: str
    path: str
    dtypes: tuple[str, ...]
    forward: float
    backward: float
    total_forward: float
    total_backward: float
    op: str
    source: str
    denied: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The larger of the program's errors at this module in the two passes."""
        return max(self.total_forward, self.total_backward)

    @property
    def error(self) -> float:
        """The larger of its own errors in the two passes."""
        return max(self.forward, self.backward)


@dataclasses.dataclass(frozen=True)
class ParameterError:
    """The error of the gradient of one parameter.

    Args:
        name: Its tree path.
        error: ‖half − float32‖ / ‖float32‖.
        share: Its share of the squared error of all gradients.
    """

    name: str
    error: float
    share: float


@dataclasses.dataclass(frozen=True)
class LayerwiseReport(Report):
    """The errors of a program in half, by module. Print it to read the report.

    Args:
        function: The function's name.
        loss_error: The relative error of the loss.
        gradient_error: ‖half − float32‖ / ‖float32‖ of the gradients of all parameters together.
        modules: The errors by module: those with half operations that need float32 first, then by own error.
        parameters: The errors of the parameters' gradients, the largest share first.
        unseen: Operations whose internals are not visible (Pallas kernels, callbacks).
    """

    function: str
    loss_error: float
    gradient_error: float
    modules: tuple[LayerError, ...]
    parameters: tuple[ParameterError, ...]
    unseen: tuple[str, ...] = ()

    main = "modules"

    @property
    def title(self) -> str:
        """The page's title."""
        return f"Layerwise error of {self.function}"

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        modules = [
            (
                row.name or "-",
                short_dtypes(row.dtypes) or "f32",
                *map(percent, (row.forward, row.backward, row.total_forward, row.total_backward)),
                f"{row.op} {row.source}".strip(),
            )
            for row in folded_rows(self.modules, _together)
        ]
        parameters = [(row.name, percent(row.error), percent(row.share)) for row in self.parameters]
        text = (
            "own: the error with exact operands, only this module in half\n"
            "total: the error that the program has there; ← is the backward pass"
        )
        return [
            Section("", "\n".join(self._finding())),
            Section("By module", text, "module|in|>own|>own ←|>total|>total ←|largest at", modules),
            Section("Gradients of parameters", "", "parameter|>error|>of the whole", parameters, shown=10),
        ]

    def _finding(self) -> list[str]:
        lines = [
            f"{self.function} in half: relative error of the gradients {percent(self.gradient_error)}, of the loss "
            f"{percent(self.loss_error)}"
        ]
        worst = [row for row in self.modules if row.error > 0][:1]
        for row in worst:
            where = f" ({row.op} at {row.source})" if row.source else ""
            found = f"runs in half, but needs float32 ({', '.join(row.denied)})" if row.denied else "largest own error"
            lines.append(
                f"{found}: {row.name or 'outside of modules'}, in {'/'.join(row.dtypes) or 'float32'}, own error "
                f"{percent(row.error)}{where}"
            )
        if not worst:
            lines.append("no module has an own error")
        lines += [f"not inspected: {place}" for place in self.unseen]
        return lines


def _together(a: LayerError, b: LayerError) -> LayerError:
    """Merges two rows, with the larger of their errors."""
    names = ("forward", "backward", "total_forward", "total_backward")
    return dataclasses.replace(a, **{name: max(getattr(a, name), getattr(b, name)) for name in names})
