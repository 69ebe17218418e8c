"""Builds a model without memory and finds what its hints and its code refuse, before a submission.

    python -m hpc_parallel.worker.model_check < VALUES

reads the resolved configuration as JSON and writes a JSON list of messages.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from hpc_parallel.config.layout import layout_of
from hpc_parallel.config.typed_config import typed
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.model_checks import find_problems
from hpc_parallel.strategies.whole_model import build_model


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
    """Write the messages to stdout; what the model prints goes to stderr."""
    values = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        answer.write(json.dumps(messages_of(values)))


if __name__ == "__main__":
    main()
