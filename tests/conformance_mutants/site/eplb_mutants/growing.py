"""Faults that take more and more from the process, its peers or the store."""

from __future__ import annotations

import os
import subprocess
import threading

from eplb_good.backend import GoodBackend as Good

from eplb_core import hookimpl


class LeaksDescriptors(Good):
    @hookimpl
    def transfer(self, plan):
        os.open(os.devnull, os.O_RDONLY)
        return super().transfer(plan)


class LeaksThreads(Good):
    @hookimpl
    def transfer(self, plan):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().transfer(plan)


class LeaksHandles(Good):
    @hookimpl
    def transfer(self, plan):
        self.kept = [*getattr(self, "kept", []), (plan, b"\1" * (1 << 20))]
        return super().transfer(plan)


class LeaksStoreKeys(Good):
    @hookimpl
    def transfer(self, plan):
        self.context.store.set(f"{self.context.rank}/{plan.sequence}", "1")
        return super().transfer(plan)


class StartsProcesses(Good):
    @hookimpl
    def register_buffers(self, buffers):
        self.helper = subprocess.Popen(["sleep", "30"])
        return super().register_buffers(buffers)

    def close(self, force=False):
        self.helper.kill()
        self.helper.wait()
        return super().close(force)


class SetsEnvironment(Good):
    @hookimpl
    def register_buffers(self, buffers):
        os.environ["OMP_NUM_THREADS_OF_A_MUTANT"] = "1"
        return super().register_buffers(buffers)


class LeavesFilesOpen(Good):
    def close(self, force=False):
        return True


class StagesEverything(Good):
    @hookimpl
    def transfer(self, plan):
        rows = [rows.clone() for rows in self.buffers.rows[plan.layer]]
        self.staged = {**getattr(self, "staged", {}), plan.layer: rows}
        return super().transfer(plan)
