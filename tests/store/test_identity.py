from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.store import CorpusFile

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
    ],
)
def test_an_impossible_identity_is_refused(synthetic: ModuleType, field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        synthetic.identity(**{field: value})
