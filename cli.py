"""The `dflash` command: every subcommand parses its options, builds one configuration and calls one function."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from safetensors import SafetensorError

from . import __version__
from .errors import DflashError

MISTYPED_URL = re.compile(r"(s3|gs|file|https?):", re.IGNORECASE)
TORCHRUN = (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1"))  # its variables, and what holds without it


class LocalPath(click.Path):
    """A path on this machine; a quoted ~ is the home folder, as an unquoted one is to the shell."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a Path."""
        return super().convert(os.path.expanduser(value), param, ctx)  # noqa: PTH111 - Path's fails on ~nobody


EXISTING = LocalPath(exists=True, path_type=Path)
ANY_PATH = LocalPath(path_type=Path)


class CachePlace(click.ParamType):  # type: ignore[type-arg]  # older click is not generic
    """A cache: a folder, or a URL, which is looked at when it is opened."""

    name = "cache"

    def __init__(self, folder: click.Path) -> None:
        self.folder = folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a Path, or the URL with its scheme in small letters; a mistyped URL is no folder."""
        if isinstance(value, str):
            scheme, separator, rest = value.partition("://")
            if separator:
                return f"{scheme.lower()}://{rest}"
            if MISTYPED_URL.match(value):
                self.fail(f"{value}: a URL is s3://bucket/prefix, gs://bucket/prefix or file:///folder", param, ctx)
        return self.folder.convert(value, param, ctx)


CACHE, NEW_CACHE = CachePlace(EXISTING), CachePlace(ANY_PATH)


class OneLineErrors(click.Group):
    """Prints a `DflashError` as one line and exits with 1; with --debug the traceback stays."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except DflashError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            click.echo(f"dflash: {' '.join(str(error).split())}", err=True)
            ctx.exit(1)
        except (OSError, SafetensorError) as error:  # a full disk, a file or folder that may not be read or written
            if isinstance(error, BrokenPipeError):
                raise  # click ends quietly
            if ctx.params.get("debug"):
                traceback.print_exc()
            filename, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
            where = "" if filename is None else f"{filename}: "
            click.echo(f"dflash: {where}{' '.join((reason or str(error)).split())}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("dflash: interrupted; the same command resumes", err=True)
            ctx.exit(1)


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:  # noqa: ARG001 - read from the context by OneLineErrors
    """Train DFlash speculative-decoding drafters from cached hidden states of a frozen target.

    corpus --extract--> cache --train--> drafter --evaluate--> tau, and export for vLLM, SGLang and z-lab's code.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def say(line: str) -> None:
    """Print a line for people: to stderr, so that stdout stays for results."""
    click.echo(line, err=True)


def finish(result: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Print a result: one JSON object, or lines for people."""
    if as_json:
        click.echo(json.dumps(result, allow_nan=False))
    elif render:
        render(result)
    else:
        click.echo("\n".join(f"{key}: {value}" for key, value in result.items()))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


@main.command()
@click.option("--prompts", type=EXISTING, required=True, help="JSONL file of prompts; a corpus will do.")
@click.option("--out", type=ANY_PATH, required=True, help="JSONL file to write, a corpus for dflash extract.")
@click.option("--server", help="URL of an OpenAI-compatible server.")
@click.option("--model", help="The name under which the server serves the target.")
@click.option("--target", help="Instead of a server: folder or name of the target, run here.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Limit of a reply.  [default: 1024]")
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests at once.  [default: 16]")
@click.option("--batch-rows", type=click.IntRange(min=1), help="Prompts that a local target reads at once.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of a local target.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Of the server.  [default: $OPENAI_API_KEY]")
@click.option("--device", default="auto", show_default=True)
@json_option
def generate(as_json: bool, **options: Any) -> None:
    """Let the target answer prompts, greedily: an on-policy corpus, from a server or from a local target."""
    from .extract.generate import GenerateConfig, run_generate

    given = {key: value for key, value in options.items() if value is not None}
    finish(run_generate(GenerateConfig(**given), say), as_json)


@main.command()
@click.option(
    "--corpus",
    multiple=True,
    required=True,
    help="JSON lines (.jsonl, .jsonl.gz), a JSON array, Parquet, a dataset saved on disk, or a hub dataset "
    "(ORG/NAME[[:CONFIG]:SPLIT]); may be repeated.",
)
@click.option("--target", required=True, help="Folder or name of a Hugging Face causal LM.")
@click.option(
    "--out", type=NEW_CACHE, required=True, help="Folder of the cache, or its URL: s3://bucket/prefix, gs://..."
)
@click.option(
    "--work", type=ANY_PATH, help="With a URL: folder to build shards in.  [default: ~/.cache/dflash/extract]"
)
@click.option("--layers", default="auto", show_default=True, help="Target layer ids, such as 1,16,31,46,61.")
@click.option("--max-length", type=click.IntRange(min=2), help="Cut rows at this many tokens.  [default: the target's]")
@click.option("--codec", default="lossless", show_default=True, help="How states are stored; lossless is the only way.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of the target.  [default: the checkpoint's]")
@click.option("--attention", default="sdpa", show_default=True, help="Attention implementation of the target.")
@click.option(
    "--batch-tokens", type=click.IntRange(min=1), help="Tokens of a batch, padding included.  [default: 8192]"
)
@click.option("--shard-tokens", type=click.IntRange(min=1), help="Tokens of a shard.  [default: 32768]")
@click.option("--top-k", type=click.IntRange(min=1), help="Likely next tokens kept per position.  [default: 8]")
@click.option("--keep-final", is_flag=True, help="Also store the last layer's state.")
@click.option("--limit", "limit_rows", type=click.IntRange(min=1), help="Stop after this many rows.")
@click.option("--limit-tokens", type=click.IntRange(min=1), help="Stop after this many tokens.")
@click.option("--append", is_flag=True, help="Extend the finished cache at --out by this corpus; folders only.")
@click.option("--strict", is_flag=True, help="Refuse a corpus with unusable rows instead of skipping them.")
@click.option("--dry-run", is_flag=True, help="Print the estimated size and stop.")
@click.option(
    "--num-workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that share the work."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N; auto: a GPU per worker.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the target's folder brings.")
@json_option
def extract(as_json: bool, **options: Any) -> None:
    """Run the target once over a corpus and cache the states of five of its layers.

    The same command on several machines that share the folder or the bucket, or under torchrun, shares the work too.
    """
    from .extract.config import ExtractConfig
    from .extract.progress import RichProgress, SilentProgress
    from .extract.run import run_extract

    given = {key: value for key, value in options.items() if value is not None}
    worker, rank, size = (int(os.environ.get(name, word)) for name, word in TORCHRUN)
    first = rank == 0  # of torchrun's processes, one speaks
    config = ExtractConfig(worker=worker, rank=rank, world_size=size, **given)
    result = run_extract(config, RichProgress() if first else SilentProgress())
    if first:
        finish(result, as_json)


@main.command()
@click.option("--cache", type=CACHE, help="A finished cache.")
@click.option("--out", type=ANY_PATH, help="Folder of the run; an interrupted run is resumed.")
@click.option("--recipe", default="default", show_default=True, help="Name of a recipe, or a TOML file.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe.")
@click.option("--steps", type=click.IntRange(min=1), help="Length of the whole schedule.")
@click.option(
    "--print-config", is_flag=True, help="Print the configuration, resolved where --cache is given, and stop."
)
@click.option(
    "--num-workers", type=click.IntRange(min=0), default=1, show_default=True, help="Threads that read ahead."
)
@click.option("--device", default="auto", show_default=True)
@json_option
def train(
    cache: Path | str | None,
    out: Path | None,
    recipe: str,
    overrides: tuple[str, ...],
    steps: int | None,
    print_config: bool,
    num_workers: int,
    device: str,
    as_json: bool,
) -> None:
    """Train a drafter from a cache. The target is not loaded."""
    from .train.recipes import load_recipe

    if steps and any(setting.partition("=")[0].strip() == "steps" for setting in overrides):
        raise click.UsageError("--steps and --set steps: give one of them")
    loaded = load_recipe(recipe, [*overrides, *([f"steps={steps}"] if steps else [])])
    if print_config:
        from .train.facts import printed_config

        click.echo(json.dumps(printed_config(loaded, cache, device), indent=2))
        return
    if cache is None or out is None:
        raise click.UsageError("--cache and --out are needed")
    from .train.loop import TrainOptions, run_train

    options = TrainOptions(cache=cache, out=out, recipe=loaded, num_workers=num_workers, device=device)
    result = run_train(options, say)
    if result is not None:
        finish(result, as_json)


@main.command()
@click.option("--drafter", type=EXISTING, required=True, help="A run, or a drafter in z-lab's layout.")
@click.option("--cache", type=CACHE, help="Offline: the cache to walk.")
@click.option(
    "--split", type=click.Choice(["heldout", "train", "all"]), help="[default: heldout on the run's own cache]"
)
@click.option("--baseline-cache", type=CACHE, help="Whose training rows the n-gram is fitted on.  [default: CACHE]")
@click.option("--against", type=EXISTING, help="Another drafter, compared on the same rows and anchors.")
@click.option(
    "--sources", type=EXISTING, multiple=True, help="Corpus file whose rows name their source; may be repeated."
)
@click.option("--samples", type=click.IntRange(min=1), help="Show so many rows, of each source.")
@click.option("--report", type=ANY_PATH, help="HTML file to write.")
@click.option("--diagnose", is_flag=True, help="Look behind tau: context, layers, mask, rotation, divergence.")
@click.option("--tree-budget", "tree_budgets", type=click.IntRange(min=0), multiple=True, help="Nodes of a tree.")
@click.option("--target", help="Live: folder or name of the target, to decode with.")
@click.option("--prompts", type=EXISTING, help="Live: JSONL file of prompts; a corpus will do.")
@click.option("--rows", type=click.IntRange(min=1), help="Live: stop after this many prompts.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), help="Live: limit of a reply.  [default: 256]")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Live: of the target.")
@click.option("--save-rows", type=ANY_PATH, help="Live: write what was decoded, a corpus for dflash extract.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Live: sample.  [default: greedy]")
@click.option("--device", default="auto", show_default=True)
@json_option
def evaluate(as_json: bool, **options: Any) -> None:
    """Measure tau, the tokens per verification: offline over a cache, or live with --target and --prompts."""
    from .evaluate.live import LiveConfig, run_live
    from .evaluate.offline import EvaluateConfig, run_evaluate
    from .evaluate.render import render_evaluation
    from .evaluate.render_live import render_live

    given = {key: value for key, value in options.items() if value is not None and value is not False and value != ()}
    if {"target", "prompts"} <= given.keys():
        finish(run_live(LiveConfig(**_fitting(given, LiveConfig, "live")), say), as_json, render_live)
    elif "cache" in given:
        config = EvaluateConfig(**_fitting(given, EvaluateConfig, "offline"))
        finish(run_evaluate(config, say), as_json, render_evaluation)
    else:
        raise click.UsageError("give --cache for an offline walk, or --target and --prompts for live decoding")


def _fitting(given: dict[str, Any], config_type: type, kind: str) -> dict[str, Any]:
    """Return the options, refusing those of the other way to evaluate: none is ignored."""
    known = {field.name for field in dataclasses.fields(config_type)}
    unfit = [f"--{key.replace('_', '-')}" for key in given if key not in known]
    if unfit:
        raise click.UsageError(f"{', '.join(unfit)}: not for {kind} evaluation")
    return given


@main.command()
@click.option("--run", type=EXISTING, required=True, help="A run, a checkpoint, a drafter, or a torch file of others.")
@click.option("--out", type=ANY_PATH, required=True, help="Folder to write.")
@click.option(
    "--config", type=EXISTING, help="Of a torch file: the drafter's config.json.  [default: beside or inside]"
)
@click.option("--weights", help="Of a torch file with several drafters: which one.")
@json_option
def export(as_json: bool, **options: Any) -> None:
    """Write a drafter's weights alone, as vLLM, SGLang and z-lab's code load them."""
    from .evaluate.export import ExportConfig, run_export

    finish(run_export(ExportConfig(**options)), as_json)


@main.group()
def cache() -> None:
    """Look at a cache, check it, repair it, compare two."""


@cache.command()
@click.argument("path", type=CACHE, metavar="CACHE")
@json_option
def info(path: Path | str, as_json: bool) -> None:
    """Show what a cache holds."""
    from .store.integrity import describe
    from .store.render import render_description

    finish(describe(path), as_json, render_description)


@cache.command()
@click.argument("path", type=CACHE, metavar="CACHE")
@click.option("--num-workers", type=click.IntRange(min=1), help="Files read at once.  [default: one per processor]")
@json_option
def verify(path: Path | str, num_workers: int | None, as_json: bool) -> None:
    """Check every file of a cache against its recorded digest."""
    from .store.integrity import verify as verify_cache
    from .store.progress import byte_bar
    from .store.render import render_verification

    result = verify_cache(path, num_workers=num_workers, bar=byte_bar)
    finish(result, as_json, render_verification)
    if not result["ok"]:
        sys.exit(1)


@cache.command()
@click.argument("path", type=CACHE, metavar="CACHE")
@click.option("--corpus", multiple=True, help="The corpus of the cache, all its files in the same order.")
@click.option("--target", help="Folder or name of the cache's target.")
@click.option("--device", default="auto", show_default=True)
@click.option("--trust-remote-code", is_flag=True, help="Run code that the target's folder brings.")
@json_option
def repair(path: Path | str, as_json: bool, **options: Any) -> None:
    """Compute the damaged shards and files of a cache again, and no others."""
    from .extract.progress import RichProgress
    from .extract.repair import RepairConfig, run_repair
    from .store.progress import byte_bar

    result = run_repair(RepairConfig(cache=path, **options), RichProgress(), byte_bar)
    finish(result, as_json)
    if not result["ok"]:
        sys.exit(1)


@cache.command()
@click.argument("first", type=CACHE, metavar="A")
@click.argument("second", type=CACHE, metavar="B")
@json_option
def diff(first: Path | str, second: Path | str, as_json: bool) -> None:
    """Compare two caches of the same rows, layer by layer."""
    from .store.diff import diff_caches
    from .store.progress import byte_bar
    from .store.render import render_difference

    finish(diff_caches(first, second, bar=byte_bar), as_json, render_difference)


@cache.command()
@click.argument("path", type=EXISTING, metavar="CACHE")
@click.argument("url", type=NEW_CACHE)
@json_option
def publish(path: Path, url: Path | str, as_json: bool) -> None:
    """Copy a finished cache under a URL: s3://bucket/prefix, gs://bucket/prefix. Run again, it goes on."""
    from .store.progress import byte_bar
    from .store.publish import publish_cache

    finish(publish_cache(path, url, bar=byte_bar), as_json)


@main.command()
@click.option("--out", type=ANY_PATH, default=Path("demo"), show_default=True, help="Folder for everything it makes.")
@json_option
def demo(out: Path, as_json: bool) -> None:
    """Run the whole path on the embedded tiny target: extract, train, evaluate, export, in a few minutes."""
    from .examples.demo import run_demo

    finish(run_demo(out, say), as_json)


if __name__ == "__main__":
    main()
