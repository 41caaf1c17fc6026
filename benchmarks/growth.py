"""Time and peak memory of decoding 1 s to 10 minutes of sound on the CPU, of the server and of the reference.

    python benchmarks/growth.py
    python benchmarks/growth.py --load benchmarks/growth.json

Writes growth.svg, and growth.json from which `--load` draws it again; half an hour for the published size on two cores.
What is measured, and how, published.py says. Up to 30 s the median of three calls by turns, above that one call; of
memory the highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from published import (
    add_common_arguments,
    random_checkpoint,
    running_reference,
    running_server,
    say,
    server_side,
    shown,
)

SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TICKS = {1: "1\ns", 2: "2", 5: "5", 10: "10", 30: "30\ns", 60: "1\nmin", 120: "2", 300: "5", 600: "10\nmin"}

_THREE_TIMES_UP_TO = 30.0
# Where the plot of memory begins; less is what an allocator rounds, and nothing has no place on a logarithmic axis.
_LEAST_GIB = 0.01
_LABEL: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 11}
# Of Okabe and Ito's palette, which the colour-blind tell apart.
_STYLES = {"ours": ("#0072B2", "o", "this server"), "reference": ("#D55E00", "s", "reference")}


@dataclass(frozen=True)
class Point:
    """One length.

    Attributes:
        seconds: of sound.
        ours_seconds: that the server's decoding takes.
        ours_gib: its peak memory above the idle process.
        reference_seconds: of the reference; None where it was not measured.
        reference_gib: likewise.
    """

    seconds: float
    ours_seconds: float
    ours_gib: float
    reference_seconds: float | None
    reference_gib: float | None


@dataclass(frozen=True)
class Growth:
    """All lengths, and what they were measured with."""

    config: str
    processor: str
    threads: int
    points: list[Point]


def main() -> None:
    """Measure or load, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=numbers, default=SECONDS, help="of sound, such as 1,2,5")
    parser.add_argument("--reference-seconds", type=float, default=120.0, help="up to which the reference decodes, too")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".svg"))
    parser.add_argument("--load", type=Path, help="draw what was measured before")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)  # not found out about after half an hour
    growth = load(arguments.load) if arguments.load else measure(arguments)
    if not arguments.load:
        arguments.output.with_suffix(".json").write_text(json.dumps(asdict(growth), indent=1) + "\n")
    print_table(growth)
    draw(growth, arguments.output)


def numbers(text: str) -> list[float]:
    """Numbers above zero in ascending order, from a list with commas."""
    values = sorted({float(word) for word in text.split(",")})
    if not values or values[0] <= 0:
        raise argparse.ArgumentTypeError(f"{text} are no lengths")
    return values


def measure(arguments: argparse.Namespace) -> Growth:
    """Have both decode each length by turns, the shortest first."""
    arguments.device = "cpu"
    points = []
    with ExitStack() as stack:
        model = stack.enter_context(random_checkpoint(arguments.config))
        server = stack.enter_context(running_server(model, "--device", "cpu", "--threads", str(arguments.threads)))
        ours = server_side(server)
        processor = f"CPU, {server.client.info().device.name}"
        reference = None
        if arguments.seconds[0] <= arguments.reference_seconds:
            reference = stack.enter_context(running_reference(arguments))
        for seconds in arguments.seconds:
            sides = [ours, reference] if reference is not None and seconds <= arguments.reference_seconds else [ours]
            repeats = 3 if seconds <= _THREE_TIMES_UP_TO else 1
            say(f"decode {seconds:g} s, {repeats} times")
            rounds = [[side.run("decode", seconds) for side in sides] for _ in range(repeats)]
            spent = [statistics.median(run[0] for run in runs) for runs in zip(*rounds, strict=True)]
            peaks = [max(run[1] for run in runs) for runs in zip(*rounds, strict=True)]
            theirs = (spent[1], peaks[1]) if len(sides) > 1 else (None, None)
            points.append(Point(seconds, spent[0], peaks[0], *theirs))
    return Growth(arguments.config.stem, processor, arguments.threads, points)


def load(path: Path) -> Growth:
    """Read what was measured before."""
    values: dict[str, Any] = json.loads(path.read_text())
    return Growth(**{**values, "points": [Point(**point) for point in values["points"]]})


def print_table(growth: Growth) -> None:
    """Print each length."""
    print(f"{'decode':>8}{'ours, s':>11}{'reference, s':>14}{'ratio':>7}{'ours, GiB':>12}{'reference, GiB':>16}")
    for point in growth.points:
        theirs = point.reference_seconds
        ratio = None if theirs is None else point.ours_seconds / theirs
        times = f"{point.ours_seconds:11.3f}{shown(theirs, 14, 3)}{shown(ratio, 7, 2)}"
        print(f"{point.seconds:6g} s{times}{point.ours_gib:12.3f}{shown(point.reference_gib, 16, 3)}")


def draw(growth: Growth, path: Path) -> None:
    """Draw time and memory side by side, both axes logarithmic."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(9.4, 4.6), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    left, right = figure.subplots(1, 2)
    seconds = [point.seconds for point in growth.points]
    for side in _STYLES:
        plot(left, seconds, [getattr(point, f"{side}_seconds") for point in growth.points], side)
        plot(right, seconds, [getattr(point, f"{side}_gib") for point in growth.points], side, _LEAST_GIB)
    left.plot(seconds, seconds, color="0.55", linestyle=(0, (4, 3)), linewidth=1.2, zorder=1)
    middle = seconds[len(seconds) // 2]
    left.annotate("as long as\nit sounds", (middle, middle), (-6, 20), color="0.4", ha="right", **_LABEL)
    left.set_title("Seconds to decode", loc="left", fontsize=13)
    right.set_title("Peak memory, GiB above the idle process", loc="left", fontsize=13)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="length of the sound")
        axes.set_xticks(list(TICKS), list(TICKS.values()))
        axes.minorticks_off()
        axes.set_xlim(0.85 * seconds[0], seconds[-1] * (seconds[-1] / seconds[0]) ** 0.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if axes is right else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(color="0.9", linewidth=0.8)
        axes.tick_params(labelsize=11)
        axes.xaxis.label.set_fontsize(12)
        axes.spines[["top", "right"]].set_visible(False)
    size = f"{growth.config} size, random weights, float32, {growth.threads} threads, {growth.processor}"
    figure.suptitle(size, x=0.01, ha="left", fontsize=11, color="0.35")
    # Drawn again from the same figures, the file is the same.
    with matplotlib.rc_context({"svg.hashsalt": "growth"}):
        figure.savefig(path, metadata={"Date": None})
    say(f"wrote {path}")


def plot(axes: Any, seconds: Sequence[float], values: Sequence[float | None], side: str, least: float = 0.0) -> None:
    """Draw one line, with its name at its end."""
    from matplotlib.patheffects import withStroke

    colour, marker, name = _STYLES[side]
    known = [(x, max(y, least)) for x, y in zip(seconds, values, strict=True) if y is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color=colour, marker=marker, markersize=6, linewidth=2, zorder=2)
        label = axes.annotate(name, known[-1], (8, -4), color=colour, fontweight="bold", **_LABEL)
        # Legible also where the other line passes below it.
        label.set_path_effects([withStroke(linewidth=3, foreground="white")])


if __name__ == "__main__":
    main()
