"""Hydra's global state, for callers that are not our own commands: a notebook may use Hydra itself."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf.basecontainer import BaseContainer

from hpc_parallel.config.schema import register

_ALONE = threading.RLock()  # what Hydra keeps is one for the whole process


@contextmanager
def borrowed_hydra() -> Iterator[None]:
    """Register our schemas and let Hydra compose in the block; then leave Hydra's state as it was.

    Other threads wait until the block ends.
    """
    with _ALONE:
        singletons = (GlobalHydra, HydraConfig, VersionBase, ConfigStore)
        kept = [(singleton.instance(), dict(vars(singleton.instance()))) for singleton in singletons]
        job = copy.deepcopy(JobRuntime.instance().conf)
        store = _copied(ConfigStore.instance().repo)
        resolvers = dict(BaseContainer._resolvers)  # no public function lists them; Hydra copies them so, too
        try:
            register()
            yield
        finally:
            for singleton, attributes in kept:  # attributes are replaced, except the tables of the store
                vars(singleton).clear()
                vars(singleton).update(attributes)
            JobRuntime.instance().conf = job
            ConfigStore.instance().repo = store
            BaseContainer._resolvers.clear()
            BaseContainer._resolvers.update(resolvers)


def _copied(groups: dict[str, Any]) -> dict[str, Any]:
    """The same nodes in tables of their own."""
    return {name: _copied(node) if isinstance(node, dict) else node for name, node in groups.items()}
