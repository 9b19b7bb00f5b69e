"""What bits, routing modes and adapters cost in quality: perplexity, KL, agreement; which mode keeps a bound."""
