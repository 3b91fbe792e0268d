"""The table of inspections, one row each. Lazy imports, the command line and the documentation are built from it.

To add an inspection, add a folder beside this file, a row in `TOOLS`, and its names for type checkers in `__init__.py`.
"""

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
    """An inspection: a function `tool(fun, *args, **options)` that returns a `Report`, and a command of the same name.

    Args:
        name: The name of the function, in `mpjax` and `mpjax.inspection`, and of the command.
        module: The module that defines it.
        question: The question that it answers, for the documentation and the command line's help.
        options: Keyword arguments of the function that the command line offers. With `CALL`, the command makes the
            arguments of the inspected function; without, the tool takes the function alone.
        classes: The result classes in `mpjax.inspection`.
    """

    name: str
    module: str
    question: str
    options: tuple[Option, ...]
    classes: tuple[str, ...] = ()


def integers(text: str) -> int | tuple[int, ...]:
    """Parses `5` as an integer and `0,3,4` as a tuple. `5,` is a tuple of one."""
    return int(text) if "," not in text else tuple(int(part) for part in text.split(",") if part)


def sizes(text: str) -> dict[str, int]:
    """Parses `data=4,model=2` as the sizes of named axes."""
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


CALL = (
    Option("--args", "a function that returns its arguments", metavar="module:make_args"),
    Option("--policy", "run it under mpjax.autocast with this policy, such as mixed_float16"),
)
_LOSS = (
    *CALL,
    Option("--loss-scale", "the loss scale in use", type=float),
    Option("--has-aux", "the function returns (loss, aux)", action="store_true"),
    Option("--argnums", "positions of the parameters, such as 0 or 0,1", type=integers, default=0, metavar="N,..."),
)
_DEVICE = Option("--device", "the name of a GPU or TPU, such as H200", metavar="D")
_SHARE = "exit with 1 if less than this share of the FLOPs is half"

TOOLS = (
    Tool(
        "audit",
        "mpjax.inspection.auditing.audit",
        "Is half precision really on? Which layer is not in half? What may go wrong there?",
        (*CALL, _DEVICE, Option("--min-half", _SHARE, type=float, metavar="SHARE")),
        ("PrecisionReport",),
    ),
    Tool(
        "explain",
        "mpjax.inspection.explanation",
        "Why does autocast run this operation in this dtype?",
        CALL,
        ("Explanation",),
    ),
    Tool(
        "numerics",
        "mpjax.inspection.ranges.numerics",
        "Does float16 lose my gradients? Which loss scale do I need?",
        (*_LOSS, Option("--dtype", "the half dtype", default="float16", choices=("float16", "bfloat16"))),
        ("NumericsReport",),
    ),
    Tool(
        "layerwise_error",
        "mpjax.inspection.layer_errors",
        "Where do half results differ from float32?",
        _LOSS,
        ("LayerwiseReport",),
    ),
    Tool(
        "search",
        "mpjax.inspection.searching",
        "Which modules must stay in float32?",
        (*_LOSS, Option("--budget", "the largest relative error of the gradients", type=float, default=0.01)),
        ("SearchReport",),
    ),
    Tool(
        "find_nonfinite",
        "mpjax.inspection.nonfinite.find_nonfinite",
        "Which operation produced the NaN?",
        CALL,
        ("NonFinite",),
    ),
    Tool(
        "profile",
        "mpjax.inspection.profiling.profile",
        "Why is it not faster?",
        (
            *CALL,
            Option("--steps", "number of steps to measure", type=int, default=10),
            Option("--carry", "number of leading outputs that replace the next step's leading arguments", type=int),
            _DEVICE,
        ),
        ("ProfileReport",),
    ),
    Tool(
        "plan",
        "mpjax.planning.plan",
        "Does my step fit the device? What should I change?",
        (
            CALL[0],
            Option("--target", "a device that need not be present, such as h200 or v5e", metavar="D"),
            Option("--memory", "what the step may take on each device, such as 80GB", metavar="SIZE"),
            Option("--mesh", "the axes of a mesh of such devices, such as data=8", type=sizes, metavar="AXIS=N,..."),
            Option("--policy", "the policy to try on a program without mpjax", default="mixed_bfloat16"),
            Option("--batch-axis", "seek the largest batch; the axis of the batch in the inputs", type=int),
            Option("--batch-args", "the positions of the arguments that carry it", nargs="+", type=int),
            Option("--quiet", "do not print each compilation", action="store_true"),
        ),
        ("PlanReport",),
    ),
    Tool(
        "parity",
        "mpjax.inspection.comparison.parity",
        "Does half precision hurt my training?",
        (
            Option(
                "--policies",
                "the policies to compare with the baseline; module:function is called with each",
                nargs="+",
                default=("mixed_float16", "mixed_bfloat16"),
                metavar="P",
            ),
            Option("--seeds", "number of seeds, or the seeds: 0,3,4", type=integers, default=5, metavar="N"),
            Option("--baseline", "the policy that the others are compared with", default="float32", metavar="P"),
        ),
        ("MakeTraining", "ParityReport", "Training"),
    ),
)
# `watch` runs inside a training step, so it is not a command.
_WATCH = "mpjax.inspection.watching"
FUNCTIONS = {tool.name: tool.module for tool in TOOLS} | {"watch": _WATCH}
CLASSES = {name: tool.module for tool in TOOLS for name in tool.classes}
CLASSES |= dict.fromkeys(("Watch", "WatchRecord", "WatchState"), _WATCH)
