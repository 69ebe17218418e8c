"""One line of what `check` prints."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Line:
    """The result of one check. refused: Slurm refuses the job, so it is no matter of the configuration."""

    state: str
    subject: str
    text: str
    refused: bool = False
