"""The text of `run --help`: usage, examples, the groups with their choices, and where to find all keys."""

from __future__ import annotations

import textwrap

from hpc_parallel.config.compose import Composer
from hpc_parallel.config.hydra_internals import composing, group_choices
from hpc_parallel.config.places import Places

WIDTH = 100
USAGE = """\
usage: python -m hpc_parallel.run [FLAGS] [KEY=VALUE ...]

Checks a configuration, then trains: as a Slurm job where sbatch is found, else on this machine.

examples:
  python -m hpc_parallel.run                                     the defaults: a small model on one device
  python -m hpc_parallel.run strategy=pipeline nodes=2           two stages on two nodes
  python -m hpc_parallel.run strategy=fsdp nodes=2 gpus_per_node=4 model=1b
  python -m hpc_parallel.run strategy=tensor gpus_per_node=2 launcher=slurm dry_run=true
                                                                 print what would be submitted
  python -m hpc_parallel.run -m strategy=data,fsdp nodes=1,2,4   a sweep: six runs
  python -m hpc_parallel.run nodes=2 -- train.py --lr 3e-4       a script of your own, on each device
  python -m hpc_parallel.run resume=RUN_FOLDER                   continue from the newest checkpoint

groups (KEY=CHOICE; a star marks the default):
"""
FLAGS = """\
keys:
  nodes=2 and gpus_per_node=4 are keys of the run; strategy.schedule=zbv is a key of a group.
  --cfg job KEY=VALUE ... prints every key with the value that it would have.

flags, before the keys:
  -m                  a sweep: every combination of the values between commas
  --config-dir DIR    a folder with your own files for the groups
  --info defaults     which file each group is read from
  --hydra-help        Hydra's other flags

All keys: docs/configuration.md. After a run: python -m hpc_parallel status | logs | show | report | cancel"""


def run_help(places: Places) -> str:
    """The help text, with the choices in all folders of `places`. Raises what Hydra raises."""
    with composing(places["config_dir"], extra_dir=places["extra_dir"]):
        defaults = Composer(places["config_name"]).defaults()
        groups = {
            group: group_choices(group)
            for group in reversed(list(defaults))
            if not group.startswith("hydra/")
        }
    rows = (_row(group, choices, defaults.get(group)) for group, choices in groups.items())
    return "\n".join([USAGE + "\n".join(rows), "", FLAGS])


def _row(group: str, choices: list[str], default: str | None) -> str:
    starred = " ".join(f"{name}*" if name == default else name for name in choices)
    return textwrap.fill(f"  {group:<10} {starred}", WIDTH, subsequent_indent=" " * 13)
