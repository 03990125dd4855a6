"""A cache in object storage: an S3 server on loopback, started here, and file:// URLs."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from dflash_pipeline.errors import BucketError, CacheCorrupt, CacheIncomplete, CacheMismatch, CacheMissing, ConfigError
from dflash_pipeline.store import CacheReader, describe, open_cache, verify
from dflash_pipeline.store.bucket import Bucket, is_url
from dflash_pipeline.store.publish import publish_cache
from dflash_pipeline.store.source import Mirror

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None or importlib.util.find_spec("moto") is None,
    reason="the extras `buckets` and `dev` are not installed",
)


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place, in the bucket and in a folder."""
    if request.param == "file":
        return f"file://{tmp_path}/published"
    request.getfixturevalue("endpoint")
    return f"s3://caches/{tmp_path.name}/cache"


def rows_of(cache: CacheReader) -> list[object]:
    return [row for shard in range(cache.num_shards) for row in cache.read_shard(shard)]


def test_what_is_published_reads_as_the_cache_itself(synthetic: ModuleType, pristine: Path, url: str) -> None:
    result = publish_cache(pristine, url)
    here, there = open_cache(pristine), open_cache(url)
    assert (result["shards"], result["resumed_shards"]) == (4, 0)
    assert result["fingerprint"] == there.fingerprint == here.fingerprint
    assert all(synthetic.same_rows(*pair) for pair in zip(rows_of(there), rows_of(here), strict=True))
    assert there.head().embed_tokens.equal(here.head().embed_tokens)
    assert there.channel_rms(4).equal(here.channel_rms(4))
    assert there.target_config() == here.target_config()
    assert sorted(file.name for file in there.target_dir.iterdir()) == [
        *("config.json", "head.safetensors", "tokenizer.json")
    ]
    assert {**describe(url), "cache": ""} == {**describe(pristine), "cache": ""}
    assert verify(url) == verify(pristine)
    copy = pickle.loads(pickle.dumps(there))
    assert copy.place == url
    assert synthetic.same_rows(copy.read_row(3), here.read_row(3))


def test_only_what_is_asked_for_is_fetched(pristine: Path, url: str) -> None:
    publish_cache(pristine, url)
    cache = open_cache(url)
    cache.read_shard(1, layer_ids=[4], top_k=False)
    fetched = {file.relative_to(cache.path).as_posix() for file in cache.path.rglob("*") if file.is_file()}
    assert fetched == {
        *("manifest.json", "plan.json", "shards/00001/record.json"),
        *(f"shards/00001/{name}/zarr.json" for name in ("tokens", "loss_mask", "states/4")),
        *(f"shards/00001/{name}" for name in ("tokens/c/0", "loss_mask/c/0", "states/4/c/0/0")),
    }


def test_the_local_copies_are_bounded_and_go_with_the_reader(synthetic: ModuleType, pristine: Path, url: str) -> None:
    publish_cache(pristine, url)
    one_shard = max(record.num_bytes for record in open_cache(pristine).manifest.shards)
    mirror = Mirror(Bucket(url), max_bytes=one_shard * 3 // 2)
    cache, here = CacheReader(mirror), open_cache(pristine)
    for shard in [0, 1, 2, 3, 0, 2]:
        rows, expected = cache.read_shard(shard), here.read_shard(shard)
        assert all(synthetic.same_rows(*pair) for pair in zip(rows, expected, strict=True))
        on_disk = sum(
            file.stat().st_size
            for file in (cache.path / "shards").rglob("*")
            if file.is_file() and file.name != "record.json"
        )
        assert on_disk == mirror.num_bytes <= mirror.max_bytes
    with mirror.holding(2):  # a shard that is being read stays, whatever else is read
        cache.read_shard(3)
        cache.read_shard(0)
        assert (cache.path / "shards/00002/tokens/c/0").is_file()
    folder = cache.path
    del cache, mirror
    assert not folder.exists()


def test_a_publication_that_stops_is_no_cache_and_goes_on(
    pristine: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Bucket.upload, []

    def upload(self: Bucket, name: str, content: Path | bytes) -> None:
        calls.append(name)
        if name == "shards/00002/tokens/c/0":
            raise KeyboardInterrupt
        real(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", upload)
        with pytest.raises(KeyboardInterrupt):
            publish_cache(pristine, url)
    assert [name for name in calls if name.endswith("record.json")] == [
        *("shards/00000/record.json", "shards/00001/record.json")
    ]
    with pytest.raises(CacheIncomplete, match="2 shards are there"):
        open_cache(url)
    result = publish_cache(pristine, url)
    assert result["resumed_shards"] == 2
    assert verify(url)["ok"]
    Bucket(url).upload("shards/00003/tokens/c/0", b"")  # cut since
    assert publish_cache(pristine, url)["resumed_shards"] == 3
    assert verify(url)["ok"]


def test_a_shard_s_record_goes_last_and_the_manifest_after_all(
    pristine: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = Bucket.upload
    monkeypatch.setattr(Bucket, "upload", lambda self, name, content: (order.append(name), real(self, name, content)))
    publish_cache(pristine, url)
    assert order[-1] == "manifest.json"
    for shard in range(4):
        places = [place for place, name in enumerate(order) if name.startswith(f"shards/0000{shard}/")]
        assert order[places[-1]] == f"shards/0000{shard}/record.json"
    assert order.index("plan.json") < order.index("shards/00000/record.json")


def test_another_cache_in_the_place_is_refused(synthetic: ModuleType, pristine: Path, tmp_path: Path, url: str) -> None:
    publish_cache(pristine, url)
    synthetic.write_cache(tmp_path / "other", attention="eager")
    with pytest.raises(CacheMismatch, match="holds another cache"):
        publish_cache(tmp_path / "other", url)
    assert open_cache(url).fingerprint == open_cache(pristine).fingerprint


def test_a_damaged_cache_is_not_published(cache: Path, url: str) -> None:
    path = cache / "shards/00001/states/1/c/0/0"
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    with pytest.raises(CacheCorrupt, match="states/1"):
        publish_cache(cache, url)
    with pytest.raises(CacheIncomplete):
        open_cache(url)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:60] + bytes([data[60] ^ 2]) + data[61:],
    "cut": lambda data: data[:-1],
    "grown": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_a_damaged_object_is_named_and_never_read(pristine: Path, url: str, damage: str) -> None:
    publish_cache(pristine, url)
    name = "shards/00001/states/4/c/0/0"
    Bucket(url).upload(name, DAMAGE[damage]((pristine / name).read_bytes()))
    cache = open_cache(url)
    with pytest.raises(CacheCorrupt, match=f"{url}/{name}"):  # and not its local copy
        cache.read_shard(1)
    assert len(cache.read_shard(0)) > 0
    assert verify(url)["bad_shards"] == [1]


def test_places_without_a_cache_and_without_a_server_say_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CacheMissing, match=r"there is no (cache|such folder)"):
        open_cache(url)
    with pytest.raises(ConfigError, match="s3, gs, file"):
        open_cache("ftp://host/cache")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"dflash-pipeline\[buckets\]"):
        open_cache(url)


def test_a_write_that_fails_is_one_line(pristine: Path, endpoint: str) -> None:
    with pytest.raises(BucketError, match=r"^s3://no-such-bucket/c: there is no such bucket$"):
        publish_cache(pristine, "s3://no-such-bucket/c")


def test_a_folder_is_no_url(pristine: Path) -> None:
    assert not is_url(str(pristine))
    assert not is_url(pristine)
    assert is_url("s3://b/c")
