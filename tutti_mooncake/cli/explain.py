"""`tutti explain`: block by block, why a prompt is found in the pool or not."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti_mooncake.cli.output import print_json, print_section, print_table
from tutti_mooncake.cli.prompts import add_prompt_arguments, prompt_keys, prompt_tokens
from tutti_mooncake.cli.store_arguments import add_store_arguments, store_config
from tutti_mooncake.errors import ConfigError, TuttiError

if TYPE_CHECKING:
    from tutti_mooncake.config import StoreConfig
    from tutti_mooncake.geometry import Geometry
    from tutti_mooncake.store.history import History
    from tutti_mooncake.store.request_log import RequestNote

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXPLAIN = """\
Says for each block of a prompt whether the pool has it, and if not, why: evicted, expired, failed its check, dropped,
cleared, never became durable, stored in another pool on these devices, or not stored as far as is known (the last 31,488
removals are remembered). Or, with --request, what became of a request of an engine: the last 2,048 are remembered, and
written every few seconds. Works beside a running engine. The tokens have to be the engine's: give their ids by --tokens, or
a text and the model's tokenizer (needs the library transformers; no chat template is applied).
"""


def add_commands(commands: Subparsers) -> None:
    """Adds the command."""
    explain = commands.add_parser("explain", help="why a prompt or a request hit or missed", description=_EXPLAIN)
    add_store_arguments(explain)
    add_prompt_arguments(explain)
    explain.add_argument("--request", metavar="ID", help="the engine's request id, or a part of it")
    explain.set_defaults(run=run_explain)


def run_explain(arguments: argparse.Namespace) -> int:
    """0 when every full block is there (or the request was found); 1 when one is missing."""
    if sum(value is not None for value in (arguments.prompt, arguments.tokens, arguments.request)) != 1:
        raise ConfigError("explain: give one of PROMPT, --tokens FILE and --request ID")
    config = store_config(arguments, read_only=True)
    return _explain_request(arguments, config) if arguments.request is not None else _explain_prompt(arguments, config)


def _explain_prompt(arguments: argparse.Namespace, config: StoreConfig) -> int:
    from tutti_mooncake.store import LocalStore, read_geometry

    geometry = read_geometry(config)
    tokens = prompt_tokens(arguments)
    with LocalStore.open(config, geometry, create=False) as store:
        keys, resident = prompt_keys(geometry, tokens, arguments.cache_salt), 0
        if keys:
            resident = store.lookup(keys)
            if not resident and arguments.cache_salt:
                older = prompt_keys(geometry, tokens, arguments.cache_salt, tagged_salt=False)
                if found := store.lookup(older):
                    keys, resident = older, found
        states = ["resident"] * resident + _why_missing(store, config, geometry, keys, resident)
    result = {
        "tokens": len(tokens),
        "block_tokens": geometry.block_tokens,
        "blocks": [{"block": i, "key": key.hex(), "state": state} for i, (key, state) in enumerate(zip(keys, states, strict=True))],
        "resident_blocks": resident,
        "tokens_in_no_full_block": len(tokens) - len(keys) * geometry.block_tokens,
    }
    if arguments.json:
        print_json(result)
    else:
        _print_blocks(result, states)
    return 0 if resident == len(keys) else 1


def _print_blocks(result: dict[str, Any], states: list[str]) -> None:
    blocks, size = len(states), result["block_tokens"]
    print(f"{result['tokens']} tokens: {blocks} full blocks of {size}, and {result['tokens_in_no_full_block']} tokens that fill none")
    rows, begin = [], 0
    for state, run in groupby(states):
        end = begin + len(list(run))
        rows.append([f"{begin}" if end == begin + 1 else f"{begin} to {end - 1}", f"{begin * size} to {end * size - 1}", state])
        begin = end
    if rows:
        print_table(["blocks", "tokens", "state"], rows)


def _why_missing(store: Any, config: StoreConfig, geometry: Geometry, keys: list[bytes], resident: int) -> list[str]:
    missing = keys[resident:]
    if not missing:
        return []
    elsewhere = _other_pools(config, geometry, keys)
    history: History = store.history
    states = []
    for position, removal in enumerate(history.reasons(store.salted(missing)), resident):
        other = next((name for name, blocks in elsewhere.items() if position < blocks), None)
        if removal is not None:
            states.append(f"{removal[0].text}, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(removal[1]))}")
        elif other is not None:
            states.append(f"in another namespace: {other}")
        else:
            states.append("not stored, as far as is known")
    return states


def _other_pools(config: StoreConfig, geometry: Geometry, keys: list[bytes]) -> dict[str, int]:
    """Other pools on the first device that have leading blocks of these keys: what tells them apart, and how many blocks."""
    from tutti_mooncake.store import LocalStore, read_geometry

    found = {}
    for path in sorted(Path(config.devices[0]).glob("*.pool")):
        if path.stem == config.pool or not path.is_file():
            continue
        try:
            other = replace(config, pool=path.stem)
            theirs = read_geometry(other)
            with LocalStore.open(other, theirs, create=False) as store:
                blocks = store.lookup(keys)
        except (TuttiError, OSError):
            continue  # a pool that can't be read explains nothing
        if blocks:
            found[f"pool {path.stem} ({', '.join(geometry.differences(theirs)) or 'same geometry'})"] = blocks
    return found


def _explain_request(arguments: argparse.Namespace, config: StoreConfig) -> int:
    from tutti_mooncake.store.pool import open_first_device
    from tutti_mooncake.store.request_log import read_notes

    device = open_first_device(config)
    try:
        notes = read_notes(device.buffered_fd)
    finally:
        device.close()
    wanted = arguments.request  # vLLM adds to the ids that it is given, before and behind
    matching = [note for note in notes if note.id == wanted or note.id.startswith(f"{wanted}-")]
    matching = matching or [note for note in notes if wanted in note.id or note.id in wanted]
    if not matching:
        raise ConfigError(f"no request {arguments.request!r} among the last {len(notes)}; notes are written every few seconds")
    if arguments.json:
        print_json([note.as_dict() for note in matching])
        return 0
    for note in matching:
        print_section(f"request {note.id}", _sentences(note))
    return 0


def _sentences(note: RequestNote) -> dict[str, str]:
    rest = note.found - note.hbm - note.loaded - note.failed
    sentences = {
        "settled": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.time)),
        "prompt": f"{note.prompt} tokens, {note.full} full blocks",
        "engine's own cache": f"{note.hbm} blocks",
        "store had": f"{note.found} leading blocks" + (f"; the next one's key begins with {note.missing}" if note.missing else ""),
        "loaded": f"{note.loaded} blocks",
    }
    if note.elsewhere or note.fetched:
        sentences["another node had"] = f"{note.elsewhere} blocks more"
        sentences["fetched"] = f"{note.fetched} blocks"
    if note.failed:
        sentences["failed"] = f"{note.failed} blocks, computed again"
    if rest > 0:
        sentences["had, not loaded"] = f"{rest} blocks: {note.why or 'the last token of a prompt is always computed'}"
    elif note.why:
        sentences["note"] = note.why
    return sentences
