"""Staging allocators of eplb-core on CuPy: ``cupy_pinned`` (page-locked host memory), ``cupy_device`` (cudaMalloc).

Nothing is imported here: `eplb_cupy.hooks` declares them, their modules are loaded when one is chosen.
"""
