"""Room of `dflash_pipeline`."""
