"""Write the tables and commands of docs/published-results.md: plans beside results that others published.

    python docs/published.py            # writes them, and leaves the text of the page alone
    python docs/published.py --check    # exits with 1 if they are stale

Each row is a command of `plan`. Nothing is fitted to the rows: if a plan changes, write the page again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))  # the package of this checkout

from hpc_parallel.__main__ import main as command  # noqa: E402

PAGE = DOCS / "published-results.md"
A100, A100_40, H100 = "a100_80gb_node8_1600gbit", "a100_40gb_node8_800gbit", "h100_sxm_node8_3200gbit"
DEVICES = {A100: "A100 80GB", A100_40: "A100 40GB", H100: "H100"}
FAMILIES = {"A100": (A100, A100_40), "H100": (H100,)}
SHAPES = {  # layers, dim, heads, kv_heads, ffn_dim, vocab_size
    "Llama 2 7B": (32, 4096, 32, 32, 11008, 32000),
    "Llama 2 13B": (40, 5120, 40, 40, 13824, 32000),
    "Llama 2 34B": (48, 8192, 64, 8, 22016, 32000),
    "Llama 2 70B": (80, 8192, 64, 8, 28672, 32000),
    "TinyLlama 1.1B": (22, 2048, 32, 4, 5632, 32000),
    "MPT 125M": (12, 768, 12, 12, 2048, 50368),
    "MPT 1B": (24, 2048, 16, 16, 5464, 50368),
    "MPT 3B": (32, 2560, 20, 20, 6824, 50368),
    "MPT 7B": (32, 4096, 32, 32, 10920, 50368),
    "MPT 13B": (40, 5120, 40, 40, 13656, 50368),
    "MPT 30B": (48, 7168, 56, 56, 19112, 50368),
    "MPT 70B": (80, 8192, 64, 64, 21848, 50368),
}
KEYS = ("layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab_size")
IN_CONF = {"Llama 3 70B": "model=70b"}


@dataclass(frozen=True)
class Row:
    """A published result, in tokens/s of a device, and its settings.

    batch: samples of a step. microbatch: of a device. recomputed: with full activation checkpointing.
    """

    source: str
    model: str
    hardware: str
    devices: int
    length: int
    batch: int
    microbatch: int
    recomputed: bool
    published: int
    strategy: str = "fsdp"

    @property
    def words(self) -> list[str]:
        """The words of `plan`."""
        model = IN_CONF.get(self.model, "model=8b").split()
        if self.model not in IN_CONF:
            model += [f"model.{key}={value}" for key, value in zip(KEYS, SHAPES[self.model], strict=True)]
        if self.model.startswith("MPT"):
            model.append("model.tied_head=true")
        return [
            f"strategy={self.strategy}", f"hardware={self.hardware}", f"nodes={self.devices // 8}",
            "gpus_per_node=8", *model, f"data.sequence_length={self.length}",
            f"training.global_batch_size={self.batch}", f"training.microbatch_size={self.microbatch}",
            *["training.activation_checkpointing=full"] * self.recomputed,
        ]  # fmt: skip


def rows() -> list[Row]:
    no, full = False, True
    titan, ibm, tiny, mpt = "torchtitan", "fms-fsdp", "TinyLlama", "llm-foundry"
    return [
        Row(titan, "Llama 2 13B", A100, 64, 4096, 128, 2, no, 2162),
        Row(titan, "Llama 2 70B", A100, 64, 4096, 128, 2, full, 353),
        Row(titan, "Llama 3 70B", A100, 64, 8192, 64, 1, full, 331),
        Row(ibm, "Llama 2 7B", A100, 128, 4096, 256, 2, no, 3760, strategy="hsdp"),
        Row(ibm, "Llama 2 13B", A100, 128, 4096, 128, 1, no, 1700, strategy="hsdp"),
        Row(ibm, "Llama 2 34B", A100, 128, 4096, 1024, 8, full, 772),
        Row(ibm, "Llama 2 70B", A100, 128, 4096, 768, 6, full, 380),
        Row(tiny, "TinyLlama 1.1B", A100_40, 16, 2048, 1024, 8, no, 24000),
        Row(mpt, "MPT 125M", A100, 8, 2048, 640, 40, no, 142830),
        Row(mpt, "MPT 3B", A100, 8, 8192, 144, 3, no, 7695),
        Row(mpt, "MPT 7B", A100, 8, 2048, 96, 6, no, 4641),
        Row(mpt, "MPT 13B", A100, 8, 4096, 240, 10, full, 2060),
        Row(mpt, "MPT 30B", A100, 8, 2048, 504, 3, full, 916),
        Row(mpt, "MPT 70B", A100, 64, 2048, 2048, 8, full, 410),
        Row(mpt, "MPT 1B", H100, 8, 2048, 112, 14, no, 45455),
        Row(mpt, "MPT 3B", H100, 64, 2048, 1152, 6, no, 22525),
        Row(mpt, "MPT 7B", H100, 8, 2048, 48, 6, no, 10643),
        Row(mpt, "MPT 13B", H100, 8, 2048, 16, 2, no, 4792),
        Row(mpt, "MPT 13B", H100, 64, 2048, 128, 2, no, 4800),
        Row(mpt, "MPT 30B", H100, 16, 2048, 480, 10, full, 2263),
        Row(mpt, "MPT 30B", H100, 8, 8192, 168, 1, full, 1384),
        Row(mpt, "MPT 70B", H100, 64, 2048, 2048, 8, full, 1039),
    ]


@dataclass(frozen=True)
class Planned:
    """What `plan` says of a row. fits: whether the memory is enough."""

    row: Row
    tokens_per_s: float
    fits: bool

    @property
    def error(self) -> float:
        return self.tokens_per_s / self.row.published - 1


def plan(row: Row) -> Planned:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = command(["plan", "--json", *row.words])
    if code:
        raise ValueError(f"plan exits with {code}: {' '.join(row.words)}")
    found = json.loads(text.getvalue())
    fits = found["memory_bytes"] <= found["device_memory_bytes"]
    return Planned(row, found["tokens_per_s"] / found["devices"], fits)


def page(planned: Sequence[Planned]) -> str:
    """The page with the tables and the commands of these plans."""
    text = PAGE.read_text()
    for name, lines in (("table", _table), ("errors", _errors), ("commands", _commands)):
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(lines(planned)) + f"\n{end}" + rest.partition(end)[2]
    return text


def _table(planned: Sequence[Planned]) -> Iterator[str]:
    heads = ("row", "source", "model", "devices", "strategy", "length", "batch", "microbatch", "recompute",
             "published", "planned", "error", "memory")  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for at, one in enumerate(planned, start=1):
        row = one.row
        cells = (
            at, row.source, row.model, f"{row.devices} x {DEVICES[row.hardware]}", row.strategy, row.length,
            row.batch, row.microbatch, "full" if row.recomputed else "none", f"{row.published:,}",
            f"{one.tokens_per_s:,.0f}", f"{100 * one.error:+.1f} %", "fits" if one.fits else "may not fit",
        )  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


def _errors(planned: Sequence[Planned]) -> Iterator[str]:
    yield "| devices | rows | mean absolute error | errors |"
    yield "|---|---|---|---|"
    for name, kinds in FAMILIES.items():
        errors = [100 * one.error for one in planned if one.row.hardware in kinds]
        spread = f"{min(errors):+.1f} to {max(errors):+.1f} %"
        yield f"| {name} | {len(errors)} | {mean(map(abs, errors)):.1f} % | {spread} |"


def _commands(planned: Sequence[Planned]) -> Iterator[str]:
    yield "<!-- not run: tests/unit/test_published_plans.py runs each, and compares it with the table -->"
    yield "```bash"
    for at, one in enumerate(planned, start=1):
        yield f"# row {at}"
        yield f"python -m hpc_parallel plan {' '.join(one.row.words)}"
    yield "```"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = page([plan(row) for row in rows()])
    if not parser.parse_args().check:
        PAGE.write_text(text)
        return 0
    return int(text != PAGE.read_text())


if __name__ == "__main__":
    sys.exit(main())
