"""Writers of metrics: the file, TensorBoard, Weights & Biases. A writer that is off imports nothing."""

from __future__ import annotations

from typing import Any, Protocol

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.tasks import total_steps
from hpc_parallel.failure.left_out import left_out
from hpc_parallel.record.credentials import public_part
from hpc_parallel.record.metrics_file import SEPARATOR, MetricsLine, described
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import append_line


class Writer(Protocol):
    """Receives each line of metrics."""

    def write(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class FileWriter:
    """Writes `metrics.jsonl`, and a readable line to the log."""

    def __init__(self, folder: RunFolder, *, steps: int) -> None:
        self._path = folder.metrics
        self._steps = steps

    def write(self, line: dict[str, Any]) -> None:
        append_line(self._path, line)
        print(SEPARATOR.join(described(MetricsLine.of(line), steps=self._steps)), flush=True)

    def close(self) -> None:
        pass


class TensorBoardWriter:
    """Writes each number of a line to `tensorboard/` in the run folder, as a scalar named by its key."""

    def __init__(self, folder: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.path / "tensorboard"))

    def write(self, line: dict[str, Any]) -> None:
        with left_out("a line for TensorBoard is"):
            for key, value in line.items():
                if isinstance(value, int | float) and key != "step":
                    self._writer.add_scalar(key, value, global_step=line["step"])

    def close(self) -> None:
        with left_out("the last lines for TensorBoard are"):
            self._writer.close()


class WandbWriter:
    """Logs to Weights & Biases; project, entity and mode come from wandb's environment variables."""

    def __init__(self, folder: RunFolder, *, config: dict[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(disable_git=True)  # otherwise wandb sends the complete uncommitted diff
        self._run = wandb.init(dir=folder.path, name=folder.path.name, config=config, settings=settings)

    def write(self, line: dict[str, Any]) -> None:
        with left_out("a line for Weights & Biases is"):
            self._run.log({k: v for k, v in line.items() if isinstance(v, int | float)}, step=line["step"])

    def close(self) -> None:
        with left_out("the last lines for Weights & Biases are"):
            self._run.finish()


def open_writers(config: RunConfig, *, folder: RunFolder, values: dict[str, Any]) -> list[Writer]:
    """Open the writers that `config` turns on. Only rank 0 calls it."""
    writers: list[Writer] = [FileWriter(folder, steps=total_steps(config))]
    if config.training.tensorboard:
        writers.append(TensorBoardWriter(folder))
    if config.training.wandb:
        writers.append(WandbWriter(folder, config=public_part(values)))
    return writers
