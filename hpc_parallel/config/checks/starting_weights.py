"""Check `weights=FILE.safetensors|RUN`, the weights that a run starts from, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.model_data_schema import (
    ConvNetConfig,
    SegmenterConfig,
    TransformerConfig,
    UNetConfig,
)
from hpc_parallel.problems import Problem, Problems, nearest
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.find import path_of
from hpc_parallel.record.run_folder import RunFolder, is_run_folder
from hpc_parallel.record.safe_read import DamagedError, parse_json
from hpc_parallel.record.safetensors_header import read_header
from hpc_parallel.record.trust import UntrustedError, require_private
from hpc_parallel.record.values import table, text

IMAGE_SHAPE = ("channels", "classes", "in_channels", "kernel_size")
SHAPE = {  # the keys of a model that decide the shapes of its weights
    TransformerConfig._target_: ("layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab_size", "tied_head"),
    ConvNetConfig._target_: IMAGE_SHAPE,
    SegmenterConfig._target_: IMAGE_SHAPE,
    UNetConfig._target_: IMAGE_SHAPE,
}


def find_problems(config: RunConfig) -> Problems:
    """Find problems of `weights=` before the job starts."""
    if config.weights is None or config.resume is not None:  # a resumed run uses its own checkpoints
        return
    path = Path(os.path.expanduser(config.weights))
    try:
        if not path.exists():
            path = path_of(config.weights)
        if not path.exists():
            names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            near = tuple(path.parent / name for name in nearest(path.name, names))
            yield Problem("weights", config.weights, "does not exist here", near)
            return
        if path.is_dir():
            model = model_of_run(path, trusted=config.launcher.shared_folder)
        else:
            model = table(parse_json(read_header(path)[1].get("model", "{}")))
    except DamagedError as error:
        yield f"weights = {path} can't be used: {error.reason}"
        return
    except (OSError, ValueError, UntrustedError) as error:  # also if several runs match the name
        yield f"weights = {path} can't be used: {getattr(error, 'strerror', None) or error}"
        return
    yield from _shape(config.model, model)


def model_of_run(path: Path, *, trusted: bool) -> Mapping[str, Any]:
    """The model of a run that has a checkpoint. Raises ValueError, UntrustedError."""
    if not is_run_folder(path):
        raise ValueError("the folder is not a run folder. Name a run folder or a .safetensors file")
    checkpoints = complete(RunFolder(path).checkpoints)
    if not checkpoints:
        raise ValueError("the run has no checkpoint")
    if not trusted:
        require_private(checkpoints[0].path)  # its index is a pickle
    return table(table(checkpoints[0].manifest.get("config")).get("model"))


def _shape(model: Any, trained: Mapping[str, Any]) -> Problems:
    """For our models: the keys that give the weights other shapes than those of the trained model."""
    target = text(trained.get("_target_"))
    if not isinstance(model, dict) or not target:
        return
    if model.get("_target_") != target:
        return  # another class may have the same weights: the job compares names
    for key in SHAPE.get(target, ()):
        if key in trained and model[key] != trained[key]:
            rule = "differs from the model that the weights were trained with"
            yield Problem(f"model.{key}", model[key], rule, (trained[key],))
