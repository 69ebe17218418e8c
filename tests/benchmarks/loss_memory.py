"""Peak memory and time of one loss with its gradients: whole logits against chunks of tokens.

Each figure is of a new process. `python -m tests.benchmarks.loss_memory` (about a minute on two cores).
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from statistics import median

TOKENS, DIM, VOCABULARY = 2048, 256, 32768
ROUNDS = 5


def measure(kind: str, chunk_bytes: int) -> None:
    """Print MB above the start and the median seconds of a round."""
    import torch

    from hpc_parallel.strategies import chunked_loss

    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, DIM, generator=generator, requires_grad=True)
    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    chunked_loss.LOSS_CHUNK_BYTES["cpu"] = chunk_bytes
    before, times_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        if kind == "whole":
            loss = torch.nn.functional.cross_entropy(hidden @ weight.T, target, reduction="sum")
        else:
            loss = chunked_loss.ChunkedCrossEntropy.apply(hidden, weight, target, torch.float32, None)
        loss.backward()
        hidden.grad = weight.grad = None
        times_s.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{(peak - before) / 1024:.0f} {median(times_s):.3f}")


def main() -> None:
    """Print a row for whole logits and for two sizes of chunks, in turn."""
    if len(sys.argv) > 1:
        measure(sys.argv[1], int(sys.argv[2]))
        return
    print(f"{TOKENS} tokens, dim {DIM}, {VOCABULARY} words, float32: MB above the start, seconds")
    for kind, chunk_bytes in (("whole", 0), ("chunked", 2**29), ("chunked", 2**26)) * 2:
        command = [sys.executable, "-m", "tests.benchmarks.loss_memory", kind, str(chunk_bytes)]
        figures = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        print(f"{kind:8} {chunk_bytes >> 20:4} MiB a chunk: {figures[0]:>5} MB {figures[1]} s", flush=True)


if __name__ == "__main__":
    main()
