"""The command prefix that runs a rank in a profiler of NVIDIA."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.values import table

# The rank itself says when the recorded steps begin and end (cudaProfilerStart and Stop). Nsight Systems ends
# its record there and lets the rank run on.
OPTIONS: Mapping[str, Sequence[str]] = {
    "nsys": (
        "profile", "--trace=cuda,nvtx,osrt,cudnn,cublas", "--sample=none", "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop", "--kill=none", "--force-overwrite=true",
    ),
    "ncu": ("--profile-from-start=off", "--nvtx", "--target-processes=all", "--force-overwrite"),
}  # fmt: skip
OUTPUT = {"nsys": "--output", "ncu": "--export"}


class ProfilerError(RuntimeError):
    """The profiler is not on this host."""


def profiler_words(config: Mapping[str, Any], *, folder: RunFolder, rank: int, host: str) -> list[str]:
    """The words before the rank's command; empty for a rank that is not recorded.

    `config`: the run's configuration as plain values. Raises ProfilerError.
    """
    profile = table(config.get("profile"))
    kind = str(profile.get("kind"))
    if kind not in OPTIONS or rank not in profile["ranks"]:
        return []
    if shutil.which(kind) is None:
        raise ProfilerError(f"profile={kind}: there is no {kind} on {host}. Try launcher.modules=[MODULE].")
    folder.profile.mkdir(mode=0o700, exist_ok=True)
    output = f"{OUTPUT[kind]}={folder.profile}/rank-{rank}"
    return [kind, *OPTIONS[kind], output, *map(str, profile["arguments"])]
