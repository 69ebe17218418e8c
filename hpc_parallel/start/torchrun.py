"""torchrun whose processes on all nodes only open each other's pickles.

As long as the ranks run, the torchruns of a start exchange pickles through torch's TCPStore, which answers
anyone who connects to its port.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from torch.distributed import run
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_text
from hpc_parallel.start.signed_store import require_names, sign, verify

_PICKLE = dynamic_rendezvous.pickle


def main(run_folder: str, arguments: Sequence[str]) -> None:
    """Run torchrun with these arguments; its pickles are signed with the secret in the run folder.

    Raises RuntimeError if this torch pickles elsewhere.
    """
    secret = bytes.fromhex(read_text(RunFolder(Path(run_folder)).torchrun_secret))
    require_names(dynamic_rendezvous._BackendRendezvousStateHolder.sync, "pickle", "dumps", "loads")
    dynamic_rendezvous.pickle = SimpleNamespace(  # type: ignore[assignment]
        dumps=lambda value: sign(secret, _PICKLE.dumps(value)),
        loads=lambda message: _PICKLE.loads(verify(secret, message)),
        PickleError=_PICKLE.PickleError,
    )
    run.main([*arguments])
