"""The agent of a local run ends also when its own output can't be written."""

import subprocess
import sys

_AGENT = """
import threading
from hpc_parallel.failure.local_agent import main
threading.Thread(target=threading.Event().wait).start()  # as torch's threads, which never end
main(["/nowhere"], load_entry=lambda: None)
"""


def test_the_agent_of_a_run_on_a_full_disk_ends() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", _AGENT], stdout=full, stderr=full, start_new_session=True, timeout=60
        )
    assert ended.returncode == 1
