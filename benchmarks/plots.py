"""Line plots as SVG, with both axes logarithmic or the vertical one linear, and a name at the end of each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 48, 54
COLOURS = ("#7f7f7f", "#cc79a7", "#e69f00", "#56b4e9", "#0072b2", "#d55e00", "#009e73")
"""Colours that most people with colour blindness can tell apart."""

SPACING = 16.0
"""The least distance between the names of two lines."""


class _Axis:
    """Maps values to places from ``begin`` to ``end``."""

    def __init__(self, values: Sequence[float], begin: float, end: float, *, log: bool) -> None:
        self.least, self.most = min(values), max(values)
        self._begin, self._end, self._log = begin, end, log

    def __call__(self, value: float) -> float:
        low, high, here = ((log10(each) if self._log else each) for each in (self.least, self.most, value))
        return self._begin + (here - low) / (high - low or 1) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Return round values between the ends of the axis."""
        if not self._log:
            return [self.least + (self.most - self.least) * part / 4 for part in range(5)]
        decades = range(floor(log10(self.least)), floor(log10(self.most)) + 1)
        values = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        return [value for value in values if self.least <= value <= self.most]


def lines(
    title: str,
    across: str,
    up: str,
    series: Mapping[str, Points],
    *,
    ticks: Sequence[float] = (),
    span: tuple[float, float] | None = None,
    dots: bool = True,
) -> str:
    """Return a line plot as SVG.

    Args:
        title: the title above the plot.
        across: the quantity of the horizontal axis, which is logarithmic.
        up: the quantity of the vertical axis.
        series: the points of each line, by its name; a line without points is left out, and the other colours stay.
        ticks: the ticks of the horizontal axis; by default round values.
        span: the ends of the vertical axis, which is then linear; by default it is logarithmic.
        dots: whether each point is marked.
    """
    points = [point for each in series.values() for point in each]
    x = _Axis([each for each, _ in points], LEFT, WIDTH - RIGHT, log=True)
    y = _Axis(span or [each for _, each in points], HEIGHT - BOTTOM, TOP, log=span is None)
    place, middle = f'width="{WIDTH}" height="{HEIGHT}"', (TOP + HEIGHT - BOTTOM) / 2
    font = 'font-family="system-ui, sans-serif" font-size="13" fill="#333"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {place} {font}>',
        f"<title>{escape(title)}</title>",
        f'<rect {place} fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(across)}</text>',
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(up)}</text>',
    ]
    for value in y.ticks():
        at = y(value)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:,.6g}</text>')
    for value in ticks or x.ticks():
        at = x(value)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:,.6g}</text>')
    names = _apart({name: y(each[-1][1]) for name, each in series.items() if each})
    for (name, each), colour in zip(series.items(), COLOURS, strict=False):
        if not each:
            continue
        path = "L".join(f"{x(across):.1f} {y(up):.1f}" for across, up in each)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-linejoin="round"/>')
        if dots:
            parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="4" fill="{colour}"/>' for a, b in each]
        end, right = each[-1], WIDTH - RIGHT + 14
        parts.append(
            f'<path d="M{x(end[0]):.1f} {y(end[1]):.1f}L{right - 4} {names[name]:.1f}" stroke="{colour}"'
            ' stroke-dasharray="2 3"/>'
        )
        parts.append(f'<text x="{right}" y="{names[name] + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _apart(places: Mapping[str, float]) -> dict[str, float]:
    """Return places in the same order that are far enough apart, and within the picture."""
    found: dict[str, float] = {}
    before = TOP - SPACING
    for name, place in sorted(places.items(), key=lambda each: each[1]):
        before = found[name] = max(place, before + SPACING)
    limit = HEIGHT - BOTTOM + SPACING
    for name in reversed(found):
        limit = found[name] = min(found[name], limit - SPACING)
    return found
