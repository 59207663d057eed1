"""What `benchmarks/serve.py` prints: a row for each bar, and below it what is only told."""

from __future__ import annotations

from typing import Any

from drumline.report.draw.table import table

_DIGITS = 150  # characters of the widest line


def text_of(measured: dict[str, Any]) -> str:
    """Return a table with a row for each bar, and below it what is only told."""
    return "\n".join([_machine(measured), _bars(measured), *_overhead(measured["overhead"]), *_load(measured),
                      *_peers(measured["peers"]), *_errors(measured)])  # fmt: skip


def verdict(part: dict[str, Any]) -> str:
    """Return whether a part's bar holds; not judged where others took too much of the cores' time.

    >>> verdict({"holds": False, "judged": False, "stolen": 0.05, "others": 0.01}), verdict({"holds": True})
    ('not judged', 'holds')
    """
    if not part.get("judged", True):
        return "not judged"
    return "holds" if part["holds"] else "MISSED"


def _taken(part: dict[str, Any]) -> str:
    return f"{part['stolen']:.1%} stolen, {part['others']:.1%} others" if "stolen" in part else ""


def _machine(measured: dict[str, Any]) -> str:
    stages, front, client = (", ".join(map(str, cores)) for cores in measured["places"])
    places = f"; stages on cores {stages}, front on {front}, client on {client}" if stages else ""
    taken = f"{measured['stolen']:.1%} of their time, other processes here {measured['others']:.1%}"
    return f"{measured['machine']}{places}\nother machines on the host took {taken}"


def _bars(measured: dict[str, Any]) -> str:
    names = "stages", "exact", "overhead", "saturated", "poisson", "peers"
    stages, exactly, added, full, some, peers = (measured[name] for name in names)
    bars = [
        (stages, f"each stage takes 10 ms or more for a row ({stages['length']} tokens)",
         " and ".join(f"{duration * 1e3:.1f} ms" for duration in stages["seconds"])),
        (exactly, f"{exactly['requests']} answers within 1e-5 of PyTorch's, none lost or swapped",
         f"{exactly['answered']} answers, {exactly['largest_relative']:.2g}"),
        (added, "the front adds at most 1.3 bare calls, one request at a time",
         f"{added['added_bare_calls']:.2f}: {added['front_ms']:.2f} - {added['by_hand_ms']:.2f} ms by hand,"
         f" over {added['bare_ms']:.2f}"),
        (full, f"bubble under 10% over {full['seconds']:.0f} s, 16 requests at a time", f"{full['bubble']:.1%}"),
        (some, f"p99 in the pipe under 50 ms at {some['rate']:.1f}/s (70% of peak)", f"{some['pipe_p99_ms']:.1f} ms"),
        (peers, "pipelined serves at least 1.75 times as many rows as unpipelined", f"{peers['gain']:.2f}"),
    ]  # fmt: skip
    rows = [[verdict(part), bar, value, _taken(part)] for part, bar, value in bars]
    return str(table(("", "bar", "measured", "of the cores' time"), rows, width=_DIGITS, left=4))


def _overhead(added: dict[str, Any]) -> list[str]:
    low, middle, high = added["pairs_ms"]
    sum_ms = added["by_hand_ms"] + 1.3 * added["bare_ms"]
    return [
        f"overhead: front {added['front_ms']:.3f} ms; by hand {added['by_hand_ms']:.3f} and 1.3 bare calls of"
        f" {added['bare_ms']:.3f} are {sum_ms:.3f} ms; medians of {added['rounds']}",
        f"  front less by hand in pairs: p10 {low:+.2f}, p50 {middle:+.2f}, p90 {high:+.2f} ms",
        f"  processor time of the front's process: {added['front_processor_ms']:.2f} ms for a request",
    ]


def _each(load: dict[str, Any]) -> str:
    return " and ".join(f"{value:.1f} ms" for value in load["stage_row_ms"])


def _load(measured: dict[str, Any]) -> list[str]:
    full, some = measured["saturated"], measured["poisson"]
    used = [
        f"  stage {at}: {busy:.1f} s computing, {cpu:.1f} s of processor, {full['seconds']:.1f} s of wall"
        for at, (busy, cpu) in enumerate(zip(full["stage_busy_seconds"], full["stage_processor_seconds"], strict=True))
    ]
    return [
        f"saturated: {full['rows_per_second']:.1f} rows/s, {full['rows_per_microbatch']:.1f} rows a microbatch,"
        f" M {full['microbatches_per_batch']:g}, {full['pipe_window']:g} in the pipe",
        *used,
        f"  a row takes {_each(full)} in the stages, {_each(some)} at random arrivals,"
        f" with {some['pipe_window']:g} in the pipe",
        f"poisson: in the pipe p50 {some['pipe_p50_ms']:.1f} ms; requests p50 {some['latency_p50_ms']:.1f},"
        f" p99 {some['latency_p99_ms']:.1f} ms; waiting mean {some['wait_mean_ms']:.1f},"
        f" p99 {some['wait_p99_ms']:.1f} ms; an M/D/1 queue waits {some['md1_wait_mean_ms']:.1f} ms on average",
    ]


def _peers(peers: dict[str, Any]) -> list[str]:
    services = peers["services"]
    pipelined = services["pipelined"]["rows_per_second"]
    lines = []
    for name, peer in services.items():
        rates = ", ".join(f"{rate:.1f}" for rate in peer["rounds"])
        ratio = pipelined / peer["rows_per_second"]
        lines.append(f"{name}: {peer['rows_per_second']:.1f} rows/s ({rates}); pipelined is {ratio:.2f} times")
    return lines


def _errors(measured: dict[str, Any]) -> list[str]:
    errors = {name: measured[name]["errors"] for name in ("exact", "saturated", "poisson") if measured[name]["errors"]}
    return [f"errors: {errors}"] if errors else []
