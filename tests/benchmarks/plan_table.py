"""Plan a table of iterations of GPT models with Megatron-LM: its rows, with the planned time of each.

    python tests/benchmarks/plan_table.py TABLE --output CSV hardware=NAME

TABLE is CSV with the columns of COLUMNS; the output has the same rows with `planned_ms`. A plan assumes the
software of the measured data in `tests/data/`: mixed precision with float16, full recomputation, 1F1B,
gradients averaged after the backward pass, and a vocabulary of 50,257 padded to a multiple of 128 on each
device. Exit codes: 0 done, 1 the output can't be written, 2 the table or the command is wrong.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc_parallel.layout.counts import DecoderSizes
from hpc_parallel.planning.hardware import NOT_CALIBRATED, Hardware, named_hardware
from hpc_parallel.planning.step_time import StepTime, step_time
from hpc_parallel.planning.work import Work
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.shell import run_command

COLUMNS = (
    "gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "sequence",
    "tensor", "data", "pipeline",
)  # fmt: skip
PLANNED = "planned_ms"
VOCABULARY, PADDING = 50257, 128
MOST_PROBLEMS = 20
Row = dict[str, str]


def read_rows(text: str, *, name: str) -> list[Row]:
    """The rows of a table. Raises ConfigError with all missing columns and wrong values."""
    reader = csv.DictReader(text.splitlines())
    try:
        return _checked_rows(reader, name)
    except csv.Error as error:
        raise ConfigError([f"{name}:{reader.line_num + 1}: {error}."]) from error


def _checked_rows(reader: csv.DictReader[str], name: str) -> list[Row]:
    columns = reader.fieldnames or []
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise ConfigError([f"{name} has no column {column}." for column in missing])
    rows, problems = [], []
    for row in reader:
        rows.append(row)
        problems += [f"{name}:{reader.line_num}: {problem}" for problem in _problems(row, len(columns))]
    if not rows:
        problems = [f"{name} has no rows."]
    if problems:
        more = len(problems) - MOST_PROBLEMS
        raise ConfigError(problems[:MOST_PROBLEMS] + [f"{name}: {more} more problems."] * (more > 0))
    return rows


def _problems(row: Mapping[str | None, Any], columns: int) -> list[str]:
    """The reasons why a row is no iteration that can run. columns: the number of the table's columns."""
    if None in row:
        return [f"there are {columns + len(row[None])} values, more than the {columns} columns."]
    values = {column: _integer(row.get(column)) for column in COLUMNS}
    wrong = [column for column, value in values.items() if value is None]
    if wrong:
        return [f"{column} = {row.get(column)!r} is not a positive integer." for column in wrong]
    numbers = {column: value or 0 for column, value in values.items()}
    factors = ("tensor", "data", "pipeline")
    devices = math.prod(numbers[factor] for factor in factors)
    problems = []
    if devices != numbers["gpus"]:
        problems.append(f"tensor x data x pipeline = {devices}, but gpus = {numbers['gpus']}.")
    for part, whole, divisor in (
        ("data x micro_batch", "global_batch", numbers["data"] * numbers["micro_batch"]),
        ("heads", "hidden", numbers["heads"]),
        ("tensor", "heads", numbers["tensor"]),
        ("pipeline", "layers", numbers["pipeline"]),
    ):
        if numbers[whole] % divisor:
            problems.append(f"{part} = {divisor} does not divide {whole} = {numbers[whole]}.")
    return problems


def _integer(text: str | None) -> int | None:
    try:
        value = int(text or "")
    except ValueError:
        return None
    return value if 0 < value < 2**31 else None


def work_of(row: Mapping[str, str]) -> Work:
    """The step of a row that `read_rows` has accepted."""
    _, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = (int(row[c]) for c in COLUMNS)
    padding = PADDING * tensor
    decoder = DecoderSizes(
        layers, hidden, heads=heads, kv_heads=heads, ffn_dim=4 * hidden, sequence=sequence,
        vocabulary=math.ceil(VOCABULARY / padding) * padding,
    )  # fmt: skip
    blocks = (layers // pipeline,) * pipeline
    return Work(decoder, tensor, data, pipeline, micro, microbatches=batch // data // micro, blocks=blocks)


def plan_row(row: Mapping[str, str], hardware: Hardware) -> StepTime:
    return step_time(work_of(row), hardware)


def with_planned(rows: Sequence[Row], hardware: Hardware) -> list[Row]:
    """The rows with `planned_ms`, the planned time of one iteration."""
    return [{**row, PLANNED: f"{1e3 * plan_row(row, hardware).total_s:.6f}"} for row in rows]


def table_text(rows: Sequence[Row]) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_table(file: Path) -> list[Row]:
    """The rows of a file. Raises ConfigError as `read_rows`, or if the file can't be read."""
    try:
        return read_rows(file.read_text(encoding="utf-8"), name=str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file} can't be read: {error}."]) from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", metavar="TABLE", type=Path)
    parser.add_argument("hardware", metavar="hardware=NAME")
    parser.add_argument("--output", metavar="CSV", type=Path, required=True)
    parser.add_argument("--config-dir", type=Path, help="a folder whose hardware/ has files of your own")
    options = parser.parse_args()
    rows = read_table(options.table)
    hardware = named_hardware(options.hardware.removeprefix("hardware="), user_folder=options.config_dir)
    write_text(options.output, table_text(with_planned(rows, hardware)), mode=0o666)
    print(f"{options.output}: {len(rows)} rows with {PLANNED}. {hardware.calibration or NOT_CALIBRATED}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
