"""The NVIDIA driver's state, asked of the driver itself, without creating a context."""

from __future__ import annotations

from eplb_pynccl.binding import NcclError
from eplb_pynccl.presence import why_no_driver


def driver_facts() -> dict[str, str]:
    """Return the driver's CUDA version and how many devices it sees.

    Raises
    ------
    NcclError
        There is no driver, it does not initialise, or sees no device; the message says what to check.
    """
    reason = why_no_driver()
    if reason is not None:
        raise NcclError(reason)
    try:
        from cuda.bindings import driver
    except (ImportError, RuntimeError) as error:
        raise NcclError(f"cuda-bindings does not load: {error}: pip install cuda-bindings") from error
    (status,) = driver.cuInit(0)  # makes no context
    if status != driver.CUresult.CUDA_SUCCESS:
        raise NcclError(f"the NVIDIA driver does not initialise ({status.name}): check nvidia-smi")
    _, version = driver.cuDriverGetVersion()
    _, count = driver.cuDeviceGetCount()
    if not count:
        raise NcclError("the NVIDIA driver sees no device: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return {"driver": f"CUDA {version // 1000}.{version % 1000 // 10}", "devices": str(count)}
