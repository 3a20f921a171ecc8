"""`jtrain explain CONFIG [--flags] [--json]`: where every parameter lies, and every collective of the compiled step."""

from __future__ import annotations

import json
import sys
from typing import Any

from jtrain.cli import args as arguments

USAGE = "jtrain explain CONFIG [--flags] [--json]"
HELP = f"""usage: {USAGE}

Compiles the train step of CONFIG for the devices that it names, without reading its data, and prints

  - every parameter: its logical axes, the mesh axes that divide it, its shape, and bytes on one device;
  - every collective of a step: operation, mesh axis, bytes, times a step (loops counted out), and source line;
  - memory of a device.

Devices need not be here: jtrain explain CONFIG --accelerator cpu --devices 8 --mesh fsdp=4,tensor=2"""


def run(args: list[str]) -> int:
    """Compiles and prints, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    as_json = "--json" in args
    config = arguments.parse_config([arg for arg in args if arg != "--json"], USAGE, optional=False)
    from jtrain.cli.explanation import explain

    model = config.model.path or config.model.preset
    print(f"compiling the train step: {config.task}, {model}", file=sys.stderr, flush=True)
    found, besides = explain(config)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(found, besides)
    return 0


def _print(found: dict[str, Any], besides: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)

    def table(title: str, columns: str, rows: list[tuple[Any, ...]]) -> None:
        made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in columns.split("|"):
            made.add_column(name.strip(), justify="right" if name.startswith(" ") else "left", overflow="fold")
        for row in rows:
            made.add_row(*(escape(str(cell)) for cell in row))
        console.print(made)
        console.print()

    parameters = sorted(found["parameters"].items(), key=lambda item: -item[1]["bytes_per_device"])
    table(
        "Parameters",
        "parameter|logical axes|spec| shape| bytes a device",
        [
            (path, _axes(p["logical"]), _axes(p["spec"]), _axes(p["shape"]), f"{p['bytes_per_device']:,}")
            for path, p in parameters
        ],
    )
    table(
        "Collectives of a step",
        "operation|axis| bytes| times| in all|loop|source",
        [
            (
                c["op"], c["axis"], f"{c['bytes']:,}", c["count"], f"{c['bytes'] * c['count']:,}",
                "loop" if c["in_loop"] else "", c["source"] or "",
            )
            for c in found["collectives"]
        ],
    )  # fmt: skip
    sent = sorted(besides["sent"].items(), key=lambda item: -item[1])
    counts = {axis: sum(c["count"] for c in found["collectives"] if c["axis"] == axis) for axis, _ in sent}
    table(
        "By axis",
        "axis| size| collectives| bytes sent a device and step",
        [(axis, _size(axis, besides["mesh"]), counts[axis], f"{total:,}") for axis, total in sent],
    )
    table(
        "Memory of a device",
        "| bytes",
        [
            ("parameters", f"{sum(p['bytes_per_device'] for _, p in parameters):,}"),
            ("state: with optimizer and counters", f"{besides['state_bytes']:,}"),
            ("temporary, in a step", f"{found['temporary_bytes']:,}"),
            ("peak", f"{found['peak_memory_bytes']:,}"),
        ],
    )
    if besides["pipeline"]:
        console.print(besides["pipeline"], soft_wrap=True, markup=False)
    for note in besides["notes"]:
        console.print(f"Note: {note}.")


def _axes(entries: list[Any] | None) -> str:
    """`(layers, embed, -)`; `-` is what is named or divided by nothing."""
    if entries is None:
        return "-"
    cells = ("+".join(entry) if isinstance(entry, list) else "-" if entry is None else str(entry) for entry in entries)
    return f"({', '.join(cells)})"


def _size(axes: str, mesh: dict[str, int]) -> int:
    size = 1
    for axis in axes.split("+"):
        size *= mesh.get(axis, 1)
    return size
