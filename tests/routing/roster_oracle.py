"""The roster rule in plain Python, token by token, as the paper's summary has it; slow and without arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.routing.roster import Shift


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
    roster: set[int] = field(default_factory=set)
    history: list[float] = field(default_factory=list)  # coverage of each token since the pin
    log: list[tuple[int, str]] = field(default_factory=list)  # (token, "pin" or "shift")

    def token(self, scores: list[float]) -> list[int]:
        self.ranges += max(scores) - min(scores)
        unit = self.ranges / (self.time + 1)
        free = best(scores, self.chosen)
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
            self.history.append(sum(expert in self.roster for expert in free) / self.chosen)
            if self.shift is not None and self.shifted():
                self.log.append((self.time, "shift"))
                self.phase, self.count, self.last, self.roster = "explore", {}, {}, set()
                self.pin_at = self.time + self.shift.explore_tokens
            return taken
        if self.phase == "explore" and len(self.count) >= self.size:
            self.form(scores)
            self.phase = "barrier"
        elif self.phase == "barrier":
            for expert in taken:
                if expert not in self.roster:
                    can_go = [member for member in self.roster if member not in taken]
                    victim = min(can_go, key=lambda member: (self.uses(member), self.last.get(member, -1), member))
                    self.roster.remove(victim)
                    self.roster.add(expert)
        if self.pin_at is not None and self.time >= self.pin_at:
            if self.phase == "explore":
                self.form(scores)
            self.phase, self.history = "pinned", []
            self.log.append((self.time, "pin"))
        return taken

    def uses(self, expert: int) -> int:
        return self.count.get(expert, 0)

    def form(self, scores: list[float]) -> None:
        order = sorted(range(self.experts), key=lambda e: (-self.uses(e), -self.last.get(e, -1), -scores[e], e))
        self.roster = set(order[: self.size])

    def shifted(self) -> bool:
        """Recomputed from the whole history since the pin."""
        shift = self.shift
        assert shift is not None
        settle = self.history[: shift.settle_tokens]
        if len(self.history) <= shift.settle_tokens:
            return False
        reference = sum(settle) / len(settle)
        chance = self.size / self.experts
        mean, below = reference, 0
        for covered in self.history[shift.settle_tokens :]:
            mean = mean + (covered - mean) / shift.horizon
            below = below + 1 if mean < chance + shift.ratio * (reference - chance) else 0
        return below >= shift.patience
