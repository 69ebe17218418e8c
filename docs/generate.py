"""Write the reference pages that come from the source, or check that they are current.

    python docs/generate.py            # writes docs/configuration.md
    python docs/generate.py --check    # exits with 1 and names what is stale

`configuration.md` is written from the keys of `hpc_parallel/config/*schema.py`, their rules and comments, and
from the files of `conf/` and `jobs/`. `run-folder.md` is written by hand; its tables must name the files and
keys of the source.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING as REQUIRED
from dataclasses import dataclass, fields, is_dataclass
from inspect import getsource
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))  # the package of this checkout

from hpc_parallel.config import schema  # noqa: E402
from hpc_parallel.config.task_schema import TASKS, TaskConfig  # noqa: E402
from hpc_parallel.failure import failure  # noqa: E402
from hpc_parallel.failure.summary import FIGURES, summarise  # noqa: E402
from hpc_parallel.layout.model_data_schema import DATA, MODELS  # noqa: E402
from hpc_parallel.problems import spell  # noqa: E402
from hpc_parallel.record.run_folder import FolderFile, RunFolder  # noqa: E402
from hpc_parallel.rules import Rule, default_of, rules_of  # noqa: E402

CONFIGURATION, RUN_FOLDER = DOCS / "configuration.md", DOCS / "run-folder.md"
INTRODUCTION = """\
<!-- Written by docs/generate.py from hpc_parallel/config/*schema.py, conf/ and jobs/: edit those. -->

# Configuration

```
python -m hpc_parallel.run --cfg job strategy=fsdp nodes=2
```

prints every key with the value that it would have. `python -m hpc_parallel.run --help` lists the groups.

A key is set on the command line as `KEY=VALUE`: `training.steps=100`. A file of a group is chosen as
`GROUP=NAME`: `strategy=pipeline`, `model=124m`. A file of your own in `FOLDER/GROUP/NAME.yaml` is chosen with
`--config-dir FOLDER GROUP=NAME`. A list is written `[1,3]`, an empty value `null`. Some tables take any key
(`launcher.extra`, `cluster.environment`, `model.config`): a new key needs a plus, `+launcher.extra.nice=10`.

The column "default" holds the value without any override. A key without a default must be set.
"""
STUDIES = """\
A study sets keys of the run and what is swept: `-m jobs=NAME` ([Sweep](sweep.md)). "Here" is the machine of
[Performance](performance.md).
"""
SECTIONS: tuple[tuple[str, type], ...] = (
    ("training", schema.TrainingConfig),
    ("optimizer", schema.OptimizerConfig),
    ("strategy", schema.StrategyConfig),
    ("launcher", schema.LauncherConfig),
    ("cluster", schema.ClusterConfig),
    ("machine", schema.MachineConfig),
    ("fabric", schema.FabricConfig),
    ("preflight", schema.PreflightConfig),
    ("script", schema.ScriptConfig),
    ("profile", schema.ProfileConfig),
    ("sweep", schema.SweepConfig),
)
GROUPS = ("model", "data", "task")  # the keys depend on the file that is chosen


@dataclass(frozen=True)
class Key:
    """One row of a table: the dotted name, the type as the source says it, the default, one sentence."""

    name: str
    kind: str
    default: str
    meaning: str
    rule: Rule | None

    def row(self) -> str:
        kind, meaning = self.kind.replace("|", "or"), self.meaning
        if self.rule is not None:
            kind += bounds(self.rule)
            if self.rule.choices:
                meaning += f" One of {', '.join(f'`{choice}`' for choice in self.rule.choices)}."
        return "| " + " | ".join((f"`{self.name}`", kind, self.default, meaning)) + " |"


def bounds(rule: Rule) -> str:
    """The legal numbers or words as a message says them; empty if the comment of the key describes them."""
    numbers = re.fullmatch(r"must (?:be|lie|name) ((?:at least|above|between|some of) .*)", rule.text)
    most = f", at most {rule.most}" if rule.most is not None else ""
    return f", {numbers[1]}{most}" if numbers else ""


def configuration() -> str:
    """The whole page `configuration.md`."""
    parts = [INTRODUCTION, "## Top-level keys", section("", schema.RunConfig, {})]
    for group, config in SECTIONS:
        parts += [f"## {group}", sentence(config), section(group, config, defaults(group))]
        if len(files := group_files(group)) > 1:
            parts.append(choices(group, files))
    for group in GROUPS:
        parts += [f"## {group}", *chosen(group)]
    parts += ["## jobs", STUDIES,
              studies()]  # fmt: skip
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def section(prefix: str, config: type, chosen: Mapping[str, Any]) -> str:
    """The table of a class's keys. `chosen`: the values that the default file of the group sets."""
    rows = [key.row() for key in keys(prefix, config, chosen)]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def keys(prefix: str, config: type, chosen: Mapping[str, Any]) -> Iterator[Key]:
    """Raises ValueError for a key without a sentence."""
    meanings, rules = comments(config), rules_of(config)
    for item in fields(config):
        if not prefix and (item.name in GROUPS or is_dataclass(default_of(item))):
            continue  # a section of its own
        if item.name not in meanings:
            raise ValueError(f"{config.__name__}.{item.name} has no comment that says what it is")
        value = chosen.get(item.name, default_of(item))
        default = "" if value is schema.MISSING or value is REQUIRED else f"`{shown(value)}`"
        name = f"{prefix}.{item.name}" if prefix else item.name
        yield Key(name, str(item.type), default, meanings[item.name], rules.get(item.name))


def shown(value: Any) -> str:
    """A value as the command line takes it; an interpolation is not quoted."""
    return value if isinstance(value, str) and value else spell(value)


def comments(config: type) -> dict[str, str]:
    """Key -> its comment, at the end of its line or in the lines above it; those of a parent class too."""
    found: dict[str, str] = {}
    for owner in reversed(config.__mro__):
        if not is_dataclass(owner):
            continue
        above: list[str] = []
        for line in getsource(owner).splitlines():
            if match := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
                words = [*above, match[2] or ""]
                if any(words):
                    found[match[1]] = " ".join(words).strip()
            above = [*above, line.strip()[2:]] if line.startswith("    # ") else []
    return found


def sentence(config: type) -> str:
    """What a class is, from its docstring."""
    return " ".join((config.__doc__ or "").split())


def group_files(group: str) -> list[Path]:
    return sorted((ROOT / "conf" / group).glob("*.yaml"))


def defaults(group: str) -> dict[str, Any]:
    """What the file that config.yaml chooses for the group sets."""
    chosen = yaml.safe_load((ROOT / "conf/config.yaml").read_text())["defaults"]
    name = next((entry[group] for entry in chosen if isinstance(entry, dict) and group in entry), None)
    return values(ROOT / "conf" / group / f"{name}.yaml") if name else {}


def values(file: Path) -> dict[str, Any]:
    """The keys that a file of a group sets."""
    content = yaml.safe_load(file.read_text()) or {}
    return {key: value for key, value in content.items() if key != "defaults"}


def head(file: Path) -> str:
    """The comment at the top of a file."""
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(line for line in lines if not line.startswith("@package"))


def choices(group: str, files: Iterable[Path]) -> str:
    """The table of a group's files: what each is and what it sets."""
    rows = [f"| `{group}={file.stem}` | {head(file)} | {settings(values(file))} |" for file in files]
    return "\n".join(["| choice | what it is | sets |", "|---|---|---|", *rows])


def settings(content: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={shown(value)}`" for key, value in content.items() if key != "name")


def chosen(group: str) -> Iterator[str]:
    """The files of a group, then one table for each class that they fill."""
    files = group_files(group)
    yield choices(group, files)
    for config, names in classes(files).items():
        title = " ".join(f"`{group}={name}`" for name in names)
        yield f"### {title}"
        yield sentence(config)
        yield section(
            group, config, values(files[0].with_name(f"{names[0]}.yaml")) if len(names) == 1 else {}
        )


def classes(files: Iterable[Path]) -> dict[type, list[str]]:
    """The class that each file names in its defaults -> the names of the files."""
    stored = {f"{name}_schema": config for name, config in {**MODELS, **DATA, **TASKS}.items()}
    found: dict[type, list[str]] = {}
    for file in files:
        content = yaml.safe_load(file.read_text()) or {}
        names = [name for name in content.get("defaults", []) if isinstance(name, str) and name in stored]
        config = stored[names[0]] if names else TaskConfig
        found.setdefault(config, []).append(file.stem)
    return found


def studies() -> str:
    rows = []
    for file in sorted((ROOT / "jobs").glob("*.yaml")):
        question, _, takes = head(file).removeprefix("Question: ").partition(" Takes: ")
        rows.append(f"| `jobs={file.stem}` | {question[0].upper()}{question[1:]} | {takes} |")
    return "\n".join(["| study | question | time |", "|---|---|---|", *rows])


def run_folder_problems() -> Iterator[str]:
    """Each file, key or kind of failure that the source has and run-folder.md does not, or the other way."""
    page = RUN_FOLDER.read_text()
    parts = [part for part in vars(RunFolder).values() if isinstance(part, FolderFile)]
    files = {part.name.partition("/")[0] for part in parts}
    kinds = {value for name, value in vars(failure).items() if name.isupper() and isinstance(value, str)}
    for title, expected in {
        "Files": files,
        "metrics.jsonl": metrics_keys(),
        "summary.json": summary_keys(),
        "failure.json": kinds,
    }.items():
        listed = table_keys(page, title=title)
        for key in sorted(expected - listed):
            yield f"docs/run-folder.md, section {title}: `{key}` is missing"
        for key in sorted(listed - expected) if title != "Files" else ():
            yield f"docs/run-folder.md, section {title}: `{key}` is not in the source"


def table_keys(page: str, *, title: str) -> set[str]:
    """The names in backticks in the first column of the tables of a section."""
    content = re.split(r"^## ", page, flags=re.MULTILINE)
    (text,) = (part for part in content if part.startswith(f"{title}\n"))
    cells = re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)
    return {name.partition("/")[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def metrics_keys() -> set[str]:
    """The keys of a line, from the text of the modules that write one: those import torch."""
    written = ast.parse((ROOT / "hpc_parallel/training/metrics.py").read_text())
    nodes = [
        node for method in ast.walk(written)
        if isinstance(method, ast.FunctionDef) and method.name in ("line", "_rates", "_skips")
        for node in ast.walk(method)
    ]  # fmt: skip
    found = {key.value for node in nodes if isinstance(node, ast.Dict) for key in node.keys
             if isinstance(key, ast.Constant)}  # fmt: skip
    found |= {node.slice.value for node in nodes
              if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
              and isinstance(node.slice.value, str)}  # fmt: skip
    return {str(key) for key in found} | {"validation_loss"}  # the trainer adds it


def summary_keys() -> set[str]:
    """The keys for every task."""
    line = {"step": 1, "samples": 1, "loss": 1.0, "samples_per_s": 1.0, "step_time_s": 1.0,
            "tokens_per_s": 1.0, "peak_memory_bytes": 1}  # fmt: skip
    history = {
        "restarts": 0,
        "lost_steps": 0,
        "layout_after_step": 0,
        "started": None,
        "job_ids": [],
        "time_use_s": {},
    }  # record/attempts.py:history
    config: dict[str, Any] = {
        "nodes": 1,
        "gpus_per_node": 1,
        "strategy": vars(schema.StrategyConfig(name="x")),
    }
    return {
        key
        for task in ("train", *FIGURES)
        for key in summarise(
            {**config, "task": {"name": task}}, outcome="completed", lines=[line], history=history
        )
    }


def problems() -> Iterator[str]:
    """Yields one line for each stale page."""
    if not CONFIGURATION.exists() or CONFIGURATION.read_text() != configuration():
        yield "docs/configuration.md is stale. Try python docs/generate.py."
    yield from run_folder_problems()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    stale = list(problems())
    if not parser.parse_args().check and CONFIGURATION.read_text() != configuration():
        CONFIGURATION.write_text(configuration())
        print("wrote docs/configuration.md")
        stale = list(problems())
    print("\n".join(stale) or "docs/configuration.md and docs/run-folder.md are current.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
