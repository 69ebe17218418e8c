"""Configurations for tests, composed as the command composes them."""

from __future__ import annotations

from hydra import version
from omegaconf import DictConfig

from hpc_parallel.config.compose import Trials, composing
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.schema import register
from hpc_parallel.launch.prepare import PreparedRun, prepare

register()
_TRIALS = Trials("config")  # a process of tests reads the files of a selection of groups once


def composed(*overrides: str) -> DictConfig:
    version.setbase("1.3")
    with composing(str(find_folder("conf"))):
        return _TRIALS.compose(overrides).copy()


def prepared(*overrides: str) -> PreparedRun:
    """Raises ConfigError as the command would."""
    return prepare(composed(*overrides), overrides=overrides)
