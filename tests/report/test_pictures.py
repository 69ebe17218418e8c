"""What the plots of a report show: read from matplotlib's own objects, and from the texts of the SVG."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from hpc_parallel.__main__ import main as command
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.report import run_plot
from hpc_parallel.report.drawing import COMMON, draw, figure_of
from hpc_parallel.report.gather import gather
from hpc_parallel.report.labels import legend
from hpc_parallel.report.picture import Picture
from hpc_parallel.report.plots import pictures
from hpc_parallel.report.tables import scaling
from hpc_parallel.report.verdict import predictions
from hpc_parallel.worker import run_plots
from tests.report.measured_runs import ended, note, state
from tests.report.test_collectives import measured, rows
from tests.report.test_tradeoffs import SIZES, timing

PARTS = {"compute": 0.2, "communication": 0.03, "bubble": 0.1, "data": 0.001, "other": 0.01}


def pictures_of(folder: Path) -> list[Picture]:
    rows = gather([folder]).rows
    return pictures(rows, series=scaling(rows), predictions=predictions(rows))


@pytest.fixture
def drawn(tmp_path: Path) -> Callable[[], dict[str, Figure]]:
    """Name -> figure of all plots of the runs in tmp_path, as they are for a wide screen."""

    def figures() -> dict[str, Figure]:
        with mpl.rc_context(COMMON):
            by_name = {picture.name: figure_of(picture) for picture in pictures_of(tmp_path)}
            for figure in by_name.values():
                figure.draw_without_rendering()
        return by_name

    return figures


Drawn = Callable[[], dict[str, Figure]]


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def labels(axis: Any) -> list[float]:
    """The numbers at the ticks in view."""
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_majorticklocs() if low <= tick <= high]


def on_cpu(folder: RunFolder) -> RunFolder:
    write_json(folder.environment, {"cuda": None, "device": "x86_64"})
    return folder


def validated(folder: RunFolder, losses: dict[int, float]) -> RunFolder:
    """Add a validation loss to the lines of these steps."""
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    folder.metrics.unlink()
    for line in lines:
        more = {"validation_loss": losses[line["step"]]} if line["step"] in losses else {}
        note(folder.metrics, **line, **more)
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((("data 2 x 1", "lr=1"), ("data 2 x 1", "lr=2")), ["lr=1", "lr=2"]),
        ((("data 2 x 1",), ("data 2 x 1", "lr=2")), ["data 2 x 1", "data 2 x 1, lr=2"]),
        ((("data 2 x 1", "lr=1"),), ["data 2 x 1, lr=1"]),
        ((("a" * 60 + "1",), ("a" * 60 + "2",)), ["…" + "a" * 46 + "1", "…" + "a" * 46 + "2"]),
        ((("a" * 60 + "1", "b"), ("a" * 60 + "2",)), None),
        ((("a" * 60 + "1" + "a" * 60,), ("a" * 60 + "2" + "a" * 60,)), None),
    ],
)
def test_a_legend_says_what_differs(words: Sequence[Sequence[str]], expected: list[str] | None) -> None:
    shown = legend(words)
    assert len(set(shown)) == len(words)
    assert max(map(len, shown)) <= 48
    assert expected is None or shown == expected


def test_a_legend_leaves_out_what_only_other_runs_differ_in(tmp_path: Path, drawn: Drawn) -> None:
    """Beside a training, two runs of task=infer differ in task from it, but not from each other."""
    ended(tmp_path / "a", "strategy=data", "nodes=2")
    timing(tmp_path / "b", "strategy=data", "nodes=2", "model.layers=8", sizes=SIZES)
    timing(tmp_path / "c", "strategy=data", "nodes=2", "model.layers=8", "strategy.bucket_mb=1", sizes=SIZES)
    figures = drawn()
    assert legend_of(figures["latency"]) == ["bucket_mb=25", "bucket_mb=1"]


def test_times_are_logarithmic_where_sizes_are(tmp_path: Path, drawn: Drawn) -> None:
    """Also where all times are alike, as those of small messages are."""
    sizes = (8, 64, 512)  # 50 us each
    measured(tmp_path / "a", *rows("all_reduce", sizes=sizes))
    times, rates = drawn()["collectives_all_reduce"].axes
    assert (times.get_xscale(), times.get_yscale(), rates.get_xscale()) == ("log", "log", "log")
    timing(tmp_path / "b", "strategy=single", sizes={1: (0.1, 0.11), 2: (0.11, 0.12), 4: (0.12, 0.13)})
    (axes,) = drawn()["latency"].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_names_of_sizes_do_not_cover_each_other(tmp_path: Path, drawn: Drawn) -> None:
    measured(tmp_path / "a", *rows("all_reduce", sizes=tuple(8 * 4**n for n in range(12))))
    for axes in drawn()["collectives_all_reduce"].axes:
        low, high = axes.get_xlim()
        shown = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        boxes = sorted(label.get_window_extent().intervalx.tolist() for label in shown)
        assert len(boxes) >= 3
        assert all(left[1] < right[0] for left, right in itertools.pairwise(boxes))


def test_ticks_are_1_2_or_5_times_a_power_of_ten(tmp_path: Path, drawn: Drawn) -> None:
    for nodes, rate in ((1, 33.0), (2, 61.0), (4, 114.0)):
        ended(
            tmp_path / f"{nodes}", "strategy=pipeline", f"nodes={nodes}", samples_per_s=rate,
            step_parts_s=PARTS, bubble_share=0.3, peak_memory_bytes=nodes * 10**8,
            predicted={"samples_per_s": 40.0, "step_time_s": 0.1},
        )  # fmt: skip
    timing(tmp_path / "infer", "strategy=single", sizes=SIZES)
    checked = 0
    for name, figure in drawn().items():
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                ticks = labels(axis)
                if axis.get_label_text() in ("", "devices", "size"):
                    continue  # bars, and measured numbers of devices
                if axis.get_scale() == "log":
                    steps = {float(f"{tick:.0e}".partition("e")[0]) for tick in ticks}
                    assert len(ticks) >= 2, name
                else:
                    steps = {float(f"{b - a:.3e}".partition("e")[0]) for a, b in itertools.pairwise(ticks)}
                assert steps <= {1.0, 2.0, 5.0}, (name, axis.get_label_text(), ticks)
                checked += 1
    assert checked >= 10


def test_there_is_a_panel_for_each_kind_of_work(tmp_path: Path, drawn: Drawn) -> None:
    """Losses, times and bytes of two models, or of two batches, are not comparable."""
    kinds = {"a": (), "b": ("model.layers=8",), "c": ("training.global_batch_size=32",)}
    for name, words in kinds.items():
        for strategy in ("data", "fsdp"):
            ended(
                tmp_path / name / strategy, f"strategy={strategy}", "nodes=2", *words, step_parts_s=PARTS,
                rank_state_bytes=state(100, 100),
            )  # fmt: skip
        timing(tmp_path / name / "infer", "strategy=single", *words, sizes=SIZES)
    figures = drawn()
    expected = [
        "layers=4, global_batch_size=16", "layers=8, global_batch_size=16", "layers=4, global_batch_size=32",
    ]  # fmt: skip
    for name in ("loss", "step_parts", "state"):
        assert titles(figures[name]) == expected, name
        for axes in figures[name].axes:
            assert len(axes.get_yticks()) == 2 or name == "loss"
    assert (len(figures["latency"].axes), len(figures["memory"].axes)) == (3, 6)  # of both tasks
    assert [len(axes.lines) for axes in figures["loss"].axes] == [2, 2, 2]


def test_a_caption_says_that_kinds_of_work_are_left_out(tmp_path: Path) -> None:
    """A plot has at most six panels."""
    for layers in range(4, 11):
        for nodes in (1, 2):
            ended(
                tmp_path / f"{layers}-{nodes}", "strategy=data", f"nodes={nodes}", f"model.layers={layers}",
                step_parts_s=PARTS, rank_state_bytes=state(100, 100),
            )  # fmt: skip
        timing(tmp_path / f"{layers}-infer", "strategy=single", f"model.layers={layers}", sizes=SIZES)
    captions = {picture.name: picture.caption for picture in pictures_of(tmp_path)}
    ends = {
        "strong_scaling": "6 of 7", "latency": "6 of 7", "step_parts": "12 of 14", "state": "12 of 14",
        "loss": "12 of 14", "memory": "9 of 21",
    }  # fmt: skip
    assert {name: caption[-len(f"The first {ends[name]}.") :] for name, caption in captions.items()} == {
        name: f"The first {end}." for name, end in ends.items()
    }


def test_the_validation_is_a_curve_of_its_own(tmp_path: Path, drawn: Drawn) -> None:
    validated(ended(tmp_path / "a", "strategy=data"), {1: 4.5, 4: 1.5})
    ended(tmp_path / "b", "strategy=fsdp")
    (axes,) = drawn()["loss"].axes
    curves = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]
    training = [(16, 4.0), (32, 2.0), (48, 4 / 3), (64, 1.0)]
    assert curves == [training, [(16, 4.5), (64, 1.5)], training]
    assert axes.lines[1].get_fillstyle() == "none"
    assert axes.lines[1].get_color() == axes.lines[0].get_color()
    assert legend_of(drawn()["loss"]) == ["data 1 x 1", "fsdp 1 x 1", "validation"]


def test_curves_that_coincide_are_all_seen(tmp_path: Path, drawn: Drawn) -> None:
    """The earlier ones are wider than those which are drawn over them."""
    for strategy in ("data", "fsdp", "tensor"):
        ended(tmp_path / strategy, f"strategy={strategy}", "nodes=2")
    widths = [line.get_linewidth() for line in drawn()["loss"].axes[0].lines]
    assert widths == sorted(set(widths), reverse=True)


def test_every_picture_has_a_title(tmp_path: Path, drawn: Drawn) -> None:
    folder = ended(
        tmp_path / "a", "strategy=pipeline", "nodes=2", step_parts_s=PARTS, rank_state_bytes=state(8)
    )
    chunks = [[0.0, 0.5, 0, "forward", 0], [0.5, 0.501, 0, "backward", 0], [0.6, 0.7, 0, "new", None]]
    write_json(folder.timeline, {"ranks": [{"rank": 0, "length_s": 1.0, "chunks": chunks}]})
    shown = {name: figure.get_suptitle() for name, figure in drawn().items()}
    assert shown == {
        "step_parts": "Where the time of a step goes",
        "memory": "Peak memory of the fullest device",
        "state": "Weights, gradients and optimizer state of the fullest device",
        "loss": "Loss of pipeline 2 x 1",
        "timeline_1": "One step of pipeline 2 x 1",
    }


def test_a_timeline_has_no_colour_that_its_legend_lacks(tmp_path: Path, drawn: Drawn) -> None:
    """Not that of a chunk of a thousandth of the step, nor of a kind that this version doesn't know."""
    folder = ended(tmp_path / "a", "strategy=pipeline", "nodes=2")
    chunks = [[0.0, 0.5, 0, "forward", 0], [0.5, 0.501, 0, "backward", 0], [0.6, 0.7, 0, "new", None]]
    write_json(folder.timeline, {"ranks": [{"rank": 0, "length_s": 1.0, "chunks": chunks}]})
    figure = drawn()["timeline_1"]
    colours = {
        mpl.colors.to_hex(colour)
        for bars in figure.axes[0].collections
        for colour in bars.get_facecolor()  # type: ignore[union-attr]
    }
    (box,) = figure.legends
    assert {mpl.colors.to_hex(patch.get_facecolor()) for patch in box.get_patches()} == colours
    assert len(colours) == 3
    assert legend_of(figure) == ["forward", "backward", "other work"]


def test_a_legend_has_no_colour_that_its_bars_lack(tmp_path: Path, drawn: Drawn) -> None:
    ended(tmp_path / "a", "strategy=data", "nodes=2", step_parts_s={**PARTS, "bubble": 0.0})
    assert legend_of(drawn()["step_parts"]) == ["compute", "communication", "data", "other"]


def test_a_cpus_memory_is_drawn_without_the_interpreter(tmp_path: Path, drawn: Drawn) -> None:
    """What was counted is drawn instead of the peak of a process; a bubble has microbatches beside it."""
    for count, share in ((2, 0.4), (8, 0.2)):
        on_cpu(ended(
            tmp_path / f"{count}", "strategy=pipeline", "nodes=2", f"strategy.microbatches={count}",
            rank_state_bytes=state(4_000_000, 8_000_000), bubble_share=share,
            predicted={"peak_memory_bytes": 10**7, "step_time_s": 0.1},
        ))  # fmt: skip
    figures = drawn()
    assert "memory" not in figures
    (axes,) = figures["state"].axes
    widths = [path.get_extents().width for bars in axes.collections for path in bars.get_paths()]
    assert widths == [2.0, 2.0, 4.0] * 2  # MB of weights, gradients, optimizer of the fullest rank
    (axes,) = figures["bubble"].axes
    assert axes.get_xlabel() == "microbatches"
    assert list(axes.lines[0].get_xdata()) == [2, 8]
    found = gather([tmp_path]).rows
    assert {prediction.key for prediction in predictions(found)} == {"step_time_s"}


def test_a_line_joins_only_runs_that_differ_in_what_it_says(tmp_path: Path) -> None:
    """Not those of another optimizer, another kind of device, or the same devices in another shape."""
    for name, words, device in (
        ("a", ("nodes=1",), "A"),
        ("b", ("nodes=2",), "A"),
        ("c", ("nodes=4", "optimizer=sgd"), "A"),
        ("d", ("nodes=4",), "B"),
    ):
        folder = ended(tmp_path / name, "strategy=data", *words)
        write_json(folder.environment, {"cuda": "13", "device": device})
    found = [s for s in scaling(gather([tmp_path]).rows) if s.kind == "strong"]
    assert [[point.devices for point in series.points] for series in found] == [[1, 2]]
    for name, words in (("e", ("nodes=4",)), ("f", ("gpus_per_node=4",)), ("g", ("gpus_per_node=2",))):
        folder = ended(tmp_path / name, "strategy=data", *words)
        write_json(folder.environment, {"cuda": "13", "device": "A"})
    found = [s for s in scaling(gather([tmp_path]).rows) if s.kind == "strong"]
    assert {
        series.label: [[row.shape for row in point.runs] for point in series.points] for series in found
    } == {
        "data, 1 a node, batch 16": [["1 x 1"], ["2 x 1"], ["4 x 1"]],
    }


def test_a_phone_gets_a_narrow_picture_with_the_same_texts(tmp_path: Path) -> None:
    for nodes in (1, 2):
        ended(tmp_path / f"{nodes}", "strategy=data", f"nodes={nodes}", samples_per_s=50 * nodes)
    plots = {picture.name: draw(picture) for picture in pictures_of(tmp_path)}
    assert set(plots) == {"strong_scaling", "memory", "loss"}
    for name, plot in plots.items():
        wide, narrow = (
            float(re.findall(r'width="([\d.]+)pt"', svg)[0]) for svg in (plot.svg, plot.narrow_svg)
        )
        assert narrow <= 330 < 560 <= wide, name  # of 390 px (292 pt) or 1280 px (960 pt), with margins
        names = {text for text in re.findall(r">([^<>]+)</text>", plot.svg) if not re.match(r"[\d.]+$", text)}
        assert names <= set(re.findall(r">([^<>]+)</text>", plot.narrow_svg)), name


def lines(*seconds: int) -> list[dict[str, str]]:
    return [{"time": f"2026-11-22T01:00:{second:02}+00:00"} for second in seconds]


def test_it_is_the_plot_of_the_report(tmp_path: Path) -> None:
    folder = ended(tmp_path / "runs" / "one", "strategy=data")
    run_plot.main([str(folder.path)])
    assert command(["report", str(folder.path)]) == 0
    drawn = (folder.plots / "loss.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert drawn == (folder.path / "report" / "plots" / "loss.png").read_bytes()
    assert folder.plots.stat().st_mode & 0o777 == 0o700


def test_nothing_is_drawn_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ended(tmp_path / "one", "strategy=data")
    monkeypatch.setattr(run_plot, "find_spec", lambda name: None)
    run_plot.main([str(folder.path)])
    assert not folder.plots.exists()


@pytest.mark.parametrize(("seconds", "starts"), [((0, 5, 10), 1), ((0, 9), 0), ((30,), 0), ((), 0)])
def test_a_short_training_does_not_wait_for_it(
    seconds: tuple[int, ...], starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended(tmp_path / "one", "strategy=data")
    commands: list[list[str]] = []
    monkeypatch.setattr(run_plots.subprocess, "run", lambda words, **_: commands.append(words))
    run_plots.draw_plots(folder, lasted_s=run_plots.span_s(lines(*seconds)))
    assert [words[1:] for words in commands] == [["-m", run_plot.__name__, str(folder.path)]] * starts


@pytest.mark.parametrize("module", ["import time; time.sleep(60)", "raise SystemExit(3)"])
def test_a_failure_does_not_reach_the_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run_plots, "MODULE", "broken")
    monkeypatch.setattr(run_plots, "PATIENCE_S", 0.5)
    run_plots.draw_plots(ended(tmp_path / "one", "strategy=data"), lasted_s=30)
