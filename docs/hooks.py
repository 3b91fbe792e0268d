"""The parts of the documentation that are generated from the program, and the hooks that MkDocs calls.

A page marks such a part with comments on lines of their own: `<!-- made: NAME ARGUMENTS -->` and `<!-- end -->`. The
text between them is committed, so that a page is complete when it is read in the repository: `python -m docs.make`
regenerates it. The site adds what only a site can show: docstrings, and the tables of the benchmarks, one page each.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import mpjax  # noqa: E402 - from this repository, whether installed or not
from mpjax.inspection.tools import CLASSES  # noqa: E402 - the same

MADE = re.compile(r"^<!-- made: ([\w ./]+) -->\n(.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)
_NAMES = re.compile(r"<!-- made: names ([\w ]+?) -->")
_RESULTS = ROOT / "benchmarks" / "results"
# Where the types of other libraries in signatures are documented. A build downloads nothing, so it reads no inventory.
_OPTAX = "https://optax.readthedocs.io/en/latest/api"
TYPES = {
    "jax.Array": "https://docs.jax.dev/en/latest/_autosummary/jax.Array.html",
    "optax.GradientTransformation": f"{_OPTAX}/transformations.html#optax.GradientTransformation",
    "optax.GradientTransformationExtraArgs": f"{_OPTAX}/transformations.html#optax.GradientTransformationExtraArgs",
    "optax.MultiSteps": f"{_OPTAX}/optimizer_wrappers.html#optax.MultiSteps",
    "jmp.Policy": "https://github.com/google-deepmind/jmp",
}


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Fills in the generated parts of a page of the site, and names above each output the versions that print it."""
    from docs.make import blocks

    text = with_links_of_site(filled(markdown, {**PARTS, **ON_SITE}), page.file.src_uri.count("/"))
    used = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax", "optax"))
    for above, block in reversed([*itertools.pairwise(blocks(text))]):
        if block.language == "text" and not above.mark:
            text = f'{text[: block.begin - 1]} title="{used}"{text[block.begin - 1 :]}'
    return text


def with_links_of_site(markdown: str, depth: int) -> str:
    """A page whose links to files outside of the documentation lead to a page of the site, or to the repository.

    Args:
        markdown: The page's text.
        depth: The number of folders that it is in.
    """
    up = "../" * depth
    text = re.sub(rf"\]\({up}\.\./benchmarks/results/README\.md#([\w-]+)\)", rf"]({up}results/\1.md)", markdown)
    return re.sub(rf"\]\({up}\.\./([^)]*)\)", rf"]({_repository()}/blob/main/\1)", text)


def _repository() -> str:
    """The address of the repository, which stands in pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def on_config(config: Any) -> Any:
    """Links the site to its repository."""
    config.repo_url = _repository()
    return config


def filled(page: str, parts: dict[str, Callable[..., str]] | None = None) -> str:
    """The page with its generated parts, by default those of the repository."""

    def make(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return f"<!-- made: {match[1]} -->\n\n{(parts or PARTS)[name](*arguments)}\n\n<!-- end -->"

    return MADE.sub(make, page)


def names(*modules: str) -> str:
    """A table of the public names of these modules; `others` means all modules that no page requests."""
    return _table(mpjax, _names_of(modules))


def names_with_docstrings(*modules: str) -> str:
    """The same table and the reference entries."""
    return "\n\n".join([names(*modules), *(f"::: mpjax.{name}" for name in _names_of(modules))])


def classes() -> str:
    """A table of the classes of the inspections: their reports, and what users give to them."""
    return _table(mpjax.inspection, sorted(CLASSES))


def classes_with_docstrings() -> str:
    """The same table and the reference entries."""
    return "\n\n".join([classes(), *(f"::: mpjax.inspection.{name}" for name in sorted(CLASSES))])


def _table(module: Any, found: list[str]) -> str:
    rows = [f"| `{name}` | {_first_sentence(getattr(module, name))} |" for name in found]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _names_of(modules: tuple[str, ...]) -> list[str]:
    return [name for name in public_names() if home(name, requested_modules()) in modules]


def _first_sentence(value: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(value.__doc__.strip().split("\n\n")[0].split()).replace("|", "\\|")


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
    from mpjax.program.primitives import TABLE, Op

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
    return (ROOT / path).read_text().split("\n", 1)[1].strip()


def script(path: str) -> str:
    """A script of the repository as a code block."""
    return f"```python\n{(ROOT / path).read_text()}```"


def changelog() -> str:
    """The release notes."""
    return included("CHANGELOG.md")


def results() -> str:
    """The tables of the benchmarks that are in the repository's page of results."""
    lines = [f"- [{title}](../benchmarks/results/README.md#{_anchor(title)})" for title in _sections()]
    return "\n".join(lines)


def results_on_site() -> str:
    """The first part of the page of results, and links to a page for each table."""
    first = re.split(r"^## ", (_RESULTS / "README.md").read_text().split("\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    first = re.sub(r"\]\(#([\w-]+)\)", r"](results/\1.md)", first)
    links = [f"- [{title}](results/{_anchor(title)}.md)" for title in _sections()]
    return "\n".join([_with_plots(first, ""), "## All tables", "", *links])


def _sections() -> dict[str, str]:
    """The sections of the page of results, by title."""
    parts = re.split(r"^## ", (_RESULTS / "README.md").read_text(), flags=re.MULTILINE)[1:]
    return {title: text for title, _, text in (part.partition("\n") for part in parts)}


def _anchor(title: str) -> str:
    """The anchor that GitHub and MkDocs give to a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _with_plots(text: str, up: str) -> str:
    return re.sub(r"\]\((?!https?:|#)([\w./-]+\.(?:png|svg))\)", rf"]({up}figures/results/\1)", text)


PARTS: dict[str, Callable[..., str]] = {
    "names": names,
    "classes": classes,
    "rules": rules,
    "commands": commands,
    "versions": versions,
    "script": script,
    "changelog": changelog,
    "results": results,
}
ON_SITE: dict[str, Callable[..., str]] = {
    "names": names_with_docstrings,
    "classes": classes_with_docstrings,
    "results": results_on_site,
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the plots of the benchmarks, a page for each of their tables, and links to the types of other libraries."""
    from mkdocs.structure.files import File

    for name, url in TYPES.items():
        config.plugins["autorefs"].register_url(name, url)
    for plot in _RESULTS.glob("*.[ps][nv]g"):
        files.append(File.generated(config, f"figures/results/{plot.name}", abs_src_path=str(plot)))
    for title, text in _sections().items():
        page = f"# {title}\n{_with_plots(re.sub(r'^###', '##', text, flags=re.MULTILINE), '../')}"
        files.append(File.generated(config, f"results/{_anchor(title)}.md", content=page))
    return files
