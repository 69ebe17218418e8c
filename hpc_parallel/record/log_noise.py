"""A warning of torch that every rank prints and that means nothing for a run.

torch's store looks up the host name of each connection (c10d/socket.cpp, `formatSockAddr`). If the site's DNS
has no name for the address, the store warns and uses the address. The environment variable that hides this
line hides every other warning too. Commands that show a log therefore leave the line out. The file keeps it.
"""

from __future__ import annotations

import re

_HOST_NAME = re.compile(
    r"(\[rank\d+\]:)?\[W[^\]]*\] \[c10d\] The hostname of the client socket cannot be retrieved\. err=-?\d+"
)


def is_noise(line: str) -> bool:
    """Whether a line of a rank's log says nothing about the run."""
    return _HOST_NAME.fullmatch(line.rstrip()) is not None
