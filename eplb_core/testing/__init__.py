"""Tools for tests of backends and hosts: ranks as real processes, faults on demand (extra ``testing``)."""
