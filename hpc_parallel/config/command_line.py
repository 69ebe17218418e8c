"""The words after `python -m hpc_parallel.run`, read once."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from hydra._internal.utils import get_args

from hpc_parallel.config.compose import find_folder
from hpc_parallel.problems import ConfigError

# Flags of Hydra that print something and start no run (--resolve: only beside --cfg or --help).
EXPLAINING = ("help", "hydra_help", "cfg", "info", "shell_completion", "resolve")


class Places(TypedDict):
    """Where the configuration files are: a folder, the name of the first file, the folder of the user."""

    config_dir: str
    config_name: str
    extra_dir: str | None


@dataclass(frozen=True)
class CommandLine:
    """One command line of `run`: its words as typed, and what Hydra's parser makes of them."""

    words: tuple[str, ...]
    flags: Namespace

    @classmethod
    def parse(cls, words: Sequence[str]) -> CommandLine:
        """Ends the process where Hydra's parser does: an unknown flag, `--version`.

        Raises ConfigError for a `--config-dir` that is not there.
        """
        # Hydra wants a plus where no default names the group; `jobs=` may be written both ways.
        plain = tuple(word.removeprefix("+") if word.startswith("+jobs=") else word for word in words)
        line = cls(plain, get_args(plain))
        if (own := line.extra_dir) and not Path(own).is_dir():
            raise ConfigError([f"--config-dir {own}: there is no such folder here."])
        if line.flags.experimental_rerun:
            rule = "would run a pickled configuration. Try python -m hpc_parallel rerun RUN."
            raise ConfigError([f"--experimental-rerun {rule}"])
        return line

    @property
    def overrides(self) -> list[str]:
        return list(self.flags.overrides)

    @property
    def explains(self) -> bool:
        """Whether a flag asks for help, the composed configuration or a completion, and for no run."""
        return any(getattr(self.flags, flag) for flag in EXPLAINING)

    @property
    def sweeps(self) -> bool:
        """Whether it starts the runs of a sweep: `-m`, or `hydra.mode=MULTIRUN`, which means the same."""
        mode = any(word.lower() == "hydra.mode=multirun" for word in self.overrides)
        return (self.flags.multirun or mode) and not self.flags.run and not self.explains

    @property
    def extra_dir(self) -> str | None:
        """The folder of the user's own configuration files (`--config-dir`)."""
        own: str | None = self.flags.config_dir
        return own

    @property
    def places(self) -> Places:
        """The package's `conf/` and `config.yaml`, unless Hydra's flags name others."""
        path, name = self.flags.config_path, self.flags.config_name
        return {
            "config_dir": str(Path(path).absolute()) if path else str(find_folder("conf")),
            "config_name": name or "config",
            "extra_dir": self.extra_dir,
        }
