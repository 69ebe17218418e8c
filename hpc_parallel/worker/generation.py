"""`task=generate`: continues prompts token by token, with the same tokens on every layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.task_schema import GenerateConfig
from hpc_parallel.config.tasks import encoded_prompts, total_steps
from hpc_parallel.data.codec import decode, reads_bytes
from hpc_parallel.models.drawn_weights import tensor_seed
from hpc_parallel.record.task_files import Continued, write_generated
from hpc_parallel.start.join import tf32
from hpc_parallel.start.start_times import synchronize
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.decode import Decoder
from hpc_parallel.strategies.exchange import all_gather_numbers
from hpc_parallel.strategies.model_checks import DifferenceError, is_compared
from hpc_parallel.strategies.precision import HALF, WEIGHTS
from hpc_parallel.training.load_weights import start_from
from hpc_parallel.training.metrics import peak_memory_bytes
from hpc_parallel.training.nonfinite import NonFiniteError, first_nonfinite, order
from hpc_parallel.training.writers import open_writers
from hpc_parallel.worker.session import Session, TaskContext, complete, phases_of


class Choose(Protocol):
    """Takes logits [batch, vocab] and the position of the next token; returns the tokens [batch]."""

    def __call__(self, logits: Tensor, *, position: int) -> Tensor: ...


def generate(context: TaskContext) -> None:
    """Continue the prompts as the configuration says, on all ranks of the default process group.

    Rank 0 writes `generated.jsonl`, `metrics.jsonl` (a step is one token of every prompt) and `summary.json`.
    Raises what `Session.open` and `start_from` raise, and ConfigError if the model can't cache keys and
    values.
    """
    config, folder, progress, rank = context.config, context.folder, context.progress, dist.get_rank()
    context.begin()
    on_phase = phases_of(folder, rank=rank)
    # One position can't be split, and a choice needs all logits.
    strategy = replace(config.strategy, sequence_parallel=False, loss_parallel=False)
    whole = replace(config, strategy=strategy)
    session = Session.open(whole, device=context.device, trains=False, on_phase=on_phase)
    on_phase("loading the weights")
    weights = start_from(config, session.assembled)
    on_phase("reading the prompts")
    prompts = prompts_of(session)
    writers = open_writers(config, folder=folder, values=context.values) if rank == 0 else []
    lines: list[dict[str, Any]] = []
    clock = Clock(config, device=context.device, prompts=len(prompts))

    def on_text() -> None:
        progress.mark("step", progress.latest[2])  # for the watchdog

    def on_token(step: int) -> None:
        progress.mark("step", step)
        if clock.due(step):
            lines.append(clock.line(step))
            for writer in writers:
                writer.write(lines[-1])

    on_phase("first tokens")
    texts, comparison = continue_prompts(session, prompts, on_token=on_token, on_text=on_text)
    continued = gathered(texts, prompts, config=config)
    progress.mark("done", progress.latest[2])
    if rank == 0:
        write_generated(folder, continued)
    comparisons = [line for line in (session.comparison, comparison) if line]
    measured = {"weights": weights, "comparison": ". ".join(comparisons) or None}
    complete(context, lines=lines, writers=writers, measured=measured)
    context.print_results()


def prompts_of(session: Session) -> list[list[int]]:
    """Returns all prompts' tokens, the same on all ranks: configured, or the start of held-out samples."""
    task = session.config.task
    assert isinstance(task, GenerateConfig)
    if task.prompts is not None:
        return encoded_prompts(session.config)
    samples = session.data.validation
    first = np.arange(session.config.training.global_batch_size, dtype=np.int64) % len(samples)
    prompts: list[list[int]] = samples.batch(first)[0][:, : task.prompt_length].tolist()
    return prompts


def continue_prompts(
    session: Session,
    prompts: Sequence[Sequence[int]],
    *,
    on_token: Callable[[int], None],
    on_text: Callable[[], None],
) -> tuple[list[Text], str | None]:
    """Returns this replica's texts, and what their comparison with whole texts shows, if there is one.

    Each of n replicas continues every n-th prompt. If n does not divide the number of prompts, some replicas
    repeat the last prompt. `on_text` is called for each compared text.

    Raises DifferenceError on all ranks if a text is not that of a model without cached keys and values, and
    NonFiniteError if the logits of a new token are NaN.
    """
    task = session.config.task
    assert isinstance(task, GenerateConfig)
    split = session.batches(session.data.validation, seed=None)
    assert split.replica is not None
    count = -(-len(prompts) // split.replicas) * split.replicas
    indices = [min(index, len(prompts) - 1) for index in range(split.replica, count, split.replicas)]
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    compares = is_compared(session.config)
    length = longest + task.new_tokens - 1
    decoder = Decoder(session.assembled, length=length, device=session.device, compares=compares)
    tokens = continue_all(
        [prompts[index] for index in indices],
        decoder=decoder,
        new_tokens=task.new_tokens,
        lengths=(shortest, longest),
        choose=chooser(task, seed=session.config.seed, prompts=indices),
        on_token=on_token,
    )
    require_finite(tokens, indices, parameters=session.assembled.named_parameters())
    ends = [len(prompts[index]) + task.new_tokens for index in indices]
    texts = [
        Text(index, prompt_tokens=len(prompts[index]), tokens=row[:end])
        for index, row, end in zip(indices, tokens, ends, strict=True)
    ]
    if not compares:
        return texts, None
    return texts, require_whole_texts(
        texts, decoder=decoder, shortest=shortest, config=session.config, on_text=on_text
    )


def gathered(
    texts: Sequence[Text], prompts: Sequence[Sequence[int]], *, config: RunConfig
) -> list[Continued]:
    """Returns a line of `generated.jsonl` for each of all `prompts`, on all ranks. `texts`: this rank's."""
    by_replica = exchange.all_gather(
        [(text.prompt, text.tokens[text.prompt_tokens :].tolist()) for text in texts]
    )
    new_tokens: dict[int, list[int]] = {index: new for part in by_replica for index, new in part}
    as_bytes = reads_bytes(config.data)
    return [
        Continued(
            prompt=decode(prompt, as_bytes=as_bytes),
            text=decode(new_tokens[index], as_bytes=as_bytes),
            prompt_tokens=tuple(prompt),
            tokens=tuple(new_tokens[index]),
        )
        for index, prompt in enumerate(prompts)
    ]


def continue_all(
    prompts: Sequence[Sequence[int]],
    *,
    decoder: Decoder,
    new_tokens: int,
    lengths: tuple[int, int],
    choose: Choose,
    on_token: Callable[[int], None],
) -> Tensor:
    """Returns this replica's prompts with their new tokens, [prompt, position].

    All prompts are at the same position: they are read together up to the end of the shortest prompt. From
    there on, a longer prompt takes its own next token until it ends. So nothing is padded or masked, and
    short prompts get more new tokens than asked for.

    `lengths`: the lengths of the shortest and the longest prompt of all replicas, because replicas may share
    collectives. `on_token` is called with the 1-based number of each new token. A token whose logits are NaN
    is -1.
    """
    shortest, longest = lengths
    total = longest + new_tokens
    rows = [[*prompt, *[-1] * (total - len(prompt))] for prompt in prompts]  # -1: not chosen yet
    tokens = torch.tensor(rows, device=decoder.device)
    start = 0
    for end in range(shortest, total):
        chosen = decoder(tokens[:, start:end].clamp_min(0), partial(choose, position=end))
        tokens[:, end] = torch.where(tokens[:, end] < 0, chosen, tokens[:, end])
        start = end
        on_token(end - shortest + 1)
    return tokens


def chooser(task: GenerateConfig, *, seed: int, prompts: Sequence[int]) -> Choose:
    """Returns a function that takes the most likely token, or draws one, the same on every layout.

    A draw depends only on (seed, prompt, position). `prompts`: for each prompt in the batch, its index among
    all prompts. To draw, probabilities are divided by exponential noise (Gumbel-max; Maddison et al. 2014).
    """
    if task.temperature == 0:
        return lambda logits, *, position: _largest(logits)

    def draw(logits: Tensor, *, position: int) -> Tensor:
        noise = torch.empty_like(logits, dtype=torch.float64)
        for row, prompt in zip(noise, prompts, strict=True):
            generator = torch.Generator(device=logits.device)
            row.exponential_(generator=generator.manual_seed(tensor_seed(seed, f"{prompt}:{position}") >> 1))
        return _largest((logits.double() / task.temperature).softmax(dim=-1) / noise)

    return draw


def _largest(scores: Tensor) -> Tensor:
    """The index of the largest score; -1 if there is a NaN, of which argmax would return the index."""
    return torch.where(scores.isnan().any(dim=-1), -1, scores.argmax(dim=-1))


def require_finite(tokens: Tensor, prompts: Sequence[int], *, parameters: Mapping[str, Parameter]) -> None:
    """Raises NonFiniteError on all ranks if the logits of a token [prompt, position] of any rank were NaN.

    prompts: the index of each row among all prompts. parameters: those of this rank, by full name.
    """
    bad = [prompt for prompt, row in zip(prompts, tokens.tolist(), strict=True) if -1 in row]
    by_rank = exchange.all_gather((bad, first_nonfinite(parameters) if bad else None))
    name = min((name for _, name in by_rank if name), key=order, default=None)
    cause = f": the weight {name} is not finite" if name else ""
    for prompt in sorted(prompt for part, _ in by_rank for prompt in part):
        message = f"the logits after prompt {prompt + 1} are NaN, so they choose no token{cause}"
        raise NonFiniteError(message, step=0, parameter=name, layer=None)


@dataclass
class Clock:
    """Measures tokens per second for each line of metrics. The host waits for the device only at a line."""

    config: RunConfig
    device: torch.device
    prompts: int

    def __post_init__(self) -> None:
        self._last_step = 0
        self._since = time.perf_counter()

    def due(self, step: int) -> bool:
        """The first step, which reads the prompts, and the last step are always due."""
        return step % self.config.training.log_every == 0 or step in (1, total_steps(self.config))

    def line(self, step: int) -> dict[str, Any]:
        """Returns the record of this step, the same on all ranks."""
        synchronize(self.device)
        step_time_s = (time.perf_counter() - self._since) / (step - self._last_step)
        times, peaks = all_gather_numbers(
            [step_time_s, float(peak_memory_bytes(self.device))], device=self.device
        )
        self._last_step, self._since = step, time.perf_counter()
        return {
            "step": step,
            "samples": self.prompts,
            "step_time_s": max(times),
            "tokens_per_s": self.prompts / max(times),
            "peak_memory_bytes": int(max(peaks)),
            "time": datetime.now(UTC).isoformat(),
        }


@dataclass(frozen=True)
class Text:
    """The index of a prompt, and all tokens [seq] of its text; `prompt_tokens` of them are the prompt."""

    prompt: int
    prompt_tokens: int
    tokens: Tensor


def require_whole_texts(
    texts: Sequence[Text],
    *,
    decoder: Decoder,
    shortest: int,
    config: RunConfig,
    on_text: Callable[[], None],
) -> str:
    """Compute each text of this replica from its start, and compare the logits of all its new tokens.

    `shortest`: the length of the prompts in the first pass of `decoder`. `on_text` is called after each text.
    All ranks call it together. Returns a line about the comparison. Raises DifferenceError on all ranks.

    The comparison at the start has random weights, few blocks and short texts. It can't show a difference of
    the run's own weights, or of a block that looks far back.
    """
    started = time.perf_counter()
    bound = _rounding(config.training.precision) ** 0.5
    shares: dict[tuple[int, int], float] = {}
    for row, text in enumerate(texts):
        shares |= _shares_of_text(text, row=row, decoder=decoder, shortest=shortest)
        on_text()
    too_far = [place for place, share in shares.items() if not share <= bound]
    by_rank = exchange.all_gather((repr(max(shares.values(), default=0.0)), too_far))  # JSON has no infinity
    largest = max(float(share) for share, _ in by_rank)
    if wrong := sorted({(prompt, number) for _, places in by_rank for prompt, number in places}):
        raise DifferenceError([_reason(wrong, largest=largest, config=config)])
    return (
        f"The logits of all new tokens are those that {config.model_class} computes from the whole text: "
        f"they differ by at most {largest:.0e} of their norm ({time.perf_counter() - started:.1f} s)"
    )


def _reason(wrong: Sequence[tuple[int, int]], *, largest: float, config: RunConfig) -> str:
    """`wrong`: prompts and the numbers of their tokens that are `largest` of the norm off, or less."""
    (prompt, number), precision = wrong[0], config.training.precision
    advice = ", so task=generate can't be used. Try task=infer."
    if precision in HALF:
        advice = f", or enlarges the rounding of {precision}: training.precision=float32 shows which."
    return (
        f"{config.model_class} computes something else with cached keys and values than from the whole text: "
        f"{len(wrong)} new tokens have other logits, the first is token {number} after prompt {prompt + 1}, "
        f"and they are off by up to {largest:.1g} of their norm. It mixes positions outside of "
        f"CausalAttention (docs/own-model.md){advice}"
    )


def _rounding(precision: str) -> float:
    """The step of numbers near 1 in a product."""
    if precision == "float32" and tf32()["matmul"]:
        return 2**-10
    return torch.finfo(HALF.get(precision, WEIGHTS[precision])).eps


def _shares_of_text(text: Text, *, row: int, decoder: Decoder, shortest: int) -> dict[tuple[int, int], float]:
    """The distance of the logits by prompt and number of the new token; empty on a rank without logits."""
    passes = slice(text.prompt_tokens - shortest, len(text.tokens) - shortest)
    logits = decoder.compare(text.tokens[None, :-1], row=row, passes=passes)
    if logits is None:
        return {}
    shares = shares_of_norm(*logits).tolist()
    return {(text.prompt, number): share for number, share in enumerate(shares, start=1)}


def shares_of_norm(whole: Tensor, cached: Tensor) -> Tensor:
    """The distance of the logits [new, vocab] as a share of their norm, [new]; infinity if it is not finite.

    An entry that both exclude (-inf) has no distance.
    """
    distance: Tensor = torch.where(whole == cached, 0.0, whole - cached)
    finite = torch.where(whole.isfinite(), whole, 0.0)
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) for x in (distance, finite)]
    shares: Tensor = norms[0] / norms[1].clamp_min(1e-300)
    return shares.nan_to_num(torch.inf, posinf=torch.inf)
