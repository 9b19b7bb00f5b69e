"""The optimisers: AdamW alone, or Muon for the matrices inside the layers and AdamW for the rest.

Muon (K. Jordan 2024): momentum, then each matrix's update is made nearly orthogonal by five Newton-Schulz steps
in bf16.
An expert's gate, up and down projection are a matrix each.
"""

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """For parameters [..., R, C]. `lr` is the size of an update's singular values, for square matrices."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                ahead = parameter.grad.add(state["momentum"], alpha=group["momentum"])
                update = orthogonal(matrices(ahead)).view_as(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])


def products_dtype() -> torch.dtype:
    """bfloat16 where the processor multiplies it; elsewhere it would be emulated, several times slower than float32."""
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def matrices(value: Tensor) -> Tensor:
    """The matrices in a parameter, [N, R, C]: gate and up of an expert, which stand above one another, come apart."""
    if value.dim() == 2:
        return value[None]
    experts, rows, cols = value.shape
    return value.reshape(experts * 2, rows // 2, cols) if rows < cols else value


def orthogonal(updates_NRC: Tensor) -> Tensor:
    """Each matrix with its singular values moved close to 1, times sqrt(R / C) where it is tall."""
    rows, cols = updates_NRC.shape[-2:]
    x = updates_NRC.to(products_dtype())
    x = x.mT if rows > cols else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    first, second, third = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    x = x.mT if rows > cols else x
    return x.to(updates_NRC.dtype) * max(1.0, rows / cols) ** 0.5


class Both:
    """Several optimisers as one. `scale_rates(part)` sets every learning rate to that part of its peak."""

    def __init__(self, *optimisers: torch.optim.Optimizer) -> None:
        self.optimisers = optimisers
        self.peaks = [[group["lr"] for group in one.param_groups] for one in optimisers]

    def scale_rates(self, part: float) -> None:
        for one, peaks in zip(self.optimisers, self.peaks, strict=True):
            for group, peak in zip(one.param_groups, peaks, strict=True):
                group["lr"] = peak * part

    def step(self) -> None:
        for one in self.optimisers:
            one.step()

    def zero_grad(self) -> None:
        for one in self.optimisers:
            one.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [one.state_dict() for one in self.optimisers]

    def load_state_dict(self, states: list[dict]) -> None:
        for one, state in zip(self.optimisers, states, strict=True):
            one.load_state_dict(state)


def make_optimiser(model: nn.Module, kind: str, rate: float, muon_rate: float, weight_decay: float) -> Both:
    """`muon` or `adamw`. No decay on norms and embeddings."""
    named = list(model.named_parameters())
    inside = [p for name, p in named if p.dim() > 1 and ".layers." in name and "mlp.gate." not in name]
    routers = [p for name, p in named if p.dim() > 1 and "mlp.gate." in name]
    others = [p for name, p in named if p.dim() == 1 or ".layers." not in name]
    by_adam = [*routers, *(inside if kind == "adamw" else [])]
    groups = [{"params": by_adam, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=True)
    return Both(adam) if kind == "adamw" else Both(adam, Muon(inside, muon_rate, weight_decay))
