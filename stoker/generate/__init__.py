"""From prompts to text: requests, sampling, detokenising, stop strings, the engine loop, and the Python door."""
