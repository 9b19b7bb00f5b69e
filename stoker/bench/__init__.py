"""Measuring: provenance, the memory cgroup, device bytes. What the scripts in benchmarks/ and the commands share."""
