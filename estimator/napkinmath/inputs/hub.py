"""The config of a model on a public hub, fetched only where the user asks (--hub): one small file
over HTTPS, nothing else.

HF_ENDPOINT names another hub, HF_TOKEN is sent for gated models, as the hub's own client does.
"""

from __future__ import annotations

import os

from napkinmath.base.errors import InputError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from http.client import HTTPResponse
    from typing import Any

TIMEOUT_S = 10.0
_DEFAULT_ENDPOINT = "https://huggingface.co"


def fetch_config(model: str) -> dict[str, Any]:
    """config.json of a hub id such as 'Qwen/Qwen3-0.6B' or 'org/name@revision'; raises InputError
    with what went wrong and the way out."""
    from napkinmath.models import config_file

    url = config_url(model)
    return config_file.parse(_fetch(url, model), f"{model}/config.json", what="hub config")


def config_url(model: str) -> str:
    """Where the hub keeps a model's config.json."""
    name, _, revision = model.partition("@")
    parts = name.split("/")
    if (
        len(parts) > 2
        or not all(_is_plain(part) for part in parts)
        or (revision and not _is_plain(revision))
    ):
        raise InputError(
            f"--hub {shown(model)} is not a hub id; write e.g. Qwen/Qwen3-0.6B, or"
            " org/name@revision"
        )
    endpoint = (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
    if not endpoint.startswith(("https://", "http://")):
        raise InputError(
            f"HF_ENDPOINT {shown(endpoint)} is not a web address; unset it or write https://..."
        )
    return f"{endpoint}/{name}/resolve/{revision or 'main'}/config.json"


def _is_plain(part: str) -> bool:
    """Letters, digits, '-', '_' and '.', and not a dot-only segment."""
    return (
        bool(part)
        and part.isascii()
        and all(c.isalnum() or c in "-_." for c in part)
        and part.strip(".") != ""
    )


def _fetch(url: str, model: str) -> str:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    request = Request(url, headers={"User-Agent": "napkinmath"})
    token = os.environ.get("HF_TOKEN")
    if token:
        request.add_unredirected_header(
            "Authorization", f"Bearer {token}"
        )  # a redirect to a storage host must not get it
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response:
            return _body(response, model)
    except HTTPError as error:
        raise InputError(_refusal(error.code, model)) from None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "reason", None) or error
        raise InputError(
            f"--hub {shown(model)} cannot be fetched from {url}: {reason}; leave --hub out for the"
            " catalog, or download its config.json"
        ) from None


def _body(response: HTTPResponse, model: str) -> str:
    from napkinmath.models.config_file import MAX_FILE_BYTES

    content = response.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise InputError(
            f"--hub {shown(model)}: its config.json is larger than {MAX_FILE_BYTES} bytes; download"
            " it and look"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(
            f"--hub {shown(model)}: its config.json is not text in UTF-8; download it and look"
        ) from None


def _refusal(status: int, model: str) -> str:
    if status in (401, 403):
        return (
            f"--hub {shown(model)} is gated or does not exist (HTTP {status}); set HF_TOKEN, or"
            " download its config.json"
        )
    if status == 404:
        return f"--hub {shown(model)} has no config.json on the hub (HTTP 404); check the id"
    return (
        f"--hub {shown(model)}: the hub answered HTTP {status}; try again later, or download its"
        " config.json"
    )
