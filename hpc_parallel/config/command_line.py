"""The arguments of `python -m hpc_parallel.run`, parsed once."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from hpc_parallel.config.hydra_internals import flags_parser
from hpc_parallel.config.key_suggestions import SYNONYMS
from hpc_parallel.config.places import Places, find_folder
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import with_quotes, with_script
from hpc_parallel.config.typed_text import as_typed
from hpc_parallel.exit_codes import DONE
from hpc_parallel.problems import ConfigError

# Flags of Hydra that print something and start no run (--resolve: only with --cfg or --help).
EXPLAINING = ("help", "hydra_help", "cfg", "info", "shell_completion", "resolve")


@dataclass(frozen=True)
class CommandLine:
    """One command line of `run`: its words, and the flags that Hydra's parser reads from them."""

    words: tuple[str, ...]
    flags: Namespace

    @classmethod
    def parse(cls, words: Sequence[str]) -> CommandLine:
        """Parse the words; flags may stand anywhere. `--version` ends the process.

        The words after `--` become overrides. Raises ConfigError for an unknown flag, a `--config-dir` that
        does not exist and `--experimental-rerun`.
        """
        words = with_script(words)
        # Hydra requires a plus if the defaults don't name the group; users may write `jobs=` both ways.
        plain = tuple(word.removeprefix("+") if word.startswith("+jobs=") else word for word in words)
        plain = tuple(as_typed(with_quotes(_with_key_of_hardware(word))) for word in plain)
        if "--version" in plain:
            print(f"hpc_parallel {sys.modules['hpc_parallel'].__version__}")  # no import from a higher layer
            sys.exit(DONE)
        flags, unknown = flags_parser().parse_known_intermixed_args(plain)
        if unknown:
            raise ConfigError([_unknown_flag(flag, plain) for flag in unknown])
        line = cls(plain, flags)
        if line.extra_dir and not Path(line.extra_dir).is_dir():
            raise ConfigError([f"--config-dir {line.extra_dir}: this folder does not exist."])
        if line.flags.experimental_rerun:
            rule = "would run a pickled configuration. Try python -m hpc_parallel rerun RUN."
            raise ConfigError([f"--experimental-rerun {rule}"])
        return line

    def with_words(self, words: Sequence[str]) -> CommandLine:
        """This line with other words, for example the words of a run to resume and then the user's."""
        return self if tuple(words) == self.words else self.parse(words)

    @property
    def overrides(self) -> list[str]:
        return list(self.flags.overrides)

    @property
    def explains(self) -> bool:
        """Whether a flag asks for help, the composed configuration or a completion instead of a run."""
        return any(getattr(self.flags, flag) for flag in EXPLAINING)

    @property
    def sweeps(self) -> bool:
        """Whether the line starts a sweep: `-m`, or `hydra.mode=MULTIRUN`, which means the same."""
        mode = any(word.lower() == "hydra.mode=multirun" for word in self.overrides)
        return (self.flags.multirun or mode) and not self.flags.run and not self.explains

    @property
    def extra_dir(self) -> str | None:
        """The user's folder of configuration files (`--config-dir`)."""
        folder: str | None = self.flags.config_dir
        return folder

    @property
    def places(self) -> Places:
        """The package's `conf/` and `config.yaml`, unless Hydra's flags name others."""
        path, name = self.flags.config_path, self.flags.config_name
        return {
            "config_dir": str(Path(path).absolute()) if path else str(find_folder("conf")),
            "config_name": name or "config",
            "extra_dir": self.extra_dir,
        }


def _with_key_of_hardware(word: str) -> str:
    """Turn `hardware=NAME` into its key. Hydra would take `hardware` for the group `conf/hardware`."""
    return f"plan.{word}" if word.startswith("hardware=") else word


def _unknown_flag(flag: str, words: Sequence[str]) -> str:
    """The problem of a flag that Hydra does not have, with the override that it probably means."""
    name, equals, value = flag.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if key.partition(".")[0] not in {field.name for field in fields(RunConfig)}:
        key = SYNONYMS.get(key, "").partition("=")[0]
    if not key:
        return f"{flag}: there is no such flag. `run --help` lists the flags and keys."
    after = words[words.index(flag) + 1 :][:1]
    if not equals and after and "=" not in after[0] and not after[0].startswith("-"):
        value = after[0]
    return f"{flag}: a key has no dashes before it. Try {key}={value or 'VALUE'}."
