from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_pipeline.errors import CacheCorrupt, ConfigError
from dflash_pipeline.store import CorpusFile, Identity
from dflash_pipeline.store.identity import parse_identity
from dflash_pipeline.store.jsonfile import canonical_bytes, parse_json

OTHER = CorpusFile(name="rows.jsonl", sha256="1" * 64, num_bytes=123)
HASHED: dict[str, Any] = {
    "target_fingerprint": "d" * 32,
    "tokenizer_hash": "d" * 32,
    "template_hash": "d" * 32,
    "corpus": (OTHER,),
    "layer_ids": (4, 1),
    "dtype": "float32",
    "attention": "eager",
    "max_length": 100,
    "codec": "other",
    "top_k": 4,
    "keep_final": True,
    "batch_tokens": 41,
    "shard_tokens": 31,
    "limit_rows": 5,
    "limit_tokens": 500,
}


def test_the_digest_of_an_identity_never_changes(synthetic: ModuleType) -> None:
    assert synthetic.identity().digest == "f51b531371223d2a5cecbfbc4c4489ce"


@pytest.mark.parametrize("field", sorted(HASHED))
def test_every_input_changes_the_identity_and_is_named(synthetic: ModuleType, field: str) -> None:
    ours, theirs = synthetic.identity(), synthetic.identity(**{field: HASHED[field]})
    assert ours.digest != theirs.digest
    assert [name for name, _, _ in ours.differences(theirs)] == [field]


def test_all_fields_are_covered(synthetic: ModuleType) -> None:
    assert set(HASHED) | {"target_name", "target_revision"} == set(synthetic.identity().fields())


def test_names_do_not_change_the_identity(synthetic: ModuleType) -> None:
    renamed = synthetic.identity(
        target_name="/moved/here",
        target_revision="main",
        corpus=(CorpusFile(name="other name.jsonl", sha256="0" * 64, num_bytes=123),),
    )
    assert renamed.digest == synthetic.identity().digest
    assert synthetic.identity().differences(renamed) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float16"),
        ("layer_ids", ()),
        ("layer_ids", (1, 1)),
        ("layer_ids", (-1,)),
        ("layer_ids", (True,)),
        ("top_k", 0),
        ("corpus", ()),
        ("corpus", (CorpusFile(name="x", sha256="short", num_bytes=1),)),
        ("batch_tokens", 0),
        ("limit_rows", 0),
        ("appended", (1,)),
        ("appended", (0,)),
    ],
)
def test_an_impossible_identity_is_refused(synthetic: ModuleType, field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        synthetic.identity(**{field: value})


def test_an_extended_cache_has_another_identity_and_only_it_says_so(synthetic: ModuleType) -> None:
    plain = synthetic.identity()
    both = synthetic.identity(corpus=(*plain.corpus, OTHER))
    extended = synthetic.identity(corpus=(*plain.corpus, OTHER), appended=(1,))
    assert "appended" not in plain.fields()
    assert "appended" not in both.fields()
    assert extended.fields()["appended"] == [1]
    assert extended.digest != both.digest
    assert both.differences(extended) == [("appended", None, [1])]
    assert extended.differences(both) == [("appended", [1], None)]
    assert (plain.generation, extended.generation) == (0, 1)
    assert (plain.part_files, both.part_files, extended.part_files) == ((1,), (2,), (1, 1))


def test_a_corpus_that_differs_is_told_file_by_file_in_words(synthetic: ModuleType) -> None:
    pairs = zip("abcdef", "123456", strict=True)
    files = [CorpusFile(name=f"{name}.jsonl", sha256=digit * 64, num_bytes=1234) for name, digit in pairs]
    one = synthetic.identity(corpus=tuple(files[:2]))
    (found,) = one.differences(synthetic.identity(corpus=(files[2],)))
    assert found == (
        "corpus",
        "a.jsonl (1,234 bytes, sha256 111111111111), b.jsonl (1,234 bytes, sha256 222222222222)",
        "c.jsonl (1,234 bytes, sha256 333333333333)",
    )
    (found,) = one.differences(synthetic.identity(corpus=(files[0],)))
    assert found[1:] == ("1 file alike, then b.jsonl (1,234 bytes, sha256 222222222222)", "1 file alike, then no more")
    (found,) = one.differences(synthetic.identity(corpus=tuple(files[1:])))
    assert found[2].endswith("d.jsonl (1,234 bytes, sha256 444444444444) and 2 more")


def test_an_empty_list_of_extensions_is_not_the_absence_of_one(synthetic: ModuleType, tmp_path: Path) -> None:
    def read(fields: dict[str, Any]) -> Identity:
        return parse_identity(parse_json(canonical_bytes(fields) + b"\n", tmp_path / "plan.json"))

    extended = synthetic.identity(corpus=(*synthetic.identity().corpus, OTHER), appended=(1,))
    assert read(extended.fields()) == extended
    assert read(synthetic.identity().fields()) == synthetic.identity()
    for value in ([], [0], [2], ["1"], 1):
        with pytest.raises(CacheCorrupt):
            read({**extended.fields(), "appended": value})
