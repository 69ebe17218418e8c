"""The names and versions of installed packages, read without a parser of mails."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from hpc_parallel.record import provenance


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    provenance._installed_packages.cache_clear()
    yield
    provenance._installed_packages.cache_clear()


def test_packages_are_those_of_importlib() -> None:
    wanted = sorted((d.metadata["Name"], d.version) for d in distributions() if d.metadata["Name"])
    assert len(wanted) > 50
    assert provenance.installed_packages() == dict(wanted)


def test_a_description_or_a_broken_package_names_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = "Metadata-Version: 2.1\nName: one\nVersion: 1.0 \n\nName: other\nVersion: 2.0\n"
    for folder, text in {"one-1.0": described, "broken-3.0": "Version: 3.0\n"}.items():
        (tmp_path / f"{folder}.dist-info").mkdir()
        (tmp_path / f"{folder}.dist-info" / "METADATA").write_text(text)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert provenance.installed_packages() == {"one": "1.0"}


def test_a_file_of_an_old_setup_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`setup.py install` of distutils wrote no folder."""
    (tmp_path / "old-1.5.egg-info").write_text("Metadata-Version: 1.0\nName: old\nVersion: 1.5\n")
    (tmp_path / "folder.egg-info").mkdir()
    (tmp_path / "folder.egg-info" / "PKG-INFO").write_text("Name: folder\nVersion: 2\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert provenance.installed_packages() == {"folder": "2", "old": "1.5"}
