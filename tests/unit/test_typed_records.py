"""Records of the run folder with the types of their fields: written as ever, read whatever the file says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest

from hpc_parallel.failure.summary import summarise
from hpc_parallel.record import attempts
from hpc_parallel.record.endings import Failure, Follower, Latency, RankState, Stop, Summary
from hpc_parallel.record.environment_file import Environment
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.typed import WHOLE, build, first, read_record


@dataclass(frozen=True)
class Link:
    host: str
    rate: float = 0.0


@dataclass(frozen=True)
class Everything:
    count: int
    note: str | None
    rate: float | None = None
    flag: bool = False
    names: list[str] = field(default_factory=list)
    places: tuple[int | None, ...] = ()
    links: Annotated[tuple[Link, ...], first(2)] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    gaps: dict[str, float | None] = field(default_factory=dict)
    link: Link | None = None
    more: Any = None


SOUND_VALUES = {
    "count": 3, "note": "a", "rate": 0.5, "flag": True, "names": ["x", "y"], "places": [1, 2],
    "links": [{"host": "n1", "rate": 2}], "rates": {"a": 1.5}, "gaps": {"b": 2.5}, "link": {"host": "n2"},
    "more": [1, {"k": None}],
}  # fmt: skip
SOUND = build(Everything, SOUND_VALUES)
STRATEGY = {"name": "data", "replicate": -1, "execution": "spmd", "dedicated_server": False}


def test_a_sound_record() -> None:
    assert build(Everything, SOUND_VALUES) == Everything(
        3, "a", 0.5, True, ["x", "y"], (1, 2), (Link("n1", 2.0),), {"a": 1.5}, {"b": 2.5}, Link("n2"),
        [1, {"k": None}],
    )  # fmt: skip


@pytest.mark.parametrize("odd", [None, True, 5, 1.5, float("nan"), 10**400, "text", [], [[]], {}, {"1": 2}])
@pytest.mark.parametrize("key", [*SOUND_VALUES])
def test_a_value_of_another_type_is_unknown(key: str, odd: Any) -> None:
    record = build(Everything, {**SOUND_VALUES, key: odd})
    if key == "count" and (odd is True or not isinstance(odd, int)):
        assert record is None  # it has no default
        return
    assert record is not None
    known = [name for name in SOUND_VALUES if name != key and getattr(record, name) == getattr(SOUND, name)]
    assert known == [name for name in SOUND_VALUES if name != key]
    value = getattr(record, key)
    types = {"count": int, "note": str, "rate": int | float, "flag": bool, "names": list, "places": tuple,
             "links": tuple, "rates": dict, "gaps": dict, "link": Link}  # fmt: skip
    assert value is None or key == "more" or (isinstance(value, types[key]) and value == value)


def test_null_is_a_value_where_anything_is() -> None:
    details = {"step": 3, "parameter": None}
    failure = build(Failure, {"details": details})
    assert failure.details == details


def test_items_of_another_type() -> None:
    links = [{"host": 1}, {"host": "n1", "rate": "fast"}, {"host": "n2"}]
    odd = {"names": ["x", 1], "places": [1, "x", 3], "links": links, "rates": {"a": 1, "b": "x"}}
    record = build(Everything, {**SOUND_VALUES, **odd, "gaps": {"a": None, "b": 2}})
    assert (record.names, record.places, record.rates) == (["x"], (1, None, 3), {"a": 1})
    assert (record.links, record.gaps) == ((Link("n1"),), {"a": None, "b": 2})


class Span(NamedTuple):
    name: str
    end_s: float
    part: int | None


@dataclass(frozen=True)
class Spans:
    spans: Annotated[tuple[Span, ...], first(3), WHOLE]
    at: Annotated[Path, lambda value: value or None] | None = None


def test_a_named_tuple_is_a_list() -> None:
    record = build(Spans, {"spans": [["a", 1.5, None], ["b", 2, 3]], "at": "/x"})
    assert record == Spans((Span("a", 1.5, None), Span("b", 2, 3)), Path("/x"))


@pytest.mark.parametrize(
    "odd", [None, [], "abc", {"name": "a", "end_s": 1, "part": 2}, ["a", 1], ["a", 1, 2, 3], [1, 1, 2],
            ["a", None, 2], ["a", 1, "2"]],
)  # fmt: skip
def test_a_whole_list_has_no_item_of_another_type(odd: Any) -> None:
    sound = ["a", 1, 2]
    assert build(Spans, {"spans": [sound, odd, sound]}) is None
    assert build(Spans, {"spans": [sound, sound, sound, odd]}) == Spans((Span("a", 1, 2),) * 3)
    assert build(Spans, {"spans": 5}) is build(Spans, {}) is None


@pytest.mark.parametrize("odd", ["a\0b", "\ud800", 5, ""])
def test_a_path_that_the_system_refuses_is_unknown(odd: Any) -> None:
    assert build(Spans, {"spans": [], "at": odd}) == Spans(())


@pytest.mark.parametrize("value", [None, [], "x", 5])
def test_what_is_no_table_is_no_record(value: Any) -> None:
    assert build(Failure, value) is None


def test_a_file_without_a_value_that_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read_record(Link, path) is None
    path.write_text('{"host": "n1", "new": 1}')
    assert read_record(Link, path) == Link("n1")
    path.write_text('{"host": 7}')
    with pytest.raises(DamagedError, match="a value that it needs is missing or of another type"):
        read_record(Link, path)


def test_failure_json_is_written_as_ever(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    failure = Failure(
        rank=1, host="n1", node=0, kind="error", message="m", time="t", traceback=("a",), details={"step": 3},
        followers=(Follower(2, "n2", "lost_peer"),), line="rank 1 on n1 failed first: m",
    )  # fmt: skip
    failure.write(folder)
    assert list(json.loads(folder.failure.read_text()).items()) == [
        ("rank", 1), ("host", "n1"), ("node", 0), ("kind", "error"), ("message", "m"), ("signal", None),
        ("time", "t"), ("traceback", ["a"]), ("details", {"step": 3}),
        ("followers", [{"rank": 2, "host": "n2", "kind": "lost_peer"}]),
        ("line", "rank 1 on n1 failed first: m"),
    ]  # fmt: skip
    assert Failure.read(folder) == failure


@pytest.mark.parametrize(
    ("stop", "keys"),
    [
        (Stop("SIGTERM", step=30, time="t"), ["signal", "step", "time"]),
        (Stop("SIGUSR2", kept="3 rows", time="t"), ["signal", "kept", "time"]),
        (Stop(code=75), ["signal", "code"]),
        (Stop("SIGTERM", step=30, time="t", how="cancelled", line="l"),
         ["signal", "step", "time", "how", "line"]),
    ],
)  # fmt: skip
def test_stopped_json_is_written_as_ever(tmp_path: Path, stop: Stop, keys: list[str]) -> None:
    folder = RunFolder(tmp_path)
    stop.write(folder)
    assert list(json.loads(folder.stopped.read_text())) == keys
    assert Stop.read(folder) == stop


@pytest.mark.parametrize("task", ["train", "infer", "generate", "collectives", "script"])
def test_what_is_read_of_a_summary_is_what_is_written(task: str) -> None:
    """A key that one side renames would read as unknown for ever."""
    config = {"task": {"name": task}, "nodes": 1, "gpus_per_node": 1, "strategy": STRATEGY}
    line = {"step": 1, "samples": 8, "loss": 0.5, "step_time_s": 0.1, "samples_per_s": 80.0, "batch_size": 1,
            "latency_s": 0.1, "latency_p99_s": 0.2, "tokens_per_s": 9.0}  # fmt: skip
    states = [{"parameters": 1, "gradients": 2, "optimizer": 3}]
    measured = {"comparison": "equal", "left_out": "a", "ended_early": "b", "shares": [1.0], "weights": "w",
                "step_parts_s": {"compute": 0.5}, "rank_state_bytes": states}  # fmt: skip
    content = summarise(
        config, outcome="completed", lines=[line], history={}, measured=measured,
        environment={"predicted": {"step_time_s": 0.2}},
    )  # fmt: skip
    only_of_infer = set() if task == "infer" else {"batch_sizes"}
    assert {field.name for field in fields(Summary)} - set(content) == only_of_infer
    summary = build(Summary, json.loads(json.dumps(content)))
    assert (summary.completed, summary.notes, summary.weights) == (True, ["equal", "b", "a"], "w")
    assert (summary.shares, summary.predicted) == ((1.0,), {"step_time_s": 0.2})
    assert (summary.rank_state_bytes, summary.step_parts_s) == ((RankState(1, 2, 3),), {"compute": 0.5})
    assert summary.batch_sizes == (() if only_of_infer else (Latency(1, 0.1, 0.2, 80.0, 9.0),))


def test_a_time_and_a_rate_of_a_summary_belong_together() -> None:
    """Of an even number of lines too: 8 samples in a step, and so 8 / 0.4 samples/s."""
    config = {"task": {"name": "train"}, "nodes": 1, "gpus_per_node": 1, "strategy": STRATEGY}
    lines = [
        {"step": step, "samples": 8 * step, "loss": 1.0, "step_time_s": time_s, "samples_per_s": 8 / time_s,
         "tokens_per_s": 80 / time_s}
        for step, time_s in enumerate([9.0, 0.1, 0.4, 0.05, 0.8], start=1)
    ]  # fmt: skip
    summary = summarise(config, outcome="completed", lines=lines, history={})
    typical = tuple(summary[key] for key in ("step_time_s", "samples_per_s", "tokens_per_s"))
    assert typical == pytest.approx((0.4, 20.0, 200.0))


def test_attempts_are_written_as_ever(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    attempts.begin(folder, step=0, environment={"SLURM_JOB_ID": "7"}, warnings=["w"])
    attempts.end(folder, how="killed", host="n1")
    attempts.end(folder, how="preflight", host="n2", exclude=["n2"])
    with folder.attempts.open("a") as file:  # lines of others
        file.write(
            '{"began": 5, "lost_steps": 1}\n{"began": "x", "lost_steps": true}\n{"ended": "x", "how": 1}\n'
        )
    lines = [list(json.loads(line)) for line in folder.attempts.read_text().splitlines()[:3]]
    assert lines == [["began", "job_id", "after_step", "lost_steps", "warnings"], ["ended", "how", "host"],
                     ["ended", "how", "host", "exclude"]]  # fmt: skip
    (start,) = attempts.starts(folder)
    assert (start.job_id, start.after_step, start.lost_steps, start.warnings) == ("7", 0, 0, ("w",))
    ends = [(end.how, end.host, end.exclude) for end in attempts.recent_ends(folder)]
    assert ends == [("killed", "n1", ()), ("preflight", "n2", ("n2",))]


@pytest.mark.parametrize(
    ("content", "cuda"), [({}, "unknown"), ({"cuda": None}, None), ({"cuda": 5}, "unknown")]
)
def test_null_is_not_missing(content: dict[str, Any], cuda: str | None) -> None:
    environment = build(Environment, content)
    assert environment.cuda == cuda
