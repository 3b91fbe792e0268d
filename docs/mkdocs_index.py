"""MkDocs' hook that makes the first page of the README."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from mkdocs.structure.files import File

README = pathlib.Path(__file__).parent.parent / "README.md"


def on_files(files: Any, config: Any) -> Any:
    """Adds the page, with links as they are seen from this folder."""
    files.append(File.generated(config, "index.md", content=from_docs(README.read_text())))
    return files


def from_docs(text: str) -> str:
    """A text of the repository's root for a page in docs: links there get shorter, other files are named only."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\[([^\]]+)\]\((?!\w+:|#|[\w-]+\.md\))[^)]*\)", r"\1", text)
