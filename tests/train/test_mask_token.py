"""The mask token is a row of the embedding that no text uses, or an error says what to pass."""

from __future__ import annotations

import pytest

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.train.mask_token import TokenizerFacts, choose_mask_token


def tokenizer(special: dict[int, str], **changes: object) -> TokenizerFacts:
    values = {"size": 1000, "mask": None, "used": frozenset({"<s>", "</s>"}), "template": "<|im_start|>user"}
    return TokenizerFacts(special={1: "<s>", 2: "</s>", 3: "<|im_start|>", **special}, **{**values, **changes})


def test_a_mask_token_is_preferred() -> None:
    assert choose_mask_token(None, tokenizer({9: "<|MASK|>", 5: "<reserved_0>"}), 1000) == 9
    assert choose_mask_token(None, tokenizer({9: "[X]"}, mask="[X]"), 1000) == 9


def test_then_a_reserved_token() -> None:
    assert choose_mask_token(None, tokenizer({7: "<reserved_1>", 5: "<reserved_0>"}), 1024) == 5


def test_then_the_first_spare_row_of_the_embedding() -> None:
    assert choose_mask_token(None, tokenizer({7: "<repo>"}), 1024) == 1000


def test_then_the_last_special_token_without_a_role() -> None:
    assert choose_mask_token(None, tokenizer({7: "<repo>", 16: "<empty_output>"}), 1000) == 16


def test_no_free_row_is_an_error_that_says_what_to_pass() -> None:
    with pytest.raises(ConfigError, match="--set mask_token_id=ID"):
        choose_mask_token(None, tokenizer({}), 1000)


def test_a_wanted_id_must_have_a_row() -> None:
    assert choose_mask_token(1023, tokenizer({}), 1024) == 1023
    for wanted in (1024, -1):
        with pytest.raises(ConfigError, match="rows 0 to 1023"):
            choose_mask_token(wanted, tokenizer({}), 1024)
