"""The page of a plan alone: its figures are those of the plan, and it opens on wide and narrow screens."""

from __future__ import annotations

import html
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_parallel.__main__ import main
from hpc_parallel.commands.plan_scaling import planned_size, with_nodes
from hpc_parallel.config.resolve import resolve
from hpc_parallel.planning import memory
from hpc_parallel.planning.hardware import named_hardware
from hpc_parallel.record.task_files import RankTimeline, StageWork
from hpc_parallel.report.plan_html import MAX_CHUNKS, MAX_RANKS, PARTS, drawable
from tests.composed import composed
from tests.report.browser import open_page, unavailable_reason

HARDWARE = "a100_80gb_node8_800gbit"
RUN = (
    "strategy=hybrid", "model=1b", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.tensor=2",
    "training.global_batch_size=8", "training.microbatch_size=1",
)  # fmt: skip
PLAN = (*RUN, f"hardware={HARDWARE}", "cluster.device_hour_price=2.5")
VALUE = re.compile(r'data-value="([^"]*)"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan") / "my-plan"
    assert main(["plan", *PLAN, "--output", str(folder)]) == 0
    return folder


def rows(page: Path, table: str) -> list[list[str]]:
    """The cells of a table's body."""
    body = page.read_text().partition(f'id="{table}"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return [re.findall(r"<td[^>]*>.*?</td>", row, re.DOTALL) for row in body.split("</tr>")[:-1]]


def test_its_figures_are_those_of_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *PLAN, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((folder / "plan.json").read_text()) == printed
    shown = {key: float(value) for key, value in re.findall(
        r'data-key="(\w+)" data-value="([^"]+)"', (folder / "index.html").read_text())}  # fmt: skip
    assert shown == {key: printed[key] for key in shown}
    assert {"step_time_s", "tokens_per_s", "device_hours", "cost", "energy_kwh", "memory_bytes"} <= set(shown)


def test_its_command_plans_the_same_and_shows_no_credential(tmp_path: Path) -> None:
    secret = "+cluster.environment.WANDB_API_KEY=k0123456789"
    words = ["model=tiny", f"hardware={HARDWARE}", "optimizer.betas=[0.9, 0.95]", secret]
    folder = tmp_path / "my-plan"
    assert main(["plan", *words, "--tokens", "2e9", "--output", str(folder)]) == 0
    text = html.unescape((folder / "index.html").read_text())
    (line,) = re.findall(r"python -m hpc_parallel plan [^<]*", text)
    command = shlex.split(line)[4:]
    assert command == ["--tokens", "2e+09", *words[:3], "+cluster.environment.WANDB_API_KEY=..."]
    assert "0123456789" not in text


def test_its_memory_is_that_of_each_role(folder: Path) -> None:
    """Two stages of two devices; each kind is in one part of a bar."""
    config, *_ = resolve(composed(*RUN, "device=cuda"))
    held = memory.plan(config)
    *kinds, total = rows(folder / "index.html", "memory")
    sums = [int(VALUE.search(cell)[1]) for cell in total[1:]]  # type: ignore[index]
    assert sums == [held.devices[0].total, held.devices[2].total]
    for at, column in ((0, 1), (2, 2)):
        values = [int(VALUE.search(row[column])[1]) for row in kinds]  # type: ignore[index]
        assert values == [size for kind, size in held.devices[at].kinds.items()
                          if size or held.devices[2 - at].kinds[kind]]  # fmt: skip
    parts = [kind for _, kinds_of_part in PARTS for kind in kinds_of_part]
    assert sorted(parts) == sorted(memory.KINDS)


def test_its_sizes_are_plans_of_the_same_batch(folder: Path) -> None:
    hardware = named_hardware(HARDWARE, user_folder=None)
    sizes = [
        planned_size(with_nodes(PLAN[:-2], str(nodes)), hardware=hardware, user_folder=None)
        for nodes in (2, 4, 8)
    ]
    shown = rows(folder / "index.html", "scaling")
    assert [re.sub("<.*?>", "", row[0]) for row in shown] == ["2", "4", "8"]
    for size, row in zip(sizes, shown, strict=True):
        assert float(VALUE.search(row[4])[1]) == pytest.approx(size.tokens_per_s)  # type: ignore[index]
        assert f"{size.efficiency(sizes[0]):.0%}" in row[6]
    assert "nodes=1: " in (folder / "index.html").read_text()  # two devices have no 2 x 2


def test_a_long_step_is_cut_for_the_picture() -> None:
    chunks = tuple(StageWork(float(at), at + 1.0, 0, "forward", at) for at in range(1000))
    ranks = [RankTimeline(rank, 1000.0, chunks) for rank in range(64)]
    kept, cut_s = drawable(ranks)
    assert [kept[0].rank, kept[-1].rank, len(kept)] == [0, 63, MAX_RANKS]
    assert cut_s is not None
    assert sum(len(rank.chunks) for rank in kept) <= MAX_CHUNKS
    few = [replace(rank, chunks=chunks[: MAX_CHUNKS // 2]) for rank in ranks[:2]]
    assert drawable(few) == (few, None)


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.full)])
def test_it_opens_on_any_screen(width: int, folder: Path, tmp_path: Path) -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    script = """
        const width = svg => svg.getBoundingClientRect().width;
        const seen = [...document.querySelectorAll("figure svg")].filter(width);
        return {figures: seen.map(svg => svg.getAttribute("aria-label")),
                page: document.documentElement.scrollWidth,
                narrow: seen.every(svg => width(svg) <= innerWidth)};
    """
    opened = open_page(folder / "index.html", script, scratch=tmp_path, width=width)
    assert (opened.console, opened.asked) == ([], [])
    assert opened.answer["page"] <= width
    assert opened.answer["narrow"]
    assert opened.answer["figures"] == [
        "Memory of a device at its fullest", "One step, planned", "More and fewer nodes: the same batch"
    ]  # fmt: skip


def test_only_an_earlier_plan_is_replaced(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    words = ["plan", *PLAN, "--output"]
    assert main([*words, str(tmp_path / "mine"), "--json"]) == 2
    said = capsys.readouterr().err
    assert "mine is there and is no plan, which alone would be replaced. Try --output=" in said
    assert "--json does not go with --output" in said
    assert (tmp_path / "mine/notes.txt").read_text() == "keep"
    (folder / "plots/old.png").write_bytes(b"")
    assert main([*words, str(folder)]) == 0
    assert not (folder / "plots/old.png").exists()
