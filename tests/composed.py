"""Configurations for tests, composed as the command composes them."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from hpc_parallel.config.compose import find_folder
from hpc_parallel.config.schema import register
from hpc_parallel.launch.prepare import PreparedRun, prepare


def composed(*overrides: str) -> DictConfig:
    register()
    with initialize_config_dir(config_dir=str(find_folder("conf")), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def prepared(*overrides: str) -> PreparedRun:
    """Raises ConfigError as the command would."""
    return prepare(composed(*overrides), overrides=overrides)
