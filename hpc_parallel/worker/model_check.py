"""Imports a user's classes, builds their model without memory and their data, before a run starts.

    python -m hpc_parallel.worker.model_check < QUESTION

reads {tables, advice, values, tries_data} as JSON. `tables` and `advice` are those of launch/import_check.py.
`values` are resolved configurations. `tries_data`: whether to build the data of the first one. The output is
{messages, note} as JSON. `messages` has a list for each configuration: why a class can't be imported. If all
classes can be imported, the list says what the data, and the model's hints and code, refuse.
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

from hpc_parallel.config.typed_config import typed
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.model_checks import find_problems
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.user_code import failure_of
from hpc_parallel.worker.data_check import Seen, look_at


def messages_of(values: Mapping[str, Any], data: Seen) -> list[str]:
    """Returns why the model of a resolved configuration can't be built, or can't be split as configured."""
    config = typed(values)
    layout = layout_of(config.strategy, devices=config.devices)
    length = config.data.get("sequence_length")  # the shape of other samples is known only from the data
    sample_shape = data.sample_shape or ((length,) if length else None)
    try:
        model = build_model(config)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return [
        str(problem)
        for problem in find_problems(
            model, config=config, layout=layout, sample_shape=sample_shape, dtype=data.dtype
        )
    ]


def answer_to(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {messages, note}."""
    advice, runs = question["advice"], question["values"]
    tried = (failure_of(key, table, advice=advice) for key, table in question["tables"])
    if failures := [*filter(None, tried)]:
        return {"messages": [failures for _ in runs], "note": None}
    data = look_at(runs[0]["data"], advice=advice) if question.get("tries_data") else Seen()
    return {"messages": [[*data.problems, *messages_of(values, data)] for values in runs], "note": data.note}


def main() -> None:
    """Write the messages to stdout; what imported modules print goes to stderr."""
    question = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        answer.write(json.dumps(answer_to(question)))


if __name__ == "__main__":
    main()
