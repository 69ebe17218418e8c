"""README.md and docs/: every command is accepted, every reference is current, every message exists."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hpc_parallel.__main__ import COMMANDS
from hpc_parallel.__main__ import main as command
from hpc_parallel.run import main as run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLS = ("", "bash", "console", "sh")
MARK = re.compile(r"<!-- (not run|exits with|file): ?(.+?) -->|<!-- (exits with) (\d) -->")
LONGEST_README = 160


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the comment before it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str | None = None  # not run, exits with, file
    value: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def command_lines(self) -> list[str]:
        """Without output, comments and prompts; a line that goes on below is one."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("```")]
    for start, end in zip(starts[::2], starts[1::2], strict=True):
        found = MARK.fullmatch(lines[start - 1]) if start else None
        mark, value = (found[1] or found[3], found[2] or found[4]) if found else (None, "")
        text = "\n".join(lines[start + 1 : end])
        yield Block(page, start + 1, lines[start][3:], text, mark=mark, value=value)


def shell_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in SHELLS]


# Each line once, on whatever pages it is.
CHECKED = {
    " ".join(shlex.split(line, comments=True)): (block, line)
    for block in shell_blocks()
    if block.mark != "not run"
    for line in block.command_lines()
}


@pytest.fixture
def here(here: Path) -> Path:
    """A folder with the files that the pages show, the GPT that they adapt, and a file of tokens."""
    for page in PAGES:
        for block in blocks(page):
            if block.mark == "file":
                (here / block.value).parent.mkdir(parents=True, exist_ok=True)
                (here / block.value).write_text(block.text + "\n")
    shutil.copy(ROOT / "tests/models_of_others/gpt.py", here / "model.py")
    np.save(here / "tokens.npy", np.zeros(100_000, dtype=np.uint16))
    (here / "tokens.json").write_text('{"vocab_size": 256, "tokenizer": "bytes", "count": 100000}')
    return here


class AcceptedError(Exception):
    """The parser of a command accepted the words; it must do no more."""


def checked(line: str) -> Any:
    """A case of the test below. The pages' own classes are imported in a process, as the job imports them."""
    imports = [text for text in CHECKED if re.search("--config-dir .*(model|data)=", text)]
    marks = [pytest.mark.processes, *([pytest.mark.full] * (line not in imports[:2]))] * (line in imports)
    if re.fullmatch(r"python -m hpc_parallel\.run -m jobs=\w+", line):
        marks = [pytest.mark.full]  # tests/commands/test_studies.py plans each
    return pytest.param(*CHECKED[line], id=line, marks=marks)


@pytest.mark.parametrize(("block", "line"), [checked(line) for line in CHECKED])
def test_a_command_is_accepted(
    block: Block,
    line: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(line, comments=True)
    expected = int(block.value) if block.mark == "exits with" else 0
    if words[:3] == ["python", "-m", "hpc_parallel.run"]:
        code = composes(words[3:])
    elif words[:3] == ["python", "-m", "hpc_parallel"] and words[3] in ("run", "check", "parity"):
        code = command([*words[3:], "dry_run=true"]) if words[3] == "parity" else composes(words[4:])
    elif words[:4] == ["python", "-m", "hpc_parallel", "plan"]:
        code = command(words[3:])  # it starts nothing
    elif words[:3] == ["python", "-m", "hpc_parallel"]:
        assert words[3] in COMMANDS
        parse_only(monkeypatch)
        with pytest.raises(AcceptedError):
            command(words[3:])
        code = 0
    else:
        assert is_known(words), f"{block.place}: check {line!r}, or mark the block <!-- not run: REASON -->"
        code = 0
    told = capsys.readouterr()
    assert code == expected, told.err
    if expected:  # the page shows what is printed
        assert told.err.splitlines() == block.text.splitlines()[1:]
    assert not (here / "runs").exists()


def composes(words: Sequence[str]) -> int:
    """The exit code of `run`, which starts nothing."""
    explains = {"--help", "--cfg"} & set(words)
    launcher = ["launcher=local"] * (not any(word.startswith("launcher=") for word in words))
    return run([*([] if explains else ["dry_run=true", *launcher]), *words])  # a script's words come last


def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def accept(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
        parse(parser, words)
        raise AcceptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", accept)


def is_known(words: Sequence[str]) -> bool:
    """Whether a command of another program can work: a target, an extra or a script that exists."""
    if words[0] == "make":
        return all(
            re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for word in words[1:]
        )
    if words[:3] == ["pip", "install", "."]:
        return True
    if words[:2] == ["pip", "install"] and (extras := re.fullmatch(r"\.\[(.+)\]", words[2])):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        return set(extras[1].split(",")) <= set(project["optional-dependencies"])
    return words[0] == "python" and (ROOT / words[1]).is_file()


def test_a_block_that_is_not_run_has_a_reason_and_exists() -> None:
    marked = [block for block in shell_blocks() if block.mark == "not run"]
    assert marked
    for block in marked:
        assert len(block.value.split()) >= 3, block.place
        for path in re.findall(r"tests/[\w/.]+|\btest_\w+\.py", block.value):
            assert any(str(file).endswith(path) for file in (ROOT / "tests").rglob("*")), block.place
    for page in PAGES:  # no comment that marks nothing
        marks = sum(bool(MARK.fullmatch(line)) for line in page.read_text().splitlines())
        assert marks == sum(block.mark is not None for block in blocks(page)), page


def cells(line: str) -> list[str]:
    """Of a row of a table; GitHub splits at each bar without a backslash, also in code."""
    return re.split(r"(?<!\\)\|", line.strip().strip("|"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_row_of_a_table_has_its_cells(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        head, *rows = table.splitlines()
        assert [row for row in rows if len(cells(row)) != len(cells(head))] == []


def test_the_references_are_current() -> None:
    assert list(generator().problems()) == []
    assert list(generator("diagrams").problems()) == []


def test_a_stale_drawing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diagrams = generator("diagrams")
    for name in ("DOCS", "IMAGES"):
        monkeypatch.setattr(diagrams, name, tmp_path)
    monkeypatch.setattr(diagrams, "PAGE", tmp_path / "approaches.md")
    monkeypatch.setattr("sys.argv", ["diagrams.py"])
    assert diagrams.main() == 0
    monkeypatch.setattr("sys.argv", ["diagrams.py", "--check"])
    file = tmp_path / "approach_fsdp.svg"
    file.write_text(file.read_text().replace("gradients", "weights", 1))
    (tmp_path / "approach_old.svg").touch()
    assert diagrams.main() == 1
    assert list(diagrams.problems()) == [
        "docs/approach_fsdp.svg is stale. Try python docs/diagrams.py.",
        "docs/approach_old.svg belongs to no approach. Delete it.",
    ]


def test_the_figures_beside_the_drawings_are_those_of_the_report() -> None:
    """Each approach has a section; its figures are in the report's own table, or those of a counted run."""
    page, strategies = (ROOT / "docs/approaches.md").read_text(), set()
    report = (ROOT / "docs/example_report/report.md").read_text().replace("**", "")
    rows = {row[0]: row for row in (re.split(r" *\| *", line)[1:-1] for line in report.splitlines())
            if len(row) > 10}  # fmt: skip
    columns = {title: at for at, title in enumerate(next(iter(rows.values())))}
    for section in page.split("\n## ")[1:]:
        command = re.search(r"hpc_parallel\.run (.*)", section)
        words = dict(word.split("=") for word in command[1].split())
        strategies.add(words["strategy"])
        assert section.count("](images/approach_") == 1
        table = [line for line in section.splitlines() if line.startswith("|")]
        assert len(table) == 3
        shape = f"{words['strategy']} {words.get('nodes', 1)} x {words.get('gpus_per_node', 1)}"
        titles, _, figures = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
        for title, figure in zip(titles, figures, strict=True):
            if shape in rows and title in columns:  # the same unit
                assert figure == rows[shape][columns[title]], (shape, title)
        if shape in rows:
            assert len(set(titles) & set(columns)) >= 5
        else:
            assert "Its speed is not in the example report; that command, then" in " ".join(section.split())
            assert float(figures[titles.index("traffic per step, MB")]) > 0
    names = {file.stem for file in (ROOT / "conf/strategy").glob("*.yaml")}
    assert strategies == names - {"auto"}  # it chooses one of the others


def test_a_stale_page_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = generator()
    stale = tmp_path / "configuration.md"
    stale.write_text("old")
    monkeypatch.setattr(generate, "CONFIGURATION", stale)
    page = generate.RUN_FOLDER.read_text().replace("| `grad_norm` |", "| `gradnorm` |")
    monkeypatch.setattr(generate, "RUN_FOLDER", tmp_path / "run-folder.md")
    (tmp_path / "run-folder.md").write_text(page)
    monkeypatch.setattr("sys.argv", ["generate.py", "--check"])
    assert generate.main() == 1
    assert list(generate.problems()) == [
        "docs/configuration.md is stale. Try python docs/generate.py.",
        "docs/run-folder.md, section metrics.jsonl: `grad_norm` is missing",
        "docs/run-folder.md, section metrics.jsonl: `gradnorm` is not in the source",
    ]


@cache
def generator(name: str = "generate") -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_short_and_names_every_strategy() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= LONGEST_README
    strategies = {file.stem for file in (ROOT / "conf/strategy").glob("*.yaml")}
    for page in (text, (ROOT / "docs/strategies.md").read_text()):
        (table,) = (part for part in page.split("\n\n") if part.startswith("| `strategy=` |"))
        assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == strategies


def test_every_study_is_listed() -> None:
    (table,) = (part for part in (ROOT / "docs/sweep.md").read_text().split("\n\n")
                if part.startswith("| `jobs=` |"))  # fmt: skip
    names = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE))))
    assert names == {file.stem for file in (ROOT / "jobs").glob("*.yaml")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_the_picture_of_the_packages_is_the_contract() -> None:
    (picture,) = (block.text for block in blocks(ROOT / "docs/architecture.md") if block.language == "text")
    shown = [line[:34].split() for line in picture.splitlines() if line[:34].strip()]
    (contract, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert shown == [layer.split(" | ") for layer in contract["layers"]]


def test_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        for path in re.findall(
            r"`((?:hpc_parallel|tests|conf|docs|jobs|sbatch_templates)/[\w/.-]*)`", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    inside = "|".join(folder.name for folder in (ROOT / "hpc_parallel").iterdir() if folder.is_dir())
    for page in ("architecture.md", "models-and-data.md", "add-a-strategy.md"):
        for path in re.findall(rf"`((?:{inside})/[\w/]*(?:\.py)?)`", (ROOT / "docs" / page).read_text()):
            assert (ROOT / "hpc_parallel" / path).exists(), f"{page}: {path}"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(
        r"[\w/-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    )
    assert set(listed) >= {page.name for page in PAGES if page.parent.name == "docs"}


def test_every_message_of_the_guide_is_one_of_the_source() -> None:
    messages = list(texts())
    titles = re.findall(r"^### (.+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(titles) >= 30
    for title in titles:
        for message in re.findall(r"`([^`]+)`", title):
            for part in filter(str.strip, message.split("...")):
                assert any(part.strip() in text for text in messages), f"{title}: {part!r}"


def texts() -> Iterator[str]:
    """Every text in the source, `...` for what is filled in, and the batch scripts."""
    for file in (ROOT / "hpc_parallel").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for file in (ROOT / "sbatch_templates").glob("*"):
        yield file.read_text()
