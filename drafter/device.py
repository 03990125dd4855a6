"""The device a drafter runs on."""

from __future__ import annotations

import torch

from ..errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Return the device: `auto` is the GPU where there is one. ConfigError where it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device
