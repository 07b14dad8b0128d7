"""`tutti warm`: has a running server compute prompts from a file, so that their KV is in its pool before anybody asks."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from tutti_mooncake.cli.output import Progress, print_json, print_section
from tutti_mooncake.cli.prompts import is_token_ids, read_text
from tutti_mooncake.cli.store_arguments import add_json_argument
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_WARM = """\
Sends each prompt of a file to a server with the OpenAI API (vLLM, or Ray Serve in front of it) and asks for one token. What
the server computes is stored, also where `admission` would wait for a second touch; what it has is only loaded. The file
holds one prompt per line: a JSON string, a JSON array of token ids, or a JSON object of a completions request (`prompt`) or a
chat request (`messages`); a line that is no JSON is a prompt as it stands. The exit status is 1 when a prompt failed.
"""


def add_commands(commands: Subparsers) -> None:
    """Adds the command."""
    warm = commands.add_parser("warm", help="compute and store prompts from a file", description=_WARM)
    warm.add_argument("file", metavar="FILE", help="prompts, one per line; - = standard input")
    warm.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    warm.add_argument("--model", help="its model (default: the first that it serves)")
    warm.add_argument("--api-key", help="for its authorization header")
    warm.add_argument("--parallel", type=int, default=4, metavar="N", help="requests at a time (default: 4)")
    warm.add_argument("--timeout-seconds", type=float, default=600, metavar="S", help="per request (default: 600)")
    add_json_argument(warm)
    warm.set_defaults(run=run_warm)


def run_warm(arguments: argparse.Namespace) -> int:
    """Sends them all; 1 when one failed."""
    if arguments.parallel < 1:
        raise ConfigError(f"--parallel {arguments.parallel}: give a number of requests")
    requests = read_prompts(arguments.file)
    server = _Server(arguments.url.rstrip("/"), arguments.api_key, arguments.timeout_seconds)
    model = arguments.model or server.first_model()
    failures: list[dict[str, Any]] = []
    begin, tokens, cached, done = time.monotonic(), 0, 0, 0
    with Progress("warm", unit="prompts") as progress, concurrent.futures.ThreadPoolExecutor(arguments.parallel) as pool:
        running = {pool.submit(server.warm, model, request): line for line, request in requests}
        for future in concurrent.futures.as_completed(running):
            try:
                prompt, hit = future.result()
                tokens, cached = tokens + prompt, cached + hit
            except Exception as error:  # whatever one prompt or answer does, the others count
                failures.append({"line": running[future], "error": _said(error)})
            done += 1
            progress(done, len(requests))
    result: dict[str, Any] = {
        "prompts": len(requests),
        "failed": len(failures),
        "prompt_tokens": tokens,
        "cached_tokens": cached,
        "seconds": round(time.monotonic() - begin, 3),
        "failures": sorted(failures, key=lambda failure: failure["line"])[:20],
    }
    if arguments.json:
        print_json(result)
    else:
        print_section("warm", {name: value for name, value in result.items() if name != "failures"})
        for failure in result["failures"]:
            print(f"line {failure['line']}: {failure['error']}", file=sys.stderr)
    return 1 if failures else 0


def read_prompts(path: str) -> list[tuple[int, dict[str, Any]]]:
    """`(line number, body of a request)` of each prompt; empty lines are left out. Raises ConfigError."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = line.rstrip("\r")
        except RecursionError:
            raise ConfigError(f"{path}, line {number}: nested too deeply") from None
        if isinstance(value, dict):
            if ("prompt" in value) == ("messages" in value):
                raise ConfigError(f"{path}, line {number}: an object needs either `prompt` or `messages`")
            found.append((number, value))
        elif isinstance(value, str) or (value and is_token_ids(value)):
            found.append((number, {"prompt": value}))
        else:
            raise ConfigError(f"{path}, line {number}: should be text, an array of token ids or an object, not {type(value).__name__}")
    if not found:
        raise ConfigError(f"{path} holds no prompt")
    return found


class _Server:
    """A server with the OpenAI API. Thread-safe."""

    def __init__(self, url: str, api_key: str | None, timeout_seconds: float) -> None:
        self._url = url
        self._timeout = timeout_seconds
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}

    def first_model(self) -> str:
        """What the server calls its first model. Raises ConfigError when nobody answers there."""
        try:
            return str(self._ask("/v1/models", None)["data"][0]["id"])
        except Exception as error:  # whoever answers there may answer anything
            raise ConfigError(f"{self._url} doesn't answer as a server with the OpenAI API: {_said(error)}; give its --url") from error

    def warm(self, model: str, request: dict[str, Any]) -> tuple[int, int]:
        """Computes a prompt. Returns its tokens, and how many of them the server had."""
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        body = {"model": model, "temperature": 0, **request, "max_tokens": 1, "stream": False}
        body["kv_transfer_params"] = {**(request.get("kv_transfer_params") or {}), "tutti_admit": True}
        usage = self._ask(path, body)["usage"]
        return int(usage["prompt_tokens"]), int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self._url + path, data, self._headers), timeout=self._timeout) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}"
    return str(error) or type(error).__name__
