from __future__ import annotations

import numpy as np
import pytest

from dflash_pipeline.errors import ConfigError
from dflash_pipeline.store.splits import heldout_rows, split_rows

HASHES = np.random.PCG64(1).random_raw(10_000)


def test_the_share_of_held_out_rows_is_the_share_asked_for() -> None:
    assert heldout_rows(HASHES, 0.1).mean() == pytest.approx(0.1, abs=0.01)
    assert not heldout_rows(HASHES, 0.0).any()


def test_equal_prompts_fall_on_the_same_side_and_splits_part_the_rows() -> None:
    doubled = np.concatenate([HASHES, HASHES])
    mask = heldout_rows(doubled, 0.3)
    assert (mask[:10_000] == mask[10_000:]).all()
    parts = [split_rows(HASHES, 0.3, name) for name in ("heldout", "train")]
    assert sorted(np.concatenate(parts).tolist()) == split_rows(HASHES, 0.3, "all").tolist()


def test_a_larger_share_holds_out_the_rows_of_a_smaller_one() -> None:
    assert not (heldout_rows(HASHES, 0.1) & ~heldout_rows(HASHES, 0.2)).any()


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share"):
        heldout_rows(HASHES, share)


def test_an_unknown_split_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="heldout, train, all"):
        split_rows(HASHES, 0.1, "test")
