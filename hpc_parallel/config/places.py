"""The folders with the files that Hydra composes: the package's and the user's."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

OWN_SITES = "site"  # the folder in which init-cluster puts a profile


class Places(TypedDict):
    """The folder of the configuration files, the name of the primary file, and the user's folder."""

    config_dir: str
    config_name: str
    extra_dir: str | None


def find_folder(name: str) -> Path:
    """The folder `conf` or `sbatch_templates`: beside the package in a checkout, inside it if installed."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
