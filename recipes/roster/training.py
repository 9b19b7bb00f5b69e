"""Training under a rule of routing: the testbed's trainer with another `choose`, from scratch or from a checkpoint.

What a run is stands in its plan; killed at any moment, it goes on from its last checkpoint.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from recipes.roster.rules import Amplified, Distilling, Free, Rostered
from recipes.testbed.data import Windows
from recipes.testbed.head import cross_entropy
from recipes.testbed.measure import load
from recipes.testbed.model import SHAPES, STUDY, hidden_states, layer_step
from recipes.testbed.optim import products_dtype
from recipes.testbed.train import Plan, Run
from stoker.routing.roster_options import Prefix, RosterOptions

TRAINED = {
    "all": lambda name: True,
    "experts": lambda name: ".experts." in name,
    "gates": lambda name: ".mlp.gate." in name,
}


@dataclass(frozen=True)
class RulePlan(Plan):
    """rule: free, roster, amplifier or distil. start: the directory of the run that this one goes on from. The
    amplifier acts from `from_part` to `until_part` of the steps."""

    rule: str = "free"
    size: int = 4
    delta: float = 0.25
    pin_after: str = "20%"
    start: str = ""
    trains: str = "all"
    window: int = 256
    strength: float = 1.0
    from_part: float = 0.0
    until_part: float = 1.0
    distil: float = 0.1

    def options(self) -> RosterOptions:
        return RosterOptions((self.size,), Prefix.parse(self.pin_after), self.delta, shift=None)

    def make_rule(self) -> Free:
        chosen = (SHAPES | STUDY)[self.model].chosen
        if self.rule == "roster":
            return Rostered(chosen, options=self.options())
        if self.rule == "distil":
            return Distilling(chosen, options=self.options())
        return Amplified(chosen, strength=self.strength) if self.rule == "amplifier" else Free(chosen)


def weights(directory: Path) -> dict[str, Tensor]:
    """Of a run, or of an exported model."""
    if (directory / "checkpoint.pt").exists():
        return torch.load(directory / "checkpoint.pt", weights_only=True)["model"]
    return load(directory).state_dict()


class RuleRun(Run):
    """A run under its plan's rule, on windows of one length."""

    plan: RulePlan

    def __init__(self, plan: RulePlan, directory: Path, data: Path) -> None:
        super().__init__(plan, directory, data, compiled=False)
        self.windows = Windows(plan.window, plan.seed, data)
        self.rule = plan.make_rule()
        if self.step == 0 and plan.start:
            self.model.load_state_dict(weights(Path(plan.start)))
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(TRAINED[plan.trains](name))

    def batch(self) -> Tensor:
        offset = 1_000_000 if self.plan.start else 0  # a run that goes on sees other text than the one before it
        return self.windows.batch(self.step + offset, self.plan.step_tokens // self.plan.window)

    def losses(self, ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        part = self.step / self.plan.steps
        active = self.plan.from_part <= part < self.plan.until_part
        step = partial(layer_step, choose=self.rule) if active and self.plan.rule != "free" else layer_step
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            hidden_BTD, balance, load_LE = hidden_states(self.model, ids_BT[:, :-1], step)
        head_VD = self.model.model.embed_tokens.weight
        loss = cross_entropy(hidden_BTD.flatten(0, 1), head_VD, ids_BT[:, 1:].reshape(-1), products_dtype())
        if isinstance(self.rule, Distilling):
            balance = balance + self.plan.distil / self.plan.balance * self.rule.take()
        return loss, balance, load_LE
