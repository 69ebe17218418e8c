"""Generation with a cache: a token of ours, which casts weights once, and over weights drawn in bfloat16."""

from __future__ import annotations

import time

import torch

from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.strategies import cache, precision, working_weights
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "generation for each token", 25.0
PROMPT = 32


@torch.no_grad()
def run(findings: Findings) -> None:
    tokens = setting.sized(128, 4)
    as_ours = token_s(model(torch.float32, ours=True, length=PROMPT + tokens), tokens)
    weights = token_s(model(torch.bfloat16, ours=False, length=PROMPT + tokens), tokens)
    findings.add(token_s=as_ours, token_s_bfloat16_weights=weights, ratio=as_ours / weights)


def model(dtype: torch.dtype, *, ours: bool, length: int) -> LayeredModel:
    """`ours`: as `assemble` prepares it for `task=generate`."""
    built = setting.build()
    if ours:
        precision.apply(built, precision="bfloat16", device_type=setting.device().type)
    materialise(built, seed=0, device=setting.device(), dtype=dtype)
    if ours:
        working_weights.cast_for_good(built)
    return cache.apply(built, length=length).eval()


def token_s(cached: LayeredModel, count: int) -> float:
    """The mean of `count` tokens after a prompt, each read back as the task does."""
    inputs, _ = setting.batch(samples=4, seq=PROMPT)
    token = cached(inputs)[:, -1:].argmax(-1)
    token = cached(token)[:, -1:].argmax(-1)  # the first of one position loads its kernels
    setting.wait()
    began = time.perf_counter()
    for _ in range(count - 2):
        token = cached(token)[:, -1:].argmax(-1)
    setting.wait()
    return (time.perf_counter() - began) / (count - 2)
