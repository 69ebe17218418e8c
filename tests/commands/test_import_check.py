"""A class that can't be imported is refused before a run starts, with the user's error and line first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_parallel.launch import import_check
from hpc_parallel.launch.import_check import IMPORT, ImportCheck, check_models
from hpc_parallel.problems import ConfigError
from hpc_parallel.run import main as run
from hpc_parallel.user_code import described, failure_of
from hpc_parallel.worker import model_check
from tests.composed import prepared
from tests.marks import in_full
from tests.unit.test_snapshot import git

SCRIPT = ("launcher=script", "launcher.snapshot=false")
BIGRAM = """
from torch import nn
from hpc_parallel.models.layered import LayeredModel

class Bigram(LayeredModel):
    def __init__(self, **shape):
        super().__init__(stem=nn.Embedding(256, 4), blocks=[nn.Linear(4, 4)], head=nn.Linear(4, 256))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules that other tests must not see as imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("import os\n\nprint(nmae)\n", "one", "NameError: name 'nmae' is not defined (one.py:3), raised by"),
        ("class M:\n    def f(:\n", "two", "SyntaxError: invalid syntax (two.py:2), raised by"),
        ("import no_such_module\n", "three",
         "ModuleNotFoundError: No module named 'no_such_module' (three.py:1), raised by"),
        ("class N: ...\n", "four", "AttributeError: module 'four' has no attribute 'M', raised by"),
        ("exit(3)\n", "five", "SystemExit: 3 (five.py:1), raised by"),
        ("class M:\n    def __init__(self, depth): ...\n", "six",
         "TypeError: missing a required argument: 'depth', raised by"),
    ],
)  # fmt: skip
def test_the_users_error_comes_first(here: Path, source: str, name: str, message: str) -> None:
    (here / f"{name}.py").write_text(source)
    found = failure_of("model", {"_target_": f"{name}.M"})
    assert found == f"{message} {name}.M (model)."


def test_a_value_is_no_class(here: Path) -> None:
    (here / "seven.py").write_text("M = 3\n")
    assert failure_of("data", {"_target_": "seven.M"}) == "seven.M (data) is not a class or a function."


def test_a_class_that_can_be_called_has_no_problem(here: Path) -> None:
    (here / "eight.py").write_text("class M:\n    class Inner:\n        def __init__(self, width): ...\n")
    assert failure_of("model", {"_target_": "eight.M.Inner", "width": 3, "_convert_": "all"}) is None
    assert failure_of("data", {"_target_": "builtins.dict", "a": 3}) is None  # has no signature


def test_an_error_below_the_users_line_names_the_users_line(here: Path) -> None:
    (here / "nine.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(ValueError, match="Expecting") as caught:
        import nine  # noqa: F401
    assert described(caught.value).endswith("(nine.py:3)")


def test_it_is_refused_before_a_submission(here: Path) -> None:
    (here / "broken.py").write_text("print('noise')\nclass M(Modul): ...\n")
    message = "NameError: name 'Modul' is not defined (broken.py:2), raised by broken.M (model)."
    with pytest.raises(ConfigError) as caught:
        prepared(*SCRIPT, "model._target_=broken.M")
    assert str(caught.value) == f"{message} {import_check._SWITCH}"
    with pytest.raises(ConfigError) as caught:
        prepared("launcher=local", "launcher.setup=[true]", "model._target_=broken.M")
    assert str(caught.value) == message  # here no setup runs, and no job's nodes import anything else
    switched_off = prepared(*SCRIPT, "model._target_=broken.M", "launcher.check_imports=false")
    assert switched_off.notes == []
    (note,) = prepared(*SCRIPT, "model._target_=broken.M", "launcher.setup=[true]").notes
    assert note == "not imported here, because launcher.setup changes the environment: broken.M"


@pytest.mark.parametrize(
    ("mode", "variable", "reason"),
    [
        (0o755, "1", "mine.py lies in {}, where Python does not look with PYTHONSAFEPATH, -P or -I. "
         "Try without them, or PYTHONPATH={}."),
        (0o777, "", "mine.py lies in {}, and Python imports nothing from there: "
         "other users may write there; try chmod go-w."),
    ],
)  # fmt: skip
def test_why_a_module_of_the_working_folder_is_not_found(
    here: Path, monkeypatch: pytest.MonkeyPatch, mode: int, variable: str, reason: str
) -> None:
    (here / "mine.py").write_text("class Net: ...\n")
    here.chmod(mode)
    monkeypatch.setenv("PYTHONSAFEPATH", variable)  # empty: as if it were not set
    with pytest.raises(ConfigError) as refused:
        prepared("launcher=local", "launcher.snapshot=false", "model._target_=mine.Net")
    (problem,) = map(str, refused.value.problems)
    assert problem.startswith("ModuleNotFoundError: No module named 'mine', raised by mine.Net (model). ")
    assert problem.endswith(reason.replace("{}", str(here)))


def test_a_missing_interface_hides_no_broken_class(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "cracked.py").write_text("class M(Modul): ...\n")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ConfigError) as caught:
        prepared("launcher=local", "launcher.snapshot=false", "model._target_=cracked.M")
    interface, import_error = caught.value.problems
    assert str(interface).startswith("GLOO_SOCKET_IFNAME=eth77: this machine has no network interface eth77")
    assert str(import_error).startswith("NameError: name 'Modul' is not defined (cracked.py:1)")


def test_this_packages_classes_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*words: Any, **options: Any) -> None:
        raise AssertionError(words)

    monkeypatch.setattr(subprocess, "run", start)
    assert prepared(*SCRIPT).import_note is None


def test_what_can_not_be_known_is_a_note(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "slow.py").write_text("import time\ntime.sleep(60)\n")
    (here / "dead.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(import_check, "TIMEOUT_S", 0.1)
    table = '{"tables": [["model", {"_target_": "%s.M"}]], "advice": ""}'
    assert import_check._tried(sys.executable, str(here), IMPORT, table % "slow", "slow.M") == ImportCheck(
        note="not imported here within 0.1 s: slow.M"
    )
    monkeypatch.setattr(import_check, "TIMEOUT_S", 60.0)
    found = import_check._tried(sys.executable, str(here), IMPORT, table % "dead", "dead.M")
    assert found.note == "not imported here (exit code -9, no message): dead.M"
    found = import_check._tried(str(here / "python"), str(here), IMPORT, table % "dead", "dead.M")
    assert found.note is not None
    assert "can't be started" in found.note


@pytest.mark.processes
def test_classes_are_imported_from_what_the_job_will_have(here: Path) -> None:
    """What git ignores, in a subfolder of the checkout; a file that looks like a credential stays behind."""
    (here / "mine.py").write_text("from lib._version import V\nM = type(V)\n")
    (here / "lib").mkdir()
    (here / "lib" / "__init__.py").write_text("")
    (here / "lib" / "_version.py").write_text("V = 1\n")
    (here / "theirs.py").write_text("open(__file__[:-9] + 'token.txt')\nM = int\n")
    (here / "token.txt").write_text("")
    (here / ".gitignore").write_text("_version.py\n")
    git(here, "init", "-q")
    assert prepared("launcher=local", "model._target_=mine.M").import_note is None
    with pytest.raises(ConfigError) as caught:
        prepared("launcher=local", "model._target_=theirs.M")
    assert str(caught.value) == (
        f"FileNotFoundError: [Errno 2] No such file or directory: 'code/{here.name}/token.txt' "
        "(theirs.py:1), raised by theirs.M (model)."
    )


def test_a_model_that_the_layout_can_not_split_is_refused_before_a_submission(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "small.py").write_text(BIGRAM)
    line = [*SCRIPT, "model._target_=small.Bigram", "strategy=context", "nodes=2", "dry_run=true"]
    assert run([*line, "strategy.pipeline=2", "nodes=4"]) == 2
    message = capsys.readouterr().err
    assert "strategy.pipeline = 2 stages are more than the model's 1 blocks" in message
    assert "strategy.context = 2 can't be used: Bigram has no CausalAttention" in message


@pytest.mark.full
def test_a_table_of_local_layouts_is_built_by_this_python(here: Path) -> None:
    """A local run ignores the modules of the site, and the Python of a job."""
    (here / "little.py").write_text(BIGRAM)
    words = ("strategy=context", "strategy.pipeline=2", "nodes=4", "cluster.modules=[cuda]")
    run = prepared("launcher=local", "launcher.snapshot=false", "model._target_=little.Bigram", *words)
    run.config.launcher.python = f"{here}/python"
    ((first, *_),) = check_models([(run.config, run.values)])
    assert "strategy.pipeline = 2 stages are more than the model's 1 blocks" in first
    run.config.resume = "runs/others"
    assert check_models([(run.config, run.values)]) == [[]]
    assert check_models([]) == []


@pytest.mark.processes
def test_a_module_is_searched_by_the_python_that_will_run_it(here: Path) -> None:
    """Its packages are not imported, and the folder's own files are no part of the search."""
    (here / "site" / "theirs").mkdir(parents=True)
    (here / "site" / "theirs" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (here / "site" / "theirs" / "train.py").write_text("")
    (here / "json.py").write_text("raise SystemExit('imported')\n")
    python = here / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={here}/site exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    words = (*SCRIPT, f"launcher.python={python}")
    assert prepared(*words, "task=script", "script.module=theirs.train").notes == []
    with pytest.raises(ConfigError) as caught:
        prepared(*words, "task=script", "script.module=theirs.tran")
    assert str(caught.value) == (
        f"script.module = theirs.tran can't be found: there is no tran in theirs (asked: {python}). "
        f"{import_check._SWITCH}"
    )
    with pytest.raises(ConfigError, match=r"theirs is a package without a __main__\.py"):
        prepared(*words, "task=script", "script.module=theirs")
    with pytest.raises(ConfigError, match="there is no theirs in the import path"):
        prepared(*SCRIPT, "task=script", "script.module=theirs.train")  # by this Python
    assert (
        prepared(*words, "launcher.check_imports=false", "task=script", "script.module=theirs.tran").notes
        == []
    )


def test_a_module_that_no_python_here_can_search_is_a_note(here: Path) -> None:
    (note,) = prepared(*SCRIPT, "launcher.setup=[true]", "task=script", "script.module=theirs.train").notes
    assert note == "not searched here, because launcher.setup changes the environment: theirs.train"
    (here / "python").write_text("#!/no/such/program\n")
    (here / "python").chmod(0o755)
    (note,) = prepared(
        *SCRIPT, f"launcher.python={here}/python", "task=script", "script.module=theirs.train"
    ).notes
    assert note.startswith(f"not searched here, because {here}/python can't be started")


OWN = """
import torch
from torch import nn
from hpc_parallel.models.layered import LayeredModel

class Bigram(LayeredModel):
    def __init__(self, width=4, **shape):
        super().__init__(stem=nn.Embedding(256, width), blocks=[nn.Linear(width, wdth)], head=nn.Identity())
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *in_full([
            (["model._target_=mine.Bigram"],
             "NameError: name 'wdth' is not defined (mine.py:8), raised by mine.Bigram (model)"),
            (["data=dataset", "data.dataset._target_=points.Points", "+data.dataset.width=3"],
             "TypeError: got an unexpected keyword argument 'width', raised by points.Points "
             "(data.dataset)."),
            (["training.callbacks=[{_target_:torn.Note}]"],
             "SyntaxError: '(' was never closed (torn.py:2), raised by torn.Note (training.callbacks[0])."),
            (["optimizer=custom", "optimizer._target_=torn.Sgd"],
             "SyntaxError: '(' was never closed (torn.py:2), raised by torn.Sgd (optimizer)."),
            (["+optimizer.groups.slow={match:['*'],_target_:torn.Sgd}"],
             "SyntaxError: '(' was never closed (torn.py:2), raised by torn.Sgd (optimizer.groups.slow)."),
            (["optimizer.schedule=torn.warm"],
             "SyntaxError: '(' was never closed (torn.py:2), raised by torn.warm (optimizer.schedule)."),
        ]),
    ],
    ids=["a name of the model", "an argument of the data", "callback", "optimizer", "group", "schedule"],
)  # fmt: skip
def test_a_run_on_this_machine_is_refused_too_and_leaves_no_folder(
    here: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    (here / "mine.py").write_text(OWN)
    (here / "points.py").write_text("class Points:\n    def __init__(self, depth=2): ...\n")
    (here / "torn.py").write_text("import os\nprint((1)\n")
    assert run(["launcher=local", "training.steps=1", *overrides]) == 2
    refusal, first, *others = capsys.readouterr().err.splitlines()
    assert (refusal, others) == ("1 problem in the configuration; nothing was started.", [])
    assert first.strip() == message
    assert not (here / "runs").exists()


@pytest.mark.processes
def test_an_optimizer_is_tried_before_the_run_unless_it_is_one_of_ours(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments, classes and rules of the user's own were refused by the ranks only, after the queue."""
    words = ["launcher=local", "training.steps=1", "strategy=fsdp", "nodes=2"]
    (here / "mine.py").write_text(SUMMING)
    assert run([*words, "optimizer=custom", "optimizer._target_=mine.Summing"]) == 2
    assert capsys.readouterr().err.splitlines()[1].strip() == (
        "optimizer: mine.Summing updates a weight by the gradients of others, which are on other devices. "
        "Try optimizer=adamw."
    )
    assert run([*words, "+optimizer.options.bettas=[0.9,0.95]"]) == 2
    assert "optimizer: torch.optim.AdamW takes no bettas. Its arguments are" in capsys.readouterr().err
    (here / "rates.py").write_text("def halved(step): return 0.5\n")
    assert run([*words, "optimizer.schedule=rates.halved"]) == 2
    assert "too many positional arguments, raised by rates.halved (optimizer" in capsys.readouterr().err
    monkeypatch.setattr(import_check, "_tried", lambda *arguments: pytest.fail("a process was started"))
    assert run([*words, "optimizer=muon", "dry_run=true"]) == 0


@pytest.mark.processes
def test_a_sweep_leaves_out_the_layouts_that_the_users_model_refuses(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All runs are tried in one process. In a job, one run of the sweep would fail after the queue."""
    (here / "mine.py").write_text(NET)
    words = ["launcher=local", "dry_run=true", "~model", "+model={_target_: mine.Net}", "nodes=2"]
    assert run(["-m", *words, "strategy=data,tensor,fsdp"]) == 0
    out = capsys.readouterr().out
    assert (
        "skipped 1 combination that can't run:\n  strategy=tensor: strategy.tensor = 2 can't be used: Net"
        in out
    )
    assert [line for line in out.splitlines() if line.startswith("# ")][:2] == [
        "# 0: strategy=data", "# 1: strategy=fsdp"
    ]  # fmt: skip


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))

    def forward(self, tokens):
        return self.layers(tokens)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
"""
SUMMING = """
import torch

class Summing(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            group["sum"] = float(sum(weight.grad.norm() for weight in group["params"]))
        super().step()
"""


def test_a_class_in_the_place_of_ours_is_told_how_to_get_its_own_arguments(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "points.py").write_text("class Points:\n    def __init__(self, depth=2): ...\n")
    assert run(["launcher=local", "model._target_=points.Points", "data._target_=points.Points"]) == 2
    _, model, data = (line.strip() for line in capsys.readouterr().err.splitlines())
    error = "TypeError: got an unexpected keyword argument '{}', raised by points.Points ({}). "
    given = "The class gets all keys of the chosen {} file as arguments. "
    assert model == error.format("layers", "model") + given.format("model") + (
        "Your own class is chosen by a file site/model/mine.yaml with the line `_target_: points.Points` and "
        "its arguments. Then try --config-dir site model=mine."
    )
    assert data == error.format("path", "data") + given.format("data") + (
        "Try data=dataset data.dataset._target_=points.Points."
    )


DATA = """
import time
import torch

class Points:
    def __init__(self, count=100, file=None, pause_s=0.0, megabytes=0):
        assert count > 0, "no points"
        self.text = open(file).read() if file else ""
        self.kept = bytearray(megabytes << 20)
        time.sleep(pause_s)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.ones(7), torch.tensor(index % self.modulo)

class Labelled(Points):
    modulo = 3

class OfItsRank(Labelled):
    def __init__(self):
        super().__init__()
        torch.distributed.get_rank()
"""
LABELLED = ["data=dataset", "data.dataset._target_=mypoints.Labelled"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.dataset._target_=mypoints.Points"],
         "AttributeError: 'Points' object has no attribute 'modulo' (mypoints.py:17), raised by sample 87 of "
         "Points (training)"),
        *in_full([
            (["+data.dataset.count=0"],
             "AssertionError: no points (mypoints.py:7), raised by mypoints.Labelled (data)"),
            (["+data.dataset.count=1"], "Labelled has 1 samples: too few for two parts."),
            (["+data.dataset.file=missing"],
             "FileNotFoundError: [Errno 2] No such file or directory: 'missing' (mypoints.py:8), raised by "
             "mypoints.Labelled (data)"),
        ]),
    ],
    ids=["a sample", "the constructor", "the number of samples", "a file"],
)  # fmt: skip
def test_errors_of_the_users_data_come_before_the_run(
    here: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    (here / "mypoints.py").write_text(DATA)
    assert run(["launcher=local", "training.steps=1", *LABELLED, *overrides]) == 2
    refusal, first, *others = capsys.readouterr().err.splitlines()
    assert (refusal, others) == ("1 problem in the configuration; nothing was started.", [])
    assert first.strip() == message
    assert not (here / "runs").exists()


@pytest.mark.processes
def test_a_job_may_find_what_this_machine_does_not(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the nodes, memory, and the rank: a note. What no node can mend is refused here."""
    (here / "mypoints.py").write_text(DATA)
    table = {"_target_": "hpc_parallel.data.dataset.DatasetData"}

    def seen(**dataset: Any) -> model_check.Seen:
        return model_check.look_at({**table, "dataset": dataset}, advice="Advice.")

    points = {"_target_": "mypoints.Labelled"}
    missing = seen(**points, file="missing")
    assert missing.problems == ()
    assert missing.note == (
        "data        not tried here: FileNotFoundError: [Errno 2] No such file or directory: 'missing' "
        "(mypoints.py:8), raised by mypoints.Labelled (data)"
    )
    of_its_rank = seen(_target_="mypoints.OfItsRank")
    assert of_its_rank.note is not None
    assert "process group has not been initialized" in of_its_rank.note
    monkeypatch.setattr(model_check, "LONGEST_S", 0.2)
    assert seen(**points, pause_s=20).note == "data        not tried here: it takes longer than 0.2 s"
    monkeypatch.setattr(model_check, "MOST_BYTES", 2**30)
    monkeypatch.setattr(model_check, "LONGEST_S", 60.0)
    assert seen(**points, megabytes=4096).note == (
        "data        not tried here: it needs more memory than a login node may give"
    )
    (problem,) = seen(**points, count=0).problems
    assert problem.endswith("raised by mypoints.Labelled (data). Advice.")
    assert (seen(**points).sample_shape, seen(**points).dtype) == ((7,), torch.float32)
