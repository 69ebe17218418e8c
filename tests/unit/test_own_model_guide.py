"""The code of docs/own-model.md works as it stands there, with a GPT that this package did not write."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from hpc_parallel.layout.layout import Layout
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.plain import plain_model
from hpc_parallel.strategies.dropout.dropout_shapes import whole_shapes
from hpc_parallel.strategies.model_checks import find_problems
from tests.composed import prepared
from tests.models_of_others import gpt

GUIDE = Path(__file__).resolve().parents[2] / "docs/own-model.md"
PLAIN, ADAPTER, ATTENTION, PATHS, SKIPS, ROLES, *_ = re.findall(
    r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL
)
(KEYS,) = re.findall(r"nanogpt.yaml -->\n```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The keys of the guide's file. `import model` imports the GPT."""
    monkeypatch.setitem(sys.modules, "model", gpt)
    monkeypatch.setattr(gpt, "CausalSelfAttention", gpt.CausalSelfAttention)  # put back after the test
    return {key: value for key, value in yaml.safe_load(KEYS).items() if key != "_target_"}


def built(code: str, arguments: dict[str, Any], *, device: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(code, "nanogpt.py", "exec"), names)
    with torch.device(device):
        return names["NanoGPT"](**arguments)


def test_a_plain_module_is_a_model_as_it_is() -> None:
    names: dict[str, Any] = {}
    exec(compile(PLAIN, "tablenet.py", "exec"), names)
    torch.manual_seed(1)
    original = names["TableNet"](columns=7, width=32)
    rows, target = torch.randn(8, 7), torch.randint(3, (8,))
    state = {name: value.clone() for name, value in original.state_dict().items()}
    wanted = torch.nn.functional.cross_entropy(original.eval()(rows), target)
    model = materialise(plain_model(original), seed=1, device="cpu", dtype=torch.float32).eval()
    torch.testing.assert_close(model.loss(model(rows), target) / 8, wanted)
    assert {model.library_name(name) for name in model.state_dict()} == state.keys()


def test_the_adapter_gives_the_originals_loss(arguments: dict[str, Any]) -> None:
    assert len([line for line in ADAPTER.splitlines() if line.strip()]) <= 25
    torch.manual_seed(1)
    model = built(ADAPTER, arguments, device="cpu")
    original = gpt.GPT(gpt.GPTConfig(**arguments))
    weights = {model.library_name(name): weight for name, weight in model.state_dict().items()}
    original.load_state_dict(weights, strict=False)
    tokens = torch.randint(256, (2, 33))
    logits = model(tokens[:, :-1])
    _, mean_loss = original(tokens[:, :-1], tokens[:, 1:].contiguous())
    torch.testing.assert_close(model.loss(logits, tokens[:, 1:]) / 64, mean_loss)


def test_its_attention_and_roles_fit_every_layout(arguments: dict[str, Any]) -> None:
    code = ATTENTION + "from hpc_parallel.models.layered import Column\n" + ADAPTER
    code = code.replace("class NanoGPT(Adapter):\n", f"class NanoGPT(Adapter):\n{ROLES}\n")
    config = prepared("strategy=single", "launcher=local").config
    generating = replace(config, task=replace(config.task, name="generate"))
    for layout in (Layout(context=2), Layout(tensor=2), Layout(pipeline=2, context=2, tensor=2)):
        model = built(code, arguments, device="meta")
        assert list(find_problems(model, config=generating, layout=layout, sample_shape=(32,))) == []
    model = built(ADAPTER, arguments, device="meta")  # with the attention of the GPT itself, that of above
    (problem,) = find_problems(model, config=config, layout=Layout(tensor=2), sample_shape=(32,))
    assert "has no role for stem.wte.weight" in str(problem)


def test_stochastic_depth_leaves_out_whole_samples_and_is_known_on_every_layout() -> None:
    names: dict[str, Any] = {}
    exec(PATHS, names)
    x, p = torch.rand(1000, 3, 2) + 1, 0.25
    factors = (names["DropPath"](p)(x) / x).reshape(1000, 6)
    torch.testing.assert_close(factors, factors[:, :1].expand(1000, 6))
    kept = factors[:, 0] > 0
    torch.testing.assert_close(factors[kept], torch.full_like(factors[kept], 1 / (1 - p)))
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / 1000) ** 0.5
    model = LayeredModel(stem=nn.Identity(), blocks=[names["DropPath"](p)], head=nn.Linear(4, 2)).to("meta")
    assert {shape.sizes for shape in whole_shapes(model, sample_shape=(3, 4)).values()} == {(1, 1)}


def test_the_parts_of_a_u_net_hand_on_their_skip_connections() -> None:
    names: dict[str, Any] = {}
    exec(SKIPS, names)
    down = names["Part"](lambda x: x / 2, goes_down=True)
    up = names["Part"](lambda x, skip: 10 * x + skip, goes_down=False)
    x = up(*up(*down(*down(torch.tensor(8.0)))))
    assert [value.item() for value in x] == [10 * (10 * 2.0 + 4.0) + 8.0]
