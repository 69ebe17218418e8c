"""Imports a user's classes and builds their model without memory, before a run starts.

    python -m hpc_parallel.worker.model_check < QUESTION

reads {tables, advice, values} as JSON: those of launch/import_check.py, and resolved configurations. It
writes as JSON, for each configuration, a list of messages: why a class can't be imported, or else what the
model's hints and code refuse.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":
    gc.disable()  # as in worker/main.py; this process ends soon

from hpc_parallel.config.layout import layout_of
from hpc_parallel.config.typed_config import typed
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.model_checks import find_problems
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.user_code import failure_of


def messages_of(values: Mapping[str, Any]) -> list[str]:
    """Returns why the model of a resolved configuration can't be built, or can't be split as it says."""
    config = typed(values)
    layout = layout_of(config.strategy, devices=config.devices)
    length = config.data.get("sequence_length")  # the shape of other samples is known in the job only
    try:
        model = build_model(config)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return [
        str(problem)
        for problem in find_problems(
            model, config=config, layout=layout, sample_shape=(length,) if length else None
        )
    ]


def main() -> None:
    """Write the messages to stdout; what imported modules print goes to stderr."""
    question = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        tried = (failure_of(key, table, advice=question["advice"]) for key, table in question["tables"])
        failures = [*filter(None, tried)]
        answer.write(json.dumps([failures or messages_of(values) for values in question["values"]]))


if __name__ == "__main__":
    main()
