"""Who holds what and who sends what to whom: closed forms, `show`, and the drawings."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from docs.drawn_layout import draw
from docs.svg import COLOURS, Svg
from hpc_parallel.__main__ import main
from hpc_parallel.commands.grid import MOST_ROWS, recorded_setup
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.layout.axes import AXES
from hpc_parallel.layout.exchanges import DIRECTED, exchanges, groups_over
from hpc_parallel.layout.holdings import (
    BATCH,
    EXPERTS,
    ModelFacts,
    Part,
    Setup,
    holdings,
    model_facts,
    ranges,
)
from hpc_parallel.layout.layout import Layout, layout_of
from tests.composed import prepared as composed_run
from tests.recorded_runs import foreign, half_written, prepared

TEXT = ModelFacts("text", tied=True, batch_norm=False)
Capture = pytest.CaptureFixture[str]


def setup_of(*words: str, gpus: bool | None = None) -> Setup:
    config = composed_run("launcher=local", *words).config
    strategy = config.strategy
    layout = layout_of(strategy, devices=config.devices)
    return Setup(strategy, layout, model=model_facts(config.model), gpus=gpus)


COMBINED = ("pipeline", "replicate", "shard", "context", "tensor")
DEGREES = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in COMBINED})


def share(parts: dict[str, Part]) -> Fraction:
    return math.prod((Fraction(len(part.indices), part.of) for part in parts.values()), start=Fraction(1))


class TestHoldings:
    @given(DEGREES)
    def test_everything_is_held_equally_often(self, degrees: dict[str, int]) -> None:
        """Weights once for each group that averages, samples once for each device that shares them."""
        layout = Layout(**degrees)
        rows = holdings(Setup(StrategyConfig(schedule="1f1b"), layout, model=TEXT))
        sliced = layout.shard * layout.context if layout.shard > 1 or (
            layout.tensor > 1 and layout.replicate * layout.context > 1
        ) else 1  # fmt: skip
        assert sum(share(row.model) for row in rows) * layout.pipeline * layout.tensor * sliced == len(rows)
        different = Counter(str(row.model_text) for row in rows)
        assert len(different) == layout.pipeline * layout.tensor * sliced
        assert len(set(different.values())) == 1
        samples = Counter(row.samples_text for row in rows)
        assert len(samples) == layout.replicate * layout.shard * layout.context
        assert sum(share(row.samples or {}) for row in rows) == layout.pipeline * layout.tensor

    @given(DEGREES)
    def test_few_rows_hold_together_what_all_hold(self, degrees: dict[str, int]) -> None:
        setup = Setup(StrategyConfig(schedule="1f1b"), Layout(**degrees), model=TEXT)
        every, rows = holdings(setup), holdings(setup, most=MOST_ROWS)
        assert len(rows) <= MOST_ROWS
        assert [device for a, b in (row.devices for row in rows) for device in range(a, b + 1)] == list(
            range(setup.layout.devices)
        )
        for row in rows:
            alone = [one for one in every if row.devices[0] <= one.devices[0] <= row.devices[1]]
            for kind, part in row.model.items():
                assert set(part.indices) == {index for one in alone for index in one.model[kind].indices}

    def test_who_has_the_optimizer(self) -> None:
        served = holdings(setup_of("strategy=parameter_server", "nodes=3"))
        assert [(row.role, "optimizer state" in row.keeps, row.samples) for row in served] == [
            ("server", True, None),
            ("worker", False, {BATCH: Part((0,), 2)}),
            ("worker", False, {BATCH: Part((1,), 2)}),
        ]
        both = setup_of("strategy=parameter_server", "nodes=2", "strategy.dedicated_server=false")
        assert [row.role for row in holdings(both)] == ["server and worker", "worker"]
        threads = holdings(setup_of("strategy=dataparallel", "gpus_per_node=2", gpus=False))
        assert [row.model_text for row in threads] == [
            "the whole model", "the whole model (shared with the first device)",
        ]  # fmt: skip

    def test_parts_of_samples(self) -> None:
        sequence = holdings(setup_of("strategy=context", "nodes=2"))
        assert [row.samples_text for row in sequence] == [
            "slices 0, 3 of 4 of each sequence", "slices 1, 2 of 4 of each sequence",
        ]  # fmt: skip
        tiles = holdings(setup_of("strategy=tile", "model=segmenter", "data=cells", "nodes=4"))
        assert [row.samples_text for row in tiles][1:3] == [
            "tile row 0 of 2, tile column 1 of 2 of each image",
            "tile row 1 of 2, tile column 0 of 2 of each image",
        ]  # fmt: skip
        experts = holdings(setup_of("strategy=expert", "model=moe_tiny", "nodes=2"))
        assert [row.model for row in experts] == [{EXPERTS: Part((0,), 2)}, {EXPERTS: Part((1,), 2)}]
        words = ("strategy=fsdp", "model=moe_tiny", "nodes=2", "gpus_per_node=2", "strategy.expert=2")
        assert [row.model_text for row in holdings(setup_of(*words))][2:] == [
            f"slice {place} of 4 of all but the experts, part {part} of 2 of the experts, slice 1 of 2 of "
            "each of their weights" for place, part in ((2, 0), (3, 1))
        ]  # fmt: skip

    def test_ranges(self) -> None:
        many = list(range(0, 512, 8))
        assert [ranges(numbers) for numbers in ([0], [0, 1], [0, 1, 2, 5], [0, 2, 4], many)] == [
            "0", "0, 1", "0-2, 5", "0, 2, 4", "0, 8, ..., 504",
        ]  # fmt: skip


class TestExchanges:
    @given(DEGREES, st.sets(st.sampled_from(AXES), min_size=1))
    def test_groups_differ_on_their_axes_only(self, degrees: dict[str, int], axes: set[str]) -> None:
        layout = Layout(**degrees)
        groups = groups_over(Setup(StrategyConfig(), layout), *axes)
        size = math.prod(layout.degrees[axis] for axis in axes)
        if size == 1:
            assert groups == ()
            return
        assert sorted(rank for group in groups for rank in group) == list(range(layout.devices))
        for group in groups:
            places = [layout.coordinates(rank) for rank in group]
            assert len(group) == size
            assert all(len({place[axis] for place in places}) == 1 for axis in set(AXES) - axes)

    @pytest.mark.parametrize("axis", AXES)
    def test_every_axis_sends_something(self, axis: str) -> None:
        setup = Setup(StrategyConfig(), Layout(**{axis: 2}))
        assert exchanges(setup)
        assert all({0, 1} == set(group) for exchange in exchanges(setup) for group in exchange.groups)

    def test_what_the_configuration_does_not_say_is_a_condition(self) -> None:
        setup = Setup(StrategyConfig(), Layout(pipeline=2, replicate=2))
        conditions = {exchange.what: exchange.only_if for exchange in exchanges(setup)}
        assert conditions["gradient of the tied weight"] == "if stem and head share a weight"
        assert conditions["moments of BatchNorm"] == "if the model has BatchNorm"
        assert conditions["activations"] is None

    @pytest.mark.parametrize(
        ("strategy", "layout", "reason"),
        [
            ({}, {"expert": 2, "tile": 2}, "expert and tile can't be combined"),
            ({"execution": "dataparallel"}, {"tensor": 2}, "execution=dataparallel has whole replicas only"),
            ({"schedule": "own"}, {"pipeline": 2}, "the schedule is unknown"),
            ({"tile_grid": [0, 0]}, {"tile": 2}, "the grid does not have one tile for each device"),
            ({}, {"tile": 2}, "tile splits images, and the model reads text"),
        ],
    )  # fmt: skip
    def test_what_is_not_covered(self, strategy: Any, layout: Any, reason: str) -> None:
        assert Setup(StrategyConfig(**strategy), Layout(**layout), model=TEXT).uncovered == reason

    @pytest.mark.parametrize(
        ("words", "facts"),
        [
            (("model=tiny",), ModelFacts("text", tied=True, batch_norm=False)),
            (("model=8b",), ModelFacts("text", tied=False, batch_norm=False)),
            (("model=huggingface",), ModelFacts("text", tied=True, batch_norm=False)),
            (("model=convnet", "data=digits"), ModelFacts("images", False, True, whole_head=True)),
            (("model=unet", "data=cells"), ModelFacts("images", False, True, whole_head=False)),
        ],
    )
    def test_facts_of_models(self, words: tuple[str, ...], facts: ModelFacts) -> None:
        assert setup_of(*words).model == facts


def shown(capsys: Capture, folder: Path) -> str:
    assert main(["show", str(folder)]) == 0
    return "\n".join(" ".join(line.split()) for line in capsys.readouterr().out.splitlines())


@pytest.fixture(autouse=True)
def _no_slurm(silent_slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


class TestShow:
    def test_a_run(self, tmp_path: Path, capsys: Capture) -> None:
        text = shown(capsys, prepared(tmp_path / "a", "strategy=hsdp", "nodes=2", "gpus_per_node=2").path)
        for line in (
            "rank 1 slice 1 of 2 of each weight part 1 of 4 of the batch",
            "forward, backward weights of a block all_gather each block and microbatch ranks 0, 1; 2, 3",
            "backward gradients all_reduce once a step ranks 0, 2; 1, 3",
        ):
            assert line in text.splitlines()

    def test_large_worlds_are_short(self, tmp_path: Path, capsys: Capture) -> None:
        words = ("strategy=hybrid", "nodes=64", "gpus_per_node=8", "strategy.tensor=2", "strategy.pipeline=2")
        text = shown(capsys, prepared(tmp_path / "a", *words).path)
        rows = [line for line in text.splitlines() if line.startswith("rank")]
        assert 1 < len(rows) <= MOST_ROWS
        assert rows[0].startswith("ranks 0-255 stage 0 of 2, parts 0, 1 of 2 of each layer")
        assert "gradients all_reduce once a step" in text
        assert "; and 252 more" in text

    def test_json(self, tmp_path: Path, capsys: Capture) -> None:
        folder = prepared(tmp_path / "a", "strategy=pipeline", "nodes=2")
        assert main(["show", str(folder.path), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [row["model"] for row in told["holdings"]] == ["stage 0 of 2", "stage 1 of 2"]
        sent = [(row["what"], row["groups"]) for row in told["exchanges"] if row["how"] == "send"]
        assert sent == [("activations", [[0, 1]]), ("activations' gradients", [[1, 0]])]

    def test_only_of_trainings(self, tmp_path: Path, capsys: Capture) -> None:
        assert "who holds" not in shown(capsys, prepared(tmp_path / "a", "task=infer", "nodes=2").path)

    @pytest.mark.parametrize("make", [foreign, half_written])
    def test_folders_of_strangers(self, make: Any, tmp_path: Path, capsys: Capture) -> None:
        shown(capsys, make(tmp_path / "a").path)

    @pytest.mark.parametrize("other", ["{replicate: 3}", "{replicate: 0, shard: -1}", "7"])
    def test_a_second_strategy(self, other: str, tmp_path: Path, capsys: Capture) -> None:
        """YAML takes the last of two equal keys, and the head of a run is read without YAML."""
        folder = prepared(tmp_path / "a", "strategy=data", "nodes=2")
        folder.config.write_text(f'{folder.config.read_text()}\n"strategy": {other}\n')
        assert "replicate 2" in shown(capsys, folder.path)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("strategy.reshard", "no"), ("strategy.tile_grid", [0, 0]), ("strategy.tile_grid", "x"),
            ("strategy.schedule", "\x1b[31m"), ("strategy.context_attention", {"a": 1}), ("strategy.cuts", 3),
            ("model", 3), ("model", []), ("model._target_", ["x"]), ("model.tied_head", "yes"),
            ("device", {}), ("strategy.expert", 2), ("strategy.execution", "dataparallel"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("strategy", ["pipeline", "tile"])
    def test_damaged_settings(
        self, key: str, value: Any, strategy: str, tmp_path: Path, capsys: Capture
    ) -> None:
        images = ("model=segmenter", "data=cells") if strategy == "tile" else ()
        folder = prepared(tmp_path / "a", f"strategy={strategy}", "nodes=4", *images)
        config = yaml.safe_load(folder.config.read_text())
        *path, last = key.split(".")
        table = config
        for name in path:
            table = table[name]
        table[last] = value
        folder.config.write_text(yaml.safe_dump(config))
        assert "\x1b" not in shown(capsys, folder.path)

    def test_a_damaged_option_is_said(self, tmp_path: Path, capsys: Capture) -> None:
        folder = prepared(tmp_path / "a", "strategy=fsdp", "nodes=2")
        folder.config.write_text(folder.config.read_text().replace("reshard: true", "reshard: 'no'"))
        told = shown(capsys, folder.path)
        assert "who sends what to whom: not known, because the configuration is damaged" in told

    def test_an_older_run_has_the_defaults_of_newer_options(self) -> None:
        setup = recorded_setup({"strategy": {"name": "x", "shard": 2}}, devices=2)
        assert (setup.strategy.reshard, setup.layout.shard) == (True, 2)


DRAWN = {
    "single": ("strategy=single",),
    "server": ("strategy=parameter_server", "nodes=4"),
    "both": ("strategy=parameter_server", "nodes=2", "gpus_per_node=2", "strategy.dedicated_server=false"),
    "hybrid": ("strategy=hybrid", "nodes=2", "gpus_per_node=4", "strategy.tensor=2"),
    "sliced": ("strategy=fsdp", "nodes=2", "gpus_per_node=4", "strategy.tensor=2", "strategy.pipeline=2"),
    "zbv": ("strategy=pipeline", "nodes=2", "gpus_per_node=4", "strategy.schedule=zbv", "model.layers=16"),
    "context": ("strategy=context", "nodes=8"),
    "tile": ("strategy=tile", "model=segmenter", "data=cells", "gpus_per_node=8"),
    "expert": ("strategy=expert", "model=moe_tiny", "nodes=4"),
    "sliced experts": ("strategy=fsdp", "model=moe_tiny", "nodes=2", "gpus_per_node=2", "strategy.expert=2"),
}
NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=DRAWN)
def drawn(request: pytest.FixtureRequest) -> tuple[Setup, ElementTree.Element]:
    words = DRAWN[request.param]
    setup = setup_of(*words)
    devices = next((int(word[14:]) for word in words if word.startswith("gpus_per_node=")), 1)
    return setup, ElementTree.fromstring(draw(setup, devices_per_node=devices, title="a <title> & more"))


def number(element: ElementTree.Element, key: str) -> float:
    return float(element.attrib[key])


class TestDrawing:
    def test_text_stays_in_its_box(self, drawn: tuple[Setup, ElementTree.Element]) -> None:
        """By 0.55 font sizes a character, which is wider than the average of common sans-serif fonts."""
        _, svg = drawn
        width, height = number(svg, "width"), number(svg, "height")

        def right(text: ElementTree.Element) -> float:
            return number(text, "x") + 0.55 * number(text, "font-size") * len(text.text or "")

        assert all(
            right(text) < width and number(text, "y") < height for text in svg.iter(f"{NAMESPACE}text")
        )
        devices = svg.findall(f"{NAMESPACE}g")
        for device in devices:
            box = device[0]
            for text in device.iter(f"{NAMESPACE}text"):
                assert number(box, "x") < number(text, "x")
                assert right(text) < number(box, "x") + number(box, "width"), text.text
                assert number(text, "y") < number(box, "y") + number(box, "height")
        labels = [text for text in svg.findall(f"{NAMESPACE}text") if number(text, "font-size") > 11]
        first = number(devices[0][0], "x")
        assert all(right(label) < first for label in labels[1:])  # the first is the title

    def test_dots_and_arrows_are_the_exchanges(self, drawn: tuple[Setup, ElementTree.Element]) -> None:
        """Every dot and every arrow's tip is on the line of a device, as many as take part."""
        setup, svg = drawn
        boxes = [group[0] for group in svg.findall(f"{NAMESPACE}g")]
        centres = {number(box, "x") + number(box, "width") / 2: place for place, box in enumerate(boxes)}
        tips = [polygon.attrib["points"] for polygon in svg.iter(f"{NAMESPACE}polygon")]
        ends = [centres[float(tip.partition(",")[0])] for tip in tips]
        dots = [centres[number(dot, "cx")] for dot in svg.iter(f"{NAMESPACE}circle")]
        sent = exchanges(setup)
        assert Counter(ends) == Counter(g[1] for e in sent if e.how in DIRECTED for g in e.groups)
        assert Counter(dots) == Counter(m for e in sent if e.how not in DIRECTED for g in e.groups for m in g)

    def test_coloured_is_what_is_held(self, drawn: tuple[Setup, ElementTree.Element]) -> None:
        setup, svg = drawn
        for row, device in zip(holdings(setup), svg.findall(f"{NAMESPACE}g"), strict=True):
            bar = next(box for box in device if box.attrib.get("class") == "empty")
            whole = number(bar, "width") * number(bar, "height")
            for kind, parts in (("weights", row.model), ("samples", row.samples)):
                boxes = [box for box in device if box.attrib.get("class") == kind]
                area = sum(number(box, "width") * number(box, "height") for box in boxes)
                if EXPERTS not in (parts or {}):  # their bar is not to scale
                    assert area / whole == pytest.approx(0 if parts is None else share(parts), rel=0.01)

    def test_too_many_devices(self) -> None:
        with pytest.raises(ValueError, match="9 devices can't be drawn, only 8"):
            draw(Setup(StrategyConfig(), Layout(replicate=9)), devices_per_node=9, title="x")

    def test_a_text_that_does_not_fit_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="does not fit into 20"):
            Svg(width=100, title="", description="").text(0, 0, "too long", within=20)

    @pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
    def test_text_and_lines_stand_out(self, scheme: int) -> None:
        """Contrast by WCAG 2.2: 4.5 for text, 3 for what is drawn."""
        for kind, least in {"text": 4.5, "faint": 4.5, "weights": 3, "gradients": 3, "state": 3, "samples": 3,
                            "numbers": 3}.items():  # fmt: skip
            for behind in ("page", "node", "device"):
                pair = sorted((luminance(COLOURS[name][scheme]) for name in (kind, behind)), reverse=True)
                assert (pair[0] + 0.05) / (pair[1] + 0.05) >= least, (kind, behind)


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_no_drawing_of_the_docs_needs_another_file() -> None:
    for file in (Path(__file__).resolve().parents[2] / "docs/images").glob("*.svg"):
        assert not re.search(r"href|url\(|@import|<script", file.read_text())
