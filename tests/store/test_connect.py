"""Buckets that cannot be asked: nothing is said of the cache there, and each cause is one line with its remedy."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflash_pipeline.errors import BucketError, CacheMissing, ConfigError, DflashError
from dflash_pipeline.store import CacheReader, open_cache, verify
from dflash_pipeline.store import bucket as bucket_room
from dflash_pipeline.store import connect as connect_room
from dflash_pipeline.store.bucket import Bucket
from dflash_pipeline.store.publish import publish_cache
from dflash_pipeline.store.source import Mirror

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None or importlib.util.find_spec("moto") is None,
    reason="the extras `buckets` and `dev` are not installed",
)


class Gate(ThreadingHTTPServer):
    """Stands before the S3 server, passes `open_for` more requests on, then answers with `status`, or not at all."""

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.behind = behind
        self.open_for = 10**9
        self.refused: list[str] = []
        self.status: int | None = 403
        self.lock = threading.Lock()


class Passing(BaseHTTPRequestHandler):
    """One request to a Gate."""

    server: Gate

    def do_GET(self) -> None:
        """Pass a GET or HEAD on."""
        with self.server.lock:
            self.server.open_for -= 1
            refused = self.server.open_for < 0
            if refused:
                self.server.refused.append(self.path)
        if refused and self.server.status is None:
            self.close_connection = True
            return
        if refused:
            assert self.server.status is not None
            self.send_response(self.server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        asked = urllib.request.Request(self.server.behind + self.path, method=self.command, headers=headers)
        try:
            answer = urllib.request.urlopen(asked, timeout=30)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.read())

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def gate(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before the S3 server, which the variables lead to."""
    server = Gate(endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def url(endpoint: str, pristine: Path, tmp_path: Path) -> str:
    """A sound cache in the bucket."""
    place = f"s3://caches/{tmp_path.name}/sound"
    publish_cache(pristine, place)
    return place


@pytest.mark.parametrize("status", [403, None], ids=["refused", "gone"])
def test_what_cannot_be_read_now_is_not_called_damaged(
    url: str, gate: Gate, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_room, "PATIENCE_SECONDS", 1.0)
    assert verify(url)["ok"]
    gate.open_for, gate.status = 20, status
    with pytest.raises(
        BucketError, match=rf"^{url}/\S+: cannot be read: .*; run the same command again when it can"
    ) as error:
        verify(url, num_workers=2)
    assert "\n" not in str(error.value)
    gate.open_for = 10**9
    # the two under way, and what a worker begins before it hears that all is over: not each file
    assert len(set(gate.refused)) < len(Bucket(url).sizes("shards")) / 4
    assert verify(url)["ok"]


def test_a_bucket_that_has_answered_is_waited_for_and_that_is_said_once(
    url: str, gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect_room, "TRY_SECONDS", 0.5)
    cache = open_cache(url)
    gate.open_for, gate.status = 0, 503
    opening = threading.Timer(1.5, lambda: setattr(gate, "open_for", 10**9))
    opening.start()
    assert len(cache.read_shard(0)) > 0
    assert gate.refused
    opening.join()
    (said,) = caplog.messages
    assert re.fullmatch(rf"{url}/\S+: cannot be read: .*[^;]; tried again for up to 120 s", said)


def test_ctrl_c_is_heard_while_a_bucket_is_waited_for(url: str, gate: Gate) -> None:
    code = """
import signal, sys
from dflash_pipeline.store import verify
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
verify(sys.argv[1], num_workers=2)
"""
    gate.open_for, gate.status = 10, 503
    with subprocess.Popen([sys.executable, "-c", code, url], stderr=subprocess.PIPE, text=True) as waiting:
        try:
            while not gate.refused:
                time.sleep(0.1)
            time.sleep(1)
            waiting.send_signal(signal.SIGINT)
            _, err = waiting.communicate(timeout=90)  # and not two minutes
        finally:
            waiting.kill()
    assert "KeyboardInterrupt" in err


def test_an_object_that_is_gone_is_damage_with_its_remedy(url: str) -> None:
    Bucket(url).delete("shards/00001/tokens/c/0")
    found = verify(url)
    assert found["bad_shards"] == [1]
    assert "there is no such object; the cache is damaged, `dflash cache repair` makes it again" in found["problems"][0]


def test_a_full_local_disk_is_said_to_be_one(url: str, monkeypatch: pytest.MonkeyPatch, small_disk: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    (small_disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 40_000))
    for read in (verify, lambda place: CacheReader(Mirror(Bucket(place), max_bytes=10**9)).read_shard(0)):
        with pytest.raises(DflashError, match=rf"^{small_disk}: No space left on device; .*or set TMPDIR$"):
            read(url)


@pytest.mark.parametrize("name", ["a?x=1", "run#1", "a%20b"])
def test_a_url_names_one_place(endpoint: str, name: str) -> None:
    with pytest.raises(ConfigError, match="may not stand in the URL of a cache"):
        Bucket(f"s3://caches/{name}")


def test_an_endpoint_without_a_scheme_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(
        ConfigError, match="AWS_ENDPOINT_URL is 'localhost:9000': expected a URL, such as http://localhost"
    ):
        open_cache("s3://caches/c")


def test_a_bucket_and_a_cache_that_are_not_there_are_told_apart(endpoint: str) -> None:
    with pytest.raises(BucketError, match=r"^s3://no-such-bucket/c: there is no such bucket$"):
        open_cache("s3://no-such-bucket/c")
    with pytest.raises(CacheMissing, match=r"^s3://caches/none: there is no cache$"):
        open_cache("s3://caches/none")
