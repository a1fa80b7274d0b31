"""What is quoted of other people's exceptions."""

from __future__ import annotations


def describe(error: BaseException) -> str:
    """Return an exception's type and text, for a reason or a problem; never raises.

    Parameters
    ----------
    error : BaseException
        Exception of a host, a plugin or a library; its ``__str__`` may raise.

    Returns
    -------
    str
        ``ValueError: text``, or the type alone where there is no text.
    """
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception as second:
        text = f"(its text raises {type(second).__name__})"
    return f"{kind}: {text}" if text else kind
