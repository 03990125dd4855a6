"""Layer ids: the default rule, the notation, the refusals."""

from __future__ import annotations

import pytest

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.target import check_layer_ids, default_layer_ids, parse_layer_ids


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (64, (1, 16, 31, 46, 61)),
        (30, (1, 8, 14, 20, 27)),
        (28, (1, 7, 13, 19, 25)),
        (36, (1, 9, 17, 25, 33)),
        (8, (1, 2, 3, 4, 5)),
    ],
)
def test_default_ids_follow_the_rule(num_layers: int, expected: tuple[int, ...]) -> None:
    assert default_layer_ids(num_layers) == expected
    assert parse_layer_ids("auto", num_layers) == expected


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_other_counts_of_default_layers_stay_in_range(k: int) -> None:
    ids = default_layer_ids(30, k)
    assert len(ids) == k
    assert check_layer_ids(ids, 30) == ids


@pytest.mark.parametrize("num_layers", [1, 4, 7])
def test_a_shallow_target_has_no_five_default_layers(num_layers: int) -> None:
    with pytest.raises(ConfigError, match=f"a target of {num_layers} layers .* --layers 0"):
        parse_layer_ids("auto", num_layers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1,2", "layer ids -1: the target has 8 layers, so ids go from 0 to 7"),
        ("2,8", "layer ids 8: the target has 8 layers"),
        ("2,2,3", "layer ids 2 are named twice"),
        ("3,1", "not in ascending order: write 1,3"),
        ("", "expected auto"),
        ("1,x", "expected auto"),
        ("1.5", "expected auto"),
    ],
)
def test_bad_ids_are_refused_clearly(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layer_ids(text, 8)


def test_an_empty_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layer is named"):
        check_layer_ids([], 8)


def test_spaces_and_the_ends_are_accepted() -> None:
    assert parse_layer_ids("0, 3 ,7", 8) == (0, 3, 7)
