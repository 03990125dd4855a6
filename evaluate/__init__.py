"""Judging a drafter: offline tau, per-slot accuracy, free baselines; and exporting it for serving."""
