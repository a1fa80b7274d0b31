"""Stands for a heavy library: discovery and selection must not import it."""


class PigeonOptions:
    pass


class PigeonBackend:
    class Nest:
        pass
