"""Regenerates the outputs in the pages of this folder: `python -m docs.make [PAGE ...]`.

The `python` blocks of a page run in one namespace, in the page's folder; the `text` block after each holds what it
prints. The output of a `console` block, `$ python -m mpjax ...` or `$ python script.py`, follows the command in the
same block. A block after `<!-- measured -->` contains times or takes long, so the tests do not regenerate it. A block
after `<!-- not run -->` never runs. What stands between `<!-- made: ... -->` and `<!-- end -->` is from `docs.hooks`;
scripts there have their own tests.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from docs import hooks

FOLDER = pathlib.Path(__file__).parent
PAGES = tuple(
    str(path.relative_to(FOLDER))
    for path in sorted(FOLDER.rglob("*.md"))
    if re.search(r"^```(python|console)$", path.read_text(), re.MULTILINE)
)
MEASURED, NOT_RUN = "<!-- measured -->", "<!-- not run -->"

_FENCED = re.compile(r"^```(python|console|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, the position of the text, and the mark above it."""

    language: str
    text: str
    begin: int
    end: int
    mark: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, without those of its generated parts."""
    generated = [match.span() for match in hooks.MADE.finditer(page)]
    for match in _FENCED.finditer(page):
        if any(begin < match.start() < end for begin, end in generated):
            continue
        above = page[: match.start()].rstrip().rsplit("\n", 1)[-1]
        mark = above if above in (MEASURED, NOT_RUN) else ""
        yield Block(match[1], match[2], match.start(2), match.end(2), mark)


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the rows of the table whose first line begins with `header`."""
    lines = page[page.index(f"\n{header}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def made(page: str, measured: bool = True, folder: pathlib.Path = FOLDER) -> str:
    """The page with regenerated outputs.

    Args:
        page: The page's text.
        measured: Whether to regenerate measured blocks too.
        folder: The folder to run in, whose modules the blocks may import.
    """
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder):
            return _made(page, measured)
    finally:
        sys.path.remove(str(folder))


def _made(page: str, measured: bool) -> str:
    parts, position, printed = [], 0, ""
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks(page):
        text = block.text
        if block.mark == NOT_RUN or (block.mark == MEASURED and not measured):
            continue
        if block.language == "python":
            printed = _run_python(block.text, namespace)
        elif block.language == "console":
            text = _run_console(block.text, in_subprocess=block.mark == MEASURED)
        elif printed:
            text, printed = printed, ""
        parts += [page[position : block.begin], text]
        position = block.end
    return "".join([*parts, page[position:]])


def _run_python(code: str, namespace: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "example.py", "exec"), namespace)
    return _trimmed(output.getvalue())


def _run_console(text: str, in_subprocess: bool) -> str:
    """Runs the command of a block, and returns the command's line and its output.

    Args:
        text: The block; `$ python -m package ...`, or any command if it runs in a subprocess.
        in_subprocess: Whether to run it in a subprocess.
    """
    command = text.splitlines()[0]
    if in_subprocess:
        return f"{command}\n{_trimmed(_subprocess_output(command.removeprefix('$ ')))}"
    return f"{command}\n{_output(command, os.getcwd())}"


@functools.cache  # two pages show the same command
def _output(command: str, folder: str) -> str:
    """Runs `python -m package ...` in this process, in the given folder, and returns its output."""
    prompt, module, *arguments = command.split(" -m ")[0], *shlex.split(command.partition(" -m ")[2])
    assert prompt == "$ python", f"not of the form '$ python -m package': {command!r}"
    before, sys.argv = sys.argv, [module, *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv = before
    return _trimmed(output.getvalue())


def _subprocess_output(command: str) -> str:
    """Runs a shell command, and returns its output.

    The output of `-m mpjax` includes stderr, where the launcher writes.
    """
    scripts = pathlib.Path(sys.executable).parent  # so that `python` is this interpreter
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    # Readers do not have the simulated devices of this process.
    environment.pop("XLA_FLAGS", None)
    errors = subprocess.STDOUT if " -m mpjax " in command else None
    run = subprocess.run(command, shell=True, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    return run.stdout


def _trimmed(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines()) if text.strip() else ""


if __name__ == "__main__":
    # Set before JAX starts: a page on several devices needs four, as in the tests.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    for name in sys.argv[1:] or (str(path.relative_to(FOLDER)) for path in sorted(FOLDER.rglob("*.md"))):
        path = FOLDER / name
        path.write_text(made(hooks.filled(path.read_text()), folder=path.parent))
        print(f"made {path}")
