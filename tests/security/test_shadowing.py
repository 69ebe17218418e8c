"""`python -m hpc_parallel` in a folder with another user's modules says so before it imports them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_parallel.shadowing import shadowed
from tests.security.users import ATTACKER, give, needs_root

ROOT = Path(__file__).resolve().parents[2]


def plant(folder: Path, name: str, canary: Path) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"import os; os.mkdir({str(canary)!r})\n")
    give(folder / name, ATTACKER)


@needs_root
@pytest.mark.parametrize("module", ["hpc_parallel", "hpc_parallel.run"])
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_another_users_yaml_is_not_imported(shared: Path, module: str, mode: int) -> None:
    here = shared / "here"
    here.mkdir()
    plant(here, "yaml", shared / "executed")
    here.chmod(mode)
    if mode == 0o755:
        os.chown(here, ATTACKER, ATTACKER)
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"The current folder {str(here)!r} holds 'yaml' of another user, which Python would import in place "
        "of the installed module. Try the command hpc-parallel, or another folder.\n"
    )
    assert not (shared / "executed").exists()


@needs_root
def test_only_what_would_be_imported_counts(shared: Path) -> None:
    import_path = [os.path.dirname(os.path.dirname(pytest.__file__))]
    shared.chmod(0o777)
    for name in ("yaml.py", "mine.py", "json.so", "pytest.txt", "hpc_parallel.py"):
        (shared / name).touch()
    for name in ("hydra_plugins", "evil-1.0.dist-info", "numpy", "notes"):
        (shared / name).mkdir()  # numpy: without __init__ the installed one comes first
    assert shadowed(str(shared), import_path) == []  # this user's own
    give(shared, ATTACKER)
    assert shadowed(str(shared), import_path) == ["evil-1.0.dist-info", "hydra_plugins", "json.so", "yaml.py"]
    assert shadowed(str(shared / "none"), import_path) == []
