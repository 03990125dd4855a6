"""The device a drafter runs on."""

from __future__ import annotations

import torch

from ..errors import ConfigError, counted, message_line


def choose_device(name: str) -> torch.device:
    """Return the device that a name means; `auto` is the GPU where there is one.

    Raises:
        ConfigError: no such device, or it cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None  # torch names twenty backends, of which two are meant
    if device is None or device.type == "meta" or name.startswith("cpu:"):
        raise ConfigError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine has {counted(torch.cuda.device_count(), 'CUDA device')}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: {message_line(error)}") from None
    return device
