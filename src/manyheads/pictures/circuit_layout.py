"""Where the nodes of a circuit stand: layers upward, with few crossings of the edges between them.

Names are those of the lens: a writer is "embeddings", "L3H1", "L3 mlp" or "L3 mixer", a reader
"L3H1 query", "L3H0-2 key", "L3 mlp" or "logits".
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

# A writer, a reader and the score of the edge between them.
WeightedEdge = tuple[str, str, float]
# A node, or a line that passes a row: its writer, whether it is negative, and the row.
Point = str | tuple[str, bool, int]

PORT = re.compile(r"(.*?) (query|key|value)$")
PLACE = re.compile(r"L(\d+)(?:H(\d+)(?:-(\d+))?)?")
# Within a layer, from the bottom: keys and values that heads share, heads and mixers, the MLP.
SHARED, MIXING, MLP = range(3)
# In place of a layer: the embeddings, and the logits.
BELOW, ABOVE = -1, 10**9
# Passes over the rows that order the nodes, and passes that only move them.
ORDERING, MOVING = 10, 14
# Columns that a box and a passing line take.
BOX, LINE, PORT_STEP = 1.0, 0.16, 0.23
PORTS = ("query", "key", "value", "")


@dataclass(frozen=True, slots=True)
class CircuitNode:
    """A node of a circuit: columns to the right of the middle, and the row from the bottom.

    `ports` are what it reads with: "query", "key" and "value" of a head, "" of the others.
    """

    name: str
    x: float
    row: int
    ports: tuple[str, ...]

    def port(self, name: str) -> float:
        """The column of one of its ports, which stand side by side."""
        return self.x + PORT_STEP * (self.ports.index(name) - (len(self.ports) - 1) / 2)


@dataclass(frozen=True, slots=True)
class CircuitLayout:
    """The nodes of a circuit, the layer of each row and how many columns the widest row has.

    `routes` has for each edge its column in every row from its writer to its reader. `shared` are
    pairs of names: keys and values of a group, and a head that uses them.
    """

    nodes: tuple[CircuitNode, ...]
    layers: tuple[str, ...]
    columns: float
    routes: tuple[tuple[float, ...], ...]
    shared: tuple[tuple[str, str], ...]

    def __getitem__(self, name: str) -> CircuitNode:
        return next(node for node in self.nodes if node.name == name)


def split_reader(reader: str) -> tuple[str, str]:
    """The node of a reader, and what it reads with.

    >>> split_reader("L3H1 query"), split_reader("L3 mlp")
    (('L3H1', 'query'), ('L3 mlp', ''))
    """
    match = PORT.match(reader)
    return (match[1], match[2]) if match else (reader, "")


def place_circuit(edges: Sequence[WeightedEdge]) -> CircuitLayout:
    """The place of every node that has an edge; rows without any are left out.

    Within a row nodes move towards those they are connected to, in turns from below and from above,
    and lines pass between them (Sugiyama, Tagawa and Toda, 1981). Edges of one writer and one sign
    pass a row at the same place.

    >>> layout = place_circuit([("embeddings", "L1H0 key", 1.0), ("L1H0", "logits", 2.0)])
    >>> layout.layers, layout["L1H0"].row, layout["L1H0"].ports
    (('', '1', ''), 1, ('key',))
    """
    ports: dict[str, set[str]] = defaultdict(set)
    for writer, reader, _ in edges:
        node, port = split_reader(reader)
        ports[writer] |= set()
        ports[node].add(port)
    places = {name: _place(name) for name in ports}
    rows = sorted({place[:2] for place in places.values()})
    row_of = {name: rows.index(places[name][:2]) for name in ports}
    by_row: list[list[Point]] = [[] for _ in rows]
    for name in sorted(ports, key=lambda name: places[name]):
        by_row[row_of[name]].append(name)
    shared = [(group, head) for group in ports for head in ports if _shares(group, head)]
    links: dict[tuple[Point, Point], float] = defaultdict(float)
    for group, head in shared:
        links[group, head] = max(abs(score) for _, _, score in edges)
    routes: list[list[Point]] = []
    for writer, reader, score in edges:
        node = split_reader(reader)[0]
        between = [(writer, score < 0, row) for row in range(row_of[writer] + 1, row_of[node])]
        for line in between:
            by_row[line[2]] += [] if line in by_row[line[2]] else [line]
        routes.append([writer, *between, node])
        for pair in pairwise(routes[-1]):
            links[pair] += abs(score)
    x = _columns(by_row, links)
    nodes = tuple(
        CircuitNode(name, x[name], row, tuple(port for port in PORTS if port in ports[name]))
        for name, row in row_of.items()
    )
    readers = [reader for _, reader, _ in edges]
    return CircuitLayout(
        nodes=nodes,
        layers=tuple("" if layer in (BELOW, ABOVE) else str(layer) for layer, _ in rows),
        columns=1 + 2 * max(map(abs, x.values()), default=0.0),
        routes=_enter([[x[point] for point in route] for route in routes], readers, nodes),
        shared=tuple(shared),
    )


def _enter(
    routes: Sequence[list[float]], readers: Sequence[str], nodes: Sequence[CircuitNode]
) -> tuple[tuple[float, ...], ...]:
    """The routes, which end at the ports of their readers, side by side in the order they come."""
    by_name = {node.name: node for node in nodes}
    for reader in dict.fromkeys(readers):
        name, port = split_reader(reader)
        own = sorted(
            (route for route, end in zip(routes, readers, strict=True) if end == reader),
            key=lambda route: route[-2],
        )
        step = min(0.08, (0.07 if port else 0.4) / max(1, len(own) - 1))
        for place, route in enumerate(own):
            route[-1] = by_name[name].port(port) + (place - (len(own) - 1) / 2) * step
    return tuple(map(tuple, routes))


def _place(name: str) -> tuple[int, int, int]:
    """The layer, the place within it from the bottom, and the head."""
    match = PLACE.search(name)
    if match is None:
        return BELOW if name == "embeddings" else ABOVE, 0, 0
    if name.endswith(" mlp"):
        return int(match[1]), MLP, 0
    return int(match[1]), SHARED if match[3] else MIXING, int(match[2] or 0)


def _shares(group: str, head: str) -> bool:
    """Whether a head uses the keys and values of a group, as L3H1 those of L3H0-2."""
    own, of_group = PLACE.search(head), PLACE.search(group)
    if own is None or of_group is None or not of_group[3] or own[3] or not own[2]:
        return False
    return own[1] == of_group[1] and int(of_group[2]) <= int(own[2]) <= int(of_group[3])


def _columns(
    by_row: list[list[Point]], links: Mapping[tuple[Point, Point], float]
) -> dict[Point, float]:
    """The column of each node and line; rows are ordered in place."""
    below: dict[Point, dict[Point, float]] = defaultdict(dict)
    above: dict[Point, dict[Point, float]] = defaultdict(dict)
    for (low, high), weight in links.items():
        below[high][low] = above[low][high] = weight
    half = max(sum(map(_width, points)) for points in by_row) / 2
    x: dict[Point, float] = {}
    for points in by_row:
        x |= zip(points, _apart([0.0] * len(points), points, half), strict=True)
    for sweep in range(ORDERING + MOVING):
        upward, moves = sweep % 2 == 0, sweep >= ORDERING
        for points in by_row if upward else reversed(by_row):
            goals = {}
            for point in points:
                near = below[point] if upward else above[point]
                near = below[point] | above[point] if moves else near
                total = sum(near.values())
                goal = sum(weight * x[end] for end, weight in near.items())
                goals[point] = goal / total if total else x[point]
            if not moves:
                # Scores that differ by rounding alone give the same order.
                points.sort(key=lambda point: round(goals[point], 6))
            x |= zip(points, _apart([goals[p] for p in points], points, half), strict=True)
    middle = (max(x.values()) + min(x.values())) / 2
    return {point: place - middle for point, place in x.items()}


def _width(point: Point) -> float:
    return BOX if isinstance(point, str) else LINE


def _apart(goals: Sequence[float], points: Sequence[Point], half: float) -> list[float]:
    """Places in this order that do not overlap, within `half` of the middle, near their goals.

    >>> _apart([0.0, 0.0], ["L0H0", "L0H1"], 2.0), _apart([3.0, 3.0], ["L0H0", "L0H1"], 1.0)
    ([-0.5, 0.5], [-0.5, 0.5])
    """
    widths = [_width(point) for point in points]
    gaps = [0.0, *((first + second) / 2 for first, second in pairwise(widths))]
    places: list[float] = []
    for goal, gap in zip(goals, gaps, strict=True):
        places.append(max(goal, places[-1] + gap) if places else goal)
    shift = float(np.mean(np.subtract(goals, places))) if places else 0.0
    lowest, highest = -np.inf, half - widths[-1] / 2
    for index, gap in enumerate(gaps):
        floor = widths[0] / 2 - half if not index else lowest + gap
        lowest = places[index] = max(places[index] + shift, floor)
    for index in reversed(range(len(places))):
        places[index] = min(places[index], highest)
        highest = places[index] - gaps[index]
    return places


# Numbers of edges among which the reader of a page chooses.
STOPS = (5, 10, 20, 30, 40, 60, 80, 120, 160)


def circuit_view(
    edges: Sequence[WeightedEdge], errors: Sequence[float], total: int
) -> dict[str, Any]:
    """What a page draws a circuit from: ranked edges, and for some numbers of them the layout.

    `total` is the number of all edges that were scored.
    """
    count = min(len(edges), STOPS[-1])
    stops = sorted({stop for stop in STOPS if stop < count} | {count})
    return {
        "edges": [
            [writer, *split_reader(reader), score, error]
            for (writer, reader, score), error in zip(edges[:count], errors, strict=False)
        ],
        "total": total,
        "layouts": [_rounded(place_circuit(edges[:stop])) for stop in stops],
    }


def _rounded(layout: CircuitLayout) -> dict[str, Any]:
    return {
        "nodes": [[node.name, round(node.x, 3), node.row, node.ports] for node in layout.nodes],
        "layers": layout.layers,
        "columns": round(layout.columns, 3),
        "routes": [[round(x, 3) for x in route] for route in layout.routes],
        "shared": layout.shared,
    }
