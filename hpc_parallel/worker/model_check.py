"""Builds a model without memory and finds what its hints and its code refuse, before a submission.

    python -m hpc_parallel.worker.model_check < VALUES

reads the resolved configuration as JSON and writes a JSON list of messages; for a list of configurations, a
list of such lists.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_parallel.config.layout import layout_of
from hpc_parallel.config.typed_config import typed
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.assemble import build_model
from hpc_parallel.strategies.model_checks import find_problems


def messages_of(values: Mapping[str, Any]) -> list[str]:
    """Returns why the model of a resolved configuration can't be built, or can't be split as it says."""
    config = typed(values)
    # Balancing by FLOPs needs the shape of a sample, which only the data knows.
    config = replace(config, strategy=replace(config.strategy, balance="parameters"))
    layout = layout_of(config.strategy, devices=config.devices)
    length = config.data.get("sequence_length") or 2 * layout.context * layout.tensor
    try:
        model = build_model(config)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return [
        str(problem) for problem in find_problems(model, config=config, layout=layout, sample_shape=(length,))
    ]


def main() -> None:
    """Write the messages to stdout; what the model prints goes to stderr."""
    given = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        several = isinstance(given, list)
        answer.write(json.dumps([messages_of(values) for values in given] if several else messages_of(given)))


if __name__ == "__main__":
    main()
