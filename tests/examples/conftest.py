"""Fixtures of the scripts' tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.imagenet.image_tree import make_photo_tree
from tests.examples.quick import make_quick


@pytest.fixture(scope="module")
def quick_programs() -> Iterator[None]:
    """Makes the scripts' runs quick."""
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        yield


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of photographs that tests do not modify."""
    return make_photo_tree(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def own_photos(tmp_path: Path) -> Path:
    """A tree of photographs that a test may modify."""
    return make_photo_tree(tmp_path / "photos")
