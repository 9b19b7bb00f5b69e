"""How published checkpoints name and lay out their experts, routers and extras: tables, and the regexes to read them.

Owns names alone; opens no file. A new layout is a new row here. "part" is one of gate, up, down, gate_up.
"""

import re
from dataclasses import dataclass

from stoker.errors import CheckpointError

PARTS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "gate_up_proj": "gate_up",
    "input_linear": "gate_up",
    "output_linear": "down",
}
# What a tensor of an expert holds: the matrix itself, its bias (one value an output), or MLX's scales and biases.
ROLES = {"weight": "weight", "bias": "row_bias", "scales": "scales", "biases": "biases"}

_LAYER = r"^.*\blayers\.(?P<layer>\d+)\.(?:[a-z_]+\.)?"
_NAMES = "|".join(("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
_PATTERNS = (
    # one tensor per expert and matrix: mlp.experts.7.gate_proj.weight, block_sparse_moe.experts.7.w1.weight
    re.compile(_LAYER + rf"experts\.(?P<expert>\d+)\.(?P<part>{_NAMES})\.(?P<role>weight|bias|scales|biases)$"),
    # stacked on axis 0: switch_mlp.gate_proj.weight (MLX), experts.gate_proj.weight (MLX's gpt-oss)
    re.compile(
        _LAYER + r"(?:switch_mlp|experts)\.(?P<part>gate_proj|up_proj|down_proj|gate_up_proj)\."
        r"(?P<role>weight|bias|scales|biases)$"
    ),
    # fused parameters: mlp.experts.gate_up_proj, mlp.experts.down_proj_bias
    re.compile(_LAYER + r"experts\.(?P<part>gate_up_proj|down_proj)(?P<role>_bias|)$"),
    # Granite: block_sparse_moe.input_linear.weight [E, 2F, D]
    re.compile(
        r"^.*\blayers\.(?P<layer>\d+)\.block_sparse_moe\.(?P<part>input_linear|output_linear)\.(?P<role>weight)$"
    ),
)


@dataclass(frozen=True)
class ExpertTensor:
    """What the name of one expert tensor says. expert None: stacked, all experts on axis 0."""

    layer: int
    expert: int | None
    part: str
    role: str


@dataclass(frozen=True)
class Fused:
    """Stacked [E, a, b]. transposed: [E, inputs, outputs]. interleaved: gate and up alternate, else gate is first."""

    transposed: bool = False
    interleaved: bool = False


# Per model type: how stacked gate_up and down tensors lie. Types that publish one tensor per expert need no row.
FUSED: dict[str, Fused] = {
    "gpt_oss": Fused(transposed=True, interleaved=True),
    "granitemoe": Fused(),
    "granitemoeshared": Fused(),
    "granitemoehybrid": Fused(),
    "llama4": Fused(transposed=True),
    "llama4_text": Fused(transposed=True),
    "qwen3_vl_moe": Fused(transposed=True),
    "qwen3_5_moe": Fused(),
    "qwen3_5_moe_text": Fused(),
}

# Always kept as they are: choosing experts and normalising lose more than they weigh.
_KEPT = re.compile(r"(?:\.(?:gate|router|router\.layer|shared_expert_gate)|norm|\bconv1d|conv\.conv)\.weight$")
MIN_QUANTISED_COLS = 32

_LEFT_OUT = {
    "vision tower": re.compile(
        r"^(?:model\.)?(?:visual|vision_tower|vision_model|multi_modal_projector|mm_projector)\."
    ),
    "multi-token prediction": re.compile(r"^(?:model\.|language_model\.)?mtp\."),
    "inverse frequencies": re.compile(r"\.rotary_emb\.inv_freq$"),
}

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Published quantised forms that are recognised and refused by name: tensor suffix -> what it is.
FOREIGN_QUANTISATION = {
    ".weight_scale_inv": "FP8 blocks",
    "_blocks": "MXFP4",
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "compressed-tensors or FP8",
}


def expert_tensor(name: str) -> ExpertTensor | None:
    """Read a tensor's name; None when it is no routed expert's."""
    for pattern in _PATTERNS:
        match = pattern.match(name)
        if match is not None:
            found = match.groupdict()
            role = found["role"].removeprefix("_") or "weight"
            expert = found.get("expert")
            return ExpertTensor(
                int(found["layer"]), None if expert is None else int(expert), PARTS[found["part"]], ROLES[role]
            )
    return None


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, if any."""
    match = re.search(r"\blayers\.(\d+)\.", name)
    return None if match is None else int(match[1])


def left_out(name: str) -> str | None:
    """Why a tensor is not packed, or None when it is."""
    return next((reason for reason, pattern in _LEFT_OUT.items() if pattern.search(name)), None)


def stays_plain(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a dense tensor is kept in its own dtype: all but 2-D weights of linears and embeddings."""
    is_matrix = name.endswith(".weight") and len(shape) == 2 and shape[1] >= MIN_QUANTISED_COLS
    return not is_matrix or _KEPT.search(name) is not None


def fused_layout(model_type: str, name: str) -> Fused:
    """How stacked experts of a model type lie. Raises CheckpointError for a type that no row describes."""
    if model_type not in FUSED:
        raise CheckpointError(
            f"stacked experts of model type {model_type!r} are not known: rows and columns cannot be told apart safely",
            where=name,
            expected=", ".join(FUSED),
        )
    return FUSED[model_type]
