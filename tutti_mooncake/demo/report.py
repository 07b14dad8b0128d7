"""The outcome as people read it."""

from __future__ import annotations

import textwrap

from tutti_mooncake.demo.model import MODEL_NAME
from tutti_mooncake.demo.run import Outcome


def render(outcome: Outcome) -> str:
    """The table, the answers side by side, and what lies on disk."""
    cold = outcome.cold["ttft_seconds"]
    rows = [
        ("cold: every token computed", outcome.cold),
        ("again: vLLM's own cache in memory", outcome.cached),
        ("after kill -9 and restart: from disk", outcome.restarted),
    ]
    lines = [
        "",
        f"{MODEL_NAME}, {outcome.prompt_tokens:,} tokens: {outcome.document}",
        "",
        f"{'':38}{'time to first token':>20}{'of cold':>10}",
    ]
    for name, answer in rows:
        ttft = answer["ttft_seconds"]
        lines.append(f"{name:38}{ttft:>18.2f} s{ttft / cold:>10.1%}")
    lines += [
        "",
        f"Q: {outcome.question}",
        "",
        *side_by_side("before the kill", outcome.cold["text"], "after the restart", outcome.restarted["text"]),
    ]
    equal = "the same, token by token" if outcome.answers_equal else "DIFFERENT"
    lines += [
        "",
        f"The three answers are {equal}.",
        f"On disk: {outcome.pool_blocks} blocks, {outcome.pool_payload_bytes / 1e6:,.0f} MB of KV, in files of "
        f"{outcome.pool_file_bytes / 1e6:,.0f} MB allocated beforehand.",
        f"Loaded after the restart: {outcome.blocks_loaded} blocks, {outcome.bytes_loaded / 1e6:,.0f} MB in "
        f"{outcome.load_seconds:.2f} s ({outcome.load_gb_per_s:.2f} GB/s).",
    ]
    return "\n".join(lines)


def side_by_side(left_title: str, left: str, right_title: str, right: str, width: int = 46) -> list[str]:
    """Two texts in two columns of `width` characters."""
    columns = [
        [
            title,
            "-" * width,
            *(part for line in text.strip().splitlines() for part in textwrap.wrap(line, width) or [""]),
        ]
        for title, text in ((left_title, left), (right_title, right))
    ]
    height = max(map(len, columns))
    for column in columns:
        column.extend([""] * (height - len(column)))
    return [f"  {a:{width}}   {b}".rstrip() for a, b in zip(*columns, strict=True)]
