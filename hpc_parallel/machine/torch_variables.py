"""Variables that torch reads when it compiles and when it first uses a GPU."""

from __future__ import annotations

from collections.abc import MutableMapping

from hpc_parallel.machine.fabric import set_unset
from hpc_parallel.record.run_folder import RunFolder

# torch also reads the older names of this variable, so each of these names can hold the user's setting.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def use_compiler_cache(folder: RunFolder, environment: MutableMapping[str, str]) -> dict[str, str]:
    """Keep compiled code in the run folder: ranks share it, and a run that starts again finds it."""
    reason = "ranks and restarts share compiled code"
    return set_unset(environment, {COMPILER_CACHE: str(folder.compiled)}, reason=reason)


def use_expandable_segments(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Let the GPU allocator grow its segments, unless the user has configured it (torch's notes on CUDA)."""
    if any(name in environment for name in ALLOCATOR):
        return {}
    reason = "less memory is lost between segments"
    return set_unset(environment, {ALLOCATOR[-1]: "expandable_segments:True"}, reason=reason)


def use_fixed_workspaces(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Let cuBLAS use the same workspaces in each call. torch requires this for determinism."""
    return set_unset(environment, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, reason="training.deterministic")
