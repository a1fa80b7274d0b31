"""A forked child keeps what it inherits of gloo for ever: to free it would take the parent's connections apart."""

from __future__ import annotations

import ctypes
import os
import weakref

_KEPT: weakref.WeakSet[object] = weakref.WeakSet()


def keep_in_children(owner: object) -> None:
    """Never free `owner`, and what it refers to, in processes forked from this one.

    A child that ends by ``sys.exit`` clears its modules. Freeing a connection there takes it out of epoll, whose set is
    the parent's too, after which nothing moves in the parent; and freeing gloo's device waits for a thread that no fork
    copies, for ever.

    Parameters
    ----------
    owner : object
        Refers to gloo's objects; may be freed in this process as ever.
    """
    _KEPT.add(owner)


def _keep() -> None:
    for owner in _KEPT:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


os.register_at_fork(after_in_child=_keep)
