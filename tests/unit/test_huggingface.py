"""The adapter against the library's own model, of the same weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.config.huggingface_source import FAMILIES, FIXED, read_source, roles_in
from hpc_parallel.models.layered import materialise
from hpc_parallel.training.load_weights import other_settings, other_tokens

transformers = pytest.importorskip("transformers")
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
VARIANTS = [
    *((kind, {"tie_word_embeddings": tied}) for kind in FAMILIES for tied in (True, False)),
    *((kind, {"num_key_value_heads": 2}) for kind in ("llama", "qwen3")),
    ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
]


def build(kind: str, dtype: torch.dtype, more: Mapping[str, Any]) -> Any:
    """Built on meta and filled as every run does it, then moved off the values that hide an error."""
    from hpc_parallel.models.huggingface import HuggingFaceModel

    with torch.device("meta"):
        model = HuggingFaceModel(config={"model_type": kind, **SHAPE, **more})
    materialise(model, seed=1, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # no norm of ones, no bias of zeros
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model


def library_model(kind: str, dtype: torch.dtype, more: Mapping[str, Any]) -> Any:
    """As a user of the library makes it, dropout switched off, and no token that stands for padding."""
    given = {"pad_token_id": None, **SHAPE, **more}
    if kind == "gpt2":
        given["n_inner"] = given.pop("intermediate_size")
    elif "num_key_value_heads" not in given:
        given["num_key_value_heads"] = given["num_attention_heads"]
    settings = transformers.AutoConfig.for_model(kind, **given)
    return transformers.AutoModelForCausalLM.from_config(settings).to(dtype).eval()


class ExactNorm(nn.Module):
    """The formula of Zhang & Sennrich 2019, in the precision that comes in."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight, self.eps = like.weight, like.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


def with_exact_norms(model: Any) -> Any:
    """The library's RMSNorm rounds float64 to float32, which would hide what is to be seen."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, ExactNorm(child))
    return model


@pytest.mark.parametrize(("dtype", "exactness"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize(("kind", "more"), VARIANTS)
def test_logits_loss_and_gradients_are_the_librarys(
    kind: str, more: Mapping[str, Any], dtype: torch.dtype, exactness: float
) -> None:
    model, reference = build(kind, dtype, more), library_model(kind, dtype, more)
    weights = {
        model.library_name(name): weight for name, weight in model.named_parameters(remove_duplicate=False)
    }
    reference.load_state_dict(weights)  # strict: the names are all that there are
    if dtype == torch.float64:
        reference = with_exact_norms(reference)
    tokens, targets = torch.randint(64, (2, 2, 17), generator=torch.Generator().manual_seed(3)).unbind()

    logits, wanted = model(tokens), reference(tokens).logits
    assert relative(logits, wanted) < exactness
    loss, wanted_loss = model.loss(logits, targets), F.cross_entropy(wanted.mT, targets, reduction="sum")
    assert relative(loss, wanted_loss) < exactness
    loss.backward()
    wanted_loss.backward()
    theirs = dict(reference.named_parameters())
    for name, weight in model.named_parameters():
        # The gradient of a key's bias is zero but for rounding: softmax doesn't see what all keys share.
        floor = 1e-3 * dict(model.named_parameters())["blocks.0.mlp." + mlp_name(kind)].grad.norm()
        assert relative(weight.grad, theirs[model.library_name(name)].grad, floor) < 10 * exactness, name


def mlp_name(kind: str) -> str:
    return {"gpt2": "c_fc.weight", "starcoder2": "c_fc.weight"}.get(kind, "up_proj.weight")


def relative(found: Tensor, wanted: Tensor, floor: Tensor | float = 0.0) -> float:
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).norm() / max(wanted.norm(), torch.as_tensor(floor)))


def test_a_later_token_changes_nothing_before_it() -> None:
    for kind in FAMILIES:
        model = build(kind, torch.float64, {})
        tokens = torch.arange(17)[None]
        other = tokens.clone()
        other[0, 9] = 60
        before, after = model(tokens), model(other)
        assert torch.equal(before[:, :9], after[:, :9])
        assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_first_weights_are_spread_as_the_library_spreads_them() -> None:
    from hpc_parallel.models.huggingface import HuggingFaceModel

    for kind in ("gpt2", "llama"):
        given = {**SHAPE, "hidden_size": 128, "vocab_size": 512, "initializer_range": 0.05}
        model = HuggingFaceModel(config={"model_type": kind, **given})
        ours = materialise(model, seed=0, device="cpu", dtype=torch.float32)
        torch.manual_seed(0)
        reference = dict(library_model(kind, torch.float32, given).named_parameters())
        for name, weight in ours.named_parameters():
            theirs = reference[ours.library_name(name)]
            assert weight.std().item() == pytest.approx(theirs.std().item(), rel=0.06), name
            assert weight.mean().item() == pytest.approx(theirs.mean().item(), abs=5e-3), name


def test_flops_count_each_weight_and_what_attention_sees() -> None:
    model = build("qwen3", torch.float32, {"head_dim": 16, "tie_word_embeddings": False})
    matrices = 4 * 32 * 64 + 3 * 32 * 48  # query, key, value, output of 4 heads of 16; gate, up, down
    flops = model.forward_flops((10,))
    assert flops.blocks == (2 * 10 * matrices + 4 * 55 * 64,) * 3  # 1 + 2 + ... + 10 pairs
    assert (flops.stem, flops.head) == (0, 2 * 10 * 32 * 64)


def test_the_login_node_reads_the_librarys_values() -> None:
    for kind in FAMILIES:
        settings = type(transformers.AutoConfig.for_model(kind))
        source = read_source(kind)
        own = {field.name for field in dataclasses.fields(settings)}
        assert source.keys <= own
        assert "num_hidden_layers" in source.names
        assert not {"n_layer", "n_inner"} & source.names
        assert source.plan == (settings.base_model_tp_plan or {})
        assert bool(roles_in(source.plan)) == (kind not in ("gpt2", "olmo2"))
        drops = {name for name in own if ("drop" in name) and not name.startswith("summary")}
        assert drops <= FIXED.keys()  # or a layout could change what is learnt


def test_an_error_of_the_library_is_one_problem() -> None:
    from hpc_parallel.models.huggingface import HuggingFaceModel
    from hpc_parallel.problems import ConfigError

    with pytest.raises(ConfigError, match="transformers rejects it"):
        HuggingFaceModel(config={"model_type": "llama", **SHAPE, "rms_norm_eps": "small"})


def test_other_settings_than_those_beside_the_weights_are_named(tmp_path: Path) -> None:
    """They fit the same shapes, so nothing else shows them: as the library writes and wrote them."""
    model = build("llama", torch.float32, {})
    beside = tmp_path / "config.json"
    assert other_settings(model, beside) is None  # there is none
    now = {key: value for key, value in model.settings.to_dict().items() if not key.startswith("_")}
    beside.write_text(json.dumps(now | {"use_cache": False, "dtype": "bfloat16", "eos_token_id": 7}))
    assert other_settings(model, beside) is None
    before = {key: value for key, value in now.items() if key != "rope_parameters"}
    beside.write_text(
        json.dumps(before | {"rope_theta": 5e5, "rms_norm_eps": 0.125, "torch_dtype": "float16"})
    )
    found = str(other_settings(model, beside))
    assert found.startswith(
        f"the weights of {tmp_path} were trained otherwise: rms_norm_eps=1e-06 (config.json: 0.125)"
    )
    assert "(config.json: {'rope_theta': 500000.0, 'rope_type': 'default'})" in found
    for odd in ("{", json.dumps(now | {"hidden_size": "32"})):  # the weights fit all the same
        beside.write_text(odd)
        assert str(other_settings(model, beside)).startswith(f"{beside} can't be compared with the model: ")
    assert other_settings(nn.Linear(1, 1), beside) is None  # type: ignore[arg-type]


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model from its configuration needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert build("llama", torch.float32, {})(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 64)


def test_tokens_that_the_weights_do_not_know_are_named(tmp_path: Path) -> None:
    """A pretrained model of 50,257 tokens went on with bytes without a word."""
    beside, file = tmp_path / "tokenizer.json", tmp_path / "tokens.npy"
    text = {"_target_": "hpc_parallel.data.text.TextData"}
    assert other_tokens(text, vocabulary=256, beside=beside) is None
    told = str(other_tokens(text, vocabulary=50257, beside=beside))
    assert told.startswith("the data has bytes, but the weights know 50,257 tokens")
    file.write_bytes(bytes(18))
    content = b'{"model": {}}'
    made_by = f"tokenizer.json {hashlib.sha256(content).hexdigest()[:12]}"
    described = {"vocab_size": 50257, "tokenizer": made_by, "count": 9}
    file.with_suffix(".json").write_text(json.dumps(described))
    tokens = {"_target_": "hpc_parallel.data.tokens.TokensData", "path": str(file)}
    assert other_tokens(tokens, vocabulary=50257, beside=beside) is None  # there is none
    beside.write_bytes(content)
    assert other_tokens(tokens, vocabulary=50257, beside=beside) is None
    beside.write_bytes(b"{}")
    found = str(other_tokens(tokens, vocabulary=50257, beside=beside))
    assert found.startswith(f"the data has tokens of {made_by}, but {beside} has another content")
