"""`task=generate`: prompts continued token by token, the same tokens on every layout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.config.schema import GenerateConfig, RunConfig
from hpc_parallel.config.tasks import encoded_prompts, total_steps
from hpc_parallel.data.codec import decode, reads_bytes
from hpc_parallel.models.layered import tensor_seed
from hpc_parallel.record import attempts
from hpc_parallel.record.results import results
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.decode import Decoder
from hpc_parallel.strategies.exchange import all_gather_numbers
from hpc_parallel.training.load_weights import start_from
from hpc_parallel.training.metrics import peak_memory_bytes
from hpc_parallel.training.writers import open_writers
from hpc_parallel.worker.session import Session, complete

Choose = Callable[[Tensor, int], Tensor]
"""Logits [batch, vocab] and the place of the token that they are for -> the token [batch]."""


def generate(
    config: RunConfig,
    *,
    values: dict[str, Any],
    folder: RunFolder,
    device: torch.device,
    environment: Mapping[str, str],
) -> None:
    """Continue the prompts as `config` says, on all ranks of the default process group.

    Rank 0 writes `generated.jsonl`, `metrics.jsonl` (a step is a token of every prompt) and `summary.json`.
    Raises what `Session.open` and `start_from` raise, and ConfigError for a model that can't keep keys
    and values.
    """
    rank = dist.get_rank()
    if rank == 0:
        attempts.begin(folder, step=0, environment=environment)
    session = Session.open(whole_positions(config), device=device, trains=False)
    weights = start_from(config, session.assembled)
    prompts = prompts_of(session)
    writers = open_writers(config, folder=folder, values=values) if rank == 0 else []
    lines: list[dict[str, Any]] = []
    clock = Clock(config, device=device, prompts=len(prompts))

    def note(step: int) -> None:
        if clock.due(step):
            lines.append(clock.line(step))
            for writer in writers:
                writer.write(lines[-1])

    texts = continue_prompts(session, prompts, note=note)
    if rank == 0:
        write_text(folder.generated, "".join(json.dumps(text) + "\n" for text in texts))
    complete(values, folder=folder, lines=lines, writers=writers, measured={"weights": weights})
    if rank == 0:
        print(*results(folder, read_json(folder.summary) or {}), sep="\n", flush=True)


def whole_positions(config: RunConfig) -> RunConfig:
    """A single position can't be split by sequence, and to choose a token all of its logits are needed."""
    return replace(config, strategy=replace(config.strategy, sequence_parallel=False, loss_parallel=False))


def prompts_of(session: Session) -> list[list[int]]:
    """Tokens of every prompt, the same on all ranks: those configured, else how held-out samples begin."""
    task = session.config.task
    assert isinstance(task, GenerateConfig)
    if task.prompts is not None:
        return encoded_prompts(session.config)
    samples = session.data.validation
    first = np.arange(session.config.training.global_batch_size, dtype=np.int64) % len(samples)
    found: list[list[int]] = samples.batch(first)[0][:, : task.prompt_length].tolist()
    return found


def continue_prompts(
    session: Session, prompts: Sequence[Sequence[int]], *, note: Callable[[int], None]
) -> list[dict[str, Any]]:
    """A line of `generated.jsonl` for each prompt, on all ranks.

    Each replica has every n-th prompt, and some the last one again where they don't divide.
    """
    task = session.config.task
    assert isinstance(task, GenerateConfig)
    split = session.batches(session.data.validation, seed=None)
    assert split.replica is not None
    count = -(-len(prompts) // split.replicas) * split.replicas
    mine = [min(index, len(prompts) - 1) for index in range(split.replica, count, split.replicas)]
    tokens = continue_all(
        session,
        [prompts[index] for index in mine],
        lengths=(min(map(len, prompts)), max(map(len, prompts))),
        choose=chooser(task, seed=session.config.seed, prompts=mine),
        note=note,
    ).tolist()
    ends = (len(prompts[index]) for index in mine)
    here = [(i, row[end : end + task.new_tokens]) for i, row, end in zip(mine, tokens, ends, strict=True)]
    found: dict[int, list[int]] = {i: new for part in exchange.all_gather(here) for i, new in part}
    as_bytes = reads_bytes(session.config.data)
    return [
        {
            "prompt": decode(prompt, as_bytes=as_bytes),
            "text": decode(found[index], as_bytes=as_bytes),
            "prompt_tokens": list(prompt),
            "tokens": found[index],
        }
        for index, prompt in enumerate(prompts)
    ]


def continue_all(
    session: Session,
    prompts: Sequence[Sequence[int]],
    *,
    lengths: tuple[int, int],
    choose: Choose,
    note: Callable[[int], None],
) -> Tensor:
    """This replica's prompts with what follows them: [prompt, position]; a short one is continued for longer.

    All stand at the same position: they are read together up to the end of the shortest, and a longer one
    then takes its next token from itself. So there is nothing to pad and nothing to mask.

    lengths: of the shortest and the longest prompt of all replicas, which may have to run in step.
    """
    task = session.config.task
    assert isinstance(task, GenerateConfig)
    shortest, longest = lengths
    total = longest + task.new_tokens
    rows = [[*prompt, *[-1] * (total - len(prompt))] for prompt in prompts]  # -1: to be chosen
    tokens = torch.tensor(rows, device=session.device)
    decoder = Decoder(session.assembled, length=total - 1, device=session.device)
    start = 0
    for end in range(shortest, total):
        chosen = decoder(tokens[:, start:end], lambda logits, place=end: choose(logits, place))  # type: ignore[misc]
        tokens[:, end] = torch.where(tokens[:, end] < 0, chosen, tokens[:, end])
        start = end
        note(end - shortest + 1)
    return tokens


def chooser(task: GenerateConfig, *, seed: int, prompts: Sequence[int]) -> Choose:
    """The likeliest token, or one drawn by (seed, prompt, place) alone: the same on every layout.

    prompts: the number of each of the batch. The draw divides probabilities by exponential noise
    (Gumbel-max; Maddison et al. 2014).
    """
    if task.temperature == 0:
        return lambda logits, place: logits.argmax(dim=-1)

    def draw(logits: Tensor, place: int) -> Tensor:
        noise = torch.empty_like(logits, dtype=torch.float64)
        for row, prompt in zip(noise, prompts, strict=True):
            generator = torch.Generator(device=logits.device)
            row.exponential_(generator=generator.manual_seed(tensor_seed(seed, f"{prompt}:{place}") >> 1))
        return ((logits.double() / task.temperature).softmax(dim=-1) / noise).argmax(dim=-1)

    return draw


@dataclass
class Clock:
    """Says now and then how fast tokens come; only then does the host wait for the device."""

    config: RunConfig
    device: torch.device
    prompts: int

    def __post_init__(self) -> None:
        self._last = 0
        self._since = time.perf_counter()

    def due(self, step: int) -> bool:
        """The first step, which reads the prompts, and the last always are."""
        return step % self.config.training.log_every == 0 or step in (1, total_steps(self.config))

    def line(self, step: int) -> dict[str, Any]:
        """The same on all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = (time.perf_counter() - self._since) / (step - self._last)
        times, peaks = all_gather_numbers(
            [elapsed, float(peak_memory_bytes(self.device))], device=self.device
        )
        self._last, self._since = step, time.perf_counter()
        return {
            "step": step,
            "samples": self.prompts,
            "step_time_s": max(times),
            "tokens_per_s": self.prompts / max(times),
            "peak_memory_bytes": int(max(peaks)),
            "time": datetime.now(UTC).isoformat(),
        }
