"""Damaged and hostile data files: every fault is an error that names the file; nothing reads as zeros."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from dflash_pipeline.errors import CacheCorrupt, CacheMissing
from dflash_pipeline.store import codecs
from dflash_pipeline.store.arrays import ArraySpec
from dflash_pipeline.store.decode import check_metadata, read_runs
from dflash_pipeline.store.encode import create_group, write_array
from dflash_pipeline.store.layout import chunk_file

SPEC = ArraySpec(name="a", shape=(40, 8), dtype="uint16")
NUM_CHUNKS = 3
DATA = (np.random.PCG64(5).random_raw(320) % np.uint64(999)).astype(np.uint16).reshape(40, 8)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(codecs, "MAX_CHUNK_ITEMS", 16)
    write_array(tmp_path, create_group(tmp_path), SPEC, "lossless", DATA)
    return tmp_path / chunk_file("a", 2)


def read(path: Path, num_bytes: int | None = None) -> np.ndarray:
    size = path.stat().st_size if num_bytes is None else num_bytes
    return read_runs(path, size, SPEC.shape, SPEC.dtype, SPEC.pipeline("lossless"), [(0, 40)])[0]


def with_index(data: bytes, change: Callable[[np.ndarray], object]) -> bytes:
    """Change the index and give it a right checksum again."""
    start = len(data) - 4 - 16 * NUM_CHUNKS
    index = np.frombuffer(data[start:-4], dtype="<u8").reshape(NUM_CHUNKS, 2).copy()
    change(index)
    raw = index.tobytes()
    return data[:start] + raw + google_crc32c.value(raw).to_bytes(4, "little")


def with_first_chunk(data: bytes, change: Callable[[bytearray], object]) -> bytes:
    """Change the first chunk's blosc buffer and give it a right checksum again."""
    start = len(data) - 4 - 16 * NUM_CHUNKS
    length = int.from_bytes(data[start + 8 : start + 16], "little")
    payload = bytearray(data[: length - 4])
    change(payload)
    return bytes(payload) + google_crc32c.value(bytes(payload)).to_bytes(4, "little") + data[length:]


def test_an_intact_file_reads(file: Path) -> None:
    np.testing.assert_array_equal(read(file), DATA)


def test_a_flip_of_any_bit_is_noticed(file: Path) -> None:
    data = file.read_bytes()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        file.write_bytes(changed)
        with pytest.raises(CacheCorrupt, match=str(file)):
            read(file)


def test_a_truncation_to_any_length_is_noticed(file: Path) -> None:
    data = file.read_bytes()
    for size in range(0, len(data), 7):
        file.write_bytes(data[:size])
        with pytest.raises(CacheCorrupt, match=f"expected {len(data)} bytes, found {size}"):
            read(file, len(data))
        with pytest.raises(CacheCorrupt, match=str(file)):  # also where the record agrees with the truncated size
            read(file)


def test_a_file_that_is_gone_is_named(file: Path) -> None:
    file.unlink()
    with pytest.raises(CacheMissing, match="missing"):
        read(file, 100)


EMPTY = 2**64 - 1
INDEX: dict[str, Callable[[np.ndarray], object]] = {
    "a chunk left out, which zarr reads as zeros": lambda index: index.__setitem__(1, (EMPTY, EMPTY)),
    "all chunks left out": lambda index: index.fill(EMPTY),
    "a chunk of no bytes": lambda index: index.__setitem__((1, 1), 0),
    "a chunk beyond the end": lambda index: index.__setitem__((1, 0), 10**6),
    "a chunk longer than the file": lambda index: index.__setitem__((1, 1), 10**6),
    "a sum that overflows": lambda index: index.__setitem__(1, (EMPTY - 10, 100)),
    "two chunks swapped with other lengths": lambda index: index.__setitem__((0, 1), index[0, 1] - 1),
}


@pytest.mark.parametrize("name", sorted(INDEX))
def test_a_hostile_index_is_refused(file: Path, name: str) -> None:
    file.write_bytes(with_index(file.read_bytes(), INDEX[name]))
    with pytest.raises(CacheCorrupt, match=str(file)):
        read(file)


def test_one_stored_chunk_that_stands_for_several_is_refused(file: Path) -> None:
    """A bomb: a small file whose index names the same bytes again and again."""
    data = file.read_bytes()
    length = int.from_bytes(data[-4 - 16 * NUM_CHUNKS + 8 :][:8], "little")
    bomb = data[:length] + data[-4 - 16 * NUM_CHUNKS :]
    file.write_bytes(with_index(bomb, lambda index: index.__setitem__(slice(None), (0, length))))
    with pytest.raises(CacheCorrupt, match="one stands for several"):
        read(file)


CHUNK: dict[str, Callable[[bytearray], object]] = {
    "a header that promises fewer bytes": lambda data: data.__setitem__(slice(4, 8), (64).to_bytes(4, "little")),
    "a header that promises a gigabyte": lambda data: data.__setitem__(slice(4, 8), (2**30).to_bytes(4, "little")),
    "a header of another length": lambda data: data.__setitem__(slice(12, 16), (17).to_bytes(4, "little")),
    "a version of blosc that is none": lambda data: data.__setitem__(0, 99),
    "garbage behind the header": lambda data: data.__setitem__(slice(16, None), bytes(len(data) - 16)),
}


@pytest.mark.parametrize("name", sorted(CHUNK))
def test_a_hostile_chunk_is_refused(file: Path, name: str) -> None:
    file.write_bytes(with_first_chunk(file.read_bytes(), CHUNK[name]))
    with pytest.raises(CacheCorrupt, match=str(file)):
        read(file)


def test_a_shape_that_the_file_cannot_hold_is_refused_before_allocation(file: Path) -> None:
    for shape in ((10**12, 8), (40, 2**40)):
        spec = ArraySpec(name="a", shape=shape, dtype="uint16")
        with pytest.raises(CacheCorrupt, match=r"cannot hold|too few"):
            read_runs(file, file.stat().st_size, shape, "uint16", spec.pipeline("lossless"), [(0, shape[0])])


METADATA: dict[str, Callable[[dict[str, Any]], object]] = {
    "another shape": lambda meta: meta.update(shape=[41, 8]),
    "a huge shape": lambda meta: meta.update(shape=[10**15, 8]),
    "another dtype": lambda meta: meta.update(data_type="int16"),
    "a group": lambda meta: meta.update(node_type="group"),
    "zarr format 2": lambda meta: meta.update(zarr_format=2),
    "no codecs": lambda meta: meta.update(codecs=[]),
    "codecs that are a number": lambda meta: meta.update(codecs=1),
    "no sharding": lambda meta: meta.update(codecs=[{"name": "bytes", "configuration": {"endian": "little"}}]),
    "other chunks": lambda meta: meta["codecs"][0]["configuration"].update(chunk_shape=[8, 8]),
    "no checksum": lambda meta: meta["codecs"][0]["configuration"]["codecs"].pop(),
    "a filter more": lambda meta: meta["codecs"][0]["configuration"]["codecs"].insert(0, {"name": "transpose"}),
    "big endian": lambda meta: meta["codecs"][0]["configuration"]["codecs"][0]["configuration"].update(endian="big"),
    "an index without checksum": lambda meta: meta["codecs"][0]["configuration"]["index_codecs"].pop(),
    "an index at the start": lambda meta: meta["codecs"][0]["configuration"].update(index_location="start"),
}


@pytest.mark.parametrize("name", sorted(METADATA))
def test_metadata_that_says_another_thing_is_refused(file: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "a" / "zarr.json"
    pipeline = SPEC.pipeline("lossless")
    check_metadata(path, SPEC.shape, SPEC.dtype, pipeline)
    metadata = json.loads(path.read_text(encoding="utf-8"))
    METADATA[name](metadata)
    path.write_text(json.dumps(metadata), encoding="utf-8")
    with pytest.raises(CacheCorrupt, match=r"a/zarr\.json"):
        check_metadata(path, SPEC.shape, SPEC.dtype, pipeline)


def test_fields_that_zarr_may_add_are_no_fault(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "a" / "zarr.json"
    metadata = json.loads(path.read_text(encoding="utf-8"))
    metadata["dimension_names"] = ["token", "channel"]
    metadata["codecs"][0]["configuration"]["codecs"][2]["configuration"] = {}
    path.write_text(json.dumps(metadata), encoding="utf-8")
    check_metadata(path, SPEC.shape, SPEC.dtype, SPEC.pipeline("lossless"))
