"""Training of what makes streaming fast: routing heads, LoRA, distillation. The base stays frozen, in its store."""
