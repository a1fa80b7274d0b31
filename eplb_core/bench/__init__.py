"""Workloads, ranks and measurements behind `eplb demo` and `eplb bench`. Internal."""
