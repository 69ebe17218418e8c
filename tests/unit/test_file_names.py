"""One file name has one subject: no two folders of the package have a file of the same name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import hpc_parallel

FIXED = {"__init__.py", "__main__.py"}  # names that Python needs


def test_no_file_name_stands_twice() -> None:
    names = Counter(path.name for path in Path(hpc_parallel.__file__).parent.rglob("*.py"))
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1 and name not in FIXED] == []
