"""Check a configuration on the login node: all contradictions at once, each with a suggestion."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_parallel.config.checks import (
    allocation_checks,
    cluster_checks,
    data_checks,
    key_checks,
    layout_checks,
    model_size_checks,
    script_checks,
    site_checks,
    task_checks,
    training_checks,
)
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK
from hpc_parallel.config.task_schema import TaskConfig
from hpc_parallel.config.tasks import prune_problems
from hpc_parallel.layout.counts import class_path, is_convnet, is_reference_decoder
from hpc_parallel.layout.model_data_schema import DigitsDataConfig, HuggingFaceConfig, ParquetDataConfig
from hpc_parallel.problems import Problem, Problems


@dataclass(frozen=True)
class Check:
    """A check, and the runs that it applies to, by a rule or by a class of model or data (None: all runs)."""

    find: Callable[[RunConfig], Problems]
    meets: Callable[[RunConfig], bool] | None = None
    of: type[Any] | None = None


# Problems of keys that the command line does not name are shown in the order of these checks.
# A script skips the checks of OF_TRAINING, because it reads no key of our training.
OF_TRAINING = (
    Check(training_checks.optimizer_problems),
    Check(layout_checks.execution_problems, lambda run: run.strategy.execution in layout_checks.WHOLE),
    Check(layout_checks.compression_problems, lambda run: run.strategy.gradient_compression != "none"),
    Check(layout_checks.find_problems),
    Check(model_size_checks.class_problems),
    Check(model_size_checks.decoder_problems, is_reference_decoder),
    Check(training_checks.callback_problems, lambda run: bool(run.training.callbacks)),
    Check(data_checks.find_problems),
    Check(data_checks.parquet_problems, of=ParquetDataConfig),
    Check(data_checks.packing_problems, lambda run: "packing" in run.data),
    Check(model_size_checks.huggingface_problems, of=HuggingFaceConfig),
    Check(data_checks.fit_problems),
    Check(data_checks.digit_problems, of=DigitsDataConfig),
    Check(model_size_checks.convnet_problems, lambda run: is_convnet(run.model)),
    Check(task_checks.find_problems, lambda run: type(run.task) is not TaskConfig),
    Check(training_checks.switch_problems),
    Check(training_checks.compile_whole_problems, lambda run: run.training.compile_whole),
    Check(training_checks.rounding_problems),
    Check(training_checks.fp8_problems, lambda run: run.training.fp8 != training_checks.OFF),
    Check(task_checks.profile_problems, lambda run: run.profile.kind != "none"),
    Check(cluster_checks.machine_problems, lambda run: bool(run.machine.collectives)),
)
OF_ALL_TASKS = (
    Check(cluster_checks.find_problems),
    Check(site_checks.find_problems),
    Check(prune_problems, lambda run: run.sweep.prune != "off" or run.sweep.prune_after is not None),
    Check(allocation_checks.find_problems, lambda run: run.launcher.kind == "allocation"),
    Check(site_checks.python_problems, lambda run: run.launcher.python is not None),
    Check(site_checks.conda_problems, lambda run: run.launcher.conda is not None),
    Check(site_checks.venv_problems, lambda run: run.launcher.venv is not None),
)


def find_problems(config: RunConfig, overrides: Sequence[str] = ()) -> list[Problem | str]:
    """Returns all problems of `config`, in the order of the command line's `overrides`."""
    huge = list(key_checks.huge_integers(config))
    if huge:  # the other checks loop up to these numbers and might never end
        return in_order(huge, overrides)
    foreign = list(key_checks.foreign_tables(config))
    classes = class_path(config.model), class_path(config.data)
    problems: list[Problem | str] = [*foreign, *key_checks.find_problems(config)]
    for check in (*(() if foreign or config.task.name == TASK else OF_TRAINING), *OF_ALL_TASKS):
        if (check.of is None or check.of._target_ in classes) and (not check.meets or check.meets(config)):
            problems += check.find(config)
    return in_order([*problems, *script_checks.find_problems(config, overrides)], overrides)


def in_order(problems: Sequence[Problem | str], overrides: Sequence[str]) -> list[Problem | str]:
    """Sort the problems by the order of their keys in the command line; problems of other keys come last."""
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]

    def position(problem: Problem | str) -> int:
        text = problem.key if isinstance(problem, Problem) else problem.lstrip("+~")
        key = re.split(r"[\s=:]", text, maxsplit=1)[0]
        named = [i for i, name in enumerate(keys) if key == name or key.startswith(f"{name}.")]
        return named[-1] if named else len(keys)

    return sorted(problems, key=position)
