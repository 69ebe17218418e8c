"""Tokens per second and MFU of about 1B and of 8B's width, an ablation, and a plain compiled loop beside it.

MFU: 3 times the forward FLOPs of `LanguageModel.forward_flops` (2 for each weight and token, and the two
attention products without their masked half), divided by the device's dense bfloat16 peak. FP8 is divided by
the same peak, so its figure can be above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from hpc_parallel.problems import ConfigError
from hpc_parallel.training.metrics import peak_flops
from tests.composed import prepared
from tests.gpu.report import setting
from tests.gpu.report.findings import NOT_AVAILABLE, Findings
from tests.gpu.report.peers import free, step_s

TITLE, LIMIT_S = "the benchmark", 210.0
STEPS, LOG_EVERY = 16, 4  # the host waits for the device at a line only
LARGE = {"layers": 4, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn_dim": 14336, "vocab_size": 128256}
ONE_B = {"layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "ffn_dim": 8192, "vocab_size": 128256}
SHAPES = {"1b": ONE_B, "8b width": LARGE}
COMPILED = ("training.precision=bfloat16", "training.compile=true")
TENSORWISE = (*COMPILED, "training.fp8=tensorwise")
PLAIN = "plain compiled loop"
# In the order of their worth, since time may end: shape, samples, tokens of a sample, what, words of ours.
CASES: Sequence[tuple[str, int, int, str, tuple[str, ...]]] = (
    ("1b", 4, 2048, "bf16, compiled", COMPILED),
    ("1b", 4, 2048, PLAIN, ()),
    ("1b", 16, 2048, "bf16, compiled", COMPILED),
    ("8b width", 4, 2048, "bf16, compiled", COMPILED),
    ("8b width", 4, 2048, "fp8 tensorwise", TENSORWISE),
    ("1b", 16, 2048, PLAIN, ()),
    ("8b width", 4, 2048, "fp8 rowwise", (*COMPILED, "training.fp8=rowwise")),
    ("8b width", 4, 2048, PLAIN, ()),
    ("1b", 4, 8192, "bf16, compiled", COMPILED),
    ("1b", 4, 2048, "without compile", ("training.precision=bfloat16",)),
    ("1b", 4, 2048, "whole logits", (*COMPILED, "training.chunked_loss=false")),
    ("1b", 4, 2048, "selective checkpointing", (*COMPILED, "training.activation_checkpointing=selective")),
    ("1b", 4, 2048, "speed=max", (*COMPILED, "training.speed=max")),
    ("1b", 4, 2048, "fp8 tensorwise", TENSORWISE),
    ("8b width", 1, 8192, "bf16, compiled", COMPILED),
)


def run(findings: Findings) -> None:
    setting.join()
    setting.compile_quickly()
    peak = peak_flops(setting.device(), precision="bfloat16")
    findings.add(peak_flops=peak, rule=" ".join((__doc__ or "").split()))
    for name, count, length, what, words in CASES:
        label, shape, size = case_of(name, count, length, what)
        if what == PLAIN:
            of_peer(findings, label, PLAIN, shape, **size)
        else:
            measure(findings, label, *words_of(shape), *words, **size)


def case_of(name: str, samples: int, seq: int, what: str) -> tuple[str, Mapping[str, int], dict[str, int]]:
    """Its label, the shape and the batch; tiny ones in a dry run."""
    label = f"{name}, {samples} x {seq} tokens, {what}"
    size = setting.sized({"samples": samples, "seq": seq}, {"samples": 2, "seq": 16})
    return label, setting.sized(SHAPES[name], setting.TINY), size


def words_of(shape: Mapping[str, int]) -> list[str]:
    return [f"model.{key}={value}" for key, value in shape.items()]


def measure(findings: Findings, label: str, *words: str, samples: int, seq: int) -> float | None:
    """Tokens per second of one training of ours; if it can't run here, None, and the findings say why."""
    fixed = (
        "strategy=single", f"training.steps={STEPS}", f"training.global_batch_size={samples}",
        f"data.sequence_length={seq}", "training.validate_every=null", "training.checkpoint_every=null",
        "training.measure_steps=0", f"training.log_every={LOG_EVERY}",
        "data.max_bytes=2000000", "optimizer.learning_rate=1e-4",
    )  # fmt: skip
    if (missing := lacks(*fixed, *words)) is not None:
        findings.add(**{label: f"{NOT_AVAILABLE}: {missing}"})
        return None
    try:
        lines = lines_of(*fixed, *words)
    except torch.cuda.OutOfMemoryError as error:
        findings.add(**{label: f"out of memory: {str(error).splitlines()[0]}"})
        return None
    finally:
        free()
    rate = median(line["tokens_per_s"] for line in lines[2:])
    mfu = [line["mfu"] for line in lines[2:] if line["mfu"] is not None]
    findings.add(**{
        label: {"tokens_per_s": rate, "mfu": median(mfu) if mfu else None,
                "tflops": median(line["tflops_per_device"] for line in lines[2:]),
                "peak_bytes": lines[-1]["peak_memory_bytes"], "last_loss": lines[-1]["loss"],
                "first_step_s": lines[0]["step_time_s"]}
    })  # fmt: skip
    return rate


def lacks(*words: str) -> str | None:
    """What this version does not know of these words."""
    try:
        prepared(
            "run_dir=/nonexistent/never/written", "launcher=local", f"device={setting.device().type}", *words
        )
    except ConfigError as error:
        return str(error).splitlines()[0]
    except Exception as error:  # Hydra's, for a key that is not there
        return str(error).splitlines()[0]
    return None


def lines_of(*words: str) -> list[dict[str, Any]]:
    from hpc_parallel.record.metrics_file import MetricsReader

    if setting.on_gpu():
        torch.cuda.reset_peak_memory_stats()
    return list(MetricsReader(setting.trained(*words).metrics).read())


def of_peer(
    findings: Findings, label: str, peer: str, shape: Mapping[str, int], *, samples: int, seq: int,
    fp8: str | None = None,
) -> float | None:  # fmt: skip
    """Tokens per second of another trainer; None if it is not installed or needs too much memory."""
    try:
        seconds = step_s(peer, shape, samples=samples, seq=seq, fp8=fp8)
        findings.add(**{label: {"tokens_per_s": samples * seq / seconds, "step_s": seconds}})
        return samples * seq / seconds
    except torch.cuda.OutOfMemoryError as error:
        findings.add(**{label: f"out of memory: {str(error).splitlines()[0]}"})
    except (ImportError, ValueError) as error:  # ValueError: no float8 on this device
        findings.add(**{label: f"{NOT_AVAILABLE}: {error}"})
    finally:
        free()
    return None
