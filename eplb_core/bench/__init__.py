"""Workloads, ranks and measurements behind ``eplb demo``. Internal."""
