"""`python -m hpc_parallel` imports nothing from a folder that other users may write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_parallel.shadowing import hiding, is_private
from tests.security.users import ATTACKER, give, needs_root

ROOT = Path(__file__).resolve().parents[2]
pytestmark = needs_root


def plant(folder: Path, name: str, canary: Path) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"import os; os.mkdir({str(canary)!r})\n")
    give(folder / name, ATTACKER)


def run(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("words", [["hpc_parallel", "status"], ["hpc_parallel.run", "--cfg", "job"]])
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_modules_of_another_user_are_not_imported(shared: Path, words: list[str], mode: int) -> None:
    """yaml hides an installed module; the standard library tries org, and other packages attr."""
    here = shared / "here"
    here.mkdir()
    for name in ("yaml", "org", "attr"):
        plant(here, name, shared / f"executed-{name}")
    here.chmod(mode)
    if mode == 0o755:
        os.chown(here, ATTACKER, ATTACKER)
    done = run(here, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        f"Python modules in {str(here)!r} are not imported, because other users may write there. "
        f"If you trust them: PYTHONPATH={here}\n"
    )
    assert not list(shared.glob("executed-*"))


def test_a_folder_of_the_users_own_stays_on_the_import_path(shared: Path) -> None:
    (shared / "mymodel.py").write_text("")
    code = "import sys; sys.argv = ['-m']; import hpc_parallel, mymodel; print(sys.path[0])"
    for mode in (0o755, 0o700):
        shared.chmod(mode)
        done = subprocess.run([sys.executable, "-c", code], cwd=shared, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_write_permission_on_a_folder_decides(shared: Path) -> None:
    assert is_private(str(shared))
    shared.chmod(0o775)
    assert is_private(str(shared))  # root's own group
    os.chown(shared, -1, ATTACKER)
    assert not is_private(str(shared))
    shared.chmod(0o1777)
    assert not is_private(str(shared))
    shared.chmod(0o755)
    os.chown(shared, ATTACKER, -1)
    assert not is_private(str(shared))
    assert not is_private(str(shared / "none"))


def test_in_a_checkout_of_another_user_hidden_modules_are_named(shared: Path) -> None:
    checkout = shared / "checkout"
    checkout.mkdir()
    (checkout / "hpc_parallel").symlink_to(ROOT / "hpc_parallel")
    (checkout / "conf").symlink_to(ROOT / "conf")
    import_path = [os.path.dirname(os.path.dirname(pytest.__file__))]
    for name in ("yaml.py", "mine.py", "json.cpython-311-x86_64-linux-gnu.so", "pytest.txt"):
        (checkout / name).touch()
    for name in ("hydra_plugins", "evil-1.0.dist-info", "numpy", "rich"):
        (checkout / name).mkdir()  # numpy: without __init__ the installed one comes first
    (checkout / "rich" / "__init__.abi3.so").touch()
    assert hiding(str(checkout), import_path) == []  # this user's own
    give(checkout, ATTACKER)
    names = ["evil-1.0.dist-info", "hydra_plugins", "json.cpython-311-x86_64-linux-gnu.so", "rich", "yaml.py"]
    assert hiding(str(checkout), import_path) == names
