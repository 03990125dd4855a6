"""Shared fixtures: the tiny random target T of the tests, and small corpora."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import random
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("dflash", deadline=None)  # tests never assert a time: the machine may be busy
settings.load_profile("dflash")

SHARED = Path(__file__).resolve().parents[2] / "shared"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
T_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """How hard the kill test is."""
    parser.addoption("--kills", type=int, default=3, help="kills of the kill test (make kill-test: 20)")


def training_text() -> list[str]:
    """Text that every Python installation carries: sources of a few standard modules."""
    return [inspect.getsource(module) for module in (argparse, textwrap, random, inspect)]


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of exactly 1,000 tokens with a ChatML template and no generation marker."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    assert tokenizer.get_vocab_size() == 1000
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    directory = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(directory)
    return directory


def save_tiny_target(directory: Path, tokenizer_dir: Path, **changes: object) -> Path:
    """Save T, the tiny random Qwen3 (8 layers, hidden 64, 4 heads of 32, 2 KV heads, 1,024 embedding rows)."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    settings = {**T_SIZES, "vocab_size": 1024, "tie_word_embeddings": False, **changes}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**settings, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.3, 3.0)  # far from 1: a reader that forgets the weight is found out
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.08)
    model.generation_config.pad_token_id = 2
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """The folder of T in float32."""
    return save_tiny_target(tmp_path_factory.mktemp("target"), tiny_tokenizer_dir)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_rows(count: int, seed: int = 0, max_reply_words: int = 40) -> list[dict[str, object]]:
    """Chat rows of random words, all different."""
    source = random.Random(seed)
    words = sorted({word for text in training_text() for word in text.split() if word.isalpha()})
    return [
        {
            "id": f"row-{seed}-{index}",
            "messages": [
                {"role": "user", "content": " ".join(source.choices(words, k=source.randint(3, 12)))},
                {"role": "assistant", "content": " ".join(source.choices(words, k=source.randint(6, max_reply_words)))},
            ],
        }
        for index in range(count)
    ]


@pytest.fixture(scope="session")
def chat_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty-seven chat rows as JSON lines."""
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "chat.jsonl", chat_rows(37))


@pytest.fixture(scope="session")
def tiny_hybrid_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """The folder of a tiny Qwen3.5-like multimodal wrapper: nested text_config, linear attention, (1 + w) norms."""
    spec = importlib.util.spec_from_file_location("dflash_test_hybrid", Path(__file__).parent / "hybrid.py")
    assert spec is not None
    assert spec.loader is not None
    hybrid = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hybrid)
    directory: Path = hybrid.save_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), tiny_tokenizer_dir)
    return directory


@pytest.fixture(scope="session")
def tiny_cache(tiny_target_dir: Path, chat_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete cache of the chat corpus on T: five layers, the final state too, several shards."""
    from dflash_pipeline.extract.config import ExtractConfig
    from dflash_pipeline.extract.run import run_extract

    out = tmp_path_factory.mktemp("cache") / "cache"
    run_extract(
        ExtractConfig(
            corpus=(chat_corpus,),
            target=str(tiny_target_dir),
            out=out,
            shard_tokens=1000,
            keep_final=True,
            device="cpu",
        )
    )
    return out


SERVER = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
moto, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()
def app(environ, start_response):
    with one_at_a_time:  # moto looks at a put's condition and writes in two steps; a real store does both at once
        return list(moto(environ, start_response))
server = make_server("127.0.0.1", 0, app, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_address[1], flush=True)
sys.stdin.read()
server.shutdown()
"""


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """The address of an S3 server with an empty bucket named `caches`; obstore's variables lead to it."""
    pytest.importorskip("obstore", reason="the extra `buckets` is not installed")
    pytest.importorskip("moto", reason="the extra `dev` is not installed")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdin is not None
    address = f"http://127.0.0.1:{int(process.stdout.readline())}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/caches", method="PUT"), timeout=30).close()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        yield address
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)
