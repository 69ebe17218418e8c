"""`python -m hpc_parallel init-cluster [NAME]`: write a first profile of this cluster.

It asks Slurm for its partitions, nodes and settings, and writes FOLDER/cluster/NAME.yaml. With --from it
reads what `scontrol show config|partition|node` printed on another machine.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from hpc_parallel.config.places import OWN_SITES, find_folder
from hpc_parallel.exit_codes import DONE, REFUSED
from hpc_parallel.machine.fabric_kind import fabric_devices
from hpc_parallel.problems import ConfigError, raise_if_any, shell_word
from hpc_parallel.record.safe_read import DamagedError, read_bytes
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.shell import command_parser, complain
from hpc_parallel.site.profile import Login, plain_name, write_profile
from hpc_parallel.slurm.records import SlurmRecords, ask_records, associations_of, read_records

_RECORDS_BYTES = 256 << 20  # Slurm prints about 20 MB for 10,000 nodes


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(list(arguments))
    records = _from_files(options.source) if options.source else ask_records()
    if records is None:
        complain([
            "Slurm does not answer here. Try it on a login node, or save the output of `scontrol show "
            "config; scontrol show partition; scontrol show node` there, and give the files with --from FILE."
        ])  # fmt: skip
        return REFUSED
    shipped = sorted(path.stem for path in (find_folder("conf") / "cluster").glob("*.yaml"))
    name = options.name or plain_name(records.cluster, taken=shipped)
    path = _free_path(name, folder=options.folder, shipped=shipped)
    login = Login() if options.source else _login(os.environ)
    try:
        text = write_profile(records, name=name, login=login, today=date.today())
    except ValueError as error:
        raise ConfigError([f"No profile can be written: {error}."]) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text, mode=0o644)  # a profile is for colleagues too
    print(text, end="")
    print(f"\nwritten     {path}")
    print(
        f"check it    python -m hpc_parallel check --config-dir {shell_word(options.folder)} cluster={name}"
    )
    return DONE


def parser() -> argparse.ArgumentParser:
    parser = command_parser("init-cluster", __doc__)
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of the profile (default: ClusterName)")
    parser.add_argument(
        "--folder", type=Path, default=Path(OWN_SITES), help="where profiles are (default: %(default)s)"
    )
    parser.add_argument(
        "--from", dest="source", metavar="FILE", nargs="+", type=Path,
        help="saved outputs of scontrol instead of this machine's Slurm",
    )  # fmt: skip
    return parser


def _from_files(paths: Sequence[Path]) -> SlurmRecords:
    """Read the saved outputs. Raises ConfigError with each file that can't be used."""
    texts: list[str] = []
    problems: list[str] = []
    for path in paths:
        try:
            text = read_bytes(path, limit_bytes=_RECORDS_BYTES, follow=True).decode(errors="replace")
            read_records([text])
            texts.append(text)
        except OSError as error:
            problems.append(f"{path} can't be read: {error.strerror or error}.")
        except DamagedError as error:
            problems.append(f"{error}.")
        except ValueError as error:
            problems.append(f"{path} can't be used: {error}. Try the output of scontrol show node.")
    raise_if_any(problems)
    return read_records(texts)


def _free_path(name: str, *, folder: Path, shipped: Sequence[str]) -> Path:
    """The path of the new profile. Raises ConfigError if the name is not legal or the path exists."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        legal = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "mysite"
        raise ConfigError([f"{name} can't name a profile: use letters, digits, _ and -. Try {legal}."])
    if name in shipped:
        raise ConfigError([f"cluster={name} comes with hpc_parallel. Try another name, such as my{name}."])
    path = folder / "cluster" / f"{name}.yaml"
    if os.path.lexists(path):
        raise ConfigError([f"{path} exists already. Try another name, such as {name}2, or another --folder."])
    return path


def _login(environment: Mapping[str, str]) -> Login:
    modules = environment.get("LOADEDMODULES", "").split(":")
    devices = fabric_devices()
    return Login(
        associations=associations_of(getpass.getuser()),
        modules=[module for module in modules if module],
        fabric=f"{devices.kind} ({devices.describe(devices.kind)})" if devices.kind != "tcp" else "",
    )
