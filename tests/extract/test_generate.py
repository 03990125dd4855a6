"""Every prompt has its reply exactly once, whole, whatever the server does; nothing else is stored."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from filelock import FileLock

from dflash_pipeline.cli import main
from dflash_pipeline.errors import CacheMismatch, ConfigError, CorpusError, DflashError
from dflash_pipeline.extract.corpus import read_corpus
from dflash_pipeline.extract.generate import GenerateConfig, run_generate
from dflash_pipeline.extract.sources import open_sources

_spec = importlib.util.spec_from_file_location("dflash_test_serving", Path(__file__).parent / "serving.py")
assert _spec is not None
assert _spec.loader is not None
serving = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(serving)

Start = Callable[..., Any]


@pytest.fixture
def start() -> Iterator[Start]:
    servers = []

    def build(**options: Any) -> Any:
        servers.append(serving.Misbehaving(**options))
        return servers[-1]

    yield build
    for server in servers:
        server.shutdown()
        server.server_close()


def write_prompts(path: Path, prompts: list[str]) -> Path:
    rows = [{"id": f"p{index}", "source": f"s{index % 2}", "prompt": text} for index, text in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_for(server: Any, tmp_path: Path, prompts: list[str], **changes: Any) -> GenerateConfig:
    values: dict[str, Any] = {
        "prompts": write_prompts(tmp_path / "prompts.jsonl", prompts),
        "out": tmp_path / "out.jsonl",
        "server": server.url,
        "model": "tiny",
        "max_tokens": 400,
        "retry_seconds": 0.01,
    }
    return GenerateConfig(**{**values, **changes})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_failures_pass_and_the_rows_stand_in_the_order_of_the_prompts(start: Start, tmp_path: Path) -> None:
    prompts = ["late a", "fail2 b", "cut c", "hangup d", "plain e", "length f"]
    server = start()
    result = run_generate(config_for(server, tmp_path, prompts), lambda _: None)
    rows = read(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == [f"p{index}" for index in range(6)]
    assert server.answered[0] != "late a"  # the first prompt was answered after others
    for row, prompt in zip(rows, prompts, strict=True):
        text = serving.reply_to(prompt)
        assert (row["prompt"], row["completion"]) == (prompt, text)
        assert (row["prompt_ids"], row["completion_ids"]) == (serving.ids_of(prompt), serving.ids_of(text))
        assert row["finish_reason"] == ("length" if prompt.startswith("length") else "stop")
    assert [row["source"] for row in rows] == ["s0", "s1"] * 3
    assert server.asked["fail2 b"] == 3
    assert server.asked["cut c"] == server.asked["hangup d"] == 2
    assert (result["rows"], result["resumed_rows"], result["refused"]) == (6, 0, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_replies_that_are_not_whole_are_refused_counted_and_asked_for_again(start: Start, tmp_path: Path) -> None:
    prompts = ["null a", "empty b", "unfinished c", "lost d", "full e", "toolong f", "plain g"]
    lines: list[str] = []
    server = start()
    config = config_for(server, tmp_path, prompts)
    result = run_generate(config, lines.append)
    assert [row["id"] for row in read(config.out)] == ["p6"]
    assert result["rows"] == 1
    refused = result["refused"]
    assert sum(refused.values()) == len(refused) == 6
    for reason in ("null reply", "empty reply", "no finish reason", "server's count differ", "called finished", "400"):
        assert any(reason in key for key in refused)
        assert any(reason in line and "refused 1 replies" in line for line in lines)
    again = run_generate(config, lines.append)
    assert (again["rows"], again["resumed_rows"], again["refused"]) == (1, 1, refused)
    assert server.asked["plain g"] == 1
    assert server.asked["null a"] == 2


def test_at_most_so_many_requests_run_at_once(start: Start, tmp_path: Path) -> None:
    server = start(pause_seconds=0.02)
    run_generate(config_for(server, tmp_path, [f"plain {n}" for n in range(24)], concurrency=5), lambda _: None)
    assert 3 <= server.most_running <= 5


def test_a_server_without_token_ids_gives_text_rows(start: Start, tmp_path: Path, tiny_target_dir: Path) -> None:
    from transformers import AutoTokenizer

    turns = [{"role": "user", "content": "plain x"}, {"role": "assistant", "content": "an older reply"}]
    config = config_for(start(strict=True), tmp_path, [])
    config.prompts.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"prompt": "plain y"}) + "\n")
    result = run_generate(config, lambda _: None)
    first, second = read(config.out)
    assert first["messages"] == [turns[0], {"role": "assistant", "content": serving.reply_to("plain x")}]
    assert (second["prompt"], second["completion"]) == ("plain y", serving.reply_to("plain y"))
    assert result["new_token_id_rows"] == 0
    assert run_generate(config, lambda _: None)["resumed_rows"] == 2
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    assert len(read_corpus(open_sources([config.out]), tokenizer, vocab_size=1024, strict=True).rows) == 2


def test_prompts_of_token_ids_are_asked_as_they_are(start: Start, tmp_path: Path) -> None:
    config = config_for(start(), tmp_path, [])
    ids = serving.ids_of("plain ids")
    config.prompts.write_text(json.dumps({"id": "a", "prompt_ids": ids}) + "\n")
    run_generate(config, lambda _: None)
    (row,) = read(config.out)
    assert (row["prompt_ids"], row["completion_ids"]) == (ids, serving.ids_of(serving.reply_to("plain ids")))
    assert "prompt" not in row
    strict = start(strict=True)
    with pytest.raises(DflashError, match="no usable reply: 1 times no token ids in answer to a prompt of token ids"):
        run_generate(replace(config, server=strict.url, out=tmp_path / "other.jsonl"), lambda _: None)


PROGRAM = "import sys; from dflash_pipeline.cli import main; main(sys.argv[1:])"


def test_after_kills_in_mid_run_every_prompt_is_there_exactly_once(start: Start, tmp_path: Path) -> None:
    prompts = [
        f"{'fail2' if n % 7 == 3 else 'cut' if n % 7 == 5 else 'late' if n == 0 else 'plain'} {n}" for n in range(60)
    ]
    config = config_for(start(), tmp_path, prompts)
    run_generate(replace(config, out=tmp_path / "whole.jsonl"), lambda _: None)
    server = start(pause_seconds=0.1)
    command = [sys.executable, "-c", PROGRAM, "generate", "--prompts", str(config.prompts), "--out", str(config.out)]
    command += ["--server", server.url, "--model", "tiny", "--max-tokens", "400", "--concurrency", "4"]
    part = tmp_path / "out.jsonl.part"
    kept = []
    for wanted in (6, 16):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not part.exists() or part.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not config.out.exists()
        with part.open("ab") as file:
            file.write(b'{"id": "p59", "completion": "torn')  # what a kill within a write leaves
        kept.append(part.read_bytes().count(b"\n"))
    result = run_generate(replace(config, server=server.url), lambda _: None)
    assert result["resumed_rows"] == kept[-1] >= 16
    assert config.out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not part.exists()
    answered = [prompt for prompt in server.answered if prompt.startswith("plain")]
    assert (
        len(answered) < len([prompt for prompt in prompts if prompt.startswith("plain")]) + 3 * 4
    )  # only what was in flight


def test_a_finished_file_grows_by_new_prompts_and_asks_for_no_old_one(start: Start, tmp_path: Path) -> None:
    server = start()
    config = config_for(server, tmp_path, ["plain a", "plain c"])
    run_generate(config, lambda _: None)
    before = config.out.stat().st_mtime_ns
    assert run_generate(config, lambda _: None)["resumed_rows"] == 2
    assert config.out.stat().st_mtime_ns == before
    rows = [json.loads(line) for line in config.prompts.read_text().splitlines()]
    new = {"id": "new", "prompt": "plain b"}
    config.prompts.write_text("".join(json.dumps(row) + "\n" for row in [rows[0], new, rows[1]]))
    assert run_generate(config, lambda _: None)["resumed_rows"] == 2
    assert [row["id"] for row in read(config.out)] == ["p0", "new", "p1"]
    assert set(server.asked.values()) == {1}


def test_other_inputs_on_the_same_output_are_refused_and_named(start: Start, tmp_path: Path) -> None:
    config = config_for(start(), tmp_path, ["plain a", "plain b"])
    run_generate(config, lambda _: None)
    before = config.out.read_bytes()
    with pytest.raises(CacheMismatch, match=r"out\.jsonl:1 was written with max_tokens 400, now 500; give the same"):
        run_generate(replace(config, max_tokens=500), lambda _: None)
    write_prompts(config.prompts, ["plain a", "plain z"])
    with pytest.raises(CacheMismatch, match=r"out\.jsonl:2 answers another prompt of id 'p1'"):
        run_generate(config, lambda _: None)
    write_prompts(config.prompts, ["plain a"])
    with pytest.raises(CacheMismatch, match="has the id 'p1', which is not among the prompts"):
        run_generate(config, lambda _: None)
    assert config.out.read_bytes() == before
    config.out.write_text("notes\n")
    with pytest.raises(CacheMismatch, match="is not a row of a generation"):
        run_generate(config, lambda _: None)
    with FileLock(tmp_path / ".out.jsonl.lock"), pytest.raises(CacheMismatch, match="another process is writing"):
        run_generate(config, lambda _: None)


def test_a_server_that_stays_down_stops_the_run_and_keeps_what_it_answered(start: Start, tmp_path: Path) -> None:
    server = start()
    config = config_for(server, tmp_path, ["plain a", "plain b", "down c", "plain d"], concurrency=1, attempts=3)
    with pytest.raises(
        DflashError, match=r"3 tries failed, the last one: HTTP 500.*run the same command again"
    ) as caught:
        run_generate(config, lambda _: None)
    assert "\n" not in str(caught.value)
    assert server.asked["down c"] == 3
    assert [row["id"] for row in read(tmp_path / "out.jsonl.part")] == ["p0", "p1"]
    gone = replace(config, server="http://127.0.0.1:9", out=tmp_path / "gone.jsonl", attempts=2)
    said: list[str] = []
    with pytest.raises(DflashError, match="2 tries failed, the last one: ConnectError"):
        run_generate(gone, said.append)
    assert any("ConnectError" in line and "trying again in" in line for line in said)


def test_wrong_requests_are_refused_at_once(start: Start, tmp_path: Path) -> None:
    server = start()
    config = config_for(server, tmp_path, ["plain a"])
    with pytest.raises(ConfigError, match="it serves tiny, not --model large"):
        run_generate(replace(config, model="large"), lambda _: None)
    with pytest.raises(ConfigError, match="--server"):
        run_generate(replace(config, server="nonsense"), lambda _: None)
    with pytest.raises(ConfigError, match="either --server with --model, or --target"):
        replace(config, target="x")
    with pytest.raises(ConfigError, match="go together"):
        replace(config, model=None)
    config.prompts.write_text(json.dumps({"prompt": "plain a", "tools": [{"type": "function"}]}) + "\n")
    with pytest.raises(ConfigError, match="1 prompt with tools, such as prompts:1"):
        run_generate(config, lambda _: None)
    config.prompts.write_text('{"id": 1, "prompt": "plain a"}\n{"id": 1, "prompt": "plain b"}\n')
    with pytest.raises(CorpusError, match="used twice"):
        run_generate(config, lambda _: None)
    assert not server.asked


def test_the_command_prints_one_json_object(start: Start, tmp_path: Path) -> None:
    config = config_for(start(), tmp_path, ["plain a", "null b"])
    arguments = ["generate", "--prompts", config.prompts, "--out", config.out, "--server", config.server]
    found = CliRunner().invoke(main, [*map(str, arguments), "--model", "tiny", "--json"])
    assert found.exit_code == 0, found.stderr
    result = json.loads(found.stdout)
    assert (result["rows"], result["prompts"], result["refused"]) == (1, 2, {"null reply": 1})
