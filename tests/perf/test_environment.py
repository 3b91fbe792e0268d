"""The environment recorded with a result."""

import pathlib
import shutil
import subprocess

import pytest

import mpjax
from perf.environment import environment


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a package in the place of mpjax's."""
    package = tmp_path / "mpjax"
    package.mkdir()
    (package / "__init__.py").write_text("")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setattr(mpjax, "__file__", str(package / "__init__.py"))
    return package


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_the_commit_of_a_checkout_is_recorded(checkout):
    head = subprocess.check_output(["git", "-C", checkout, "rev-parse", "--short=8", "HEAD"], text=True).strip()
    assert environment()["commit"] == head
    (checkout / "__init__.py").write_text("changed = True")
    assert environment()["commit"] == f"{head} with changes"


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_an_installed_package_has_no_commit(checkout, monkeypatch):
    installed = pathlib.Path(checkout.parent, "site-packages", "__init__.py")
    installed.parent.mkdir()
    installed.write_text("")
    monkeypatch.setattr(mpjax, "__file__", str(installed))
    assert "commit" not in environment()
