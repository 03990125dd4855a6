"""A large vocabulary never becomes full logits."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
import torch
torch.set_num_threads(1)
from dflash_pipeline.train.loss import weighted_loss
torch.manual_seed(0)
slots, vocab, hidden = 512 * 15, 150_000, 64
head, labels = torch.randn(vocab, hidden), torch.randint(vocab, (slots,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
states = torch.randn(slots, hidden, requires_grad=True)
loss, _ = weighted_loss(states, head, labels, torch.ones(slots))
loss.backward()
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
assert grown < 60e6, f"{grown / 1e6:.0f} MB; full logits take {slots * vocab * 4 / 1e6:.0f} MB"
"""


def test_the_loss_of_a_vocabulary_of_150000_takes_a_tile_of_logits_and_no_more() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
