"""Train DFlash speculative-decoding drafters from cached hidden states of a frozen target."""

__version__ = "0.1.0"
