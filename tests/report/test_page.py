"""A report opened in a browser: it says what the run folders say, and can be sorted and searched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_parallel.__main__ import main
from tests.report.browser import Opened, open_page, unavailable_reason
from tests.report.measured_runs import ended, started

RATES = {"a": 9.5, "b": 100.25, "c": 33.0}
PARTS = {"compute": 0.2, "communication": 0.03, "bubble": 0.0, "data": 0.001, "other": 0.01}
ROWS = """
const rows = [...document.querySelectorAll("#comparison tbody tr")];
const named = row => row.dataset.run.split("/").pop();
"""
HEAD = """
const head = name => [...document.querySelectorAll("#comparison thead th")].find(
  th => th.textContent.replace("\\u00ad", "").startsWith(name));
const order = () => [...document.querySelectorAll("#comparison tbody tr")].map(named);
"""
Ask = Callable[..., Opened]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page") / "runs"
    for kept, (name, rate) in enumerate(RATES.items(), start=1):  # no repeats of each other
        shares = {"bubble_share": rate / 200, "exposed_communication_share": 0.1, "traffic_bytes": 12345}
        words = ("strategy=pipeline", "nodes=2", f"training.keep_last={kept}")
        ended(root / name, *words, samples_per_s=rate, step_parts_s=PARTS, **shares)
    started(root / "d", "strategy=data", "nodes=2", samples_per_s=50)
    assert main(["report", str(root)]) == 0
    return root


@pytest.fixture
def ask(runs: Path, tmp_path: Path) -> Ask:
    if reason := unavailable_reason():
        pytest.skip(reason)
    return lambda script, **options: open_page(
        runs / "report/index.html", ROWS + script, scratch=tmp_path, **options
    )


def test_it_opens_without_an_error_or_a_request(ask: Ask) -> None:
    opened = ask("return document.querySelectorAll('figure svg').length;")
    assert (opened.console, opened.asked) == ([], [])
    assert opened.answer == 8  # parts, memory, bubble, loss, each for wide and narrow screens


def test_the_browser_would_have_seen_an_error_and_a_request(ask: Ask) -> None:
    """The two lists above are empty since there is nothing, not since nobody looks."""
    opened = ask('console.error("told"); new Image().src = "http://192.0.2.1/x.png"; return 1;')
    assert any("told" in line for line in opened.console)
    assert opened.asked == ["http://192.0.2.1/x.png"]


def test_its_numbers_are_those_of_the_run_folders(ask: Ask, runs: Path) -> None:
    opened = ask(
        "return Object.fromEntries(rows.map(row => [named(row), Object.fromEntries("
        "[...row.querySelectorAll('[data-key]')].map(cell => [cell.dataset.key, cell.dataset.value]))]));"
    )
    assert set(opened.answer) == {*RATES, "d"}
    for name in RATES:
        summary = json.loads((runs / name / "summary.json").read_text())
        shown = {key: float(value) if value else None for key, value in opened.answer[name].items()}
        assert shown.pop("device_hours") == 2.0
        assert shown == {key: summary[key] for key in shown}
        assert shown["samples_per_s"] == RATES[name]
    assert opened.answer["d"]["samples_per_s"] == "50"
    assert opened.answer["d"]["bubble_share"] == ""


def test_columns_are_sorted_by_their_buttons(ask: Ask) -> None:
    """By number and not by text; once more turns it round; what is not measured stays last."""
    opened = ask(
        HEAD
        + "const found = []; for (const name of ['throughput', 'throughput', 'bubble', 'bubble', 'run']) {"
        "head(name).querySelector('button').click(); "
        "found.push([order(), head(name).ariaSort]); } return found;"
    )
    assert opened.answer == [
        [["a", "c", "d", "b"], "ascending"],
        [["b", "d", "c", "a"], "descending"],
        [["a", "c", "b", "d"], "ascending"],
        [["b", "c", "a", "d"], "descending"],
        [["d", "a", "b", "c"], "ascending"],
    ]


def test_a_column_of_numbers_without_raw_values_is_sorted_by_number(ask: Ask) -> None:
    opened = ask(
        "const cells = [...document.querySelectorAll("
        "'#comparison tbody td:nth-child(2) .value')];"
        "['10', '9', '100', '1'].forEach((text, index) => cells[index].textContent = text);"
        + HEAD
        + "head('state').querySelector('button').click(); return order();"
    )
    assert opened.answer == ["d", "b", "a", "c"]


def test_sorting_is_for_the_keyboard_too(ask: Ask) -> None:
    opened = ask(
        HEAD + "const button = head('throughput').querySelector('button'); button.focus();"
        "return [document.activeElement === button, button.tagName, button.tabIndex];"
    )
    assert opened.answer == [True, "BUTTON", 0]


def test_rows_are_filtered_by_name_and_state(ask: Ask) -> None:
    opened = ask(
        "const filter = document.getElementById('filter'), state = document.getElementById('state');"
        "const look = (words, of) => { filter.value = words; state.value = of;"
        " filter.dispatchEvent(new Event('input'));"
        " return [rows.filter(row => row.getClientRects().length).map(named),"
        " document.querySelectorAll('#parts tbody tr:not([hidden])').length,"
        " document.getElementById('shown').textContent]; };"
        "return [look('', ''), look('DATA 2', ''), look('pipeline data', ''), look('layout', ''),"
        " look('', 'completed'), look('', '')];"
    )
    assert opened.answer == [
        [["a", "b", "c", "d"], 3, "4 of 4 runs"],
        [["d"], 0, "1 of 4 runs"],
        [[], 0, "0 of 4 runs"],
        [[], 0, "0 of 4 runs"],  # a title of a column, in no value
        [["a", "b", "c"], 3, "3 of 4 runs"],
        [["a", "b", "c", "d"], 3, "4 of 4 runs"],
    ]


def test_the_best_is_marked(ask: Ask) -> None:
    opened = ask(
        "return rows.flatMap(row => [...row.querySelectorAll('.best')].map("
        "cell => [named(row), cell.dataset.key]));"
    )
    assert sorted(opened.answer) == [["a", "bubble_share"], ["b", "samples_per_s"], ["b", "step_time_s"]]


@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_in_the_light_and_in_the_dark(ask: Ask, dark: bool) -> None:
    """Contrast of the page and of the plots' ink at least 7 (WCAG 2.2, 1.4.6)."""
    opened = ask(
        "const of = (element, what) =>"
        " getComputedStyle(element)[what].match(/[\\d.]+/g).slice(0, 3).map(Number);"
        "const ink = document.querySelector('figure svg text');"
        "return [of(document.body, 'backgroundColor'), of(document.body, 'color'), of(ink, 'fill')];",
        dark=dark,
    )
    paper, *inks = (luminance(colour) for colour in opened.answer)
    assert (paper < 0.5) == dark
    for ink in inks:
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 7


def luminance(colour: list[float]) -> float:
    """Relative, of sRGB (WCAG 2.2)."""
    parts = [value / 255 for value in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_cut_on_a_phone_or_a_laptop(ask: Ask, width: int) -> None:
    """Neither a table, a code block or a text of a plot lies outside the window or its own box."""
    opened = ask(
        "document.querySelectorAll('details').forEach(details => details.open = true);"
        "const cut = [...document.querySelectorAll('main *')].filter(element => {"
        " const box = element.getBoundingClientRect();"
        " return box.width && (box.right > innerWidth + 1 || box.left < -1"
        "  || (!element.ownerSVGElement && element.scrollWidth > element.clientWidth + 1"
        "      && getComputedStyle(element).overflowX !== 'visible')); });"
        "const texts = [...document.querySelectorAll('figure svg text')]"
        ".filter(t => t.getClientRects().length);"
        "return [innerWidth, cut.map(e => e.outerHTML.slice(0, 80)), texts.length,"
        " Math.min(...texts.map(t => t.getBoundingClientRect().height))];",
        width=width,
    )
    window, cut, texts, height = opened.answer
    assert (window, cut) == (width, [])
    assert texts > 40
    assert height >= 8  # pixels of the smallest text in a plot


def test_the_report_begins_with_the_verdict_and_folds_what_has_no_figure(ask: Ask) -> None:
    opened = ask(
        "const titles = [...document.querySelectorAll('h2')].map(h => h.textContent);"
        "const folded = [...document.querySelectorAll('details')];"
        "const after = document.querySelector('header').nextElementSibling;"
        "return [after.querySelector('h2').textContent,"
        " titles, folded.map(details => details.open),"
        " [...document.querySelectorAll('#unmeasured li')].map(li => li.textContent.split(':')[0]),"
        " document.querySelectorAll('#open-claims tbody tr').length > 0];"
    )
    first, titles, is_open, unmeasured, has_claims = opened.answer
    assert first == "Verdict"
    assert unmeasured == [
        "Scaling",
        "Latency against throughput",
        "Where the time of a run went",
        "A pipeline's step",
        "Predicted and measured",
    ]
    assert not set(unmeasured) & set(titles)
    assert is_open == [False, False]
    assert has_claims


def test_the_cells_of_a_phones_table_have_the_titles_of_their_columns(ask: Ask) -> None:
    opened = ask(
        "return [...rows[1].cells].map(cell => [...cell.children].map(e =>"
        " [e.textContent, getComputedStyle(e).display !== 'none' && e.getClientRects().length > 0]));",
        width=390,
    )
    (title, name), *cells = opened.answer
    assert (title[1], name[1]) == (False, True)
    assert [cell[0] for cell in cells][:3] == [
        ["state", True],
        ["layout", True],
        ["throughput, samples/s", True],
    ]
    assert cells[0][1] == ["completed", True]
