"""What a part found, on disk at once: a part that hangs or is killed leaves what it knew before."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_AVAILABLE = "not available"


@dataclass(frozen=True)
class Findings:
    """Appends one JSON object a line to `file`."""

    file: Path

    def add(self, **values: Any) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(values, default=str) + "\n")

    def read(self) -> dict[str, Any]:
        """All values by name; a later one takes the place of an earlier one."""
        found: dict[str, Any] = {}
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        for line in lines:
            found |= json.loads(line)
        return found
