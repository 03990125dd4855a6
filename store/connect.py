"""Connecting to a bucket: what its URL may be, how long to try, and what a refusal means."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..errors import CacheMissing, ConfigError, message_line

SCHEMES = ("s3", "gs", "file")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
TRY_SECONDS = 5.0
"""How long obstore tries a request, deaf to Ctrl-C meanwhile."""
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles in ~/.aws are not read: "
    "`aws configure export-credentials --format env` prints a profile's)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
}


def check_url(url: str) -> None:
    """Check that a URL names one place, by the same path that the provider's own tools give it.

    Raises:
        ConfigError: it does not, or an endpoint of the environment is no URL.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise ConfigError(f"{url}: expected a folder, or a URL that begins with {', '.join(SCHEMES)} and ://")
    for sign in "?#" if scheme == "file" else "?#%":
        if sign in url:
            raise ConfigError(f"{url}: {sign!r} may not stand in the URL of a cache; use another name")
    for name in ENDPOINTS if scheme == "s3" else ():
        value = os.environ.get(name)
        if value and not value.startswith(("http://", "https://")):
            raise ConfigError(f"{name} is {value!r}: expected a URL, such as http://{value}")


def connect(url: str, *, create: bool) -> Any:
    """Return obstore's store of a URL that `check_url` has passed.

    An endpoint of the environment that begins with http:// is taken at its word, without AWS_ALLOW_HTTP.

    Args:
        url: s3://, gs:// or file://.
        create: make the folder of a file:// URL.

    Raises:
        ConfigError: the extra is not installed, or a variable of the provider is not valid.
        CacheMissing: there is no folder of a file:// URL.
    """
    try:
        import obstore  # noqa: PLC0415 - an extra
        from obstore.store import from_url  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"{url}: buckets need an extra: pip install 'dflash-pipeline[buckets]'") from error
    options: Any
    if url.startswith("file:"):
        if not create and not Path(url2pathname(urlsplit(url).path)).is_dir():
            raise CacheMissing(f"{url}: there is no such folder")
        options = {"mkdir": create}
    else:
        options = {
            "retry_config": {
                "max_retries": 1000,
                "retry_timeout": timedelta(seconds=TRY_SECONDS),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.1),
                    "max_backoff": timedelta(seconds=5),
                    "base": 2,
                },
            }
        }
        if any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS):
            options["client_options"] = {"allow_http": True}
    try:
        return from_url(url, **options)
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ConfigError(f"{url}: {message_line(error)}") from error


def refusal(url: str, error: BaseException) -> str | None:
    """Return what a store's long message means, where that is known: no credentials, no bucket."""
    text = str(error)
    if "169.254.169.254" in text or "metadata.google.internal" in text:  # where a cloud's own machines ask for them
        return f"no credentials: {CREDENTIALS[url.partition('://')[0]]}"
    return "there is no such bucket" if "NoSuchBucket" in text else None
