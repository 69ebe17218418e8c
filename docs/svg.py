"""Elements of a drawing as text, with colours for light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from xml.sax.saxutils import escape, quoteattr

REGULAR, BOLD = 0.56, 0.6  # the width of an average character of a sans-serif font, in font sizes
# class -> fill on light, fill on dark. A class that ends in -line is a stroke.
COLOURS = {
    "page": ("#ffffff", "#14181d"),
    "node": ("#f0f2f5", "#20262d"),
    "device": ("#ffffff", "#2c343d"),
    "text": ("#1b2026", "#e8ecf0"),
    "faint": ("#57606a", "#a5afba"),
    "empty": ("#e3e7eb", "#414b56"),
    "weights": ("#2f6fde", "#6ea3ff"),
    "gradients": ("#d9622b", "#ff9a66"),
    "state": ("#8250c4", "#b992f0"),
    "samples": ("#1f8a5b", "#4fc78f"),
    "numbers": ("#68727d", "#9aa5b1"),
}
Point = tuple[float, float]
FONT = "font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def width_of(text: str, *, size: float, bold: bool = False) -> float:
    """The width of a text, estimated."""
    return len(text) * size * (BOLD if bold else REGULAR)


class Svg:
    """Collects elements; `str` is the whole file."""

    def __init__(self, *, width: float, title: str, description: str) -> None:
        self.width, self.height = width, 0.0
        self._title, self._description = title, description
        self._elements: list[str] = []

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        self._elements.append(f'<g class="{name}">')
        yield
        self._elements.append("</g>")

    def box(
        self,
        x: float,
        y: float,
        size: Point,
        kind: str,
        *,
        round_by: float = 2,
        faint: bool = False,
    ) -> None:
        """A filled box; `faint`: half transparent, for a copy that does not stay."""
        more = ' fill-opacity="0.45"' * faint
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{size[0]:g}" height="{size[1]:g}" rx="{round_by:g}"'
            f' class="{kind}"{more}/>'
        )

    def line(self, start: Point, end: Point, kind: str, *, width: float = 1) -> None:
        self._elements.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}"'
            f' class="{kind}-line" stroke-width="{width:g}"/>'
        )

    def arrow(self, x: float, y: float, target_x: float, kind: str) -> None:
        """A horizontal arrow."""
        back = 7 if target_x > x else -7
        self.line((x, y), (target_x - back, y), kind, width=2)
        tip = f"{target_x:g},{y:g} {target_x - back:g},{y - 4:g} {target_x - back:g},{y + 4:g}"
        self._elements.append(f'<polygon points="{tip}" class="{kind}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        self._elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="4" class="{kind}"/>')

    def text(
        self, x: float, y: float, text: str, *, size: float = 11, kind: str = "text", bold: bool = False,
        within: float,
    ) -> None:  # fmt: skip
        """A line of text that begins at `x`. Raises ValueError if it is wider than `within`."""
        if width_of(text, size=size, bold=bold) > within:
            raise ValueError(f"{text!r} does not fit into {within:g}")
        weight = ' font-weight="600"' * bold
        self._elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{weight} class="{kind}">{escape(text)}</text>'
        )

    def __str__(self) -> str:
        size = f"{self.width:g} {self.height:g}"
        width, height = self.width, self.height
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"'
            f' width="{width:g}" height="{height:g}"'
            f' role="img" aria-label={quoteattr(self._title)}>'
        )
        page = f'<rect width="{width:g}" height="{height:g}" rx="8" class="page"/>'
        return "\n".join([
            head, f"<title>{escape(self._title)}</title>", f"<desc>{escape(self._description)}</desc>",
            f"<style>\n{_style()}\n</style>", page, *self._elements, "</svg>\n",
        ])  # fmt: skip


def _style() -> str:
    rules = [f"text {{ {FONT}; }}"]
    for number, scheme in enumerate(("light", "dark")):
        lines = [
            f".{name} {{ fill: {values[number]}; }} .{name}-line {{ stroke: {values[number]}; }}"
            for name, values in COLOURS.items()
        ]
        rules += lines if scheme == "light" else ["@media (prefers-color-scheme: dark) {", *lines, "}"]
    return "\n".join(rules)
