"""A warning of torch's that every rank prints and that means nothing for a run.

torch's store asks for the host name of each connection (c10d/socket.cpp, `formatSockAddr`) and warns if the
site's DNS has none for the address; it then uses the address. The environment variable that hides this line
hides every other warning too, so the line is left out where a log is shown. The file keeps it.
"""

from __future__ import annotations

import re

_HOST_NAME = re.compile(
    r"(\[rank\d+\]:)?\[W[^\]]*\] \[c10d\] The hostname of the client socket cannot be retrieved\. err=-?\d+"
)


def is_noise(line: str) -> bool:
    """Whether a line of a rank's log says nothing about the run."""
    return _HOST_NAME.fullmatch(line.rstrip()) is not None
