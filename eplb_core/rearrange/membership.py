"""What a communicator does when its group or its weights change; the part of its face that is about that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eplb_core.errors import TransferError
from eplb_core.rearrange.begin import poisoning

if TYPE_CHECKING:
    import torch

    from eplb_core.control.plane import ControlPlane
    from eplb_core.rearrange.lives import Lives
    from eplb_core.rearrange.state import CommunicatorState
    from eplb_core.report import RearrangeReport


class ChangingMembers:
    """Base of `Communicator`: other members, after a failure."""

    _lives: Lives
    _state: CommunicatorState

    def rebuild(
        self,
        timeout_s: float,
        control: ControlPlane | None = None,
        ranks: Sequence[int] | None = None,
        device_group: Any = None,
        landing: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> RearrangeReport:
        """Make the communicator usable again after a failure; collective over the ranks named.

        The members meet again and settle layers in doubt, so that all know the same placement; a new epoch begins with
        new connections. Ranks may call it at different times and unequally often: they meet at the first attempts that
        overlap.

        Parameters
        ----------
        timeout_s : float
            Limit, seconds.
        control : ControlPlane or None
            A new one when the store was lost; ranks keep their numbers.
        ranks : sequence of int or None
            Members from now on, this rank among them; None keeps the members. Map columns keep their numbers; those of
            ranks that take no part become -1.
        device_group : ProcessGroup or None
            A new one, for backends that use one.
        landing : sequence of sequence of torch.Tensor or None
            New landing rows of the host, needed if those it gave are quarantined.

        Returns
        -------
        RearrangeReport
            The placement that holds on all members.

        Raises
        ------
        TransferError
            Too much landing memory is quarantined (EPLB-T009), or a member did not come (EPLB-T023).
        """
        with self._state.calling():
            self._state.check_open()
            if self._state.invalid is not None:
                problem = "the weights of this rank are invalid since a commit failed on it"
                raise TransferError("EPLB-T009", problem=problem) from self._state.invalid
            lives = self._lives
            lives.renew(control=control, ranks=ranks, device_group=device_group, landing=landing)
            with poisoning(lives, self._state, "rebuild"):
                lives.enter(timeout_s, everyone=False)
            return self._state.report()
