"""Routers for the demo model: one [experts, width] matrix a layer, from clustering the dense model's own hidden states.

Spherical k-means on the centred inputs of each MLP gives directions; the mean direction then carries a bias for each
expert, so that no expert is idle. Owns no weights of the model and knows nothing of how experts are made.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

TEXT = Path(__file__).with_name("text.txt")
KMEANS_ROUNDS = 30
BALANCE_ROUNDS = 300
BALANCE_STEP = 0.05
LOGIT_SPREAD = 2.0  # standard deviation of the logits before balancing: clear choices, weights that still mix


def passages() -> list[str]:
    """The texts that the routers are fitted to: prose, dialogue, code, lists, sums, three other languages."""
    return TEXT.read_text(encoding="utf-8").split("\n---\n")


def mlp_inputs(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Tensor]:
    """What each layer's MLP sees: one float32 [tokens, width] a layer, over all texts; each text is one user turn."""
    seen: list[list[Tensor]] = [[] for _ in model.model.layers]

    def recorder(layer: int):
        def record(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen[layer].append(arguments[0][0])

        return record

    hooks = [block.mlp.register_forward_pre_hook(recorder(layer)) for layer, block in enumerate(model.model.layers)]
    with torch.inference_mode():
        for text in texts:
            turn = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(turn, return_tensors="pt", return_dict=True)
            model.model(prompt["input_ids"], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts).clone() for parts in seen]


def fit(inputs_TD: Tensor, experts: int, chosen: int, seed: int) -> Tensor:
    """A router [experts, width]: softmax top-`chosen` of `inputs_TD @ router.T` follows the clusters, evenly used."""
    mean_D = inputs_TD.mean(0)
    centred_TD = inputs_TD - mean_D
    directions_ED = spherical_kmeans(nn.functional.normalize(centred_TD, dim=1), experts, seed)
    rows_ED = directions_ED * (LOGIT_SPREAD / (centred_TD @ directions_ED.T).std())
    # This router has no bias. Along the mean every input has nearly the same length, so that direction serves as one.
    unit_D = mean_D / mean_D.square().sum()
    rows_ED = rows_ED - (rows_ED @ mean_D)[:, None] * unit_D
    return balance(inputs_TD, rows_ED, unit_D, chosen)


def spherical_kmeans(unit_TD: Tensor, clusters: int, seed: int) -> Tensor:
    """Unit centroids [clusters, width] by cosine; starts from points far apart (k-means++)."""
    generator = torch.Generator().manual_seed(seed)
    picks = [int(torch.randint(len(unit_TD), (1,), generator=generator))]
    while len(picks) < clusters:
        distance_T = (1 - (unit_TD @ unit_TD[picks].T).amax(1)).clamp(min=0)
        picks.append(int(torch.multinomial(distance_T, 1, generator=generator)))
    centroids_CD = unit_TD[picks]
    for _ in range(KMEANS_ROUNDS):
        nearest_T = (unit_TD @ centroids_CD.T).argmax(1)
        sums_CD = torch.zeros_like(centroids_CD).index_add_(0, nearest_T, unit_TD)
        centroids_CD = nn.functional.normalize(sums_CD + 1e-6 * centroids_CD, dim=1)
    return centroids_CD


def balance(inputs_TD: Tensor, rows_ED: Tensor, bias_direction_D: Tensor, chosen: int) -> Tensor:
    """Shift each expert's logits along `bias_direction_D` until all are chosen about equally often."""
    experts = len(rows_ED)
    lengths_T = inputs_TD @ bias_direction_D
    logits_TE = inputs_TD @ rows_ED.T
    bias_E = torch.zeros(experts)
    for _ in range(BALANCE_ROUNDS):
        top_TK = (logits_TE + lengths_T[:, None] * bias_E).topk(chosen).indices
        share_E = torch.bincount(top_TK.flatten(), minlength=experts) / top_TK.numel()
        bias_E += BALANCE_STEP * (1 - share_E * experts)
    return rows_ED + bias_E[:, None] * bias_direction_D
