"""The table of inspections, one row each. Lazy imports, the command line and the documentation are built from it.

To add an inspection, add a folder beside this file, a row in `TOOLS`, and its names for type checkers in `__init__.py`.
"""

import argparse
import dataclasses
from typing import Any


class Option:
    """An option of a command.

    Args:
        flag: The flag. The value of `--loss-scale` is the keyword argument `loss_scale` of the function.
        help: Help text, one line.
        argparse: Other arguments of `ArgumentParser.add_argument`.
    """

    def __init__(self, flag: str, help: str, **argparse: Any):
        self.flag, self.help, self.argparse = flag, help, argparse

    @property
    def name(self) -> str:
        """The name of the keyword argument."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclasses.dataclass(frozen=True)
class Tool:
    """An inspection.

    Args:
        names: The public names of its module, in `mpjax` and `mpjax.inspection`: the function, then its result classes.
        module: The module that defines them.
        question: The question that it answers, for the documentation.
        summary: One line for the command line's help.
        command: Its name on the command line.
        batches: Whether it takes `batches=` besides positional arguments. Otherwise it takes the arguments of one call.
        options: Keyword arguments of the function that the command line offers.
        views: Options that choose what the report shows. See `Report.viewed`.
        packed: Whether the function takes the call's arguments as one tuple.
        checks: Options that the finished report is checked against. See `Report.failure`.
        nothing: The text that the command prints if the function returns None.
        maker: Whether the tool takes a factory of the inspected object. The factory is passed on unchanged, without
            arguments or a policy.
    """

    names: tuple[str, ...]
    module: str
    question: str
    summary: str
    command: str
    batches: bool = False
    packed: bool = False
    options: tuple[Option, ...] = ()
    views: tuple[Option, ...] = ()
    checks: tuple[Option, ...] = ()
    nothing: str = ""
    maker: bool = False

    @property
    def function(self) -> str:
        """The name of the function."""
        return self.names[0]


def integers(text: str) -> int | tuple[int, ...]:
    """Parses `5` as an integer and `0,3,4` as a tuple. `5,` is a tuple of one."""
    return int(text) if "," not in text else tuple(int(part) for part in text.split(",") if part)


_LOSS = (
    Option("--loss-scale", "the loss scale in use", type=float),
    Option("--has-aux", "the function returns (loss, aux)", action="store_true"),
    Option("--argnums", "positions of the parameters, such as 0 or 0,1", type=integers, default=0, metavar="N,..."),
)

_DEVICE = Option("--device", "its name, or GB/s of memory and TFLOP/s in half and float32: 2000,300,40", metavar="D")

TOOLS = (
    Tool(
        ("audit", "PrecisionReport"),
        "mpjax.inspection.audit.audit",
        "Is half precision really on? Which layer is not in half? What may go wrong there?",
        "the precision of each operation, what keeps matmuls off Tensor Cores, and the operations that half may harm",
        "audit",
        views=(_DEVICE,),
        checks=(
            Option(
                "--min-half", "exit with 1 if less than this share of the FLOPs is half", type=float, metavar="SHARE"
            ),
        ),
    ),
    Tool(
        ("explain", "Explanation"),
        "mpjax.casting",
        "Why does autocast run this operation in this dtype?",
        "the plan that autocast makes, and why",
        "explain",
    ),
    Tool(
        ("numerics", "NumericsReport"),
        "mpjax.inspection.numerics.numerics",
        "Does float16 lose my gradients? Which loss scale do I need?",
        "ranges of activations and gradients of a loss function, and the loss scale to use",
        "numerics",
        batches=True,
        options=(
            *_LOSS,
            Option("--dtype", "the half dtype", default="float16", choices=("float16", "bfloat16")),
        ),
    ),
    Tool(
        ("layerwise_error", "LayerwiseReport"),
        "mpjax.inspection.layerwise.layerwise",
        "Where do half results differ from float32?",
        "the errors of a loss function in half against float32, by module",
        "layerwise",
        options=_LOSS,
    ),
    Tool(
        ("search", "SearchReport"),
        "mpjax.inspection.search.search",
        "Which modules must stay in float32?",
        "the modules that must stay in float32 to meet an error budget, as rules; exits with 1 if none do",
        "search",
        packed=True,
        options=(
            *_LOSS,
            Option("--budget", "the largest relative error of the gradients", type=float, default=0.01),
        ),
    ),
    Tool(
        ("find_nonfinite", "NonFinite"),
        "mpjax.inspection.nonfinite.find_nonfinite",
        "Which operation produced the NaN?",
        "the operation that produces the first inf or NaN; exits with 1 if there is one",
        "nonfinite",
        nothing="all results are finite",
    ),
    Tool(
        ("profile", "ProfileReport"),
        "mpjax.inspection.profile.profile",
        "Why is it not faster?",
        "where the time of a step goes",
        "profile",
        batches=True,
        options=(
            Option("--steps", "number of steps to measure", type=int, default=10),
            Option("--carry", "number of leading outputs that replace the next step's leading arguments", type=int),
            Option("--trace", "keep the profiler's trace in this folder, for XProf and Perfetto", metavar="DIR"),
            Option("--against", "compare with an earlier profile, written with --json", metavar="FILE"),
            _DEVICE,
        ),
    ),
    Tool(
        ("parity", "ParityReport", "Training", "MakeTraining"),
        "mpjax.inspection.parity.parity",
        "Does half precision hurt my training?",
        "the results of training in half and in float32, over several seeds; exits with 1 if a policy is worse",
        "parity",
        options=(
            Option(
                "--policies",
                "the policies to compare with the baseline; module:function is called with each",
                nargs="+",
                default=("mixed_float16", "mixed_bfloat16"),
                metavar="P",
            ),
            Option("--seeds", "number of seeds, or the seeds: 0,3,4", type=integers, default=5, metavar="N"),
            Option("--baseline", "the policy that the others are compared with", default="float32", metavar="P"),
            Option("--fix", "try the remedy that the evidence suggests for each worse policy", action="store_true"),
            Option("--output", "keep runs and report in this folder; a later call continues there", metavar="DIR"),
            Option("--metric-every", "steps between two measurements of the metric", type=int, metavar="N"),
            Option(
                "--progress",
                "show progress on stderr: a bar, or in a log one line for each run",
                action=argparse.BooleanOptionalAction,
                default=True,
            ),
        ),
        maker=True,
    ),
)
# Runs inside a training step, so it is not a command.
_WATCH = "Watch WatchRecord WatchState watch".split()
HOMES = {name: tool.module for tool in TOOLS for name in tool.names}
HOMES |= dict.fromkeys(_WATCH, "mpjax.inspection.watch.watch")
