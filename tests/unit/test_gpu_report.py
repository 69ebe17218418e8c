"""`make gpu` in a dry run on the CPU: each part works, and one that fails or hangs does not stop the next."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu.report import parts
from tests.gpu.report.markdown import page

pytestmark = pytest.mark.processes

QUICK = "abdefghin"
SLOW = "cjklmop"
STOPPED = {"failed": "raise ValueError('no such kernel')", "killed by signal 9": "os.kill(os.getpid(), 9)",
           "out of time": "time.sleep(1000)"}  # fmt: skip


def points_agree(found: dict[str, Any]) -> bool:
    images = [figures for key, figures in found.items() if "float" in key and "," in key]
    losses = [(figures["channels_last"]["loss"], figures["plain"]["loss"]) for figures in images]
    same = all(ordered == pytest.approx(plain, rel=1e-2) for ordered, plain in losses)
    return same and found["same_bits"] is True and len(found["experts_in_bfloat16"]) == 4


def all_are_measured(found: dict[str, Any]) -> bool:
    measured = [figures for figures in found.values() if isinstance(figures, dict)]
    return len(measured) >= 10 and all(figures["tokens_per_s"] > 0 for figures in measured)


def tensor_learns_as_plain(found: dict[str, Any]) -> bool:
    losses = [figures["losses"] for figures in found.values()]
    return all(each["tensor"] == pytest.approx(each["plain"], rel=1e-2) for each in losses)


FOUND: dict[str, Callable[[dict[str, Any]], bool]] = {  # what is true of a part's findings on a CPU too
    "d": lambda found: found["ring_slice_8k"]["kernel"] == "CPU_FLASH",
    "e": lambda found: set(found["timeouts_s"].values()) == {found["expected_s"]},
    "f": lambda found: {name: each["ranks"] for name, each in found.items()} == {"8b": 32, "70b": 32},
    "g": tensor_learns_as_plain,
    "j": lambda found: not any(row["problems"] for key, row in found.items() if "," in key),
    "k": lambda found: set(found["outcomes"].values()) == {"PASSED"},
    "l": all_are_measured,
    "m": lambda found: all(isinstance(figures, dict) for figures in found.values()),  # a text: it stopped
    "n": points_agree,
    "o": lambda found: found["1b, 4 x 2048 tokens, bf16, compiled, ours by FSDP2 loop"] > 0,
    "p": lambda found: all(figures["tokens_per_s"] > 0 for figures in found.values()),
}


@pytest.fixture(autouse=True)
def dry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_PARALLEL_TEST_DEVICE", "cpu")


@pytest.mark.full
@pytest.mark.parametrize("letters", [QUICK, *SLOW])
def test_each_part_works_on_the_cpu(letters: str, tmp_path: Path) -> None:
    outcomes = parts.run_parts(list(letters), tmp_path, total_s=1000)
    assert {outcome.letter: outcome.error for outcome in outcomes} == dict.fromkeys(letters)
    assert all(outcome.outcome == "done" and outcome.found for outcome in outcomes)
    found = {outcome.letter: outcome.found for outcome in outcomes}
    json.dumps(found)
    assert "| d | attention | done |" in page({}, outcomes) or "d" not in letters
    for letter, holds in FOUND.items():
        assert letter not in found or holds(found[letter]), found[letter]


def test_a_part_that_stops_does_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes a figure, then stops in its own way; the last one works."""
    modules = tmp_path / "stopping"
    modules.mkdir()
    monkeypatch.syspath_prepend(modules)
    letters = {}
    for number, (outcome, code) in enumerate({**STOPPED, "done": "pass"}.items()):
        source = f"import os, time\ndef run(findings):\n    findings.add(known={number})\n    {code}\n"
        (modules / f"stopping_{number}.py").write_text(source)
        letters[outcome] = f"stopping_{number}"
    monkeypatch.setattr(parts, "LETTERS", letters)
    monkeypatch.setattr(parts, "heading", lambda module: (module, 1.5))
    outcomes = [
        parts.run_part(letter, tmp_path, context=SimpleNamespace(Process=in_fork)) for letter in letters
    ]
    assert [outcome.outcome for outcome in outcomes] == list(letters)
    assert [outcome.found for outcome in outcomes] == [{"known": number} for number in range(4)]
    assert "ValueError: no such kernel" in (outcomes[0].error or "")


def in_fork(**arguments: object) -> object:
    import multiprocessing

    return multiprocessing.get_context("fork").Process(**arguments)


def test_the_benchmark_comes_first_and_leaves_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = parts.LETTERS
    limits = {letter: parts.heading(module)[1] for letter, module in parts.LETTERS.items()}
    assert (first, others[0]) == ("l", "k")
    assert limits["l"] + limits["k"] + limits["n"] <= parts.TOTAL_S - 150  # for what only one device shows
    given: list[float] = []

    def run_part(letter: str, folder: Path, *, context: object, most_s: float) -> parts.Outcome:
        given.append(round(most_s))
        return parts.Outcome(letter, letter, "done", 0.0, {}, None)

    server = SimpleNamespace(Process=in_fork, set_forkserver_preload=lambda names: None)
    monkeypatch.setattr(parts, "run_part", run_part)
    # None of the replaced parts needs what a server imports.
    monkeypatch.setattr(parts, "multiprocessing", SimpleNamespace(get_context=lambda kind: server))
    clock = iter([0.0, 0.0, 200.0, 479.0]).__next__
    parts.run_parts(["l", "k", "a"], tmp_path, total_s=480, clock=clock)
    assert given == [480, 280, parts.LEAST_S]
