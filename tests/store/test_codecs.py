from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import zarr
from zarr.storage import LocalStore

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.store import codecs
from dflash_pipeline.store.arrays import ArraySpec
from dflash_pipeline.store.codecs import CHUNK_BYTES, check_codec, chunk_items, pipeline_for
from dflash_pipeline.store.decode import check_metadata, read_runs
from dflash_pipeline.store.encode import create_group, write_array
from dflash_pipeline.store.layout import chunk_file

SHAPES = [(1,), (16,), (40,), (48,), (16, 8), (33, 8), (100, 3)]
DTYPES = ["uint8", "uint16", "int32", "float32", "int64"]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "MAX_CHUNK_ITEMS", 16)


def example(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    raw = np.random.PCG64(5).random_raw(int(np.prod(shape))).reshape(shape)
    return (raw % np.uint64(200)).astype(dtype)


def write(directory: Path, spec: ArraySpec, data: np.ndarray) -> Path:
    write_array(directory, create_group(directory), spec, "lossless", data)
    return directory / chunk_file(spec.name, len(spec.shape))


def read(path: Path, spec: ArraySpec, runs: list[tuple[int, int]]) -> list[np.ndarray]:
    return read_runs(path, path.stat().st_size, spec.shape, spec.dtype, spec.pipeline("lossless"), runs)


def test_an_unknown_codec_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="'zip' is not one of: lossless"):
        check_codec("zip")
    with pytest.raises(ConfigError, match="lossless"):
        pipeline_for("zip", (10,), "uint8")


@pytest.mark.parametrize("hidden", [1, 64, 576, 1024, 5120, 2**18])
def test_a_chunk_of_states_is_a_power_of_two_of_tokens_in_four_mebibytes(hidden: int) -> None:
    items = chunk_items(2 * hidden, 10**9)
    assert items.bit_count() == 1
    assert items * 2 * hidden <= CHUNK_BYTES or items == codecs.MIN_CHUNK_ITEMS
    assert chunk_items(2 * hidden, 5) == 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("small_chunks")
def test_zarr_reads_what_we_write_and_we_read_what_zarr_writes(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    data = example(shape, dtype)
    spec = ArraySpec(name="states/1", shape=shape, dtype=dtype, attributes={"dtype": "x"})
    write(tmp_path / "ours", spec, data)
    array = zarr.open_array(LocalStore(tmp_path / "ours", read_only=True), path=spec.name, mode="r")
    np.testing.assert_array_equal(array[...], data)
    assert dict(array.attrs) == {"dtype": "x"}
    theirs = zarr.create_array(
        LocalStore(tmp_path / "theirs"),
        name=spec.name,
        shape=shape,
        dtype=dtype,
        chunks=array.chunks,
        shards=array.shards,
        filters=(),
        compressors=spec.pipeline("lossless").compressors,
        fill_value=0,
        config={"write_empty_chunks": True},
    )
    theirs[...] = data
    path = tmp_path / "theirs" / chunk_file(spec.name, len(shape))
    check_metadata(tmp_path / "theirs" / spec.name / "zarr.json", shape, dtype, spec.pipeline("lossless"))
    np.testing.assert_array_equal(read(path, spec, [(0, shape[0])])[0], data)


@pytest.mark.usefixtures("small_chunks")
def test_runs_of_chunks_equal_slices_of_the_whole(tmp_path: Path) -> None:
    data = example((100, 3), "uint16")
    spec = ArraySpec(name="a", shape=data.shape, dtype="uint16")
    path = write(tmp_path, spec, data)
    runs = [(0, 16), (32, 64), (96, 100), (16, 100)]
    for run, piece in zip(runs, read(path, spec, runs), strict=True):
        np.testing.assert_array_equal(piece, data[run[0] : run[1]])


@pytest.mark.usefixtures("small_chunks")
def test_zeros_are_really_stored(tmp_path: Path) -> None:
    spec = ArraySpec(name="a", shape=(64, 8), dtype="float32")
    path = write(tmp_path, spec, np.zeros((64, 8), np.float32))
    assert path.stat().st_size > 4 * (16 + 16 + 4)
    assert not read(path, spec, [(0, 64)])[0].any()


def test_the_bytes_do_not_depend_on_the_thread(tmp_path: Path, synthetic: ModuleType) -> None:
    data = synthetic.state_bits(1, (3000, 64), "bfloat16").view(torch.uint16).numpy()
    spec = ArraySpec(name="a", shape=data.shape, dtype="uint16")
    here = write(tmp_path / "main", spec, data).read_bytes()
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(write, tmp_path / "thread", spec, data).result().read_bytes()
    assert here == there


def test_an_array_of_another_shape_is_not_written(tmp_path: Path) -> None:
    spec = ArraySpec(name="a", shape=(4,), dtype="int32")
    with pytest.raises(ValueError, match="array a"):
        write(tmp_path, spec, np.zeros(5, np.int32))
