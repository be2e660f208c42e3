"""The engine's counters as text that Prometheus reads. docs/metrics.md defines each of them."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.engine import Engine

Sample = tuple[str, float]
"""Labels as they stand in the text, or nothing, and the value."""


def exposition(engine: Engine) -> str:
    """Every metric in Prometheus's text format (version 0.0.4). Reads what the host knows: no look at the device."""
    lines = []
    for name, kind, text, samples in _metrics(engine):
        lines += [f"# HELP specdec_{name} {text}", f"# TYPE specdec_{name} {kind}"]
        lines += [f"specdec_{name}{labels} {value:.10g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _metrics(engine: Engine) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """Name, kind, help and samples of each."""
    stats, scheduler = engine.stats, engine.scheduler
    counters = {
        "rounds": ("Rounds launched.", stats.rounds),
        "row_rounds": ("Rounds that a row ran in, summed over rows.", stats.row_rounds),
        "row_stalls": ("Rounds that a row sat out for lack of a KV slot.", stats.stalls),
        "emitted_tokens": ("Tokens emitted and kept.", stats.emitted),
        "drafted_tokens": ("Drafts that were verified.", stats.drafted),
        "accepted_tokens": ("Drafts that were emitted.", stats.accepted),
        "wasted_tokens": ("Drafts that were verified and not emitted.", stats.drafted - stats.accepted),
        "dropped_tokens": ("Tokens emitted past the end of their request.", stats.dropped),
        "prompt_tokens": ("Prompt tokens that the target ran.", stats.prompt_tokens),
        "cached_prompt_tokens": ("Prompt tokens whose KV was found in the pool.", stats.cached_tokens),
        "drafter_tokens": ("Prompt and missed tokens that the drafter ran.", stats.drafter_tokens),
        "preemptions": ("Requests that lost their blocks to older ones.", scheduler.preemptions),
    }
    for name, (text, value) in counters.items():
        yield f"{name}_total", "counter", text, [("", value)]
    for name in ("drafted", "tested", "accepted"):
        text, counts = f"Drafts {name}, by their place in a round.", getattr(stats.places, name)
        yield f"place_{name}_total", "counter", text, [(_label("place", i + 1), n) for i, n in enumerate(counts)]
    ends: list[Sample] = [(_label("reason", reason), n) for reason, n in sorted(stats.finished.items())]
    yield "requests_total", "counter", "Samples that ended, by reason.", ends
    parts = [(_label("part", part), seconds) for part, seconds in stats.seconds.items()]
    yield "seconds_total", "counter", "Time of the engine's thread, by part of a step.", parts
    waited = [("_sum", stats.first_token_s), ("_count", stats.first_tokens)]
    yield "time_to_first_token_seconds", "summary", "From submission to the first tokens.", waited
    gauges = {
        "running": ("Samples that hold a row.", len(scheduler.sequences)),
        "waiting": ("Samples that wait for a row.", len(scheduler.waiting)),
        "rows": ("Rows of the engine.", engine.rows.num_rows),
        "free_blocks": ("KV blocks that nobody owns.", engine.pool.allocator.num_free),
        "blocks": ("KV blocks of the pool.", engine.pool.num_blocks),
    }
    for name, (text, value) in gauges.items():
        yield name, "gauge", text, [("", value)]


def _label(name: str, value: str | int) -> str:
    return f'{{{name}="{value}"}}'
