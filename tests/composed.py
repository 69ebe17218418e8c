"""Configurations for tests, composed as the command composes them."""

from __future__ import annotations

from functools import cache

from hydra import version
from omegaconf import DictConfig

from hpc_parallel.config.compose import Composer
from hpc_parallel.config.hydra_internals import composing
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.resolve import with_values
from hpc_parallel.config.schema import register
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.record.snapshot import cached_plan_snapshot

register()
_plan_snapshot = cached_plan_snapshot()  # git takes longer than all the rest of a preparation


@cache  # a process of tests reads the files of a selection of groups once
def _composer() -> Composer:
    return Composer("config")


def composed(*overrides: str) -> DictConfig:
    version.setbase("1.3")
    with composing(str(find_folder("conf"))):
        return with_values(_composer().compose(overrides), {})


def prepared(*overrides: str) -> PreparedRun:
    """Raises ConfigError as the command would."""
    return prepare(composed(*overrides), overrides=overrides, keep=_plan_snapshot)
