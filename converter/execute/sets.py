"""Which rows are completed together, and in which order: disjoint sets of small integers, sorted topologically."""

from collections.abc import Iterable, Sequence
from itertools import pairwise


class Sets:
    """Disjoint sets of small integers."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = i = self.parent[self.parent[i]]
        return i

    def join(self, items: Iterable[int]) -> None:
        roots = sorted({self.find(i) for i in items})
        for root in roots[1:]:
            self.parent[root] = roots[0]


def ordered(sets: Sets, first: Sequence[int]) -> list[list[int]]:
    """Sets of nodes in an order in which each tensor's rows ascend; sets that contradict each other come as one."""
    after: dict[int, set[int]] = {sets.find(node): set() for node in range(first[-1])}
    for begin, end in pairwise(first):
        for node in range(begin, end - 1):
            a, b = sets.find(node), sets.find(node + 1)
            if a != b:
                after[a].add(b)
    waiting = dict.fromkeys(after, 0)
    for nexts in after.values():
        for b in nexts:
            waiting[b] += 1
    order, ready = [], [root for root, n in waiting.items() if n == 0]
    while ready:
        root = ready.pop(0)
        order.append([root])
        for b in sorted(after[root]):
            waiting[b] -= 1
            if waiting[b] == 0:
                ready.append(b)
    rest = [root for root, n in waiting.items() if n > 0]
    return [*order, rest] if rest else order
