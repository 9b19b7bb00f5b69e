"""Synthetic routes with the reuse, popularity and predictability of real ones: a Gaussian latent model.

A hidden state h wanders in time (a sum of AR(1) processes with memories of 2000, 20 and 2 tokens, and fresh noise) and
drifts from layer to layer; a router sees it through its own random matrix plus a fixed preference for some experts:

    z[t,l] = sqrt(static) b_l + sqrt(dynamic) W_l h[t,l] + sqrt(noise) n[t,l],   experts = top-k(z)

The stale gate is the next layer's router on this layer's h. Calibrated on public routes of Qwen3-30B-A3B. No torch.
"""

from dataclasses import dataclass

import numpy as np

from stoker.errors import OptionError

WIDTH = 256
MEMORIES_TOKENS = (2000.0, 20.0, 2.0)


@dataclass(frozen=True)
class Preset:
    """Shares of a router logit's variance; `static + slow + middle + fast + iid = 1`. `drift`: share of h new a layer.

    `spread`: how much more the favoured experts answer to h: row e of the router is scaled by exp(spread * b_e).
    `first`, `second`, `last` layers differ: their own static share, and the share of noise that no layer before sees.
    """

    static: float
    slow: float
    middle: float
    fast: float
    drift: float
    spread: float = 0.0
    first: tuple[float, float] = (0.10, 0.72)
    second: tuple[float, float] = (0.25, 0.36)
    last: tuple[float, float] = (0.22, 0.36)

    @property
    def iid(self) -> float:
        return 1 - self.static - self.slow - self.middle - self.fast


PRESETS = {
    "general": Preset(static=0.228, slow=0.26, middle=0.088, fast=0.264, drift=0.017, spread=0.012),
    "code": Preset(static=0.445, slow=0.14, middle=0.07, fast=0.205, drift=0.02, last=(0.22, 0.31)),
}


@dataclass(frozen=True)
class Synthetic:
    """experts_LTK: int16 [L, T, K], strongest first. stale_LTK: int16 [L, T, K], the guess for layer l made at layer
    l - 1; layer 0 has none (-1)."""

    experts_LTK: np.ndarray
    stale_LTK: np.ndarray


def generate(
    preset: str | Preset,
    tokens: int,
    layers: int = 48,
    experts: int = 128,
    k: int = 8,
    seed: int = 0,
    shift_at: int | None = None,
    shift_correlation: float = 0.3,
) -> Synthetic:
    """Routes of one sequence. `shift_at`: the token at which the topic changes; the fixed preferences are then redrawn
    with `shift_correlation` to the old ones (0.12 to 0.45 between real domains). Same arguments, same routes."""
    shape = preset if isinstance(preset, Preset) else _preset(preset)
    if not 1 <= k <= experts or tokens < 1 or layers < 1:
        got = f"{tokens} tokens, {layers} layers, {k} of {experts} experts"
        raise OptionError("no such shape", where="synthetic routes", expected="1 <= k <= experts", got=got)
    rng = np.random.default_rng(seed)
    chosen = np.empty((layers, tokens, k), np.int16)
    stale = np.full((layers, tokens, k), -1, np.int16)
    hidden_TD = _process(rng, shape, tokens)
    for layer in range(layers):
        before_TD = hidden_TD
        if layer:
            hidden_TD = np.sqrt(1 - shape.drift) * hidden_TD + np.sqrt(shape.drift) * _process(rng, shape, tokens)
        static, noise = _mix(shape, layer, layers)
        preference_TE = _preference(rng, experts, tokens, shift_at, shift_correlation)
        router_DE = rng.standard_normal((WIDTH, experts), np.float32) * _row_scale(preference_TE[0], shape.spread)
        fixed_TE = np.sqrt(static) * preference_TE
        dynamic = np.float32(np.sqrt(1 - static - noise))
        fresh_TE = np.float32(np.sqrt(noise)) * rng.standard_normal((tokens, experts), np.float32) if noise else 0.0
        chosen[layer] = _top(fixed_TE + dynamic * (hidden_TD @ router_DE) + fresh_TE, k)
        if layer:
            stale[layer] = _top(fixed_TE + dynamic * (before_TD @ router_DE), k)
    return Synthetic(chosen, stale)


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise OptionError("unknown preset", where="synthetic routes", expected=", ".join(PRESETS), got=name)
    return PRESETS[name]


def _mix(shape: Preset, layer: int, layers: int) -> tuple[float, float]:
    """The static share and the share of unseen noise of one layer."""
    if layer == 0:
        return shape.first
    if layer == layers - 1:
        return shape.last
    return shape.second if layer == 1 else (shape.static, 0.0)


def _row_scale(preference_E: np.ndarray, spread: float) -> np.ndarray:
    """float32 [E]: scales of the router's rows, so that a logit has unit variance on average."""
    scale_E = np.exp(spread * preference_E)
    return (scale_E / np.sqrt(np.mean(scale_E**2) * WIDTH)).astype(np.float32)


def _process(rng: np.random.Generator, shape: Preset, tokens: int) -> np.ndarray:
    """h over time, float32 [T, D], unit variance: AR(1) processes in stationary state, and noise."""
    weights = np.array([shape.slow, shape.middle, shape.fast, shape.iid]) / (1 - shape.static)
    hidden_TD = np.sqrt(weights[3], dtype=np.float32) * rng.standard_normal((tokens, WIDTH), np.float32)
    for weight, memory in zip(weights, MEMORIES_TOKENS, strict=False):
        keep = float(np.exp(-1 / memory))
        steps_TD = rng.standard_normal((tokens, WIDTH), np.float32) * np.float32(np.sqrt(weight))
        steps_TD[1:] *= np.float32(np.sqrt(1 - keep**2))
        state_D = np.zeros(WIDTH, np.float32)
        for row_D in steps_TD:
            state_D *= keep
            state_D += row_D
            row_D[:] = state_D
        hidden_TD += steps_TD
    return hidden_TD


def _preference(
    rng: np.random.Generator, experts: int, tokens: int, shift_at: int | None, correlation: float
) -> np.ndarray:
    """b_l for each token, float32 [T or 1, E]."""
    first_E = rng.standard_normal(experts, np.float32)
    if shift_at is None:
        return first_E[None]
    second_E = correlation * first_E + np.sqrt(1 - correlation**2) * rng.standard_normal(experts, np.float32)
    return np.where(np.arange(tokens)[:, None] < shift_at, first_E, second_E).astype(np.float32)


def _top(logits_TE: np.ndarray, k: int) -> np.ndarray:
    """The k largest of each row, largest first, int16 [T, k]."""
    top_TK = np.argpartition(-logits_TE, k - 1, axis=1)[:, :k] if k < logits_TE.shape[1] else None
    if top_TK is None:
        return np.argsort(-logits_TE, axis=1).astype(np.int16)
    order = np.argsort(-np.take_along_axis(logits_TE, top_TK, 1), axis=1)
    return np.take_along_axis(top_TK, order, 1).astype(np.int16)
