"""The roster rule in plain Python, token by token: as the paper's summary has it, but that the experts with most
probability in the prefix are pinned; slow and without arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stoker.routing.shift import Shift


def best(scores: list[float], chosen: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:chosen]


@dataclass
class PlainRoster:
    experts: int
    chosen: int
    size: int
    delta: float
    pin_at: int | None = None
    shift: Shift | None = None
    time: int = 0
    ranges: float = 0.0
    phase: str = "explore"
    count: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    mass: dict[int, float] = field(default_factory=dict)  # probability of the prefix's free choices
    roster: set[int] = field(default_factory=set)
    # since the pin: share held, free choices with their probabilities
    history: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    log: list[tuple[int, str]] = field(default_factory=list)  # (token, "pin" or "shift")

    def token(self, scores: list[float]) -> list[int]:
        self.ranges += max(scores) - min(scores)
        unit = self.ranges / (self.time + 1)
        free = best(scores, self.chosen)
        largest = max(scores)
        whole = sum(math.exp(score - largest) for score in scores)
        probabilities = {expert: math.exp(scores[expert] - largest) / whole for expert in free}
        if self.phase == "pinned":
            inside = sorted(self.roster, key=lambda expert: (-scores[expert], expert))
            taken = inside[: self.chosen]
        elif self.phase == "barrier":
            lead = min(self.delta, 1e6) * unit
            taken = best([s + lead if e in self.roster else s - lead for e, s in enumerate(scores)], self.chosen)
        else:
            taken = free
        for expert in taken:
            self.count[expert] = self.count.get(expert, 0) + 1
            self.last[expert] = self.time
        self.time += 1
        if self.phase == "pinned":
            weights = [math.exp(scores[expert]) for expert in free]
            held = sum(w for w, expert in zip(weights, free, strict=True) if expert in self.roster)
            self.history.append((held / sum(weights), probabilities))
            since = self.shifted() if self.shift is not None else None
            if since is not None:
                self.log.append((self.time, "shift"))
                self.phase, self.count, self.last, self.roster, self.mass = "explore", {}, {}, set(), {}
                explore = self.shift.explore_tokens
                known = self.history[-min(since, explore) :]
                for place, (_, choices) in enumerate(known):
                    for expert, probability in choices.items():
                        self.mass[expert] = self.mass.get(expert, 0.0) + probability
                        self.count[expert] = self.count.get(expert, 0) + 1
                        self.last[expert] = self.time - len(known) + place
                self.pin_at = self.time + max(explore - len(known), explore // 4, 1)
            return taken
        for expert, probability in probabilities.items():
            self.mass[expert] = self.mass.get(expert, 0.0) + probability
        if self.phase == "explore" and len(self.count) >= self.size:
            self.form(scores, {})
            self.phase = "barrier"
        elif self.phase == "barrier":
            for expert in taken:
                if expert not in self.roster:
                    can_go = [member for member in self.roster if member not in taken]
                    victim = min(can_go, key=lambda member: (self.uses(member), self.last.get(member, -1), member))
                    self.roster.remove(victim)
                    self.roster.add(expert)
        if self.pin_at is not None and self.time >= self.pin_at:
            self.form(scores, self.mass)
            self.phase, self.history = "pinned", []
            self.log.append((self.time, "pin"))
        return taken

    def uses(self, expert: int) -> int:
        return self.count.get(expert, 0)

    def form(self, scores: list[float], mass: dict[int, float]) -> None:
        def rank(e: int) -> tuple[float, ...]:
            return -mass.get(e, 0.0), -self.uses(e), -self.last.get(e, -1), -scores[e], e

        order = sorted(range(self.experts), key=rank)
        self.roster = set(order[: self.size])

    def shifted(self) -> int | None:
        """Since how many tokens, recomputed from the whole history since the pin."""
        shift = self.shift
        assert shift is not None
        chance = self.size / self.experts
        held = [share for share, _ in self.history]
        topic, weights = held[: shift.settle_tokens], [1.0] * min(len(held), shift.settle_tokens)
        evidence, since = 0.0, 0
        for place in range(shift.settle_tokens, len(held)):
            total = sum(weights)
            mean = sum(w * h for w, h in zip(weights, topic, strict=True)) / total
            variance = sum(w * (h - mean) ** 2 for w, h in zip(weights, topic, strict=True)) / total
            fall = (1 - shift.left) * max(mean - chance, 0.05)
            before = (held[place] - mean) ** 2 / 2 / max(variance, 0.01)
            after = (held[place] - mean + fall) ** 2 / 2 / max(variance, 0.01)
            evidence, since = max(0.0, evidence + min(1.0, max(-1.0, before - after))), since + 1
            if evidence == 0:
                topic, weights = topic + held[place + 1 - since : place + 1], weights + [1.0] * since
                most = max(shift.memory_tokens, shift.settle_tokens)
                weights = [w * min(1.0, most / sum(weights)) for w in weights]
                since = 0
        return since if evidence >= shift.evidence else None
