"""MkDocs' hook that makes the README the first page."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from mkdocs.structure.files import File

README = pathlib.Path(__file__).parent.parent / "README.md"


def on_files(files: Any, config: Any) -> Any:
    """Adds the page, with links relative to this folder."""
    files.append(File.generated(config, "index.md", content=from_docs(README.read_text())))
    return files


def from_docs(text: str) -> str:
    """Adapts a text of the repository root: links into docs become relative, links to other files plain text."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\[([^\]]+)\]\((?!\w+:|#|[\w-]+\.md\))[^)]*\)", r"\1", text)
