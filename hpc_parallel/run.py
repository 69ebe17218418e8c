"""The command: compose the configuration, check it, write the run folder, launch.

    python -m hpc_parallel.run strategy=pipeline nodes=2

Exit codes: 0 done, 1 the run failed, 2 the configuration is wrong (nothing was written or submitted),
3 the site refused (Slurm's own words are shown).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra._internal.utils import get_args
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hpc_parallel.config.compose import find_folder
from hpc_parallel.config.problems import ConfigError, Problem
from hpc_parallel.config.schema import register
from hpc_parallel.launch.launchers import SiteRefusedError, choose
from hpc_parallel.launch.prepare import prepare

DONE, FAILED, WRONG_CONFIGURATION, REFUSED = range(4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: this process's own); returns the exit code."""
    if arguments is not None:
        sys.argv[1:] = arguments
    register()
    configs = str(find_folder("conf"))
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=configs, config_name="config")
    def compose_and_launch(config: DictConfig) -> None:
        codes.append(launch(config))

    try:
        with _hydra_raises():
            compose_and_launch()
    except Exception as error:
        from hpc_parallel.config.diagnose import COMPOSE_ERRORS, diagnose

        if not isinstance(error, COMPOSE_ERRORS):
            raise
        words = get_args()
        found = diagnose(words.overrides, config_dir=configs, config_name=words.config_name or "config")
        return _report(found or [" ".join(str(error).split())])
    return max(codes, default=DONE)


def launch(composed: DictConfig) -> int:
    """One composed configuration, from its checks to its end (or its submission)."""
    try:
        run = prepare(composed, overrides=HydraConfig.get().overrides.task)
        launcher, choice = choose(run.config.launcher.kind)
        if run.config.dry_run:
            print(launcher.preview(run))
            return DONE
        print(f"{run}\n{choice}")
        return launcher.launch(run)
    except ConfigError as error:
        return _report(error.problems)
    except SiteRefusedError as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Hydra prints its refusals and exits with 1, unless this variable makes it raise them."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _report(problems: Sequence[Problem | str]) -> int:
    count = len(problems)
    print(f"{count} problem{'s' * (count > 1)} in the configuration; nothing was started.", file=sys.stderr)
    for problem in problems:
        print(f"  {problem}", file=sys.stderr)
    return WRONG_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())
