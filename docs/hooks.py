"""MkDocs hooks: the parts of the site that are generated from the program when the site is built.

A page requests a part with a comment on its own line: `<!-- made: NAME -->` or `<!-- made: NAME ARGUMENTS -->`.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import mpjax  # noqa: E402 - from this repository, whether installed or not

_MADE = re.compile(r"^<!-- made: ([\w ./]+?) -->$", re.MULTILINE)
_NAMES = re.compile(r"<!-- made: names ([\w ]+?) -->")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Fills in the parts that a page requests."""
    return filled(markdown)


def filled(page: str) -> str:
    """The page with the parts that it requests."""

    def make(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return PARTS[name](*arguments)

    return _MADE.sub(make, page)


def names(*modules: str) -> str:
    """The reference entries for the public names of these modules; `others` means all modules that no page requests."""
    return "\n\n".join(f"::: mpjax.{name}" for name in public_names() if home(name, requested_modules()) in modules)


def public_names() -> list[str]:
    """The public names of mpjax that are not modules."""
    modules = {path.stem for path in (ROOT / "mpjax").iterdir()} - set(mpjax.__all__)
    return [name for name in dir(mpjax) if not name.startswith("_") and name not in modules]


def home(name: str, requested: set[str]) -> str:
    """The module under which a reference page shows a name; `others` if no page requests its module."""
    locations = vars(mpjax)["_HOMES"] | vars(mpjax)["_INSPECTION"]
    module = locations[name].partition(":")[0].split(".")[1]
    return module if module in requested else "others"


def requested_modules() -> set[str]:
    """The modules that the reference pages request."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return {module for page in pages for found in _NAMES.findall(page.read_text()) for module in found.split()}


def rules() -> str:
    """The table of primitives by list."""
    from mpjax._jaxpr.primitives import TABLE, Op

    meanings = {
        Op.ALLOW: "Tensor Core work: runs in half.",
        Op.DENY: "Needs the range or the mantissa of float32: runs in float32.",
        Op.INFER: "Runs in the widest dtype among its activations.",
        Op.WIDE: "Runs in float32 because its derivative is a sum; its result is classified like its input.",
        Op.MOVE: "Moves elements without arithmetic: any dtype works.",
        Op.READ: "The result is not a float (a comparison, an index): reads the widest stored dtype.",
        Op.CONVERT: "A cast that the user or `jax.numpy` wrote: kept.",
        Op.ENTER: "Has sub-jaxprs, which autocast plans too.",
        Op.OPAQUE: "Called with the dtypes of the traced program.",
    }
    lines = ["| list | meaning | primitives |", "|---|---|---|"]
    for op, meaning in meanings.items():
        rows = sorted(name for name, row in TABLE.items() if row.op is op)
        lines.append(f"| **{op.value}** | {meaning} | {', '.join(f'`{name}`' for name in rows)} |")
    risky = ["", "| risk in half | primitives |", "|---|---|"]
    for risk in sorted({row.risk for row in TABLE.values()} - {""}):
        rows = sorted(name for name, row in TABLE.items() if row.risk == risk)
        risky.append(f"| {risk} | {', '.join(f'`{name}`' for name in rows)} |")
    return "\n".join([*lines, *risky])


def commands() -> str:
    """The help texts of the command line."""
    return "\n\n".join(f"## `{title}`\n\n```text\n{text}```" for title, text in _help_texts())


def _help_texts() -> Iterator[tuple[str, str]]:
    import argparse
    import os

    from mpjax.inspection.cli import _parser
    from mpjax.launcher.cli import parser as launcher

    os.environ["COLUMNS"], before = "100", os.environ.get("COLUMNS")
    try:
        inspections = _parser()
        yield inspections.prog, inspections.format_help()
        yield launcher().prog, launcher().format_help()
        (choices,) = (a.choices for a in inspections._actions if isinstance(a, argparse._SubParsersAction))
        for name, parser in choices.items():
            if name != "run":
                # Its epilog repeats the examples of the first help text.
                parser.epilog = None
                yield f"{inspections.prog} {name}", parser.format_help()
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def versions() -> str:
    """The supported versions, from pyproject.toml and the versions that CI tests."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = dict(line.split("==") for line in (ROOT / ".ci" / "oldest.txt").read_text().split() if "==" in line)
    lines = ["| package | required | oldest version tested |", "|---|---|---|"]
    lines.append(f"| Python | `{project['requires-python']}` | 3.11 |")
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]  # type: ignore[index]  # a requirement begins with its name
        lines.append(f"| {name} | `{requirement.removeprefix(name)}` | {oldest[name]} |")
    extras = ["", "| extra | installs |", "|---|---|"]
    for name, needed in project["optional-dependencies"].items():
        extras.append(f"| `{name}` | {', '.join(f'`{need}`' for need in needed)} |")
    return "\n".join([*lines, *extras])


def included(path: str) -> str:
    """The text of a file of the repository without its heading."""
    return (ROOT / path).read_text().split("\n", 1)[1]


def script(path: str) -> str:
    """A script of the repository as a code block."""
    return f"```python\n{(ROOT / path).read_text()}```"


def changelog() -> str:
    """The release notes."""
    return included("CHANGELOG.md")


def results() -> str:
    """The tables of the benchmarks, after their plots."""
    text = (ROOT / "benchmarks" / "results" / "README.md").read_text().split("\n", 1)[1]
    plots = re.findall(r"^!\[.*\]\(.*\)$", text, re.MULTILINE)
    text = "\n\n".join(
        [*plots, re.sub(r"^!\[.*\]\(.*\)\n", "", text, flags=re.MULTILINE)]
    )  # readers look at plots first
    return re.sub(r"\]\((?!https?:|#)([\w./-]+\.(?:png|svg))\)", r"](figures/results/\1)", text)


PARTS: dict[str, Callable[..., str]] = {
    "names": names,
    "rules": rules,
    "commands": commands,
    "versions": versions,
    "script": script,
    "changelog": changelog,
    "results": results,
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the plots of the benchmarks, which are in `benchmarks/results`."""
    from mkdocs.structure.files import File

    for plot in (ROOT / "benchmarks" / "results").glob("*.[ps][nv]g"):
        files.append(File.generated(config, f"figures/results/{plot.name}", abs_src_path=str(plot)))
    return files
