"""The oracle of prerouted decoding: transformers' eager model, whole sequences, heads in plain torch, no engine.

For each position the model is run again over everything before it, with every layer's route given. Written from the
formulas of DESIGN section 7 alone; shares nothing with stoker/routing and stoker/runtime/heads.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoker.adapter.heads import Head
from stoker.runtime.skeleton import moe_blocks


class Prerouted:
    """`model`: eager, float32. heads: by decoder layer. The gates choose `top_k` experts for the first `prompt_tokens`
    tokens and in layers that no head serves."""

    def __init__(self, model: PreTrainedModel, heads: dict[int, Head], top_k: int) -> None:
        self.model, self.heads, self.top_k = model, heads, top_k
        self.blocks = moe_blocks(model)
        self.prompt_tokens = 0
        self.gaps: list[float] = []  # between the last expert that was taken and the first that was not
        self._inputs: dict[int, Tensor] = {}
        self._used: dict[int, Tensor] = {}
        self._embedded_TD = torch.empty(0)
        for at, block in enumerate(self.blocks):
            self._wrap(at, block)

    def logits(self, ids: list[int], prompt_tokens: int) -> Tensor:
        """float32 [T, V], teacher-forced."""
        self.prompt_tokens, self._inputs, self._used = prompt_tokens, {}, {}
        self._embedded_TD = self.model.get_input_embeddings().weight.data[ids].float()
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([ids])).logits[0].float()

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], Tensor]:
        """The answer's tokens, and the logits float32 [tokens, V] that they were taken from."""
        ids, rows = list(prompt), []
        for _ in range(tokens):
            rows.append(self.logits(ids, len(prompt))[-1])
            ids.append(int(rows[-1].argmax()))
        return ids[len(prompt) :], torch.stack(rows)

    def routes(self) -> dict[int, Tensor]:
        """layer -> experts [T, K] of the last run."""
        return self._used

    def _wrap(self, at: int, block: Any) -> None:
        inner, layer = block.experts.forward, block.layer
        before = self.blocks[at - 1].layer if at else -1

        def forward(hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
            index_TK, weights_TK = self._gate(block, hidden_TD, index_TK, weights_TK)
            if before in self.heads:
                index_TK, weights_TK = self._predicted(block, before, index_TK, weights_TK)
            self._inputs[layer], self._used[layer] = hidden_TD, index_TK
            return inner(hidden_TD, index_TK, weights_TK)

        block.experts.forward = forward

    def _gate(self, block: Any, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The gate's own choice, of top_k experts."""
        if self.top_k == index_TK.shape[1]:
            return index_TK, weights_TK
        router, own = block.router, block.router.top_k
        router.top_k = self.top_k
        _, weights_TK, index_TK = router(hidden_TD)
        router.top_k = own
        return index_TK, weights_TK

    def _predicted(self, block: Any, owner: int, index_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of answer tokens by the owner's head from the token before: the consumer's router with its product
        replaced by the head's logits."""
        index_TK, weights_TK = index_TK.clone(), weights_TK.clone()
        hidden_TD, used_TK, head = self._inputs[owner], self._used[owner], self.heads[owner]
        for t in range(max(1, self.prompt_tokens), len(index_TK)):
            next_token = [head.next_scale * self._embedded_TD[t]] if head.next_scale else []
            before = self._hot(used_TK[t - 2] if t > 1 else None, head)
            x = torch.cat([hidden_TD[t - 1], *next_token, self._hot(used_TK[t - 1], head), before])
            inner = head.fc1.float() @ x
            inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
            logits_E = head.fc2.float() @ inner + head.linear_init.float() @ x
            index_TK[t], weights_TK[t] = self._by_router(block, logits_E)
        return index_TK, weights_TK

    def _by_router(self, block: Any, logits_E: Tensor) -> tuple[Tensor, Tensor]:
        """What transformers' own router makes of these logits: its matrix is the identity for the moment."""
        router = block.router
        weight, own, width = router.weight.data, router.top_k, router.hidden_dim
        router.weight.data, router.top_k, router.hidden_dim = torch.eye(len(logits_E)), self.top_k, len(logits_E)
        try:
            _, weights_1K, index_1K = router(logits_E[None])
        finally:
            router.weight.data, router.top_k, router.hidden_dim = weight, own, width
        return index_1K[0], weights_1K[0]

    @staticmethod
    def _hot(experts: Tensor | None, head: Head) -> Tensor:
        hot = torch.zeros(head.experts)
        if experts is not None:
            hot[experts] = 1.0
        return hot
