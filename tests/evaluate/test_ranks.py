"""Ranks found through common tokens are those of the whole head."""

from __future__ import annotations

import pytest
import torch

from dflash_pipeline.evaluate import ranks
from dflash_pipeline.evaluate.ranks import MAX_RANK, common_tokens, token_ranks


def slow_ranks(hidden: torch.Tensor, wanted: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Sort every slot's whole vocabulary by falling logit, equal ones by id."""
    order = (hidden @ head.T).sort(dim=-1, descending=True, stable=True).indices
    found = (order == wanted[..., None]).int().argmax(-1).clamp(max=MAX_RANK)
    return torch.where(wanted < 0, MAX_RANK, found)


@pytest.mark.parametrize("num_common", [1, 10, 200])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_equal_those_of_a_whole_sort_as_far_as_they_are_asked_for(
    seed: int, num_common: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "NUM_COMMON", num_common)
    source = torch.Generator().manual_seed(seed)
    head = torch.randn(300, 16, generator=source).round(decimals=0)  # whole numbers: equal logits abound
    hidden = torch.randn(200, 5, 16, generator=source).round(decimals=0)
    order = (hidden @ head.T).argsort(dim=-1, descending=True)
    place = torch.randint(0, 12, (200, 5, 1), generator=source)
    wanted = order.gather(-1, place)[..., 0]
    wanted[::7, 3:] = -1
    found = token_ranks(hidden, wanted, head, common_tokens(wanted[wanted >= 0]))
    expected = slow_ranks(hidden, wanted, head)
    assert torch.equal(found == 0, expected == 0)
    asked = torch.cat([torch.ones(200, 1), (expected < MAX_RANK).cumprod(1)[:, :-1]], dim=1).bool()
    assert torch.equal(found[asked], expected[asked])
    assert 100 < int(asked.sum()) < 900
    assert len(expected.unique()) == MAX_RANK + 1


def test_most_slots_never_see_the_whole_head(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(1)
    head, hidden = torch.randn(3000, 32, generator=source), torch.randn(100, 7, 32, generator=source)
    wanted = torch.randint(0, 3000, (100, 7), generator=source)
    whole = ranks.head_chunks
    seen = 0

    def counted(states: torch.Tensor, weight: torch.Tensor) -> object:
        nonlocal seen
        seen += len(states)
        return whole(states, weight)

    monkeypatch.setattr(ranks, "head_chunks", counted)
    found = token_ranks(hidden, wanted, head, torch.arange(300))
    assert torch.equal(found == 0, slow_ranks(hidden, wanted, head) == 0)
    assert seen < 70
