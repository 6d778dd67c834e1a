"""Draws docs/address_map.svg: `python docs/draw.py`."""

from pathlib import Path

COLORS = ("#4e79a7", "#f28e2b", "#59a14f")
CELL = 34


def cell(x: int, y: int, color: str, label: str) -> str:
    text = f'<text x="{x + CELL // 2}" y="{y + 22}" text-anchor="middle" font-size="12" fill="white">{label}</text>'
    box = f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="4" fill="{color}"/>'
    return box + (text if label else "")


def note(x: int, y: int, text: str, size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#333">{text}</text>'


def draw(outer: int = 2, row: int = 8, world: int = 3) -> str:
    run = -(-row // world)
    parts = [note(20, 26, f"rows [outer={outer}, row={row}]", 14)]
    for o in range(outer):
        for c in range(row):
            parts.append(cell(20 + c * CELL, 40 + o * CELL, COLORS[c // run], f"{o}{c}"))
    parts.append(note(20, 136, f"wire [world={world}, outer={outer}, run={run}]", 14))
    for w in range(world):
        left = 20 + w * (run * CELL + 24)
        parts.append(note(left, 156, f"rank {w}"))
        for o in range(outer):
            for k in range(run):
                c = w * run + k
                color, label = (COLORS[w], f"{o}{c}") if c < row else ("#ccc", "")
                parts.append(cell(left + k * CELL, 164 + o * CELL, color, label))
    parts.append(
        note(20, 256, "wire[w, o, k] = rows[o, w*run + k] where w*run + k &lt; row; grey is padding, only on the wire")
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="680" height="272" font-family="sans-serif">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("address_map.svg").write_text(draw())
