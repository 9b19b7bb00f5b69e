"""stoker runs Mixture-of-Experts models whose experts stay on the SSD, inside a memory budget that holds."""

__version__ = "0.1.0"
