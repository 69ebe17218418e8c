"""From text files to token ids and back: the converter, the file, the windows over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.commands import encode_text, tokenize
from hpc_parallel.data.tokens import TokensData, read_description
from hpc_parallel.problems import ConfigError
from tests.composed import prepared
from tests.security.disk import small_disk

TEXT = "the quick brown fox jumps over the lazy dog; été, 東京, \U0001f40d\n" * 40


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text(TEXT, encoding="utf-8", newline="")
    (folder / "deep" / "a.txt").write_text("second file\r\nno line end", encoding="utf-8", newline="")
    (folder / "other.md").write_text("not asked for")
    return folder


def train_tokenizer(file: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.enable_truncation(max_length=4)  # must not cut our text
    tokenizer.save(str(file))
    return file


def test_bytes_are_the_files_one_after_the_other(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "PIECE", 7)
    output = tmp_path / "tokens.npy"
    assert command(["tokenize", str(source), str(source / "other.md"), "--output", str(output)]) == 0
    expected = b"".join((source / name).read_bytes() for name in ("b.txt", "deep/a.txt", "other.md"))
    tokens = np.load(output)
    assert tokens.dtype == np.uint16
    assert tokens.astype(np.uint8).tobytes() == expected
    assert json.loads((tmp_path / "tokens.json").read_text()) == {
        "vocab_size": 256, "tokenizer": "bytes", "count": len(expected),
    }  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text", "tokens.json", "tokens.npy"]


def test_a_tokenizer_gives_text_back(source: Path, tmp_path: Path) -> None:
    tokenizer_file = train_tokenizer(tmp_path / "tokenizer.json")
    output = tmp_path / "tokens.npy"
    words = [str(source), "--output", str(output), "--tokenizer", str(tokenizer_file)]
    assert command(["tokenize", *words, "--end-of-text", "<|end|>"]) == 0
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokens = np.load(output)
    description = read_description(output)
    texts = [(source / name).read_bytes().decode() for name in ("b.txt", "deep/a.txt")]
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == "".join(
        t + "<|end|>" for t in texts
    )
    assert description["vocab_size"] == 300
    assert description["count"] == len(tokens) < len(TEXT.encode())
    assert description["tokenizer"].startswith("tokenizer.json ")
    ids = [token for t in texts for token in [*tokenizer.encode(t).ids, tokenizer.token_to_id("<|end|>")]]
    assert tokens.tolist() == ids


def tokenizers_of_all_kinds() -> dict[str, Any]:
    """Tokenizers that change the begin of a text, or whose tokens may depend on text far away."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    llama = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_level = pre_tokenizers.ByteLevel
    cases: dict[str, tuple[Any, Any, Any]] = {
        "prepend": (models.BPE(unk_token="<unk>", byte_fallback=True), llama, None),
        "metaspace": (models.BPE(unk_token="<unk>"), None, pre_tokenizers.Metaspace(prepend_scheme="first")),
        "prefix space": (models.BPE(), None, byte_level(add_prefix_space=True)),
        "bytes in one word": (models.BPE(), None, byte_level(add_prefix_space=True, use_regex=False)),
        "trimmed NFC": (models.BPE(), normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]), None),
        "counted from the begin": (models.BPE(), None, pre_tokenizers.Split(Regex(r"[\s\S]{7}"), "isolated")),
        "words of unigrams": (models.Unigram(), normalizers.NFKC(), pre_tokenizers.Metaspace()),
        "unigrams in one word": (models.Unigram(), None, None),
        "pieces of words": (
            models.WordPiece(unk_token="<unk>"), normalizers.BertNormalizer(),
            pre_tokenizers.BertPreTokenizer(),
        ),
        "own pattern": (models.BPE(), None, pre_tokenizers.Split(Regex(r"\s+(?!\S)|\w+"), "isolated")),
        "pairs": (models.BPE(), None, pre_tokenizers.Split(Regex(r"a[^!]*!"), "isolated")),
    }  # fmt: skip
    made = {}
    for name, (model, normalizer, pre_tokenizer) in cases.items():
        made[name] = tokenizer = Tokenizer(model)
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        if pre_tokenizer is not None:
            tokenizer.pre_tokenizer = pre_tokenizer
        trainer = model.get_trainer()
        if isinstance(model, models.Unigram):
            trainer = trainers.UnigramTrainer(unk_token="<unk>")
        trainer.vocab_size, trainer.show_progress, trainer.special_tokens = 300, False, ["<unk>", "[BEGIN]"]
        tokenizer.train_from_iterator([mixed_text(seed, 300) for seed in range(20)], trainer)
        tokenizer.add_tokens([AddedToken("<m>", lstrip=True, rstrip=True)])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[BEGIN] $A", special_tokens=[("[BEGIN]", tokenizer.token_to_id("[BEGIN]"))]
        )
    return made


def mixed_text(seed: int, length: int) -> str:
    """Words, accents that follow their letter, added tokens, and some long runs."""
    random = Random(seed)
    words = [
        "alpha",
        "the",
        "of",
        "naïve",
        "cafe\u0301",
        "東京",
        "don't",
        "\n",
        "  ",
        "<m>",
        "aab",
        "\U0001f40d",
    ]
    parts = []
    for _ in range(length // 4):  # a part has about four characters
        parts.append(random.choice(words) + " " * (random.random() < 0.7))
        if random.random() < 0.004:
            parts.append(random.choice([" ", "a", "=", "\u0301", "aab"]) * random.randrange(1, 200))
    return "".join(parts)


def test_the_ids_are_those_of_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a text that is encoded in windows: each window began with a token for the begin of a text."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(encode_text, "WINDOW", 1000)
    monkeypatch.setattr(encode_text, "OVERLAP", 512)
    (tmp_path / "a.txt").write_text(mixed_text(99, 30_000), encoding="utf-8", newline="")
    far = ("counted from the begin", "unigrams in one word", "pairs")
    for name, tokenizer in tokenizers_of_all_kinds().items():
        whole = tokenizer.encode((tmp_path / "a.txt").read_bytes().decode(), add_special_tokens=False).ids
        watched = Watched(tokenizer)
        ids = np.concatenate(list(tokenize.Encoder(name, 302, tokenizer=watched).encode(tmp_path / "a.txt")))
        assert ids.tolist() == whole, name
        assert watched.longest < 15_000 or name in far


class Watched:
    """A tokenizer that notes the length of the longest text that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.model, self.pre_tokenizer = tokenizer.model, tokenizer.pre_tokenizer
        self.longest, self._tokenizer = 0, tokenizer

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.longest = max(self.longest, *map(len, texts))
        return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)


def test_tokens_that_depend_on_far_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written can't be taken back once a longer window shows other tokens at its begin."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(encode_text, "WINDOW", 1000)
    monkeypatch.setattr(encode_text, "OVERLAP", 512)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "?": 1, "<unk>": 2}, unk_token="<unk>")
    )
    tokenizer.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("a(?=[^!]*!)"), "?")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    text = StringIO("a " * 1500 + "b" * 900 + " a !" + " a" * 2000)
    with pytest.raises(ValueError, match="its tokens depend on text that is 1,000 characters away"):
        list(encode_text.encode_text(tokenizer, text))


def test_all_problems_are_printed_and_nothing_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    words = ["nowhere.txt", str(source), "--pattern", "*.rst", "--tokenizer", str(tmp_path / "no.json")]
    assert command(["tokenize", *words, "--output", str(tmp_path / "missing" / "tokens.bin")]) == 2
    told = capsys.readouterr().err
    for part in ("nowhere.txt does not exist", "matches *.rst", "no.json does not exist", "end in .npy",
                 "there is no folder"):  # fmt: skip
        assert part in told
    assert len(told.splitlines()) == 5
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failure_halfway_leaves_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer_file = train_tokenizer(tmp_path / "tokenizer.json")
    for name in ("x.txt", "y.txt"):
        (source / name).write_bytes(b"good line\nbad \xff byte\n")
    before = sorted(tmp_path.rglob("*"))
    words = [str(source), "--output", str(tmp_path / "tokens.npy"), "--tokenizer", str(tokenizer_file)]
    assert command(["tokenize", *words]) == 2
    told = capsys.readouterr().err
    assert "x.txt is not UTF-8" in told
    assert "y.txt is not UTF-8" in told
    assert sorted(tmp_path.rglob("*")) == before


def test_an_existing_file_is_not_overwritten(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(source), "--output", str(tmp_path / "tokens.npy")]
    assert command(["tokenize", *words]) == 0
    assert command(["tokenize", *words]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.processes
def test_neither_command_nor_description_imports_torch(source: Path, tmp_path: Path) -> None:
    program = (
        "import sys; import hpc_parallel.data.tokens; assert 'numpy' not in sys.modules;"
        "from hpc_parallel.commands.tokenize import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'tokenizers' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", program, str(source), "--output", str(tmp_path / "tokens.npy")]
    assert subprocess.run(command, check=False).returncode == 0


def store(folder: Path, tokens: np.ndarray, **description: object) -> str:
    np.save(folder / "t.npy", tokens)
    described = {"vocab_size": 500, "tokenizer": "mine", "count": len(tokens)} | description
    (folder / "t.json").write_text(json.dumps(described))
    return str(folder / "t.npy")


def test_the_end_of_the_tokens_is_held_out(tmp_path: Path) -> None:
    tokens = (np.arange(1000) * 7 % 500).astype(np.uint16)
    data = TokensData(path=store(tmp_path, tokens), sequence_length=10, validation_share=0.1)
    assert (len(data.train), len(data.validation)) == (89, 9)
    inputs, targets = data.validation.batch(np.arange(9))
    assert inputs.flatten().tolist() == tokens[900:990].tolist()
    assert targets.flatten().tolist() == tokens[901:991].tolist()
    assert (data.vocab_size, data.sample_shape) == (500, (10,))
    assert isinstance(data.train.tokens, np.memmap)
    again = TokensData(path=store(tmp_path, tokens), sequence_length=10, validation_share=0.1)
    assert again.digest == data.digest
    tokens[345] += 1
    assert TokensData(path=store(tmp_path, tokens), sequence_length=10).digest != data.digest


def test_a_start_sees_tokens_that_a_job_could_not_use(tmp_path: Path) -> None:
    """Of 1,000 tokens 50 are held out: 49 and one more, as the class in the job says."""
    path = store(tmp_path, np.zeros(1000, dtype=np.uint16))
    words = ("launcher=local", "data=tokens", f"data.path={path}", "model.vocab_size=500")
    TokensData(path=path, sequence_length=49)
    assert prepared(*words, "data.sequence_length=49").config.data["sequence_length"] == 49
    with pytest.raises(ValueError, match="validation part has 50"):
        TokensData(path=path, sequence_length=50)
    with pytest.raises(ConfigError, match=r"validation has 50\. Try data\.sequence_length=49\."):
        prepared(*words, "data.sequence_length=50")
    os.truncate(path, 1500)  # as by a copy that was ended
    with pytest.raises(ConfigError, match=r"t\.npy has 1,500 bytes, and its 1,000 tokens need 2,000 or more"):
        prepared(*words, "data.sequence_length=49")


def test_ids_beyond_uint16_fit(tmp_path: Path) -> None:
    path = store(tmp_path, np.arange(70_000, 71_000, dtype=np.uint32), vocab_size=128_256)
    inputs, _ = TokensData(path=path, sequence_length=10).train.batch(np.array([2]))
    assert inputs.tolist() == [list(range(70_020, 70_030))]


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    tokens = np.full(1000, 7, dtype=np.uint16)
    with pytest.raises(ValueError, match=r"has 1000 tokens, but t\.json says 999"):
        TokensData(path=store(tmp_path, tokens, count=999), sequence_length=10)
    with pytest.raises(ValueError, match="token 7 in the training part is beyond vocab_size = 7"):
        TokensData(path=store(tmp_path, tokens, vocab_size=7), sequence_length=10).train.batch(np.array([0]))
    with pytest.raises(ValueError, match="vocab_size = 'many' must be a whole number"):
        TokensData(path=store(tmp_path, tokens, vocab_size="many"))
    with pytest.raises(ValueError, match="needs 10001 tokens"):
        TokensData(path=store(tmp_path, tokens), sequence_length=10_000)
    with pytest.raises(ValueError, match="1 dims of float32"):
        TokensData(path=store(tmp_path, tokens.astype(np.float32)))
    (tmp_path / "t.npy").write_bytes(b"not an array" * 200)
    with pytest.raises(ValueError, match="can't be read as an array"):
        TokensData(path=str(tmp_path / "t.npy"))
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match="does not describe tokens"):
        read_description(tmp_path / "t.npy")
    (tmp_path / "t.json").unlink()
    with pytest.raises(ValueError, match=r"t\.json is missing\. Make both with"):
        read_description(tmp_path / "t.npy")
    with pytest.raises(ValueError, match=r"no \.npy file"):
        read_description(tmp_path / "t.bin")


@pytest.mark.parametrize("kind", ["pipe", "device", "proc"])
def test_sources_that_never_end_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    places = {"pipe": tmp_path / "pipe", "device": Path("/dev/zero"), "proc": Path("/proc/uptime")}
    os.mkfifo(places["pipe"])
    assert command(["tokenize", str(places[kind]), "--output", str(tmp_path / "tokens.npy")]) == 2
    said = {"pipe": "it is a pipe", "device": "it is a device", "proc": "hold no text"}[kind]
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe"]


def tokenizer_json(model: str, **more: object) -> str:
    return json.dumps({"version": "1.0", "added_tokens": [], "model": json.loads(model), **more})


EMPTY = tokenizer_json('{"type": "BPE", "vocab": {}, "merges": []}')
AT_RANDOM = tokenizer_json('{"type": "BPE", "dropout": 0.1, "vocab": {"a": 0}, "merges": []}')
WITHOUT_UNKNOWN = tokenizer_json('{"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}')


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (EMPTY, "has no vocabulary"),
        (WITHOUT_UNKNOWN, "the tokenizer fails: WordLevel error"),
        (AT_RANDOM, "leaves out merges at random"),
        ("{", "can't be used: the tokenizer fails"),
        ("[" * 100_000, "can't be used: the tokenizer fails"),
    ],
)
def test_tokenizers_that_fail(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    before = sorted(tmp_path.rglob("*"))
    words = [str(source), "--output", str(tmp_path / "tokens.npy"), "--tokenizer", str(file)]
    assert command(["tokenize", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


class PanicException(BaseException):
    """As pyo3's, which can't be made from Python."""


def test_a_tokenizer_that_panics(tmp_path: Path) -> None:
    class Panicking:
        def encode_batch(self, pieces: list[str], add_special_tokens: bool) -> None:
            raise PanicException("called `Option::unwrap()` on a `None` value")

    (tmp_path / "a.txt").write_text("text")
    encoder = tokenize.Encoder("x", 3, tokenizer=Panicking())
    with pytest.raises(ValueError, match="the tokenizer fails: called"):
        list(encoder.encode(tmp_path / "a.txt"))


def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 200_000)
    with small_disk(tmp_path / "disk", bytes_=100_000) as disk:
        assert command(["tokenize", str(tmp_path / "a.txt"), "--output", str(disk / "tokens.npy")]) == 1
        assert "can't be written: No space left on device." in capsys.readouterr().err
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("tokens", "description"),
    [
        (b"\x93NUMPY\x01\x00\x02\x00{}", None),
        (b"", None),
        (b"PK\x03\x04", None),
        (None, "[" * 200_000),
        (None, '{"vocab_size": 1e999, "tokenizer": "bytes", "count": 8}'),
        (None, '{"vocab_size": 256, "tokenizer": {}, "count": 8}'),
        (None, "[]"),
    ],
)
def test_odd_tokens_are_refused(tmp_path: Path, tokens: bytes | None, description: str | None) -> None:
    file = tmp_path / "tokens.npy"
    np.save(file, np.arange(8, dtype=np.uint16))
    (tmp_path / "tokens.json").write_text('{"vocab_size": 256, "tokenizer": "bytes", "count": 8}')
    TokensData(path=str(file), sequence_length=1, validation_share=0.3)
    if tokens is not None:
        file.write_bytes(tokens)
    if description is not None:
        (tmp_path / "tokens.json").write_text(description)
    with pytest.raises(ValueError, match=r"Make both with|not a table|nests more"):
        TokensData(path=str(file), sequence_length=1, validation_share=0.3)


def test_a_pipe_of_tokens_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokens.npy")
    (tmp_path / "tokens.json").write_text('{"vocab_size": 256, "tokenizer": "bytes", "count": 8}')
    with pytest.raises(ValueError, match="is no regular file"):
        TokensData(path=str(tmp_path / "tokens.npy"))
