"""Claims that need each rank's state, the hosts of a run, or a study: judged against numbers made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_parallel.config.compose import compose_cells
from hpc_parallel.config.places import find_folder
from hpc_parallel.record.endings import RankState, Summary
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.record.typed import build
from hpc_parallel.report.claims import APPROACHES, judged
from hpc_parallel.report.figures import fullest, rank_states
from hpc_parallel.report.gather import gather
from hpc_parallel.report.measures import (
    BACKED,
    CONTRADICTED,
    EVEN,
    NO_FIGURE,
    ONE_MACHINE,
    OPEN,
    Evidence,
    Runs,
)
from hpc_parallel.report.page import render
from hpc_parallel.report.tables import scaling
from hpc_parallel.sweep.sweep_plan import plan_sweep
from tests.marks import in_full
from tests.report.measured_runs import ended, state

CLAIMS = [claim for approach in APPROACHES for claim in approach.claims]
STUDIES = sorted({claim.study for claim in CLAIMS if claim.study})
SERVER = ("strategy=parameter_server", "training.global_batch_size=24")


def evidence(tmp_path: Path) -> dict[tuple[str, str], Evidence]:
    """By the strategy and the beginning of the claim."""
    rows = gather([tmp_path / "runs"]).rows
    return {
        (approach.strategy, claim.text): answer
        for approach, claims in judged(Runs(rows, scaling(rows)))
        for claim, answer in claims
    }


def worker(quarter: int) -> dict[str, int]:
    return {"parameters": quarter, "gradients": quarter, "optimizer": 0}


def test_workers_are_compared_with_one_device(tmp_path: Path, new: Callable[[], Path]) -> None:
    """n counts those that compute: three workers and a server are four devices."""
    key = "parameter_server", "close to n times as fast with up to 8 workers"
    ended(new(), *SERVER, "nodes=4", samples_per_s=250)
    ended(new(), "strategy=single", "training.global_batch_size=16", samples_per_s=100)
    assert evidence(tmp_path)[key].verdict == OPEN  # of another batch
    ended(new(), "strategy=single", "training.global_batch_size=24", samples_per_s=100)
    assert evidence(tmp_path)[key] == Evidence(
        BACKED,
        "efficiency 83% with 3 workers (parameter_server 4 x 1), from one device (single 1 x 1, "
        "global_batch_size=24); 80% would be close",
    )
    ended(new(), *SERVER, "nodes=7", samples_per_s=300)
    answer = evidence(tmp_path)[key]
    assert answer.verdict == CONTRADICTED
    assert answer.figure.startswith("efficiency 50% with 6 workers")
    ended(new(), *SERVER, "nodes=13", samples_per_s=1200)  # 12 workers are more than the claim is about
    assert evidence(tmp_path)[key] == answer


def test_a_worker_is_compared_with_the_server_and_with_a_replica(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    no_state, less, replica = (
        ("parameter_server", text)
        for text in (
            "workers hold no optimizer state",
            "a worker needs less memory than the server",
            "a worker needs less memory than a replica with its own optimizer",
        )
    )
    ended(new(), *SERVER, "nodes=3", rank_state_bytes=[*state(8000), worker(2000), worker(2000)])
    found = evidence(tmp_path)
    assert found[no_state] == Evidence(
        BACKED, "optimizer state: 0 kB (fullest worker) against 4.00 kB (server, parameter_server 3 x 1)"
    )
    assert found[less] == Evidence(
        BACKED,
        "weights, gradients and optimizer state per device: 4.00 kB (fullest worker) against 8.00 kB "
        "(server, parameter_server 3 x 1)",
    )
    assert found[replica].verdict == OPEN
    ended(
        new(),
        "strategy=data",
        "nodes=3",
        "training.global_batch_size=24",
        rank_state_bytes=state(*[8000] * 3),
    )
    assert evidence(tmp_path)[replica] == Evidence(
        BACKED,
        "weights, gradients and optimizer state per device: 4.00 kB (fullest worker, parameter_server 3 x 1) "
        "against 8.00 kB (replica, data 3 x 1)",
    )
    ended(new(), *SERVER, "nodes=4", rank_state_bytes=state(800, 800, 801, 790))  # as if workers held all
    found = evidence(tmp_path)
    assert (found[no_state].verdict, found[less].verdict) == (CONTRADICTED, EVEN)
    ended(new(), *SERVER, "nodes=5", rank_state_bytes=[worker(2000)] * 5)  # an optimizer without state
    assert evidence(tmp_path)[no_state].verdict == EVEN


@pytest.mark.parametrize(
    ("stages", "held", "verdict"), [(2, 4000, BACKED), (2, 4300, CONTRADICTED), (4, 2050, BACKED)]
)
def test_a_hybrid_is_compared_with_as_many_parts_of_the_model(
    tmp_path: Path, new: Callable[[], Path], stages: int, held: int, verdict: str
) -> None:
    """Pipeline 2 x tensor 2 against two stages and against four; not against replicas or three stages."""
    key = "hybrid", "keeps the memory of model parallelism"
    hybrid = ("strategy=hybrid", "nodes=2", "gpus_per_node=2")
    ended(new(), *hybrid, rank_state_bytes=state(held, 4, 4, 4))
    ended(new(), "strategy=data", "nodes=4", rank_state_bytes=state(*[8000] * 4))
    ended(new(), "strategy=model", "nodes=3", "model.layers=4", rank_state_bytes=state(3000, 2000, 3000))
    assert evidence(tmp_path)[key].verdict == OPEN
    whole = 8000 // stages
    ended(new(), "strategy=model", f"nodes={stages}", rank_state_bytes=state(*[whole] * stages))
    answer = evidence(tmp_path)[key]
    assert answer.verdict == verdict
    assert f"(hybrid 2 x 2) against {whole / 1000:.2f} kB (model {stages} x 1)" in answer.figure


def test_a_pipeline_by_another_name_is_no_hybrid(tmp_path: Path, new: Callable[[], Path]) -> None:
    for strategy in ("hybrid", "model"):
        ended(new(), f"strategy={strategy}", "nodes=2", rank_state_bytes=state(400, 400))
    assert evidence(tmp_path)["hybrid", "keeps the memory of model parallelism"].verdict == OPEN


def placed(path: Path, nodes: int, gpus: int, *, rate: float, hosts: Sequence[Any]) -> RunFolder:
    folder = ended(path, "strategy=data", f"nodes={nodes}", f"gpus_per_node={gpus}", samples_per_s=rate)
    write_json(folder.environment, {"cuda": "13.0", "ranks": [{"host": host} for host in hosts]})
    return folder


@pytest.mark.parametrize(
    ("rate", "hosts", "verdict"),
    [
        (60, "abcd", BACKED), (140, "abcd", CONTRADICTED), (98, "abcd", EVEN), (60, "aaaa", ONE_MACHINE),
        (60, [], ONE_MACHINE), (60, [1, None, "a", ["b"]], ONE_MACHINE),
    ],
)  # fmt: skip
def test_machines_are_compared_if_they_are_several(
    tmp_path: Path, new: Callable[[], Path], rate: float, hosts: Sequence[Any], verdict: str
) -> None:
    key = "data", "slower across machines than inside one"
    placed(new(), 1, 4, rate=100, hosts="aaaa")
    placed(new(), 2, 2, rate=1, hosts="aabb")
    assert evidence(tmp_path)[key].verdict == OPEN
    placed(new(), 4, 1, rate=rate, hosts=hosts)
    answer = evidence(tmp_path)[key]
    assert answer.verdict == verdict
    assert answer.figure.endswith("against 100 samples/s (data 1 x 4, 100 to 100)")


@pytest.mark.parametrize(
    "value",
    ["x", 7, {}, [1], [None], [{}], [{"parameters": 1, "gradients": 1}], [*state(8), None],
     *([{**state(8)[0], "optimizer": odd}] for odd in (-1, "1", True, 1e300))],
    ids=str,
)  # fmt: skip
def test_no_strangers_value_is_a_state(tmp_path: Path, new: Callable[[], Path], value: Any) -> None:
    summary = build(Summary, {"rank_state_bytes": value})
    assert summary is not None
    assert (rank_states(summary), fullest(summary)) == ((), None)
    ended(new(), *SERVER, "nodes=3", rank_state_bytes=value)
    assert evidence(tmp_path)["parameter_server", "workers hold no optimizer state"].verdict == OPEN


def test_the_fullest_rank_counts() -> None:
    summary = build(Summary, {"rank_state_bytes": state(8, 16, 12)})
    assert summary is not None
    assert rank_states(summary)[1] == RankState(4, 4, 8)
    assert fullest(summary) == 16


def test_a_claim_has_a_study_if_a_figure_can_decide_it(tmp_path: Path, new: Callable[[], Path]) -> None:
    assert [claim.text for claim in CLAIMS if bool(claim.study) != bool(claim.measure)] == []
    ended(new(), "strategy=context", "nodes=2")
    report = render(gather([tmp_path / "runs"]))
    assert {answer.verdict for answer in evidence(tmp_path).values()} == {OPEN, NO_FIGURE}
    folded = report.html.split("<details>")[-1]
    for claim in CLAIMS:
        if claim.study:
            assert f"<td><code>{claim.command}</code></td>" in folded


FIGURES = {
    "bubble_share": 0.2, "exposed_communication_share": 0.2, "traffic_bytes": 10, "step_time_s": 1.0,
    "busiest_rank_traffic_bytes": 10,
}  # fmt: skip


@pytest.mark.parametrize("study", [next(iter(STUDIES)), *in_full((study,) for study in [*STUDIES][1:])])
def test_the_command_of_a_claim_measures_it(study: str, here: Path, new: Callable[[], Path]) -> None:
    """Runs of the study with all figures decide each claim that names it."""
    words = [f"jobs={study}", "launcher.snapshot=false"]
    assert f"python -m hpc_parallel.run -m {words[0]}" in {claim.command for claim in CLAIMS}
    cells = compose_cells(words, config_dir=str(find_folder("conf")), config_name="config")
    assert cells is not None
    for planned in plan_sweep(cells, command=words).runs:
        folder, run = RunFolder(new()), planned.run
        folder.create()
        write_text(folder.config, yaml.safe_dump(run.values, sort_keys=False))
        names = [f"n{rank // run.config.gpus_per_node}" for rank in range(run.processes)]
        write_json(folder.environment, {"cuda": "13.0", "ranks": [{"host": name} for name in names]})
        figures = {**FIGURES, "samples_per_s": 10, "peak_memory_bytes": 10, "world_size": run.processes}
        states = state(*[8] * run.processes)
        write_json(folder.summary, {"outcome": "completed", **figures, "rank_state_bytes": states})
    undecided = [
        claim.text
        for claim in CLAIMS
        if claim.study == study and evidence(here)[strategy_of(claim.text), claim.text].verdict == OPEN
    ]
    assert undecided == []


def strategy_of(text: str) -> str:
    (strategy,) = {
        approach.strategy for approach in APPROACHES for claim in approach.claims if claim.text == text
    }
    return strategy
