"""Adapters: trained extras beside a store (prerouter heads, LoRA, a roster), bound to it by fingerprint."""
